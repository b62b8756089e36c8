//! The counters of each scope.

/// What happened to a request.
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
    pub(super) fn name(self) -> &'static str {
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

/// A counter of a scope.
#[derive(Clone, Copy)]
#[cfg_attr(not(all(feature = "metrics", feature = "tokio")), allow(dead_code))]
pub(super) enum Count {
    Decision(Outcome),
    StoreFailure,
    WithoutStore,
    Overflow,
    RememberedRefusal,
    LeaseTaken,
    LeaseSpent,
    LeaseReturned,
}

#[cfg(feature = "metrics")]
const OUTCOMES: usize = Outcome::FailedClosed as usize + 1;
#[cfg(feature = "metrics")]
pub(super) const COUNTS: usize = OUTCOMES + 7;

#[cfg(feature = "metrics")]
impl Count {
    pub(super) const ALL: [Self; COUNTS] = [
        Self::Decision(Outcome::Passed),
        Self::Decision(Outcome::Reserved),
        Self::Decision(Outcome::Refused),
        Self::Decision(Outcome::ShadowRefused),
        Self::Decision(Outcome::MissingKey),
        Self::Decision(Outcome::ShadowMissingKey),
        Self::Decision(Outcome::FailedOpen),
        Self::Decision(Outcome::FailedClosed),
        Self::StoreFailure,
        Self::WithoutStore,
        Self::Overflow,
        Self::RememberedRefusal,
        Self::LeaseTaken,
        Self::LeaseSpent,
        Self::LeaseReturned,
    ];

    #[inline]
    pub(super) fn index(self) -> usize {
        match self {
            Self::Decision(outcome) => outcome as usize,
            Self::StoreFailure => OUTCOMES,
            Self::WithoutStore => OUTCOMES + 1,
            Self::Overflow => OUTCOMES + 2,
            Self::RememberedRefusal => OUTCOMES + 3,
            Self::LeaseTaken => OUTCOMES + 4,
            Self::LeaseSpent => OUTCOMES + 5,
            Self::LeaseReturned => OUTCOMES + 6,
        }
    }

    pub(super) fn name_and_help(self) -> (&'static str, &'static str) {
        match self {
            Self::Decision(_) => ("tower_fixed_window_decisions_total", "Requests, by outcome"),
            Self::StoreFailure => (
                "tower_fixed_window_store_failures_total",
                "Calls to the store that failed or timed out",
            ),
            Self::WithoutStore => (
                "tower_fixed_window_without_store_total",
                "Requests answered without the store, because it failed",
            ),
            Self::Overflow => (
                "tower_fixed_window_overflow_total",
                "Charges in memory without an entry of their own",
            ),
            Self::RememberedRefusal => (
                "tower_fixed_window_remembered_refusals_total",
                "Refusals answered from memory, without a call",
            ),
            Self::LeaseTaken => (
                "tower_fixed_window_lease_tokens_taken_total",
                "Tokens taken by calls for leases, including those for the requests that waited",
            ),
            Self::LeaseSpent => (
                "tower_fixed_window_lease_tokens_spent_total",
                "Leased tokens spent on requests without a call",
            ),
            Self::LeaseReturned => {
                ("tower_fixed_window_lease_tokens_returned_total", "Leased tokens returned unspent")
            }
        }
    }
}
