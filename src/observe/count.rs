//! What is counted, in each scope by itself.

/// What happened to a request. [`OUTCOMES`] has their names.
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
pub(super) const OUTCOMES: [&str; Outcome::FailedClosed as usize + 1] = [
    "passed",
    "reserved",
    "refused",
    "shadow_refused",
    "missing_key",
    "shadow_missing_key",
    "failed_open",
    "failed_closed",
];

/// What else happens. [`EVENTS`] has their counters.
#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "tokio"), allow(dead_code))]
pub(super) enum Event {
    StoreFailure,
    WithoutStore,
    Overflow,
    RememberedRefusal,
    LeaseTaken,
    LeaseSpent,
    LeaseReturned,
}

/// Names and help texts.
#[cfg(feature = "metrics")]
pub(super) const EVENTS: [(&str, &str); Event::LeaseReturned as usize + 1] = [
    ("tower_fixed_window_store_failures_total", "Calls that the store failed"),
    (
        "tower_fixed_window_without_store_total",
        "Requests that were answered without the store, since it failed",
    ),
    (
        "tower_fixed_window_overflow_total",
        "Charges in memory that were left without an entry of their own",
    ),
    (
        "tower_fixed_window_remembered_refusals_total",
        "Refusals for which the store was not asked, since it had said so before",
    ),
    (
        "tower_fixed_window_lease_tokens_taken_total",
        "Tokens that calls for leases have taken, with those for who waited",
    ),
    (
        "tower_fixed_window_lease_tokens_spent_total",
        "Tokens of leases that have paid for requests without a call",
    ),
    (
        "tower_fixed_window_lease_tokens_returned_total",
        "Tokens of leases that were given back unspent",
    ),
];
