//! A server's health, by the calls over one connection: [`Health`].

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// Milliseconds after an answer in which a connection is taken to be open.
const FRESH: u64 = 10;

/// As seen over one connection. Times are milliseconds of the origin's clock.
#[derive(Default)]
pub(crate) struct Health {
    pub(super) answered_at: AtomicU64,
    /// When the first call since then is to be answered; 0 if none was sent.
    pub(super) answer_due: AtomicU64,
    /// 0 if the connection is not lost.
    pub(super) lost_since: AtomicU64,
    /// A call was answered as it should be.
    pub(super) is_proved: AtomicBool,
    /// The server has refused what another one may take: it is a replica, or not Redis.
    pub(super) refuses: AtomicBool,
    /// For each script, the last call by its hash found none. The next one brings it, as the callers
    /// of that one may all have left before they had an answer.
    pub(crate) lacks_script: [AtomicBool; 2],
}

impl Health {
    pub(super) fn is_well(&self) -> bool {
        self.lost_since.load(Relaxed) == 0
    }

    pub(super) fn note_sent(&self, until: u64) {
        if self.answer_due.load(Relaxed) == 0 {
            self.answer_due.store(until, Relaxed);
        }
    }

    /// No call is in flight, of which the loss would be known, and the last answer is not of now.
    pub(super) fn rests_since(&self, now: u64) -> bool {
        self.answer_due.load(Relaxed) == 0 && now >= self.answered_at.load(Relaxed) + FRESH
    }

    pub(super) fn note_answer(&self, now: u64, proves: bool) {
        self.answer_due.store(0, Relaxed);
        self.answered_at.fetch_max(now, Relaxed);
        if proves && !self.is_proved.load(Relaxed) {
            self.is_proved.store(true, Relaxed);
        }
    }

    /// Returns `false` if it was lost already.
    pub(super) fn mark_lost_once(&self, now: u64) -> bool {
        self.lost_since.compare_exchange(0, now, Relaxed, Relaxed).is_ok()
    }
}
