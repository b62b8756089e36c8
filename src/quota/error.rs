//! What is wrong with a quota: [`QuotaError`].

use std::fmt;

/// Why a quota, or a set of them, can't be built. The message says what to write instead.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum QuotaError {
    /// The limit is above [`MAX_TOKENS`](crate::MAX_TOKENS).
    LimitTooLarge,
    /// The window is zero.
    WindowZero,
    /// The window is above [`MAX_WINDOW`](crate::MAX_WINDOW).
    WindowTooLong,
    /// The window has a part of a millisecond.
    WindowNotWholeMillis,
    /// The capacity is below the limit, or above [`MAX_TOKENS`](crate::MAX_TOKENS) with what may be reserved.
    Capacity,
    /// Two quotas of one set have the same window and anchor.
    EqualWindows,
    /// More than [`Quotas::MAX`](crate::Quotas::MAX) quotas in one set.
    TooMany,
}

impl QuotaError {
    pub(super) const fn message(self) -> &'static str {
        match self {
            Self::LimitTooLarge => {
                "a quota's limit is at most 2^53 - 1: for \"unlimited\", .skip(..) the request"
            }
            Self::WindowZero => {
                "a quota's window is at least 1 ms: write Duration::from_secs(60) for a minute"
            }
            Self::WindowTooLong => {
                "a quota's window is at most ten years of 365 days: choose a shorter one"
            }
            Self::WindowNotWholeMillis => {
                "a quota's window is whole milliseconds: write Duration::from_millis(n)"
            }
            Self::Capacity => {
                "a rollover capacity is at least the limit and, with what may be reserved, at most 2^53 - 1"
            }
            Self::EqualWindows => {
                "two quotas of one set have the same window and anchor and would be one counter: keep the smaller"
            }
            Self::TooMany => "a set holds at most 4 quotas: stack a second layer for more",
        }
    }
}

impl fmt::Display for QuotaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.message())
    }
}

impl std::error::Error for QuotaError {}
