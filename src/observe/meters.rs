//! Counters and timings through the `metrics` facade. `docs/observing.md` lists their names.

use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{array, iter};
#[cfg(feature = "saved")]
use std::{sync::PoisonError, time::UNIX_EPOCH};

#[cfg(feature = "saved")]
use metrics::counter;
use metrics::{Counter, Histogram, Key, Label, Level, Metadata, Recorder, Unit, gauge};

#[cfg(feature = "saved")]
use super::Saves;
use super::{Change, Event, OUTCOMES, Timed};

static METADATA: Metadata<'_> =
    Metadata::new("tower_fixed_window", Level::INFO, Some("tower_fixed_window"));

/// Names and help texts. Events of one name differ by [`policy`].
const EVENTS: [(&str, &str); Event::TokensSettled as usize + 1] = [
    ("tower_fixed_window_store_failures_total", "Calls to the store that failed or timed out"),
    WITHOUT_STORE,
    WITHOUT_STORE,
    WITHOUT_STORE,
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

const WITHOUT_STORE: (&str, &str) = (
    "tower_fixed_window_without_store_total",
    "Requests answered without the store, because it failed",
);

fn policy(event: usize) -> Option<&'static str> {
    let policies = ["local", "allow", "deny"];
    policies.get(event.checked_sub(Event::CountedLocally as usize)?).copied()
}

const SECONDS: [(&str, &str); Timed::Wait as usize + 1] = [
    ("tower_fixed_window_store_seconds", "Duration of calls to a remote store, in seconds"),
    ("tower_fixed_window_wait_seconds", "Time that requests have waited in a queue, in seconds"),
];

const GAUGES: [(&str, &str); 2] = [
    ("tower_fixed_window_waiting", "Requests that wait in a queue"),
    ("tower_fixed_window_store_calls", "Calls to stores in flight"),
];

/// Outcomes first, then events.
const COUNTERS: usize = OUTCOMES.len() + EVENTS.len();

fn name_and_help(counter: usize) -> (&'static str, &'static str) {
    const DECISIONS: (&str, &str) =
        ("tower_fixed_window_decisions_total", "Requests, by what became of them");
    counter.checked_sub(OUTCOMES.len()).map_or(DECISIONS, |event| EVENTS[event])
}

/// Made when the first of them is used: a recorder need not be there before the layer is.
#[derive(Default)]
pub(crate) struct Meters {
    counters: [OnceLock<Counter>; COUNTERS],
    seconds: [OnceLock<Histogram>; SECONDS.len()],
    keys: OnceLock<Keys>,
    /// A charge had a cost other than 1. Until then, tokens are not counted.
    costs: AtomicBool,
}

/// A panic in a recorder leaves nothing half done here, and a feature takes no trait from a public
/// type.
impl UnwindSafe for Meters {}
impl RefUnwindSafe for Meters {}

struct Keys {
    counters: [Key; COUNTERS],
    seconds: [Key; SECONDS.len()],
    waiting: Key,
}

impl Keys {
    fn new(scope: &str) -> Self {
        let scope = || Label::new("scope", scope.to_owned());
        let counter = |i: usize| {
            let other = match i.checked_sub(OUTCOMES.len()) {
                None => Some(Label::new("outcome", OUTCOMES[i])),
                Some(event) => policy(event).map(|policy| Label::new("policy", policy)),
            };
            let labels: Vec<_> = iter::once(scope()).chain(other).collect();
            Key::from_parts(name_and_help(i).0, labels)
        };
        Self {
            counters: array::from_fn(counter),
            seconds: SECONDS.map(|(name, _)| Key::from_parts(name, vec![scope()])),
            waiting: Key::from_parts(GAUGES[0].0, vec![scope()]),
        }
    }
}

impl Meters {
    pub(super) fn note_costs(&self) {
        if !self.has_costs() {
            self.costs.store(true, Ordering::Relaxed);
        }
    }

    #[inline(always)]
    pub(super) fn has_costs(&self) -> bool {
        self.costs.load(Ordering::Relaxed)
    }

    #[inline(always)]
    pub(super) fn increment(&self, scope: &str, counter: usize, by: u64) {
        match self.counters[counter].get() {
            Some(counter) => counter.increment(by),
            None => self.register(scope, counter).increment(by),
        }
    }

    pub(super) fn time(&self, scope: &str, what: Timed, took: Duration) {
        let seconds = took.as_secs_f64();
        match self.seconds[what as usize].get() {
            Some(histogram) => histogram.record(seconds),
            None => self.register_seconds(scope, what).record(seconds),
        }
    }

    pub(super) fn wait(&self, scope: &str, more: f64) {
        let key = &self.keys(scope).waiting;
        metrics::with_recorder(|recorder| recorder.register_gauge(key, &METADATA).increment(more));
    }

    /// All at once, so that counters of rare events start at 0: Prometheus can't see an increase
    /// from a counter that did not exist.
    #[cold]
    fn register(&self, scope: &str, counter: usize) -> Counter {
        let keys = self.keys(scope);
        metrics::with_recorder(|recorder| {
            let register = |i: usize| recorder.register_counter(&keys.counters[i], &METADATA);
            if !is_there(recorder) {
                return register(counter);
            }
            for (name, help) in GAUGES {
                recorder.describe_gauge(name.into(), None, help.into());
            }
            for (i, counter) in self.counters.iter().enumerate() {
                counter.get_or_init(|| {
                    let (name, help) = name_and_help(i);
                    recorder.describe_counter(name.into(), None, help.into());
                    register(i)
                });
            }
            self.counters[counter].get().cloned().unwrap_or(Counter::noop())
        })
    }

    fn register_seconds(&self, scope: &str, what: Timed) -> Histogram {
        let (name, help) = SECONDS[what as usize];
        let key = &self.keys(scope).seconds[what as usize];
        metrics::with_recorder(|recorder| {
            let histogram = recorder.register_histogram(key, &METADATA);
            let kept = &self.seconds[what as usize];
            if is_there(recorder) && kept.set(histogram.clone()).is_ok() {
                recorder.describe_histogram(name.into(), Some(Unit::Seconds), help.into());
            }
            histogram
        })
    }

    fn keys(&self, scope: &str) -> &Keys {
        self.keys.get_or_init(|| Keys::new(scope))
    }
}

/// Without a recorder, the facade has one of size zero that does nothing, and its handles do
/// nothing for ever, so these are not kept. (Nor are those of an app's recorder of size zero.)
fn is_there(recorder: &dyn Recorder) -> bool {
    size_of_val(recorder) > 0
}

pub(crate) fn memory(store: &str, tracked_keys: usize, max_keys: usize) {
    const TRACKED: &str = "tower_fixed_window_tracked_keys";
    const MAX: &str = "tower_fixed_window_max_keys";

    metrics::describe_gauge!(TRACKED, "Entries of a memory store whose windows run");
    metrics::describe_gauge!(MAX, "Entries that a memory store was created for");
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

        metrics::describe_counter!(FAILURES, "Saves of counts that failed");
        let failures = self.failures.load(Ordering::Relaxed);
        counter!(FAILURES, "store" => store.to_owned()).absolute(failures);
        let last = *self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((at, took, bytes)) = last else { return };
        let at = at.duration_since(UNIX_EPOCH).unwrap_or_default();
        let values = [at.as_secs_f64(), took.as_secs_f64(), bytes as f64];
        for ((name, help), value) in GAUGES.into_iter().zip(values) {
            metrics::describe_gauge!(name, help);
            gauge!(name, "store" => store.to_owned()).set(value);
        }
    }
}

pub(super) fn call(more: f64) {
    gauge!(GAUGES[1].0).increment(more);
}

/// `end` is in milliseconds; `None` sets 0.
pub(super) fn change(scope: &str, of: Change, end: Option<i64>) {
    const UNTIL: &str = "tower_fixed_window_changed_until_timestamp_seconds";

    metrics::describe_gauge!(UNTIL, "When the last change of this kind ends by itself");
    let end = end.map_or(0.0, |end| end as f64 / 1_000.0);
    gauge!(UNTIL, "scope" => scope.to_owned(), "of" => of.name()).set(end);
}
