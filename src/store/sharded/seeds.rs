//! The seed of a hash that another process can repeat, and a probe that shows whether it does.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};

use foldhash::SharedSeed;
use foldhash::quality::SeedableRandomState;

use super::super::account::Scope;
use super::{Aligned, Sharded, fingerprint, hash};
use crate::key::Key;
use crate::quota::{Quota, Weekday, fmix64};
use crate::sync::{self, Mutex};

static ALL: Mutex<BTreeMap<u64, &SharedSeed>> = Mutex::new(BTreeMap::new());

/// New files of a process have one seed, since the `SharedSeed` made of it is never freed.
pub(in crate::store) fn random() -> u64 {
    // The standard library seeds its hashes from the system's source of randomness.
    let random = || RandomState::new().hash_one(0);
    sync::lock(&ALL).keys().next().copied().unwrap_or_else(random)
}

fn hasher(seed: u64) -> SeedableRandomState {
    let mut all = sync::lock(&ALL);
    let new = || &*Box::leak(Box::new(SharedSeed::from_u64(seed)));
    SeedableRandomState::with_seed(fmix64(seed), all.entry(seed).or_insert_with(new))
}

/// Hashes known keys in each way that the hash and the counters have. A build with another
/// digest would find no entry by these seeds.
pub(in crate::store) fn probe(seed: u64) -> u64 {
    let hasher = hasher(seed);
    let scope = Scope::named("probe");
    let month = Quota::per_month(1);
    // The hash has ways of its own for keys of some lengths.
    let counters = [
        (0, Quota::per_week(1)),
        (1, Quota::per_minute(1).staggered()),
        (2, Quota::per_day(1).from_first_request()),
        (4, month),
        (20, month.from_day(15)),
        (40, Quota::per_week(1).from_weekday(Weekday::Sunday)),
    ];
    let mut probe = 0;
    for (parts, quota) in counters {
        let mut key = Key::global();
        (0..parts).for_each(|_| key.append(&Key::from("a part")));
        probe = fingerprint(hash(&hasher, &scope, &key) ^ probe, &quota);
    }
    probe
}

impl<S: Default> Sharded<S> {
    pub(in crate::store) fn seeded(shards: impl Iterator<Item = S>, seed: u64) -> Self {
        let shards: Box<[_]> = shards.map(Aligned).collect();
        let count = shards.len();
        Self::hashed_by(hasher(seed), shards.into(), count)
    }
}
