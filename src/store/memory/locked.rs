//! A shard with its lock, and with what is read without it.

use super::last_refused::LastRefused;
use super::shard::Shard;
use super::time::Reading;
use crate::decision::Ruling;
use crate::quota::Quota;
use crate::sync::{self, Mutex, MutexGuard};

#[derive(Default)]
pub(super) struct LockedShard {
    shard: Mutex<Shard>,
    last_refused: LastRefused,
}

/// A shard under its lock, for a charge in a window that runs: only this leaves the copy of another
/// key's entry.
pub(super) struct Running<'a> {
    shard: MutexGuard<'a, Shard>,
    last_refused: &'a LastRefused,
}

impl LockedShard {
    /// Locks the shard, for any change.
    #[inline]
    pub(super) fn lock(&self) -> MutexGuard<'_, Shard> {
        self.lock_running().into_any()
    }

    #[inline(always)]
    pub(super) fn lock_running(&self) -> Running<'_> {
        let Self { shard, last_refused } = self;
        Running { shard: sync::lock(shard), last_refused }
    }

    /// Refuses a plain charge of one quota without the lock, if the last one that was refused is of
    /// the same key.
    #[inline(always)]
    pub(super) fn refuse_again(
        &self,
        now: Reading,
        quota: &Quota,
        fingerprint: u64,
        cost: u64,
    ) -> Option<Ruling> {
        if !self.last_refused.is_of(fingerprint) {
            return None;
        }
        let state = self.last_refused.get(fingerprint)?;
        let ruling = Shard::rule_running(now, quota, state, cost)?;
        (!ruling.passed()).then_some(ruling)
    }
}

impl<'a> Running<'a> {
    /// Sets the time of the shard, as [`Shard::enter`] does.
    #[inline(always)]
    pub(super) fn enter(&mut self, now: Reading) -> bool {
        self.shard.enter(now.at)
    }

    /// Decides a plain charge of one quota in a window that runs, as nearly every charge is.
    #[inline(always)]
    pub(super) fn charge(
        &mut self,
        now: Reading,
        quota: &Quota,
        fingerprint: u64,
        cost: u64,
    ) -> Option<Ruling> {
        let (ruling, state) = self.shard.charge_running(now, quota, fingerprint, cost)?;
        if ruling.passed() {
            if self.last_refused.is_of(fingerprint) {
                self.last_refused.clear();
            }
        } else {
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
