//! Shards: a key's hash selects one, so that all state of a key is under one lock, and few calls
//! wait for other keys.

use std::hash::BuildHasher;
use std::sync::OnceLock;

// The simulated network (tests/sim) and the models (tests/shuttle) replay a run from its seed.
#[cfg(any(tfw_sim, tfw_shuttle))]
use foldhash::quality::FixedState as RandomState;
#[cfg(not(any(feature = "saved", tfw_sim, tfw_shuttle)))]
use foldhash::quality::RandomState;
#[cfg(all(feature = "saved", not(any(tfw_sim, tfw_shuttle))))]
use foldhash::quality::SeedableRandomState as RandomState;

use super::account::Scope;
use super::table::WAYS;
use crate::key::Key;
use crate::quota::Quota;

#[cfg(feature = "saved")]
pub(super) mod seeds;

/// Keys of a shard, in a small store (enough shards keep threads apart) and at most, in a large one
/// (doubling such a table takes some 0.1 ms).
const KEYS_OF_A_SHARD: (usize, usize) = (1_024, 4_096);
const SHARDS_FOR_THREADS: usize = 64;
/// Those of a store that is larger than any machine's memory.
pub(super) const MAX_SHARDS: usize = 32_768;

pub(super) struct Sharded<S> {
    /// Allocated by the first call: most limiters are moved to a shared store before any.
    shards: OnceLock<Box<[Aligned<S>]>>,
    pub(super) count: usize,
    hasher: RandomState,
    salt: u64,
}

/// A shard on cache lines of its own: threads with different keys share no memory that they write.
#[derive(Default)]
#[repr(align(128))]
struct Aligned<S>(S);

pub(super) fn shares(max_entries: usize) -> (usize, usize) {
    let few = (max_entries / KEYS_OF_A_SHARD.0).min(SHARDS_FOR_THREADS).next_power_of_two();
    let many = (max_entries / KEYS_OF_A_SHARD.1).min(MAX_SHARDS).next_power_of_two();
    let count = many.max(few);
    (count, share(max_entries, count))
}

pub(super) fn share(max_entries: usize, shards: usize) -> usize {
    let entries = max_entries.saturating_add(max_entries / 10).div_ceil(shards);
    entries.div_ceil(WAYS)
}

impl<S: Default> Sharded<S> {
    /// `count` is a power of two.
    pub(super) fn new(count: usize) -> Self {
        Self::hashed_by(RandomState::default(), OnceLock::new(), count)
    }

    fn hashed_by(hasher: RandomState, shards: OnceLock<Box<[Aligned<S>]>>, count: usize) -> Self {
        let salt = hasher.hash_one("scopes");
        Self { shards, count, hasher, salt }
    }

    #[inline(always)]
    pub(super) fn shard_of(&self, scope: &Scope, key: &Key) -> (&S, u64) {
        let (hash, shards) = (hash(&self.hasher, scope, key), self.shards());
        (&shards[index(shards, hash)].0, hash)
    }

    /// A number for a scope that nobody can know.
    #[inline(always)]
    pub(super) fn secret(&self, scope: &Scope) -> u64 {
        self.salt ^ scope.id()[0]
    }

    #[inline(always)]
    fn shards(&self) -> &[Aligned<S>] {
        match self.shards.get() {
            Some(shards) => shards,
            None => self.allocate(),
        }
    }

    #[cold]
    fn allocate(&self) -> &[Aligned<S>] {
        self.shards.get_or_init(|| (0..self.count).map(|_| Aligned::default()).collect())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &S> {
        self.shards.get().into_iter().flatten().map(|Aligned(shard)| shard)
    }

    pub(super) fn bytes(&self) -> usize {
        self.count * size_of::<Aligned<S>>()
    }
}

#[inline(always)]
fn hash(hasher: &impl BuildHasher, scope: &Scope, key: &Key) -> u64 {
    let [low, high] = scope.id();
    let hash = match key.as_word() {
        Some(word) => hasher.hash_one((low, word)),
        None => hash_bytes(hasher, low, key),
    };
    // Keeps two names with one lower half apart for the same key; all else is hashed by a seed.
    hash ^ high
}

/// Not inlined, so that short keys need no registers for it.
#[inline(never)]
fn hash_bytes(hasher: &impl BuildHasher, scope: u64, key: &Key) -> u64 {
    hasher.hash_one((scope, key.as_bytes()))
}

#[inline]
pub(super) fn fingerprint(hash: u64, quota: &Quota) -> u64 {
    // 0 is no entry.
    mix([hash, hash.rotate_left(32)], quota.identity()).max(1)
}

/// Nobody who doesn't know the secrets can choose two pairs of numbers that give the same.
#[inline]
pub(super) fn mix([secret, other]: [u64; 2], [a, b]: [u64; 2]) -> u64 {
    let product = u128::from(secret ^ a) * u128::from(other ^ b);
    (product >> 64) as u64 ^ product as u64
}

#[inline(always)]
fn index<S>(shards: &[Aligned<S>], hash: u64) -> usize {
    (hash >> 32) as usize & (shards.len() - 1)
}
