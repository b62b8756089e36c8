//! Calendars as the script receives them: it chooses between boundaries around the server's time.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::clock::{Clock, SystemClock};
use crate::quota::{Boundaries, Calendar, Quota};
use crate::store::account::instant;

/// Calendars whose boundaries are cached, for one window each. With more, the cache is cleared.
const MAX_CACHED: usize = 4_096;
/// The key of a state that lasts for more windows may outlive the state.
const LASTING: u64 = 64;
/// Reservations are compared with the windows of other quotas, over ten years at most.
const COMPARED: u64 = 4_096;

#[derive(Default)]
pub(super) struct Calendars {
    /// How far the server's clock is ahead of this process's, noted once it was far off.
    ahead: AtomicI64,
    cached: Mutex<HashMap<Calendar, Arc<Boundaries>>>,
}

impl Calendars {
    /// Returns the server's time, as far as this process knows it.
    pub(super) fn server_time(&self) -> i64 {
        let now = instant(SystemClock.now_ms());
        instant(now.saturating_add(self.ahead.load(Ordering::Relaxed)).max(0) as u64)
    }

    /// Notes the server's time, which is not what was assumed.
    pub(super) fn correct_time(&self, time: i64) {
        let ahead = time.saturating_sub(instant(SystemClock.now_ms()));
        self.ahead.store(ahead, Ordering::Relaxed);
    }

    /// Returns the boundaries from the window before `at` on, and how many of them it takes until
    /// everything that is written at `at` under a quota has ended.
    pub(super) fn boundaries_around(
        &self,
        calendar: Calendar,
        at: i64,
        quota: &Quota,
        compared: bool,
    ) -> (Arc<Boundaries>, usize) {
        let most = quota.capacity + quota.max_reserved;
        let bound = if compared { COMPARED } else { LASTING };
        let windows = most.div_ceil(quota.limit.max(1)).min(bound);
        // The window before, this one, and two that may begin until the script runs.
        let count = windows as usize + 4;
        let mut cached = self.cached.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(boundaries) = cached.get(&calendar)
            && boundaries.starts.len() >= count
            && (boundaries.starts[1]..boundaries.starts[2]).contains(&at)
        {
            return (Arc::clone(boundaries), count);
        }
        let boundaries = Arc::new(calendar.boundaries(at, count as i64));
        if cached.len() >= MAX_CACHED {
            cached.clear();
        }
        cached.insert(calendar, Arc::clone(&boundaries));
        (boundaries, count)
    }
}
