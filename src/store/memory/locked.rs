//! A shard with its lock, and with what is read without it.

use super::last_refused::LastRefused;
use super::shard::Shard;
use super::time::{Reading, Time};
use crate::decision::Ruling;
use crate::quota::Quota;
use crate::sync::{self, Mutex, MutexGuard};

#[derive(Default)]
pub(super) struct LockedShard {
    shard: Mutex<Shard>,
    last_refused: LastRefused,
}

/// Two cache lines, so that shards stay as small as `max_bytes` says.
#[cfg(all(target_os = "linux", target_pointer_width = "64", not(tfw_shuttle)))]
const _: () = assert!(size_of::<LockedShard>() <= 128);

/// A shard under its lock, for a charge in a window that runs. The copy stays if it is of another
/// key.
pub(super) struct LockedForCharge<'a> {
    shard: MutexGuard<'a, Shard>,
    last_refused: &'a LastRefused,
}

impl LockedShard {
    /// Locks the shard, for any change.
    #[inline]
    pub(super) fn lock(&self) -> MutexGuard<'_, Shard> {
        self.lock_for_charge().into_any()
    }

    /// Locks the shard, unless it is locked.
    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, Shard>> {
        let shard = self.shard.try_lock().ok()?;
        self.last_refused.clear();
        Some(shard)
    }

    #[inline(always)]
    pub(super) fn lock_for_charge(&self) -> LockedForCharge<'_> {
        let Self { shard, last_refused } = self;
        LockedForCharge { shard: sync::lock(shard), last_refused }
    }

    /// Refuses a plain charge of one plain quota without the lock, if the last one that was refused
    /// is of the same key. A clock that has stepped back within the window is left to the next call
    /// that takes the lock.
    #[inline(always)]
    pub(super) fn refuse_again(
        &self,
        time: &Time,
        quota: &Quota,
        fingerprint: u64,
        cost: u64,
    ) -> Option<Ruling> {
        // Most charges are of another key, and load no more than this.
        if !self.last_refused.is_of(fingerprint) {
            return None;
        }
        let state = self.last_refused.get(fingerprint)?;
        // Read after the copy, so that no refusal is of an earlier time than the copied one.
        let now = time.recently();
        let ruling = Shard::rule_running(now, quota, state, cost)?;
        (!ruling.passed()).then_some(ruling)
    }
}

impl<'a> LockedForCharge<'a> {
    /// Decides a plain charge of one quota in a window that runs, as nearly every charge is.
    #[inline(always)]
    pub(super) fn charge(
        &mut self,
        now: Reading,
        quota: &Quota,
        fingerprint: u64,
        cost: u64,
    ) -> Option<Ruling> {
        let entered = self.shard.enter(now)?;
        let (ruling, state) = self.shard.charge_running(entered, quota, fingerprint, cost)?;
        if ruling.passed() {
            if self.last_refused.is_of(fingerprint) {
                self.last_refused.clear();
            }
        } else if entered.at == now.at && !self.last_refused.is_of(fingerprint) {
            // Where the shard is ahead of the clock's last tick, so would be the copied refusal.
            self.last_refused.set(fingerprint, state);
        }
        Some(ruling)
    }

    /// Returns the shard for any change.
    #[inline(always)]
    pub(super) fn into_any(self) -> MutexGuard<'a, Shard> {
        self.last_refused.clear();
        self.shard
    }
}

impl From<Shard> for LockedShard {
    fn from(shard: Shard) -> Self {
        Self { shard: Mutex::new(shard), last_refused: LastRefused::default() }
    }
}
