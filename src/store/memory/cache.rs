//! The store's table as a cache: single entries of a key, under names of the caller's own, that
//! hold two numbers until a time. What finds no room is forgotten, which a cache may.

use super::{Account, Home, Key, MemoryStore, MutexGuard, Place, Scope, Shard, State, fmix64};

/// All entries of a key, under the lock that they share.
pub(crate) struct Entries<'a> {
    now: i64,
    shard: MutexGuard<'a, Shard>,
    home: Home,
}

/// Two numbers, and when they are forgotten.
#[derive(Clone, Copy)]
pub(crate) struct Entry {
    pub(crate) until: i64,
    pub(crate) values: [i64; 2],
}

impl MemoryStore {
    /// The entries of an account's key. Nothing else may be counted in a store that is used so.
    #[inline]
    pub(crate) fn entries(&self, account: &Account<'_>) -> Entries<'_> {
        self.entries_of(account.scope(), account.key())
    }

    #[inline]
    pub(crate) fn entries_of(&self, scope: &Scope, key: &Key) -> Entries<'_> {
        let (now, shard, home) = self.find_key(scope, key);
        Entries { now, shard, home }
    }
}

impl Entries<'_> {
    /// The time by which they were found.
    pub(crate) fn now(&self) -> i64 {
        self.now
    }

    /// A number of the key's, the same in the life of the store.
    pub(crate) fn hash(&self) -> u64 {
        self.home.hash
    }

    #[inline]
    pub(crate) fn get(&self, name: u64) -> Option<Entry> {
        let Place::Own(slot) = self.place(name) else { return None };
        let State { start, used, until } = self.shard.table.get(slot);
        (self.now < until).then_some(Entry { until, values: [start, used] })
    }

    /// Changes an entry, unless the closure returns `None`.
    #[cfg(feature = "tokio")]
    #[inline]
    pub(crate) fn update(
        &mut self,
        name: u64,
        change: impl FnOnce([i64; 2]) -> Option<[i64; 2]>,
    ) -> Option<()> {
        let Place::Own(slot) = self.place(name) else { return None };
        let State { start, used, until } = self.shard.table.get(slot);
        let [start, used] = change([start, used]).filter(|_| self.now < until)?;
        self.shard.table.set(slot, State { start, used, until });
        Some(())
    }

    /// `false`: there is no room.
    #[inline]
    pub(crate) fn set(&mut self, name: u64, entry: Entry) -> bool {
        let Entry { until, values: [start, used] } = entry;
        loop {
            match self.place(name) {
                Place::Own(slot) | Place::Free(slot) => {
                    self.shard.table.set(slot, State { start, used, until });
                    return true;
                }
                place if self.shard.grows_for(&[place], self.now) => {}
                _ => return false,
            }
        }
    }

    pub(crate) fn remove(&mut self, name: u64) {
        if let Place::Own(slot) = self.place(name) {
            self.shard.table.clear(slot);
        }
    }

    #[inline]
    fn place(&self, name: u64) -> Place {
        let fingerprint = fmix64(self.home.hash ^ name).max(1);
        self.shard.table.find(fingerprint, self.now, |_| false)
    }
}
