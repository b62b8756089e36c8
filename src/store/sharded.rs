//! Locks that share out the keys: a key's hash chooses one, so that all that is kept of a key is
//! under one lock, and no call waits long for another key's.

use std::hash::BuildHasher;
use std::sync::OnceLock;

// The simulated network (tests/sim) and the models (tests/shuttle) replay a run from its seed:
// hashes are always the same there.
#[cfg(any(tfw_sim, tfw_shuttle))]
use foldhash::quality::FixedState as RandomState;
#[cfg(not(any(feature = "saved", tfw_sim, tfw_shuttle)))]
use foldhash::quality::RandomState;
#[cfg(all(feature = "saved", not(any(tfw_sim, tfw_shuttle))))]
use foldhash::quality::SeedableRandomState as RandomState;

use super::scope::Scope;
use super::table::WAYS;
use crate::key::Key;
use crate::quota::{Quota, fmix64};
use crate::sync::{Mutex, MutexGuard};

#[cfg(feature = "saved")]
pub(super) mod seeds;

/// Keys of a shard: in a small store, as long as there are enough shards to keep threads apart, and
/// at most in a large one, where doubling a table takes some 0.1 ms.
const KEYS_OF_A_SHARD: (usize, usize) = (1_024, 4_096);
const SHARDS_FOR_THREADS: usize = 64;
/// Of stores that are larger than any machine's memory.
pub(super) const MAX_SHARDS: usize = 32_768;

pub(super) struct Sharded<S> {
    /// Allocated by the first call: most limiters of a shared store never use the memory that they
    /// began with.
    shards: OnceLock<Box<[Shard<S>]>>,
    count: usize,
    hasher: RandomState,
}

/// On cache lines of its own: threads with different keys write nothing that they share.
#[derive(Default)]
#[repr(align(128))]
struct Shard<S>(Mutex<S>);

/// How many shards to make for a number of entries, and the buckets that each may have.
pub(super) fn shares(max_entries: usize) -> (usize, usize) {
    let few = (max_entries / KEYS_OF_A_SHARD.0).min(SHARDS_FOR_THREADS).next_power_of_two();
    let many = (max_entries / KEYS_OF_A_SHARD.1).min(MAX_SHARDS).next_power_of_two();
    let count = many.max(few);
    (count, share(max_entries, count))
}

/// The buckets that each of a number of shards may have.
pub(super) fn share(max_entries: usize, shards: usize) -> usize {
    let entries = max_entries.saturating_add(max_entries / 10).div_ceil(shards);
    entries.div_ceil(WAYS)
}

impl<S: Default> Sharded<S> {
    /// `count` is a power of two.
    pub(super) fn new(count: usize) -> Self {
        Self { shards: OnceLock::new(), count, hasher: RandomState::default() }
    }

    /// The shard of a key, and the key's hash.
    #[inline(always)]
    pub(super) fn lock(&self, scope: &Scope, key: &Key) -> (MutexGuard<'_, S>, u64) {
        let hash = hash(&self.hasher, scope, key);
        let shards = self.shards();
        (lock(&shards[index(shards, hash)]), hash)
    }

    /// The number of a key's shard, and the key's hash.
    #[inline]
    pub(super) fn place(&self, scope: &Scope, key: &Key) -> (usize, u64) {
        let hash = hash(&self.hasher, scope, key);
        (index(self.shards(), hash), hash)
    }

    /// A thread that holds one locks only those of larger numbers.
    #[inline]
    pub(super) fn lock_at(&self, shard: usize) -> MutexGuard<'_, S> {
        lock(&self.shards()[shard])
    }

    #[inline(always)]
    fn shards(&self) -> &[Shard<S>] {
        match self.shards.get() {
            Some(shards) => shards,
            None => self.allocate(),
        }
    }

    #[cold]
    fn allocate(&self) -> &[Shard<S>] {
        self.shards.get_or_init(|| (0..self.count).map(|_| Shard::default()).collect())
    }

    /// All of them, one at a time.
    pub(super) fn iter(&self) -> impl Iterator<Item = MutexGuard<'_, S>> {
        self.shards.get().into_iter().flatten().map(lock)
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// What they take apart from what is in their tables.
    pub(super) fn bytes(&self) -> usize {
        self.count * size_of::<Shard<S>>()
    }
}

#[inline(always)]
fn hash(hasher: &impl BuildHasher, scope: &Scope, key: &Key) -> u64 {
    hasher.hash_one((scope.id(), key.as_bytes()))
}

/// What a key's entry for a quota is found by.
#[inline]
pub(super) fn fingerprint(hash: u64, quota: &Quota) -> u64 {
    // 0 is no entry.
    fmix64(hash ^ quota.identity()).max(1)
}

/// Which of the shards, whose number is a power of two, is that of a hash.
#[inline(always)]
fn index<S>(shards: &[Shard<S>], hash: u64) -> usize {
    (hash >> 32) as usize & (shards.len() - 1)
}

#[inline]
fn lock<S>(Shard(shard): &Shard<S>) -> MutexGuard<'_, S> {
    // A panic can't happen under the lock; if it did, the counters would be as good as before.
    shard.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
