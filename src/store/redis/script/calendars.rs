//! Calendars as the script receives them: it chooses between boundaries around the server's time.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::clock::{Clock, SystemClock};
use crate::quota::{Boundaries, Calendar, Quota};
use crate::store::account::instant;

/// Boundaries that are kept, each worked out once for a window. Past that they are worked out anew.
const KEPT: usize = 4_096;
/// A state that lasts longer, in windows, may keep its key longer than it lasts.
const LASTING: u64 = 64;
/// What is reserved is compared with the windows of other quotas: of ten years at most.
const COMPARED: u64 = 4_096;

#[derive(Default)]
pub(super) struct Calendars {
    /// By how much the server's time is ahead of this process's, once it was far off.
    ahead: AtomicI64,
    kept: Mutex<HashMap<Calendar, Arc<Boundaries>>>,
}

impl Calendars {
    /// What time it is for the server, as far as this process knows.
    pub(super) fn time(&self) -> i64 {
        let now = instant(SystemClock.now_ms());
        instant(now.saturating_add(self.ahead.load(Ordering::Relaxed)).max(0) as u64)
    }

    /// The server has another time than it was taken to have.
    pub(super) fn correct(&self, time: i64) {
        let ahead = time.saturating_sub(instant(SystemClock.now_ms()));
        self.ahead.store(ahead, Ordering::Relaxed);
    }

    /// The boundaries from the window before an instant on, and how many of them it takes until all
    /// has ended that is written there under a quota.
    pub(super) fn around(
        &self,
        calendar: Calendar,
        at: i64,
        quota: &Quota,
        compared: bool,
    ) -> (Arc<Boundaries>, usize) {
        let most = quota.capacity + quota.max_reserved;
        let bound = if compared { COMPARED } else { LASTING };
        let windows = most.div_ceil(quota.limit.max(1)).min(bound);
        // One before, this one, and two that may begin until the script runs.
        let count = windows as usize + 4;
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(boundaries) = kept.get(&calendar)
            && boundaries.starts.len() >= count
            && (boundaries.starts[1]..boundaries.starts[2]).contains(&at)
        {
            return (Arc::clone(boundaries), count);
        }
        let boundaries = Arc::new(calendar.boundaries(at, count as i64));
        if kept.len() >= KEPT {
            kept.clear();
        }
        kept.insert(calendar, Arc::clone(&boundaries));
        (boundaries, count)
    }
}
