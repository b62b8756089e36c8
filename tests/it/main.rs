//! The layer's promises over HTTP: one module for each subject.

mod all_or_none;
mod auto_traits;
mod breaker;
mod calendars;
mod client_ip;
mod client_libraries;
mod compile_errors;
mod concurrency;
mod dashboards_and_alerts;
mod endpoint;
mod forged_headers;
/// The example, so that its very policy is tested, with a clock that can be moved.
#[path = "../../examples/github.rs"]
#[allow(dead_code, reason = "its main function")]
mod github;
mod hang_ups;
mod header_formats;
mod header_keys;
mod headers;
mod late_responses;
mod layer_order;
mod log;
mod memory_metrics;
mod metrics_and_logs;
mod missing_keys;
mod mistakes;
mod openapi;
mod options;
mod panics;
mod pictures;
mod prelude;
mod queue;
mod queue_faults;
mod queue_nodes;
mod queue_races;
mod queue_random;
mod readiness;
mod refusals;
mod refused_keys;
mod resets;
mod routing;
#[cfg(unix)]
mod runtimes;
mod saved_counts;
mod secrets;
mod shadow_mode;
mod stacked_layers;
mod store_failures;
mod streams_and_upgrades;
mod support;
mod temporary_changes;
mod token_metrics;
mod true_costs;
mod types;
mod uploads;
mod warnings;
