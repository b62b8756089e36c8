//! What operators see: a log through `tracing`, and counters and timings through `metrics`. Only
//! these files use the two crates. Without `metrics` nothing is counted, and warnings that no
//! subscriber of `tracing` shows go to standard error.
//!
//! No key reaches these files, so none can be logged (S26).

use std::sync::Arc;
#[cfg(feature = "saved")]
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
#[cfg(feature = "saved")]
use std::time::SystemTime;

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
#[cfg(feature = "metrics")]
pub(crate) use meters::{Meters, memory};

/// `true` if requests without a fault are reported.
pub(crate) const ON: bool = cfg!(any(feature = "tracing", feature = "metrics"));

#[cfg(not(feature = "metrics"))]
pub(crate) type Meters = ();

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

    #[inline(always)]
    pub(crate) fn event(&self, what: Event, n: u64) {
        #[cfg(feature = "metrics")]
        self.meters.event(self.name(), what, n);
        let _ = (what, n);
    }

    #[inline(always)]
    pub(crate) fn passed(&self, what: Event, tokens: u64) {
        self.event(what, 1);
        #[cfg(feature = "metrics")]
        if tokens != 1 || self.meters.has_costs() {
            self.charged(tokens);
        }
        let _ = tokens;
    }

    #[cfg(feature = "metrics")]
    #[inline(never)]
    fn charged(&self, tokens: u64) {
        self.meters.note_costs();
        self.event(Event::TokensCharged, tokens);
    }

    /// From here on, tokens are counted.
    pub(crate) fn has_costs(&self) {
        #[cfg(feature = "metrics")]
        self.meters.note_costs();
    }

    /// The duration of a call to a store, or of a wait in a queue.
    pub(crate) fn took(&self, what: Timed, time: Duration) {
        #[cfg(feature = "metrics")]
        self.meters.took(self.name(), what, time);
        let _ = (what, time);
    }

    pub(crate) fn waits(&self, more: i64) {
        #[cfg(feature = "metrics")]
        self.meters.waits(self.name(), more as f64);
        let _ = more;
    }

    /// `end` is in milliseconds.
    pub(crate) fn changed(&self, of: Change, end: Option<i64>) {
        #[cfg(feature = "metrics")]
        meters::change(self.name(), of, end);
        let _ = (of, end);
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
    #[cfg(feature = "metrics")]
    meters::call(1.0);
    AtEnd(|| {
        #[cfg(feature = "metrics")]
        meters::call(-1.0);
    })
}

/// What is counted: what became of a request, how one was answered without its store, and others.
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
