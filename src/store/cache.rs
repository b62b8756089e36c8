//! What a process knows of keys for a while, bounded: tables behind locks, on a [`Stopwatch`]. What
//! finds no room is forgotten, which a cache may.

use super::account::Account;
use super::scope::Scope;
use super::sharded::{Sharded, fingerprint, shares};
use super::stopwatch::Stopwatch;
use super::table::{Entry, Found, Slot, Table};
use crate::key::Key;
use crate::quota::Quota;
use crate::sync::MutexGuard;

pub(super) struct Cache<P> {
    shards: Sharded<Table<OfKey<P>>>,
    /// Buckets in a shard's table when it has grown.
    buckets: usize,
    time: Stopwatch,
}

/// What is known of a key, with the key's hash: a reset finds all of it, whatever its quotas are.
#[derive(Clone, Copy, Default)]
struct OfKey<P> {
    hash: u64,
    payload: P,
}

/// All entries of a key, one for each quota, under the lock that they share.
pub(super) struct Entries<'a, P> {
    now: i64,
    hash: u64,
    table: MutexGuard<'a, Table<OfKey<P>>>,
}

impl<P: Copy + Default> Cache<P> {
    pub(super) fn new(max_entries: usize, time: Stopwatch) -> Self {
        let (shards, buckets) = shares(max_entries);
        Self { shards: Sharded::new(shards), buckets, time }
    }

    pub(super) fn entries(&self, account: &Account<'_>) -> Entries<'_, P> {
        self.entries_of(account.scope(), account.key())
    }

    pub(super) fn entries_of(&self, scope: &Scope, key: &Key) -> Entries<'_, P> {
        let (mut table, hash) = self.shards.lock(scope, key);
        if table.is_unallocated() {
            *table = Table::new(1, self.buckets);
        }
        Entries { now: self.time.now(), hash, table }
    }
}

impl<P: Copy + Default> Entries<'_, P> {
    /// The time by which they were found.
    pub(super) fn now(&self) -> i64 {
        self.now
    }

    /// A number of the key's, the same in the life of the cache.
    pub(super) fn hash(&self) -> u64 {
        self.hash
    }

    /// The entry of a quota that lives, and until when it does.
    pub(super) fn get(&self, quota: &Quota) -> Option<(P, i64)> {
        let Found::Entry(slot) = self.find(quota) else { return None };
        let Entry { until, payload, .. } = self.table.get(slot);
        (self.now < until).then_some((payload.payload, until))
    }

    /// `false`: there is no room.
    pub(super) fn set(&mut self, quota: &Quota, until: i64, payload: P) -> bool {
        let payload = OfKey { hash: self.hash, payload };
        loop {
            match self.find(quota) {
                Found::Entry(slot) | Found::Free(slot) => {
                    self.table.set(slot, until, payload);
                    return true;
                }
                Found::Full if self.table.grow(self.now) => {}
                Found::Full => return false,
            }
        }
    }

    pub(super) fn remove(&mut self, quota: &Quota) {
        if let Found::Entry(slot) = self.find(quota) {
            self.table.clear(slot);
        }
    }

    /// Removes the entries of all quotas. They are looked for in the whole table: resets are rare.
    pub(super) fn clear(&mut self) {
        let of_key = |entry: &&mut Entry<OfKey<P>>| entry.payload.hash == self.hash;
        self.table.entries_mut().filter(of_key).for_each(|entry| *entry = Entry::default());
    }

    fn find(&self, quota: &Quota) -> Found {
        self.table.find(fingerprint(self.hash, quota), self.now, |_: &Slot| false)
    }
}
