//! What operators see of connections: counters through `metrics`. The rest is the core's.

#[cfg(feature = "metrics")]
use std::sync::OnceLock;

#[cfg(feature = "metrics")]
use metrics::{counter, describe_counter};

#[cfg(feature = "metrics")]
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

/// The counters of a store, from its first charge on.
#[derive(Default)]
pub(crate) struct Meters {
    #[cfg(feature = "metrics")]
    registered: OnceLock<()>,
}

impl Meters {
    /// Counters start at 0: Prometheus can't see an increase from a counter that did not exist.
    #[inline]
    pub(crate) fn register(&self) {
        #[cfg(feature = "metrics")]
        if self.registered.get().is_none() && has_recorder() {
            self.registered.get_or_init(|| {
                for (name, help) in CONNECTIONS {
                    describe_counter!(name, help);
                    counter!(name).increment(0);
                }
            });
        }
    }
}

/// Without a recorder, the facade has one of size zero that does nothing.
#[cfg(feature = "metrics")]
fn has_recorder() -> bool {
    metrics::with_recorder(|recorder| size_of_val(recorder) > 0)
}

pub(crate) fn store_connected() {
    #[cfg(feature = "metrics")]
    counter!(CONNECTIONS[0].0).increment(1);
}

pub(crate) fn store_checked() {
    #[cfg(feature = "metrics")]
    counter!(CONNECTIONS[1].0).increment(1);
}
