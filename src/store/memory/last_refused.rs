//! A copy of the entry that last refused a charge of a shard in memory, which is read without a lock:
//! a client that goes on after a refusal writes no shared memory, and no other request waits for it.

use crate::sync::atomic::{AtomicI64, AtomicU64, Ordering, fence};
use crate::window::State;

/// Changes only under the lock of its shard, and equals its entry: a thread that changes the entry
/// removes the copy before it releases the lock.
#[derive(Default)]
pub(super) struct LastRefused {
    /// Counts the changes, twice: it is odd during one.
    version: AtomicU64,
    /// 0 if there is no copy.
    fingerprint: AtomicU64,
    start: AtomicI64,
    used: AtomicI64,
    until: AtomicI64,
}

impl LastRefused {
    #[inline(always)]
    pub(super) fn is_of(&self, fingerprint: u64) -> bool {
        self.fingerprint.load(Ordering::Relaxed) == fingerprint
    }

    #[inline(always)]
    pub(super) fn get(&self, fingerprint: u64) -> Option<State> {
        let version = self.version.load(Ordering::Acquire);
        if !self.is_of(fingerprint) {
            return None;
        }
        let state = State {
            start: self.start.load(Ordering::Relaxed),
            used: self.used.load(Ordering::Relaxed),
            until: self.until.load(Ordering::Relaxed),
            end: 0,
        };
        // If one of these was of a later change, the second load of the version sees that.
        fence(Ordering::Acquire);
        let is_whole = version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version;
        is_whole.then_some(state)
    }

    #[inline]
    pub(super) fn set(&self, fingerprint: u64, state: State) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version + 1, Ordering::Relaxed);
        fence(Ordering::Release);
        self.fingerprint.store(fingerprint, Ordering::Relaxed);
        self.start.store(state.start, Ordering::Relaxed);
        self.used.store(state.used, Ordering::Relaxed);
        self.until.store(state.until, Ordering::Relaxed);
        self.version.store(version + 2, Ordering::Release);
    }

    #[inline]
    pub(super) fn clear(&self) {
        if !self.is_of(0) {
            self.fingerprint.store(0, Ordering::Relaxed);
        }
    }
}
