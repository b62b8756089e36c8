//! The errors of failed calls. They contain no address and no key.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use redis::{ErrorKind, RedisError, ServerErrorKind};
use tokio::time::Instant;

use super::super::connect::{FULL, SILENT};
use tower_fixed_window::StoreError;

/// Timers are not so late on a busy machine.
const STALL: Duration = Duration::from_millis(50);

const STOOD_STILL: &str =
    "the runtime stood still, and so did its calls to Redis: something blocks its threads";
const LATE: &str = "Redis did not answer in time";
const UNREACHABLE: &str = "Redis can't be reached";
const REFUSED: &str = "Redis refused the command";
const FORBIDDEN: &str = "Redis does not permit this user the key";
const OTHER_VALUE: &str = "Redis has another value for this key";
const UNEXPECTED: &str = "Redis returned an unexpected answer";
const NO_TLS: &str = "rediss:// needs the feature tls";
/// On all systems with sockets like those of Unix.
const ENFILE: i32 = 23;
const EMFILE: i32 = 24;
const UNRESOLVED: &str = "its name can't be resolved";

pub(crate) fn late_error(until: Instant) -> StoreError {
    StoreError::new(if stood_still(until) { STOOD_STILL } else { LATE })
}

pub(crate) fn apart_error() -> StoreError {
    StoreError::new("limits are in several slots").apart()
}

/// The numbers don't fit this key's charge.
pub(crate) fn unexpected_answer() -> StoreError {
    StoreError::new(UNEXPECTED).of_key()
}

pub(crate) fn unsent_error(until: Instant) -> StoreError {
    let late = "the call to Redis could not be sent in time";
    StoreError::new(if stood_still(until) { STOOD_STILL } else { late }).unsent()
}

/// A runtime that notices a deadline so late was kept from its tasks.
fn stood_still(until: Instant) -> bool {
    until.elapsed() > STALL
}

pub(super) fn is_of_key(error: &RedisError) -> bool {
    [OTHER_VALUE, FORBIDDEN].contains(&cause(error).0)
}

pub(crate) fn store_error(error: RedisError) -> StoreError {
    let is_of_key = is_of_key(&error);
    let (what, more) = cause(&error);
    let failed = match more {
        Some(more) => StoreError::with_source(format!("{what} ({more})"), error),
        None => StoreError::with_source(what, error),
    };
    if is_of_key { failed.of_key() } else { failed }
}

/// In words that the operator can act on, and what is known beyond.
fn cause(error: &RedisError) -> (&'static str, Option<String>) {
    use ServerErrorKind::{Ask, MasterDown, Moved, NoPerm, ReadOnly};

    if let Some((what, name)) = missing_command(error) {
        return (what, name.map(str::to_ascii_lowercase).or_else(|| harmless_code(error)));
    }
    let (kind, said) = (error.kind(), error.detail().unwrap_or_default());
    let says = |text| said.contains(text);
    let what = match kind {
        // A script reports its own errors as the server's.
        _ if error.code() == Some("WRONGTYPE") || says("hash value is not an integer") => {
            OTHER_VALUE
        }
        ErrorKind::UnexpectedReturnType => UNEXPECTED,
        ErrorKind::Parse => "this is not Redis' protocol: another service, or TLS (rediss://)",
        ErrorKind::Io if said == SILENT => LATE,
        ErrorKind::Io => return (UNREACHABLE, describe_io(error)),
        // An error of the library's own client of a cluster.
        ErrorKind::ClusterConnectionNotFound => UNREACHABLE,
        ErrorKind::InvalidClientConfig => return (UNREACHABLE, describe_address(error)),
        ErrorKind::AuthenticationFailed => "Redis refused the password",
        ErrorKind::MasterNameNotFoundBySentinel => "the Sentinels know no master of this name",
        ErrorKind::Server(ReadOnly | MasterDown) => "Redis is a replica here",
        ErrorKind::Server(Moved | Ask) => {
            "this is a node of a cluster: connect with RedisStore::cluster"
        }
        _ if says(FULL) => "Redis has as many clients as its maxclients allows",
        _ if says("DB index is out of range") => "Redis has no database of this number",
        // Redis answers this to a long command before authentication.
        _ if says("unauthenticated") => return (REFUSED, Some("NOAUTH".to_owned())),
        ErrorKind::Server(NoPerm) if says("key") => FORBIDDEN,
        ErrorKind::Server(_) | ErrorKind::Extension => REFUSED,
        _ => "Redis failed",
    };
    (what, harmless_code(error))
}

/// Within a script, too; with the command, if that is known.
fn missing_command(error: &RedisError) -> Option<(&'static str, Option<&str>)> {
    const FORBIDDEN: &str = "Redis does not permit a command that is needed";
    const ABSENT: &str = "Redis lacks a command that is needed";
    const KNOWN: [(&str, &str); 6] = [
        ("permissions to run the '", FORBIDDEN),
        ("can't run this command", FORBIDDEN),
        ("nknown command '", ABSENT),
        ("command called from", ABSENT),
        ("Invalid command passed", ABSENT),
        ("rong number of args calling", "Redis lacks options that are needed, as of Redis 7.0"),
    ];
    let said = error.detail()?;
    let (text, what) = KNOWN.into_iter().find(|(text, _)| said.contains(text))?;
    let named = said.split_once(text).and_then(|(_, after)| after.split_once('\''));
    // Other names may contain a secret.
    let plain = |byte: u8| byte.is_ascii_alphabetic() || b"|, _".contains(&byte);
    let is_name = |name: &&str| name.len() <= 100 && name.bytes().all(plain);
    Some((what, named.map(|(name, _)| name).filter(is_name)))
}

fn harmless_code(error: &RedisError) -> Option<String> {
    let plain = |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit();
    let is_harmless = |code: &&str| (1..=32).contains(&code.len()) && code.bytes().all(plain);
    error.code().filter(|code| *code != "ERR").filter(is_harmless).map(str::to_owned)
}

fn describe_io(error: &RedisError) -> Option<String> {
    let source = error.source()?.downcast_ref::<Arc<dyn Error + Send + Sync>>()?;
    let io = source.downcast_ref::<io::Error>()?;
    #[cfg(feature = "tls")]
    if let Some(error) = io.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>()) {
        // The names of its variants. What follows them may be an address.
        let said = format!("{error:?}");
        let names = said.split(|c: char| !c.is_alphanumeric());
        let names = names.filter(|name| !["", "Other", "OtherError"].contains(name));
        let names = names.take(2).collect::<Vec<_>>().join(" ");
        return Some(format!("TLS failed: {}", names.trim_end_matches("Context").trim_end()));
    }
    // Neither this nor a name that can't be resolved has a kind of its own.
    if let Some(EMFILE | ENFILE) = io.raw_os_error() {
        return Some("too many open files".to_owned());
    }
    Some(match io.to_string().contains("lookup address") {
        true => UNRESOLVED.to_owned(),
        false => io.kind().to_string(),
    })
}

fn describe_address(error: &RedisError) -> Option<String> {
    let said = error.to_string();
    let known = [("feature is not enabled", NO_TLS), ("No address found", UNRESOLVED)];
    known.iter().find(|(text, _)| said.contains(text)).map(|(_, what)| (*what).to_owned())
}

/// The usual advice would lead away from TLS.
pub(crate) fn address_error(advice: &'static str, error: RedisError) -> StoreError {
    let lacks_tls = describe_address(&error).as_deref() == Some(NO_TLS);
    StoreError::with_source(if lacks_tls { NO_TLS } else { advice }, error)
}
