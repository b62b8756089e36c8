//! The error of a quota that can't be built: [`QuotaError`].

use std::fmt;

/// Why a quota, or a set of them, can't be built. The message says what to write instead:
/// see [`Quota::try_new`](crate::Quota::try_new).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum QuotaError {
    /// The limit is above [`MAX_TOKENS`](crate::Quota::MAX_TOKENS).
    LimitTooLarge,
    /// The window is zero.
    WindowZero,
    /// The window is above [`MAX_WINDOW`](crate::Quota::MAX_WINDOW).
    WindowTooLong,
    /// The window has a part of a millisecond.
    WindowNotWholeMillis,
    /// The capacity is below the limit, or above [`MAX_TOKENS`](crate::Quota::MAX_TOKENS) with
    /// what may be reserved.
    Capacity,
    /// Two quotas of one set have the same window and anchor.
    EqualWindows,
    /// More than four quotas in one set.
    TooMany,
    /// A time zone or a first day for a window that is no day, week, month or year.
    NotACalendar,
    /// A calendar together with another anchor.
    CalendarAnchor,
    /// The first day is not one that windows of this length have.
    FirstDay,
    /// The time zone is not in the time zone database.
    UnknownTimeZone,
    /// There is no time zone database.
    NoTimeZoneDatabase,
    /// The crate was built without the feature `time-zones`.
    NoTimeZones,
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
            Self::NotACalendar => {
                "only a day, a week, a month or a year follows a calendar: write Quota::per_day(n), per_week, per_month or per_year"
            }
            Self::CalendarAnchor => {
                "a calendar says where windows begin: leave out staggered, from_first_request and starting_at"
            }
            Self::FirstDay => {
                "a week begins on a weekday, a month on a day from 1 to 31, a year on a month and a day: write .from_weekday(..), .from_day(..) or .from_date(..)"
            }
            Self::UnknownTimeZone => {
                "the time zone database has no such time zone: write an IANA name, such as Europe/Berlin"
            }
            Self::NoTimeZoneDatabase => {
                "there is no time zone database: install tzdata, or use the feature `time-zones-bundled`"
            }
            Self::NoTimeZones => {
                "time zones other than UTC need the feature `time-zones` of tower-fixed-window"
            }
        }
    }
}

impl fmt::Display for QuotaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.message())
    }
}

impl std::error::Error for QuotaError {}
