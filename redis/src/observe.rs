//! Counters of connections, through `metrics`. The core has the rest.

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

/// Counters start at 0: Prometheus can't see an increase from a counter that did not exist.
pub(crate) fn store_connections(made: u64, checked: u64) {
    #[cfg(not(feature = "metrics"))]
    let _ = (made, checked);
    #[cfg(feature = "metrics")]
    for ((name, help), more) in CONNECTIONS.into_iter().zip([made, checked]) {
        describe_counter!(name, help);
        counter!(name).increment(more);
    }
}
