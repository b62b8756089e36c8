//! The log: `tracing`. Warnings and errors that no subscriber shows go to standard error.

#![cfg_attr(not(feature = "tracing"), allow(unused_variables))]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::io::Write;
use std::panic::Location;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

#[cfg(feature = "tracing")]
use super::{CHANGES, LABELS};
use super::{Change, Event, Observed};

macro_rules! log {
    ($level:ident, $what:expr $(, $name:ident = $value:expr)*) => {{
        #[cfg(feature = "tracing")]
        tracing::$level!(target: "tower_fixed_window", $($name = $value,)* "{}", $what);
        if !shows_errors() {
            // `eprintln!` panics if standard error is closed.
            let _ = writeln!(
                std::io::stderr(),
                concat!("tower_fixed_window: {}" $(, " ", stringify!($name), "={:?}")*),
                $what $(, $value)*
            );
        }
    }};
}

/// Without a subscriber, or with a filter that names other crates only, a service that responds
/// with 500 would leave no trace.
fn shows_errors() -> bool {
    #[cfg(feature = "tracing")]
    return tracing::event_enabled!(target: "tower_fixed_window", tracing::Level::ERROR);
    #[cfg(not(feature = "tracing"))]
    false
}

/// Returns whether the log shows refusals: only then is worked out what they need.
pub(crate) fn shows_refusals() -> bool {
    #[cfg(feature = "tracing")]
    return tracing::level_enabled!(tracing::Level::DEBUG);
    #[cfg(not(feature = "tracing"))]
    false
}

/// `Extract<a::b::header::{{closure}}>` is `header`.
#[cfg(feature = "tracing")]
fn without_paths(type_name: &str) -> String {
    let names = type_name.replace("::{{closure}}", "");
    // Each part is a path, with what stands between it and the next one.
    let parts = names.split_inclusive(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':'));
    let short: String = parts.filter_map(|path| path.rsplit("::").next()).collect();
    let inner = short.strip_prefix("Extract<").and_then(|inner| inner.strip_suffix('>'));
    inner.unwrap_or(&short).to_owned()
}

impl Observed {
    /// By a quota, until the next retry (`None`: never), or because something is missing.
    #[cold]
    pub(crate) fn log_refusal(
        &self,
        outcome: Event,
        by: Option<(&dyn Display, Option<Duration>)>,
        missing: Option<&dyn Display>,
    ) {
        #[cfg(feature = "tracing")]
        tracing::debug!(
            target: "tower_fixed_window",
            scope = self.name(),
            quota = by.map(|(quota, _)| tracing::field::display(quota)),
            outcome = LABELS[outcome as usize],
            missing = missing.map(tracing::field::display),
            retry_after = by.and_then(|(_, after)| Some(after?.as_millis().div_ceil(1_000) as u64)),
            "a request {} refused",
            if outcome == Event::ShadowRefused { "would be" } else { "is" },
        );
    }

    /// Without `quotas`, the request is exempt or unlimited.
    #[cfg(feature = "tracing")]
    pub(crate) fn first_request(
        &self,
        quotas: Option<&impl Display>,
        cost: Option<u64>,
        key_type: &str,
        store: &str,
        shadow: bool,
    ) {
        let key = without_paths(key_type);
        tracing::info!(
            target: "tower_fixed_window",
            scope = self.name(),
            quotas = quotas.map_or_else(|| "none".to_owned(), ToString::to_string),
            cost,
            key,
            store,
            shadow,
            "a rate limit has its first request"
        );
    }

    /// By itself.
    pub(crate) fn change_ended(&self, of: Change) {
        #[cfg(feature = "tracing")]
        tracing::info!(
            target: "tower_fixed_window",
            scope = self.name(),
            of = CHANGES[of as usize],
            "a change has ended: what held before holds again"
        );
    }

    pub(crate) fn store_fails(&self, policy: Event, server: Option<&str>, error: &impl Display) {
        const WHAT: &str = "the store fails";

        let meanwhile = match policy {
            Event::Allowed => "requests pass uncounted",
            Event::Denied => "requests are refused with 503",
            _ => "requests are counted in this process",
        };
        let scope = self.name();
        match server {
            Some(server) => {
                log!(
                    warn,
                    WHAT,
                    scope = scope,
                    meanwhile = meanwhile,
                    server = server,
                    error = format_args!("{error}")
                );
            }
            None => log!(
                warn,
                WHAT,
                scope = scope,
                meanwhile = meanwhile,
                error = format_args!("{error}")
            ),
        }
    }

    pub(crate) fn store_is_back(&self, requests: u64, after: Duration) {
        let (scope, seconds) = (self.name(), after.as_millis() as f64 / 1_000.0);
        log!(warn, "the store is back", scope = scope, requests = requests, seconds = seconds);
    }
}

/// The page on which symptoms have their causes, and these lines.
const MORE: &str = "docs/trouble.md";

/// Logs how to fix a mistake in the configuration, once in the life of the process.
#[track_caller]
pub(crate) fn mistake(fix: &impl Display) {
    if let Some(fix) = if_new(fix, Location::caller()) {
        log!(error, fix, more = MORE);
    }
}

/// Logs what may be a mistake, and what to write in either case, once in the life of the process.
#[track_caller]
pub(crate) fn doubt(hint: &impl Display) {
    if let Some(hint) = if_new(hint, Location::caller()) {
        log!(warn, hint, more = MORE);
    }
}

/// `None` if the text was logged before, or many others of its kind: those of one place in the
/// code. A text of changing content neither fills memory nor keeps other kinds from being logged.
fn if_new(text: &impl Display, kind: &'static Location<'static>) -> Option<String> {
    const MAX_OF_A_KIND: usize = 16;
    static LOGGED: Mutex<BTreeMap<&Location<'_>, BTreeSet<String>>> = Mutex::new(BTreeMap::new());

    let text = text.to_string();
    let mut logged = LOGGED.lock().unwrap_or_else(PoisonError::into_inner);
    let logged = logged.entry(kind).or_default();
    (logged.len() < MAX_OF_A_KIND && logged.insert(text.clone())).then_some(text)
}

/// The caller limits how often this is logged.
pub(crate) fn overflow(max_keys: usize, overflowed: u64) {
    const WHAT: &str = "the memory store is full: new keys share entries and may be refused early. \
        Either a client sends requests with ever new keys (put a limit per address in front), or \
        it is too small (MemoryStore::with_max_keys)";

    log!(warn, WHAT, max_keys = max_keys, overflowed = overflowed);
}

#[cfg(feature = "saved")]
pub(crate) fn counts_loaded(file: &impl Display, bytes: u64, age_ms: i64) {
    #[cfg(feature = "tracing")]
    tracing::info!(
        target: "tower_fixed_window",
        %file,
        bytes,
        age = age_ms as f64 / 1_000.0,
        "the counts of a file are loaded"
    );
}

#[cfg(feature = "saved")]
pub(crate) fn counts_broken(reason: &impl Display, renamed_to: &impl Display) {
    const WHAT: &str = "the store starts empty, because its file can't be used";

    log!(warn, WHAT, reason = format_args!("{reason}"), renamed_to = format_args!("{renamed_to}"));
}

#[cfg(feature = "saved")]
pub(crate) fn counts_saved(file: &impl Display, bytes: u64, took: Duration) {
    #[cfg(feature = "tracing")]
    tracing::debug!(
        target: "tower_fixed_window",
        %file,
        bytes,
        seconds = took.as_secs_f64(),
        "the counts are saved"
    );
}

#[cfg(feature = "saved")]
pub(crate) fn counts_not_saved(error: &impl Display) {
    const WHAT: &str = "the counts can't be saved, and would be lost with the process";

    log!(warn, WHAT, error = format_args!("{error}"));
}

#[cfg(feature = "saved")]
pub(crate) fn counts_saved_again(file: &impl Display, after: Duration) {
    let seconds = after.as_millis() as f64 / 1_000.0;
    log!(warn, "the counts are saved again", file = format_args!("{file}"), seconds = seconds);
}
