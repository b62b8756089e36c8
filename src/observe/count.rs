//! The counters of each scope.

/// The outcome of a request. [`OUTCOMES`] has the names.
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

/// An event that is no outcome of a request. [`EVENTS`] has the counters.
#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "tokio"), allow(dead_code))]
pub(super) enum Event {
    StoreFailure,
    /// Requests answered without the store, by the policy for that.
    CountedLocally,
    Allowed,
    Denied,
    Overflow,
    RememberedRefusal,
    Warned,
    TokensCharged,
    TokensRefunded,
    TokensSettled,
}

/// How requests are answered while the store fails.
#[derive(Clone, Copy)]
pub(crate) enum Meanwhile {
    Local,
    Allow,
    Deny,
}

impl Meanwhile {
    pub(super) fn event(self) -> Event {
        match self {
            Self::Local => Event::CountedLocally,
            Self::Allow => Event::Allowed,
            Self::Deny => Event::Denied,
        }
    }

    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Local => "requests are counted in this process",
            Self::Allow => "requests pass uncounted",
            Self::Deny => "requests are refused with 503",
        }
    }
}

/// A kind of change of a limit at run time.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Change {
    Quotas,
    Shadow,
    /// The quotas of one key.
    Key,
}

impl Change {
    #[cfg_attr(not(any(feature = "tracing", feature = "metrics")), allow(dead_code))]
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Quotas => "quotas",
            Self::Shadow => "shadow",
            Self::Key => "key",
        }
    }
}

/// A duration that is recorded.
#[derive(Clone, Copy)]
pub(super) enum Timed {
    Store,
    Wait,
}

/// Names and help texts. Events of one name differ by [`policy`].
#[cfg(feature = "metrics")]
pub(super) const EVENTS: [(&str, &str); Event::TokensSettled as usize + 1] = [
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

#[cfg(feature = "metrics")]
const WITHOUT_STORE: (&str, &str) = (
    "tower_fixed_window_without_store_total",
    "Requests answered without the store, because it failed",
);

/// Returns the policy by which requests are answered without the store, as a label.
#[cfg(feature = "metrics")]
pub(super) fn policy(event: usize) -> Option<&'static str> {
    let policies = ["local", "allow", "deny"];
    policies.get(event.checked_sub(Event::CountedLocally as usize)?).copied()
}
