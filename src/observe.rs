//! The operator's log through `tracing`, and counters and timings through `metrics`. Only
//! these files use the two crates. Without `metrics` nothing is counted, and warnings that no
//! subscriber of `tracing` shows go to standard error.
//!
//! No key reaches these files, so none can be logged (S26).

use std::sync::Arc;
#[cfg(feature = "saved")]
use std::sync::atomic::{AtomicU64, Ordering};
#[cfg(feature = "saved")]
use std::time::{Duration, SystemTime};

use crate::sync::AtEnd;
#[cfg(feature = "saved")]
use crate::sync::{Mutex, lock};

mod log;
#[cfg(feature = "metrics")]
mod meters;

#[cfg(feature = "saved")]
pub(crate) use log::{
    counts_broken, counts_loaded, counts_not_saved, counts_saved, counts_saved_again,
};
pub(crate) use log::{doubt, mistake, overflow, shows_refusals};
pub(crate) use meters::Meters;
#[cfg(feature = "metrics")]
pub(crate) use meters::memory;

/// `true` if requests without a fault are reported.
pub(crate) const ON: bool = cfg!(any(feature = "tracing", feature = "metrics"));

/// Nothing is counted.
#[cfg(not(feature = "metrics"))]
mod meters {
    use std::time::Duration;

    use super::{Change, Event, Observed, Timed};

    pub(crate) type Meters = ();

    impl Observed {
        pub(crate) fn event(&self, _: Event, _: u64) {}
        pub(crate) fn passed(&self, _: Event, _: u64) {}
        pub(crate) fn has_costs(&self) {}
        pub(crate) fn took(&self, _: Timed, _: Duration) {}
        pub(crate) fn waits(&self, _: i64) {}
        pub(crate) fn changed(&self, _: Change, _: Option<i64>) {}
    }

    pub(super) fn call(_: f64) {}
}

/// A scope, as the log and the metrics know it.
#[cfg_attr(not(feature = "metrics"), allow(dead_code))]
pub(crate) struct Observed {
    pub(crate) name: Arc<str>,
    pub(crate) meters: Meters,
}

impl Observed {
    /// Worked out where it is shown, since most requests are counted without it.
    #[inline]
    fn name(&self) -> &str {
        if self.name.is_empty() { "unnamed" } else { &self.name }
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
        *lock(&self.last) = Some(last);
    }

    pub(crate) fn note_failure(&self) {
        self.failures.fetch_add(1, Ordering::Relaxed);
    }
}

/// Counts a call to a store as in flight until the guard is dropped.
pub(crate) fn call_under_way() -> AtEnd<impl Fn()> {
    meters::call(1.0);
    AtEnd(|| meters::call(-1.0))
}

/// Events that are counted: a request's outcome, an answer without a store, and others.
#[derive(Clone, Copy, PartialEq)]
#[cfg_attr(not(all(feature = "metrics", feature = "tokio")), allow(dead_code))]
pub(crate) enum Event {
    Passed,
    Reserved,
    Refused,
    ShadowRefused,
    MissingKey,
    ShadowMissingKey,
    FailedOpen,
    FailedClosed,
    CountedLocally,
    Allowed,
    Denied,
    StoreFailure,
    Overflow,
    RememberedRefusal,
    Warned,
    TokensCharged,
    TokensRefunded,
    TokensSettled,
}

/// The outcomes of requests, and then the policies while a store fails.
#[cfg(any(feature = "tracing", feature = "metrics"))]
const LABELS: [&str; Event::Denied as usize + 1] = [
    "passed",
    "reserved",
    "refused",
    "shadow_refused",
    "missing_key",
    "shadow_missing_key",
    "failed_open",
    "failed_closed",
    "local",
    "allow",
    "deny",
];

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Change {
    Quotas,
    Shadow,
    Key,
}

#[cfg(any(feature = "tracing", feature = "metrics"))]
const CHANGES: [&str; Change::Key as usize + 1] = ["quotas", "shadow", "key"];

#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "metrics"), allow(dead_code))]
pub(crate) enum Timed {
    Store,
    Wait,
}
