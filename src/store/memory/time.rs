//! The clock of a store in memory.

use super::super::account::instant;
use crate::clock::{Clock, LAG_MS, SystemClock};

/// The system's clock is called directly, others through a pointer.
pub(super) enum Time {
    #[cfg_attr(tfw_sim, allow(dead_code))]
    System,
    Other(Box<dyn Clock>),
}

#[derive(Clone, Copy)]
pub(crate) struct Reading {
    pub(super) at: i64,
    /// The instant may have been later, until then.
    pub(super) latest: i64,
}

impl Time {
    #[cfg(not(tfw_sim))]
    pub(super) fn system() -> Self {
        Self::System
    }

    /// In the simulated network, the system's clock begins with each store.
    #[cfg(tfw_sim)]
    pub(super) fn system() -> Self {
        Self::Other(Box::new(crate::sync::Instant::now()))
    }

    #[inline]
    pub(super) fn now(&self) -> Reading {
        let now = match self {
            Self::System => SystemClock.now_ms(),
            Self::Other(clock) => clock.now_ms(),
        };
        let at = instant(now);
        Reading { at, latest: at }
    }

    /// The time, or a little before it if that is cheaper to read.
    #[inline]
    pub(super) fn recently(&self) -> Reading {
        // In a model, every clock has ticks, as long as they can be.
        #[cfg(tfw_shuttle)]
        return Reading::up_to_lag_after(self.now().at / LAG_MS * LAG_MS);
        #[cfg(not(tfw_shuttle))]
        if let Self::System = self
            && let Some(recent) = SystemClock.recent_ms()
        {
            Reading::up_to_lag_after(instant(recent))
        } else {
            self.now()
        }
    }
}

impl Reading {
    #[inline(always)]
    fn up_to_lag_after(at: i64) -> Self {
        Self { at, latest: at + LAG_MS }
    }

    #[inline]
    pub(super) fn is_exact(self) -> bool {
        self.at == self.latest
    }

    /// From an instant on, if the reading may have been then.
    #[inline(always)]
    pub(super) fn not_before(self, at: i64) -> Option<Self> {
        if self.at >= at {
            return Some(self);
        }
        (at <= self.latest).then_some(Self { at, ..self })
    }
}

#[cfg(tfw_sim)]
impl Clock for crate::sync::Instant {
    fn now_ms(&self) -> u64 {
        1_700_000_000_000 + self.elapsed().as_millis() as u64
    }
}
