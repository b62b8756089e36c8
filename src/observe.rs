//! What the crate tells its operator: here its log, in `meters` its metrics. The only files that know
//! `tracing` and `metrics`; without these features what they do is nothing, or goes to standard error.
//!
//! No key gets here, so that none can be told (S26).

use std::collections::BTreeSet;
use std::fmt::Display;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::quota::Quota;

mod meters;

#[cfg(feature = "metrics")]
pub(crate) use meters::memory;
pub(crate) use meters::{Meters, Timing, UnderWay};
#[cfg(feature = "redis")]
pub(crate) use meters::{store_checked, store_connected};

/// Whether anybody looks.
pub(crate) const ON: bool = cfg!(any(feature = "tracing", feature = "metrics"));

/// What became of a request.
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

impl Outcome {
    #[cfg(any(feature = "tracing", feature = "metrics"))]
    fn name(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Reserved => "reserved",
            Self::Refused => "refused",
            Self::ShadowRefused => "shadow_refused",
            Self::MissingKey => "missing_key",
            Self::ShadowMissingKey => "shadow_missing_key",
            Self::FailedOpen => "failed_open",
            Self::FailedClosed => "failed_closed",
        }
    }
}

/// A scope, as its operator sees it.
#[derive(Clone, Copy)]
#[cfg_attr(not(any(feature = "tracing", feature = "metrics")), allow(dead_code))]
pub(crate) struct Observed<'a> {
    name: &'a str,
    meters: &'a Meters,
}

impl<'a> Observed<'a> {
    #[inline]
    pub(crate) fn new(name: &'a str, meters: &'a Meters) -> Self {
        Self { name: if name.is_empty() { "unnamed" } else { name }, meters }
    }

    /// A request was answered without a refusal by a quota.
    #[inline]
    pub(crate) fn answered(self, outcome: Outcome) {
        self.count_outcome(outcome);
        #[cfg(feature = "tracing")]
        if matches!(outcome, Outcome::MissingKey | Outcome::FailedClosed) {
            let scope = self.name;
            let outcome = outcome.name();
            tracing::debug!(target: "tower_fixed_window", scope, outcome, "a request is refused");
        }
    }

    /// A request was refused by a quota, or would have been. They are worked out only if somebody
    /// looks; a `retry_after` of `None` is never.
    #[inline]
    pub(crate) fn refused<'q>(
        self,
        outcome: Outcome,
        quota: impl Fn() -> &'q Quota,
        retry_after: impl Fn() -> Option<Duration>,
    ) {
        self.count_outcome(outcome);
        #[cfg(feature = "tracing")]
        if tracing::level_enabled!(tracing::Level::DEBUG) {
            self.tell_refused(outcome, quota(), retry_after());
        }
        let _ = (quota, retry_after);
    }

    #[cfg(feature = "tracing")]
    #[cold]
    fn tell_refused(self, outcome: Outcome, quota: &Quota, retry_after: Option<Duration>) {
        tracing::debug!(
            target: "tower_fixed_window",
            scope = self.name,
            %quota,
            outcome = outcome.name(),
            retry_after = retry_after.map(|after| after.as_millis().div_ceil(1_000) as u64),
            "{}",
            match outcome {
                Outcome::Refused => "a request is refused",
                _ => "a request would be refused",
            },
        );
    }

    /// The store begins to fail.
    #[cold]
    pub(crate) fn store_fails(self, error: &impl Display) {
        const WHAT: &str = "the store fails, and requests are answered without it";

        #[cfg(feature = "tracing")]
        tracing::warn!(target: "tower_fixed_window", scope = self.name, %error, "{WHAT}");
        #[cfg(not(feature = "tracing"))]
        eprintln!("tower_fixed_window: {WHAT} scope={:?} error={error}", self.name);
    }

    /// It answers again: how many requests have been answered without it, and how long that was.
    #[cold]
    pub(crate) fn store_is_back(self, requests: u64, after: Duration) {
        const WHAT: &str = "the store is back";

        let seconds = after.as_millis() as f64 / 1_000.0;
        #[cfg(feature = "tracing")]
        tracing::warn!(target: "tower_fixed_window", scope = self.name, requests, seconds, "{WHAT}");
        #[cfg(not(feature = "tracing"))]
        eprintln!(
            "tower_fixed_window: {WHAT} scope={:?} requests={requests} seconds={seconds}",
            self.name
        );
    }
}

/// Tells how to mend a mistake in the set-up, once for each mistake in the life of the process.
/// Without the `tracing` feature it goes to standard error: a service that answers 500 in silence
/// would be worse than a line that nobody asked for.
pub(crate) fn mistake(fix: &impl Display) {
    /// Enough for every mistake of one app; a message of changing content does not fill memory.
    const MOST: usize = 64;
    static TOLD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

    let fix = fix.to_string();
    let mut told = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
    if told.len() < MOST && !told.contains(&fix) {
        #[cfg(feature = "tracing")]
        tracing::error!(target: "tower_fixed_window", "{fix}");
        #[cfg(not(feature = "tracing"))]
        eprintln!("tower_fixed_window: {fix}");
        told.insert(fix);
    }
}

/// Tells that a store in memory is full, so that keys share entries: how large it is, and how many
/// charges that has met so far. It is for the caller not to say so too often.
pub(crate) fn overflow(max_keys: usize, overflowed: u64) {
    const WHAT: &str = "the memory store is full: new keys share entries and may be refused early. \
        Either somebody sends requests under ever new keys (put a limit per address in front), or \
        it is too small (MemoryStore::with_max_keys)";

    #[cfg(feature = "tracing")]
    tracing::warn!(target: "tower_fixed_window", max_keys, overflowed, "{WHAT}");
    #[cfg(not(feature = "tracing"))]
    eprintln!("tower_fixed_window: {WHAT} max_keys={max_keys} overflowed={overflowed}");
}
