//! Counters and timings through the `metrics` facade. Their names are listed in
//! `docs/observing.md`.

use std::iter;
use std::sync::OnceLock;
use std::time::Instant;

#[cfg(feature = "redis")]
use metrics::counter;
use metrics::{Counter, Histogram, Key, Label, Level, Metadata, Recorder, Unit, gauge};

use super::count::{COUNTS, Count};

static METADATA: Metadata<'_> =
    Metadata::new("tower_fixed_window", Level::INFO, Some("tower_fixed_window"));

const STORE_SECONDS: &str = "tower_fixed_window_store_seconds";

/// The handles of one scope, made when the first of them is used: a recorder need not be there
/// before the layer is.
#[derive(Default)]
pub(crate) struct Meters {
    counters: [OnceLock<Counter>; COUNTS],
    store_seconds: OnceLock<Histogram>,
    /// Their names, made once also where no recorder is installed.
    keys: OnceLock<Keys>,
}

struct Keys {
    counters: [Key; COUNTS],
    store_seconds: Key,
}

impl Keys {
    fn new(scope: &str) -> Self {
        let scope = || Label::new("scope", scope.to_owned());
        let counter = |count: Count| {
            let outcome = match count {
                Count::Decision(outcome) => Some(Label::new("outcome", outcome.name())),
                _ => None,
            };
            let (name, _) = count.name_and_help();
            Key::from_parts(name, iter::once(scope()).chain(outcome).collect::<Vec<_>>())
        };
        Self {
            counters: Count::ALL.map(counter),
            store_seconds: Key::from_parts(STORE_SECONDS, vec![scope()]),
        }
    }
}

impl Meters {
    #[inline]
    pub(super) fn count(&self, scope: &str, count: Count, by: u64) {
        match self.counters[count.index()].get() {
            Some(counter) => counter.increment(by),
            None => self.register(scope, count).increment(by),
        }
    }

    #[inline]
    pub(super) fn time(&self, scope: &str, Timing(start): Timing) {
        let seconds = start.elapsed().as_secs_f64();
        match self.store_seconds.get() {
            Some(histogram) => histogram.record(seconds),
            None => self.register_store_seconds(scope).record(seconds),
        }
    }

    /// All counters at once, so that counters of rare events start at 0: Prometheus can't see an
    /// increase from a counter that did not exist.
    #[cold]
    fn register(&self, scope: &str, count: Count) -> Counter {
        let keys = self.keys(scope);
        metrics::with_recorder(|recorder| {
            let register =
                |count: Count| recorder.register_counter(&keys.counters[count.index()], &METADATA);
            if !is_there(recorder) {
                return register(count);
            }
            #[cfg(feature = "redis")]
            for (name, help) in CONNECTIONS {
                recorder.describe_counter(name.into(), None, help.into());
                let _ = recorder.register_counter(&Key::from_static_name(name), &METADATA);
            }
            for count in Count::ALL {
                self.counters[count.index()].get_or_init(|| {
                    let (name, help) = count.name_and_help();
                    recorder.describe_counter(name.into(), None, help.into());
                    register(count)
                });
            }
            self.counters[count.index()].get().cloned().unwrap_or(Counter::noop())
        })
    }

    #[cold]
    fn register_store_seconds(&self, scope: &str) -> Histogram {
        const HELP: &str = "Duration of calls to a remote store, in seconds";
        let key = &self.keys(scope).store_seconds;
        metrics::with_recorder(|recorder| {
            let histogram = recorder.register_histogram(key, &METADATA);
            if is_there(recorder) && self.store_seconds.set(histogram.clone()).is_ok() {
                let unit = Some(Unit::Seconds);
                recorder.describe_histogram(STORE_SECONDS.into(), unit, HELP.into());
            }
            histogram
        })
    }

    fn keys(&self, scope: &str) -> &Keys {
        self.keys.get_or_init(|| Keys::new(scope))
    }
}

/// Whether a recorder is installed. Without one, the facade has a recorder of size zero that does
/// nothing, and its handles do nothing for ever, so these are not kept. (If a recorder of the app
/// has size zero, its handles are not kept either.)
fn is_there(recorder: &dyn Recorder) -> bool {
    size_of_val(recorder) > 0
}

/// How full a store in memory is.
pub(crate) fn memory(store: &str, tracked_keys: usize, max_keys: usize) {
    const TRACKED: &str = "tower_fixed_window_tracked_keys";
    const MAX: &str = "tower_fixed_window_max_keys";

    metrics::describe_gauge!(TRACKED, "Entries of a memory store whose windows run");
    metrics::describe_gauge!(MAX, "Entries that a memory store was created for");
    gauge!(TRACKED, "store" => store.to_owned()).set(tracked_keys as f64);
    gauge!(MAX, "store" => store.to_owned()).set(max_keys as f64);
}

/// The counters for the connections of all stores.
#[cfg(feature = "redis")]
const CONNECTIONS: [(&str, &str); 2] = [
    (
        "tower_fixed_window_store_connections_total",
        "Connections made to stores, including the first one of each",
    ),
    (
        "tower_fixed_window_store_checks_total",
        "Idle connections to stores that were checked before use",
    ),
];

/// A connection to a store was made.
#[cfg(feature = "redis")]
pub(crate) fn store_connected() {
    counter!(CONNECTIONS[0].0).increment(1);
}

/// A connection that was idle is tried.
#[cfg(feature = "redis")]
pub(crate) fn store_checked() {
    counter!(CONNECTIONS[1].0).increment(1);
}

/// A call to a store, from its beginning to its end.
pub(crate) struct UnderWay;

impl UnderWay {
    const NAME: &str = "tower_fixed_window_store_calls";

    pub(crate) fn new() -> Self {
        gauge!(Self::NAME).increment(1.0);
        Self
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        gauge!(Self::NAME).decrement(1.0);
    }
}

/// When a call to the store began.
pub(crate) struct Timing(Instant);

impl Timing {
    #[inline]
    pub(super) fn start() -> Self {
        Self(Instant::now())
    }
}
