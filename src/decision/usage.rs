//! A key's use of one quota after a charge: [`Usage`].

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::Verdict;
use crate::quota::Span;
use crate::window::Window;

/// A key's use of one quota, and what is left.
///
/// ```
/// use std::time::Duration;
/// use tower_fixed_window::testing::block_on;
/// use tower_fixed_window::{Limiter, Quota};
///
/// let decision = block_on(Limiter::new(Quota::per_minute(5)).check("alice"))?;
/// let usage = decision.usage()[0];
/// assert_eq!((usage.limit(), usage.used(), usage.remaining()), (5, 1, 4));
/// assert_eq!((usage.window(), usage.reset_at()), (Duration::from_secs(60), decision.reset_at()));
/// # Ok::<_, tower_fixed_window::StoreError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    pub(super) limit: u64,
    /// Instants are milliseconds since the epoch.
    pub(super) start: i64,
    pub(crate) end: i64,
    /// As a store keeps it: below 0 while saved tokens are left.
    pub(crate) used: i64,
}

impl Usage {
    pub(crate) const NONE: Self = Self { limit: 0, start: 0, end: 0, used: 0 };

    #[inline]
    pub(crate) fn from_window(window: &Window<'_>) -> Self {
        Self { limit: window.quota.limit, start: window.start, end: window.end, used: window.used }
    }

    /// Returns the limit.
    #[inline]
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns the length of the window; on a calendar, that of the current one.
    pub fn window(&self) -> Duration {
        Duration::from_millis(self.length())
    }

    #[inline]
    pub(super) fn length(&self) -> u64 {
        self.end.saturating_sub(self.start) as u64
    }

    /// Returns the tokens used in this window. Above the limit, the key is in debt. With rollover,
    /// it is 0 while saved tokens are left.
    #[inline]
    pub fn used(&self) -> u64 {
        self.used.max(0) as u64
    }

    /// Returns the tokens left in this window. With rollover, this can be above the limit.
    #[inline]
    pub fn remaining(&self) -> u64 {
        (self.limit as i64 - self.used).max(0) as u64
    }

    /// Returns the verdict on a charge in a [running](Window::running) window, whose quota is plain
    /// and whose count is not negative.
    #[inline(always)]
    pub(super) fn verdict(&self, cost: u64) -> Verdict {
        if cost <= self.remaining() {
            Verdict::Passed
        } else if cost <= self.limit {
            Verdict::Refused { retry_at: self.end }
        } else {
            Verdict::RefusedForGood
        }
    }

    /// Returns whether the last `taken` tokens have reached this share of the limit, in percent.
    pub(crate) fn has_reached(&self, percent: u8, taken: u64) -> bool {
        let share = (u128::from(self.limit) * u128::from(percent)).div_ceil(100) as i64;
        let before = self.used.saturating_sub_unsigned(taken);
        before < share && share <= self.used
    }

    /// Returns when the window ends.
    pub fn reset_at(&self) -> SystemTime {
        system_time(self.end)
    }

    #[inline]
    pub(crate) fn span(&self) -> Span {
        Span { start: self.start, end: self.end }
    }
}

impl fmt::Debug for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limit, start, used, .. } = self;
        write!(f, "{used} of {limit} in [{start}, +{})", self.length())
    }
}

pub(crate) fn system_time(ms: i64) -> SystemTime {
    let since = Duration::from_millis(ms.unsigned_abs());
    let time = if ms < 0 { UNIX_EPOCH.checked_sub(since) } else { UNIX_EPOCH.checked_add(since) };
    // Not every system's time reaches 285,000 years.
    time.unwrap_or(UNIX_EPOCH)
}
