//! Constructors of quotas, from a limit and a window.

use std::time::Duration;

use super::calendar::Period;
use super::error::QuotaError;
use super::zone::Zone;
use super::{Anchor, MONDAY_MS, Quota, WEEK_MS, expect_quota};

impl Quota {
    /// `limit` tokens in each second.
    ///
    /// # Panics
    /// If the limit is above [`MAX_TOKENS`](Self::MAX_TOKENS).
    #[track_caller]
    pub const fn per_second(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(1))
    }

    /// `limit` tokens in each minute.
    ///
    /// # Panics
    /// If the limit is above [`MAX_TOKENS`](Self::MAX_TOKENS).
    #[track_caller]
    pub const fn per_minute(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(60))
    }

    /// `limit` tokens in each hour.
    ///
    /// # Panics
    /// If the limit is above [`MAX_TOKENS`](Self::MAX_TOKENS).
    #[track_caller]
    pub const fn per_hour(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(3_600))
    }

    /// `limit` tokens in each day, from midnight to midnight UTC.
    ///
    /// # Panics
    /// If the limit is above [`MAX_TOKENS`](Self::MAX_TOKENS).
    #[track_caller]
    pub const fn per_day(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(86_400))
    }

    /// `limit` tokens in each week, from Monday 00:00 UTC.
    ///
    /// # Panics
    /// If the limit is above [`MAX_TOKENS`](Self::MAX_TOKENS).
    #[track_caller]
    pub const fn per_week(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(7 * 86_400))
    }

    /// `limit` tokens in each month, from the first day of the month at 00:00 UTC. In memory, a
    /// restart forgets what was used: write `MemoryStore::open(path, interval)?` (feature `saved`)
    /// or use `RedisStore`.
    ///
    /// ```
    /// use std::time::{Duration, UNIX_EPOCH};
    /// use tower_fixed_window::testing::block_on;
    /// use tower_fixed_window::{Limit, ManualClock, MemoryStore, Quota};
    ///
    /// const PLAN: Quota = Quota::per_month(10_000);
    /// let february_29 = ManualClock::at_ms(1_709_164_800_000);
    /// let limiter = Limit::new(PLAN).store(MemoryStore::new().clock(february_29));
    /// let decision = block_on(limiter.check("alice")).unwrap();
    /// assert_eq!(decision.reset_after(), Duration::from_secs(86_400));
    /// ```
    ///
    /// # Panics
    /// If the limit is above [`MAX_TOKENS`](Self::MAX_TOKENS).
    #[track_caller]
    pub const fn per_month(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(86_400)).on_calendar(Period::Month(1), Zone::UTC)
    }

    /// `limit` tokens in each year, from 1 January 00:00 UTC. In memory, a restart
    /// forgets what was used, as for [`per_month`](Self::per_month).
    ///
    /// # Panics
    /// If the limit is above [`MAX_TOKENS`](Self::MAX_TOKENS).
    #[track_caller]
    pub const fn per_year(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(86_400)).on_calendar(Period::Year(1, 1), Zone::UTC)
    }

    /// `limit` tokens in each window of the given length.
    ///
    /// # Panics
    /// If the limit or the window is out of [bounds](Quota#bounds). In a `const` this is a compile
    /// error:
    ///
    /// ```compile_fail
    /// # use std::time::Duration; use tower_fixed_window::Quota;
    /// const NEVER: Quota = Quota::new(10, Duration::ZERO);
    /// # let _ = NEVER;
    /// ```
    #[track_caller]
    pub const fn new(limit: u64, window: Duration) -> Self {
        expect_quota(Self::try_new(limit, window))
    }

    /// The same as [`new`](Self::new), for numbers from a database or a file.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_fixed_window::Quota;
    ///
    /// let error = Quota::try_new(10, Duration::ZERO).unwrap_err();
    /// assert_eq!(error.to_string(), "a quota's window is at least 1 ms: write Duration::from_secs(60) for a minute");
    /// ```
    ///
    /// # Errors
    /// [`QuotaError`] if the limit or the window is out of [bounds](Quota#bounds).
    pub const fn try_new(limit: u64, window: Duration) -> Result<Self, QuotaError> {
        if limit > Self::MAX_TOKENS {
            return Err(QuotaError::LimitTooLarge);
        }
        if !window.subsec_nanos().is_multiple_of(1_000_000) {
            return Err(QuotaError::WindowNotWholeMillis);
        }
        if window.as_millis() == 0 {
            return Err(QuotaError::WindowZero);
        }
        if window.as_millis() > Self::MAX_WINDOW.as_millis() {
            return Err(QuotaError::WindowTooLong);
        }
        let window = window.as_millis() as u64;
        let offset = if window == WEEK_MS { MONDAY_MS } else { 0 };
        Ok(Self {
            limit,
            window,
            anchor: Anchor::Grid { offset },
            capacity: limit,
            max_reserved: 0,
        })
    }
}
