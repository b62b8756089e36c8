//! Counters and timings through the `metrics` facade. `docs/observing.md` lists their names.

use std::array;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
#[cfg(feature = "saved")]
use std::time::UNIX_EPOCH;

use metrics::{
    Counter, Gauge, Histogram, Key, Label, Level, Metadata, Unit, describe_gauge, gauge, histogram,
};
#[cfg(feature = "saved")]
use metrics::{counter, describe_counter};

#[cfg(feature = "saved")]
use super::Saves;
use super::{CHANGES, Change, Event, LABELS, Observed, Timed};
#[cfg(feature = "saved")]
use crate::sync::lock;

static METADATA: Metadata<'_> =
    Metadata::new("tower_fixed_window", Level::INFO, Some("tower_fixed_window"));

const OUTCOMES: usize = Event::FailedClosed as usize + 1;
const LABELED: usize = LABELS.len();
const EVENTS: usize = Event::TokensSettled as usize + 1;

/// Names and help texts of the events without a label.
const UNLABELED: [(&str, &str); EVENTS - LABELED] = [
    ("tower_fixed_window_store_failures_total", "Calls to the store that failed or timed out"),
    ("tower_fixed_window_overflow_total", "Charges in memory without an entry of their own"),
    (
        "tower_fixed_window_remembered_refusals_total",
        "Refusals answered from memory, without a call",
    ),
    (
        "tower_fixed_window_warnings_total",
        "Times that a key has used the share of a limit at which the limit warns",
    ),
    (
        "tower_fixed_window_tokens_charged_total",
        "Tokens charged to requests that passed, where they have costs",
    ),
    ("tower_fixed_window_tokens_refunded_total", "Tokens refunded, since a true cost was lower"),
    (
        "tower_fixed_window_tokens_settled_total",
        "Tokens taken beyond the charge, since a true cost was higher",
    ),
];

/// Name and help text of an event's counter.
fn described(event: usize) -> (&'static str, &'static str) {
    match event {
        ..OUTCOMES => ("tower_fixed_window_decisions_total", "Requests, by what became of them"),
        OUTCOMES..LABELED => (
            "tower_fixed_window_without_store_total",
            "Requests answered without the store, because it failed",
        ),
        _ => UNLABELED[event - LABELED],
    }
}

fn key(scope: &str, event: usize) -> Key {
    let name = if event < OUTCOMES { "outcome" } else { "policy" };
    let label = LABELS.get(event).map(|value| Label::new(name, *value));
    let labels = [Label::new("scope", scope.to_owned())].into_iter().chain(label);
    Key::from_parts(described(event).0, labels.collect::<Vec<_>>())
}

const SECONDS: [(&str, &str); Timed::Wait as usize + 1] = [
    ("tower_fixed_window_store_seconds", "Duration of calls to a remote store, in seconds"),
    ("tower_fixed_window_wait_seconds", "Time that requests have waited in a queue, in seconds"),
];

const WAITING: &str = "tower_fixed_window_waiting";
const CALLS: &str = "tower_fixed_window_store_calls";

/// Counters of a limit, registered at its first event, a gauge and histograms, registered when they
/// are first used: a recorder need not be there before the layer is.
#[derive(Default)]
pub(crate) struct Meters {
    counters: OnceLock<[Counter; EVENTS]>,
    keys: OnceLock<[Key; EVENTS]>,
    waiting: OnceLock<Gauge>,
    seconds: [OnceLock<Histogram>; SECONDS.len()],
    /// A charge had a cost other than 1. Until then, tokens are not counted.
    costs: AtomicBool,
}

/// A panic in a recorder leaves nothing half done here, and a feature takes no trait from a public
/// type.
impl UnwindSafe for Meters {}
impl RefUnwindSafe for Meters {}

impl Observed {
    #[inline(always)]
    pub(crate) fn event(&self, what: Event, n: u64) {
        match self.meters.counters.get() {
            Some(counters) => counters[what as usize].increment(n),
            None => self.first_event(what as usize, n),
        }
    }

    /// Registers all counters at once, so that those of rare events start at 0: Prometheus can't
    /// see an increase from a counter that did not exist.
    ///
    /// Without a recorder, the facade has one of size zero that does nothing, and its handles do
    /// nothing for ever, so these are not kept. (Nor are those of an app's recorder of size zero.)
    #[cold]
    fn first_event(&self, what: usize, n: u64) {
        let keys = || array::from_fn(|event| key(self.name(), event));
        let keys = self.meters.keys.get_or_init(keys);
        metrics::with_recorder(|recorder| {
            if size_of_val(recorder) == 0 {
                return recorder.register_counter(&keys[what], &METADATA).increment(n);
            }
            describe_gauge!(WAITING, "Requests that wait in a queue");
            describe_gauge!(CALLS, "Calls to stores in flight");
            for (name, help) in SECONDS {
                recorder.describe_histogram(name.into(), Some(Unit::Seconds), help.into());
            }
            let counters = self.meters.counters.get_or_init(|| {
                array::from_fn(|event| {
                    let (name, help) = described(event);
                    recorder.describe_counter(name.into(), None, help.into());
                    recorder.register_counter(&keys[event], &METADATA)
                })
            });
            counters[what].increment(n);
        });
    }

    #[inline(always)]
    pub(crate) fn passed(&self, what: Event, tokens: u64) {
        self.event(what, 1);
        if tokens != 1 || self.meters.costs.load(Ordering::Relaxed) {
            self.charged(tokens);
        }
    }

    #[inline(never)]
    fn charged(&self, tokens: u64) {
        self.has_costs();
        self.event(Event::TokensCharged, tokens);
    }

    /// From here on, tokens are counted.
    pub(crate) fn has_costs(&self) {
        if !self.meters.costs.load(Ordering::Relaxed) {
            self.meters.costs.store(true, Ordering::Relaxed);
        }
    }

    /// The duration of a call to a store, or of a wait in a queue.
    pub(crate) fn took(&self, what: Timed, time: Duration) {
        let (name, _) = SECONDS[what as usize];
        let register = || histogram!(name, "scope" => self.name().to_owned());
        with(&self.meters.seconds[what as usize], register, |of| of.record(time.as_secs_f64()));
    }

    pub(crate) fn waits(&self, more: i64) {
        let register = || gauge!(WAITING, "scope" => self.name().to_owned());
        with(&self.meters.waiting, register, |of| of.increment(more as f64));
    }

    /// `end` is in milliseconds; `None` sets 0.
    pub(crate) fn changed(&self, of: Change, end: Option<i64>) {
        const UNTIL: &str = "tower_fixed_window_changed_until_timestamp_seconds";

        describe_gauge!(UNTIL, "When the last change of this kind ends by itself");
        let end = end.map_or(0.0, |end| end as f64 / 1_000.0);
        gauge!(UNTIL, "scope" => self.name().to_owned(), "of" => CHANGES[of as usize]).set(end);
    }
}

/// Keeps the handle, but for one that does nothing: see [`Observed::first_event`].
fn with<H>(kept: &OnceLock<H>, register: impl FnOnce() -> H, change: impl FnOnce(&H)) {
    let does_nothing = || metrics::with_recorder(|recorder| size_of_val(recorder) == 0);
    match kept.get() {
        None if does_nothing() => change(&register()),
        _ => change(kept.get_or_init(register)),
    }
}

pub(super) fn call(more: f64) {
    gauge!(CALLS).increment(more);
}

pub(crate) fn memory(store: &str, tracked_keys: usize, max_keys: usize) {
    const TRACKED: &str = "tower_fixed_window_tracked_keys";
    const MAX: &str = "tower_fixed_window_max_keys";

    describe_gauge!(TRACKED, "Entries of a memory store whose windows run");
    describe_gauge!(MAX, "Entries that a memory store was created for");
    gauge!(TRACKED, "store" => store.to_owned()).set(tracked_keys as f64);
    gauge!(MAX, "store" => store.to_owned()).set(max_keys as f64);
}

#[cfg(feature = "saved")]
impl Saves {
    pub(crate) fn record(&self, store: &str) {
        const GAUGES: [(&str, &str); 3] = [
            ("tower_fixed_window_saved_timestamp_seconds", "When counts were last saved"),
            ("tower_fixed_window_saved_seconds", "Duration of the last save, in seconds"),
            ("tower_fixed_window_saved_bytes", "Size of the file of counts, in bytes"),
        ];
        const FAILURES: &str = "tower_fixed_window_save_failures_total";

        describe_counter!(FAILURES, "Saves of counts that failed");
        let failures = self.failures.load(Ordering::Relaxed);
        counter!(FAILURES, "store" => store.to_owned()).absolute(failures);
        let last = *lock(&self.last);
        let Some((at, took, bytes)) = last else { return };
        let at = at.duration_since(UNIX_EPOCH).unwrap_or_default();
        let values = [at.as_secs_f64(), took.as_secs_f64(), bytes as f64];
        for ((name, help), value) in GAUGES.into_iter().zip(values) {
            describe_gauge!(name, help);
            gauge!(name, "store" => store.to_owned()).set(value);
        }
    }
}
