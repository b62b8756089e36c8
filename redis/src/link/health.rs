//! What calls tell of a server: [`Health`].

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// Scripts that were missing again until none is expected to be kept.
const FORGOTTEN: u64 = 3;
/// Milliseconds after an answer in which a connection is taken to be open.
const FRESH: u64 = 10;

/// As seen over one connection. Times are milliseconds of the origin's clock.
#[derive(Default)]
pub(super) struct Health {
    pub(super) answered_at: AtomicU64,
    /// Of the first call since then, plus 1; 0 if none was sent.
    answer_due: AtomicU64,
    /// Plus 1; 0 if the connection is not lost.
    lost_since: AtomicU64,
    /// When the task that tests the connection is given up.
    pub(super) check_ends: AtomicU64,
    /// A call was answered as it should be.
    pub(super) is_proved: AtomicBool,
    pub(super) led_to_replica: AtomicBool,
    /// How often in a row a script was missing that had been sent before.
    missing_scripts: AtomicU64,
    /// When a script was last sent.
    script_sent: AtomicU64,
}

impl Health {
    pub(super) fn is_well(&self) -> bool {
        self.lost_since.load(Relaxed) == 0
    }

    pub(super) fn note_sent(&self, until: u64) {
        if self.answer_due.load(Relaxed) == 0 {
            self.answer_due.store(until + 1, Relaxed);
        }
    }

    /// A server or proxy that never keeps scripts gets them with each call.
    pub(super) fn keeps_scripts(&self) -> bool {
        self.missing_scripts.load(Relaxed) < FORGOTTEN
    }

    pub(super) fn note_script_sent(&self, now: u64) {
        self.script_sent.store(now, Relaxed);
    }

    /// Notes a call by a script's hash, which was sent at this time.
    pub(super) fn note_script(&self, at: u64, is_missing: bool) {
        let sent = self.script_sent.load(Relaxed);
        if is_missing && sent > 0 && at > sent {
            self.missing_scripts.fetch_add(1, Relaxed);
        } else if !is_missing && self.missing_scripts.load(Relaxed) > 0 {
            self.missing_scripts.store(0, Relaxed);
        }
    }

    /// No call is in flight, of which the loss would be known, and the last answer is not of now.
    pub(super) fn rests_since(&self, now: u64) -> bool {
        self.answer_due().is_none() && now >= self.answered_at.load(Relaxed) + FRESH
    }

    /// When the first call since the last answer is overdue.
    pub(super) fn answer_due(&self) -> Option<u64> {
        self.answer_due.load(Relaxed).checked_sub(1)
    }

    pub(super) fn note_answer(&self, now: u64, proves: bool) {
        self.answer_due.store(0, Relaxed);
        self.answered_at.fetch_max(now, Relaxed);
        if proves && !self.is_proved.load(Relaxed) {
            self.is_proved.store(true, Relaxed);
        }
    }

    pub(super) fn lost_since(&self) -> u64 {
        self.lost_since.load(Relaxed).saturating_sub(1)
    }

    /// From now on, even if it was lost before.
    pub(super) fn mark_lost(&self, now: u64) {
        self.lost_since.store(now + 1, Relaxed);
    }

    /// Returns `false` if it was lost already.
    pub(super) fn mark_lost_once(&self, now: u64) -> bool {
        self.lost_since.compare_exchange(0, now + 1, Relaxed, Relaxed).is_ok()
    }

    pub(super) fn clear_loss(&self) {
        self.check_ends.store(0, Relaxed);
        self.lost_since.store(0, Relaxed);
    }

    /// Until the connection is tested. Returns `true` for the first caller, which tests it.
    pub(super) fn mark_suspect(&self, now: u64, check_ends: u64) -> bool {
        let first = self.mark_lost_once(now);
        if first {
            self.check_ends.store(check_ends, Relaxed);
        }
        first
    }
}
