//! What operators see: a log through `tracing`, and counters and timings through `metrics`. Only
//! these files use the two crates. Without `metrics` nothing is counted, and warnings that no
//! subscriber of `tracing` shows go to standard error.
//!
//! No key reaches these files, so none can be logged (S26).

use std::fmt::Display;
#[cfg(feature = "saved")]
use std::sync::atomic::{AtomicU64, Ordering};
#[cfg(feature = "saved")]
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
#[cfg(feature = "saved")]
use std::time::SystemTime;

use crate::sync::AtEnd;

mod log;
#[cfg(feature = "metrics")]
mod meters;

#[cfg(feature = "saved")]
pub(crate) use log::{
    counts_broken, counts_loaded, counts_not_saved, counts_saved, counts_saved_again,
};
pub(crate) use log::{doubt, mistake, overflow, shows_refusals};
#[cfg(feature = "metrics")]
pub(crate) use meters::{Meters, memory};

/// `true` if requests without a fault are reported.
pub(crate) const ON: bool = cfg!(any(feature = "tracing", feature = "metrics"));

#[cfg(not(feature = "metrics"))]
pub(crate) type Meters = ();

#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "metrics"), allow(dead_code))]
pub(crate) struct Observed<'a> {
    name: &'a str,
    meters: &'a Meters,
}

impl<'a> Observed<'a> {
    #[inline]
    pub(crate) fn new(name: &'a str, meters: &'a Meters) -> Self {
        Self { name, meters }
    }

    /// Worked out where it is shown, since most requests are counted without it.
    #[inline]
    fn name(self) -> &'a str {
        if self.name.is_empty() { "unnamed" } else { self.name }
    }
}

impl Observed<'_> {
    fn count(self, event: Event, by: u64) {
        #[cfg(feature = "metrics")]
        self.meters.increment(self.name(), OUTCOMES.len() + event as usize, by);
        let _ = (event, by);
    }

    #[inline(always)]
    fn time(self, what: Timed, took: Duration) {
        #[cfg(feature = "metrics")]
        self.meters.time(self.name(), what, took);
        let _ = (what, took);
    }

    #[inline]
    pub(crate) fn answered(self, outcome: Outcome) {
        #[cfg(feature = "metrics")]
        self.meters.increment(self.name(), outcome as usize, 1);
        let _ = outcome;
    }

    /// From here on, tokens are counted.
    pub(crate) fn has_costs(self) {
        #[cfg(feature = "metrics")]
        self.meters.note_costs();
    }

    #[inline(always)]
    pub(crate) fn passed(self, outcome: Outcome, tokens: u64) {
        #[cfg(feature = "metrics")]
        if tokens != 1 || self.meters.has_costs() {
            return self.charged(outcome, tokens);
        }
        let _ = tokens;
        self.answered(outcome);
    }

    #[cfg(feature = "metrics")]
    #[inline(never)]
    fn charged(self, outcome: Outcome, tokens: u64) {
        self.answered(outcome);
        self.meters.note_costs();
        self.count(Event::TokensCharged, tokens);
    }

    pub(crate) fn refunded(self, tokens: u64) {
        self.count(Event::TokensRefunded, tokens);
    }

    pub(crate) fn settled(self, tokens: u64) {
        self.count(Event::TokensSettled, tokens);
    }

    pub(crate) fn refused_undecided(self, outcome: Outcome, missing: Option<&impl Display>) {
        self.answered(outcome);
        #[cfg(feature = "tracing")]
        tracing::debug!(
            target: "tower_fixed_window",
            scope = self.name(),
            outcome = OUTCOMES[outcome as usize],
            missing = missing.map(tracing::field::display),
            "a request is refused"
        );
        let _ = missing;
    }

    /// A `retry_after` of `None` is never.
    pub(crate) fn log_refusal(
        self,
        outcome: Outcome,
        quota: &impl Display,
        retry_after: Option<Duration>,
    ) {
        log::refused(self.name(), outcome, quota, retry_after);
    }

    /// Without `quotas`, the request is exempt or unlimited.
    #[cfg(feature = "tracing")]
    pub(crate) fn first_request(
        self,
        quotas: Option<&impl Display>,
        cost: Option<u64>,
        key_type: &str,
        store: &str,
        shadow: bool,
    ) {
        let key = log::without_paths(key_type);
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

    /// `end` is in milliseconds.
    pub(crate) fn changed(self, of: Change, end: Option<i64>) {
        #[cfg(feature = "metrics")]
        meters::change(self.name(), of, end);
        let _ = (of, end);
    }

    /// By itself.
    pub(crate) fn change_ended(self, of: Change) {
        #[cfg(feature = "tracing")]
        tracing::info!(
            target: "tower_fixed_window",
            scope = self.name(),
            of = of.name(),
            "a change has ended: what held before holds again"
        );
        let _ = of;
    }

    pub(crate) fn store_fails(
        self,
        meanwhile: Meanwhile,
        server: Option<&str>,
        error: &impl Display,
    ) {
        log::store_fails(self.name(), meanwhile.text(), server, error);
    }

    pub(crate) fn store_is_back(self, requests: u64, after: Duration) {
        log::store_is_back(self.name(), requests, after);
    }

    pub(crate) fn store_was_called(self, took: Duration) {
        self.time(Timed::Store, took);
    }

    pub(crate) fn waits(self, more: i64) {
        #[cfg(feature = "metrics")]
        self.meters.wait(self.name(), more as f64);
        let _ = more;
    }

    pub(crate) fn waited(self, time: Duration) {
        self.time(Timed::Wait, time);
    }

    pub(crate) fn store_failed(self) {
        self.count(Event::StoreFailure, 1);
    }

    pub(crate) fn without_store(self, meanwhile: Meanwhile) {
        self.count(meanwhile.event(), 1);
    }

    pub(crate) fn warned(self) {
        self.count(Event::Warned, 1);
    }

    #[inline]
    pub(crate) fn overflowed(self) {
        self.count(Event::Overflow, 1);
    }

    pub(crate) fn refused_from_memory(self) {
        self.count(Event::RememberedRefusal, 1);
    }
}

#[cfg(feature = "saved")]
#[derive(Default)]
pub(crate) struct Saves {
    /// When it was complete, how long it took, how large it was.
    last: Mutex<Option<(SystemTime, Duration, u64)>>,
    failures: AtomicU64,
}

#[cfg(feature = "saved")]
impl Saves {
    pub(crate) fn note(&self, bytes: u64, took: Duration) {
        let last = (SystemTime::now(), took, bytes);
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(last);
    }

    pub(crate) fn note_failure(&self) {
        self.failures.fetch_add(1, Ordering::Relaxed);
    }
}

/// Counts a call to a store as in flight until the guard is dropped.
pub(crate) fn call_under_way() -> AtEnd<impl Fn()> {
    #[cfg(feature = "metrics")]
    meters::call(1.0);
    AtEnd(|| {
        #[cfg(feature = "metrics")]
        meters::call(-1.0);
    })
}

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Outcome {
    Passed,
    Reserved,
    Refused,
    ShadowRefused,
    MissingKey,
    ShadowMissingKey,
    FailedOpen,
    FailedClosed,
}

#[cfg(any(feature = "tracing", feature = "metrics"))]
const OUTCOMES: [&str; Outcome::FailedClosed as usize + 1] = [
    "passed",
    "reserved",
    "refused",
    "shadow_refused",
    "missing_key",
    "shadow_missing_key",
    "failed_open",
    "failed_closed",
];

#[derive(Clone, Copy)]
#[cfg_attr(not(all(feature = "metrics", feature = "tokio")), allow(dead_code))]
enum Event {
    StoreFailure,
    CountedLocally,
    Allowed,
    Denied,
    Overflow,
    RememberedRefusal,
    Warned,
    TokensCharged,
    TokensRefunded,
    TokensSettled,
}

#[derive(Clone, Copy)]
pub(crate) enum Meanwhile {
    Local,
    Allow,
    Deny,
}

impl Meanwhile {
    fn event(self) -> Event {
        match self {
            Self::Local => Event::CountedLocally,
            Self::Allow => Event::Allowed,
            Self::Deny => Event::Denied,
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::Local => "requests are counted in this process",
            Self::Allow => "requests pass uncounted",
            Self::Deny => "requests are refused with 503",
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Change {
    Quotas,
    Shadow,
    Key,
}

impl Change {
    #[cfg_attr(not(any(feature = "tracing", feature = "metrics")), allow(dead_code))]
    fn name(self) -> &'static str {
        match self {
            Self::Quotas => "quotas",
            Self::Shadow => "shadow",
            Self::Key => "key",
        }
    }
}

#[derive(Clone, Copy)]
enum Timed {
    Store,
    Wait,
}
