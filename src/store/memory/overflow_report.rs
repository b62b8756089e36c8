//! Counts and logs charges that find no entry of their own in a full store.

use std::sync::atomic::Ordering;

use super::shard::{CountedIn, Shard};
use super::{MINUTE, MemoryStore};
use crate::observe;
use crate::store::account::Account;
use crate::sync::MutexGuard;

impl MemoryStore {
    /// Counts a charge without entries of its own, and logs this unless it was logged recently.
    /// Returns a bit for each quota that is counted in a shared entry.
    #[cold]
    pub(super) fn count_overflow<const N: usize>(
        &self,
        now: i64,
        until: i64,
        mut shard: MutexGuard<'_, Shard>,
        account: &Account<'_>,
        places: [CountedIn; N],
        written: u8,
    ) -> u8 {
        let places = &places[..account.quotas().len()];
        let own = |(i, place): (usize, &CountedIn)| place.is_own(written >> i & 1 == 1);
        if places.iter().enumerate().all(own) {
            return 0;
        }
        shard.overflowed += 1;
        // `log_overflow` takes the locks of all shards.
        drop(shard);
        account.scope().observe().overflowed();
        self.log_overflow(now, until);
        let shared = places.iter().map(|place| u8::from(matches!(place, CountedIn::Shared(_))));
        shared.rev().fold(0, |bits, bit| bits << 1 | bit)
    }

    /// Logs the overflow, unless it was logged recently. Takes the locks of all shards.
    pub(super) fn log_overflow(&self, now: i64, until: i64) {
        let next = until.max(now.saturating_add(MINUTE)) as u64;
        let is_first =
            self.memory.quiet_until.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |quiet| {
                (quiet <= now as u64).then_some(next)
            });
        if is_first.is_ok() {
            observe::overflow(self.memory.max_keys, self.overflowed());
        }
    }
}
