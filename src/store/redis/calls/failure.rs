//! The errors of failed calls. They contain no address and no key.

use std::error::Error;
use std::io;
use std::sync::Arc;

use redis::{ErrorKind, RedisError, ServerErrorKind};

#[cfg(feature = "redis-tls")]
use super::super::connect::tls;
use super::super::script::rights::missing_command;
use crate::store::error::StoreError;

/// Redis' answer to one client too many.
const FULL: &str = "max number of clients reached";

pub(crate) fn late_error() -> StoreError {
    StoreError::new("Redis did not answer in time")
}

pub(crate) fn unsent_error() -> StoreError {
    StoreError::new("the call to Redis could not be sent in time").unsent()
}

pub(crate) fn runtime_ended_error() -> StoreError {
    StoreError::new("the runtime of the call to Redis has ended")
}

pub(crate) fn store_error(error: RedisError) -> StoreError {
    // A script reports its own errors as the server's.
    let of_key = error.code() == Some("WRONGTYPE")
        || error.kind() == ErrorKind::Parse
        || error.detail().is_some_and(|detail| detail.contains("hash value is not an integer"));
    let what = match error.kind() {
        _ if of_key => "Redis has another value for this key",
        _ if error.detail() == Some(FULL) => "Redis has as many clients as its maxclients allows",
        ErrorKind::Server(ServerErrorKind::ReadOnly | ServerErrorKind::MasterDown) => {
            "Redis is a replica here"
        }
        kind => missing_command(&error).map(|(what, _)| what).unwrap_or(match kind {
            ErrorKind::Server(_) | ErrorKind::Extension => "Redis refused the command",
            ErrorKind::AuthenticationFailed => "Redis refused the password",
            ErrorKind::Io => "Redis can't be reached",
            _ => "Redis failed",
        }),
    };
    let code = harmless_code(&error);
    let mut failed = StoreError::with_source(what, error);
    if let Some(code) = code {
        failed = failed.with_code(&code);
    }
    if of_key { failed.of_key() } else { failed }
}

/// Returns the code of Redis, the system or TLS, which contains no secret.
fn harmless_code(error: &RedisError) -> Option<String> {
    if let Some((_, Some(name))) = missing_command(error) {
        return Some(name.to_ascii_lowercase());
    }
    // Redis answers this to a long command before authentication.
    if error.detail().is_some_and(|detail| detail.contains("unauthenticated")) {
        return Some("NOAUTH".to_owned());
    }
    if let Some(code) = error.code() {
        let plain = |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit();
        return (code.len() <= 32 && code.bytes().all(plain)).then(|| code.to_owned());
    }
    let source = error.source()?;
    let io = match source.downcast_ref::<Arc<dyn Error + Send + Sync>>() {
        Some(inner) => inner.downcast_ref::<io::Error>()?,
        None => source.downcast_ref::<io::Error>()?,
    };
    #[cfg(feature = "redis-tls")]
    if let Some(what) = tls::describe_refusal(io) {
        return Some(what.to_owned());
    }
    Some(io.kind().to_string())
}
