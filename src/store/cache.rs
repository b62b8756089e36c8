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
    shards: Sharded<Table<P>>,
    /// Buckets in a shard's table when it has grown.
    buckets: usize,
    time: Stopwatch,
}

/// All entries of a key, one for each quota, under the lock that they share.
pub(super) struct Entries<'a, P> {
    now: i64,
    hash: u64,
    table: MutexGuard<'a, Table<P>>,
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

    /// The entry of a quota that lives.
    pub(super) fn get(&self, quota: &Quota) -> Option<Entry<P>> {
        let Found::Entry(slot) = self.find(quota) else { return None };
        Some(self.table.get(slot)).filter(|entry| self.now < entry.until)
    }

    /// `false`: there is no room.
    pub(super) fn set(&mut self, quota: &Quota, until: i64, payload: P) -> bool {
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

    fn find(&self, quota: &Quota) -> Found {
        self.table.find(fingerprint(self.hash, quota), self.now, |_: &Slot| false)
    }
}
