//! Seeds of hashes that another process can repeat, and a probe that shows whether it does.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Mutex, PoisonError};

use foldhash::SharedSeed;
use foldhash::quality::SeedableRandomState;

use super::super::account::Scope;
use super::{Aligned, Sharded, fingerprint, hash};
use crate::key::Key;
use crate::quota::{Quota, Weekday};

#[derive(Clone, Copy)]
pub(in crate::store) struct Seeds {
    pub(in crate::store) own: u64,
    /// Shared by all new files of a process, since the `SharedSeed` made of it is never freed.
    pub(in crate::store) shared: u64,
}

static SHARED: Mutex<BTreeMap<u64, &SharedSeed>> = Mutex::new(BTreeMap::new());

impl Seeds {
    pub(in crate::store) fn random() -> Self {
        // The standard library seeds its hashes from the system's source of randomness.
        let random = || RandomState::new().hash_one(0);
        let shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = shared.keys().next().copied();
        Self { own: random(), shared: shared.unwrap_or_else(random) }
    }

    fn hasher(self) -> SeedableRandomState {
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        let seed = shared
            .entry(self.shared)
            .or_insert_with(|| Box::leak(Box::new(SharedSeed::from_u64(self.shared))));
        SeedableRandomState::with_seed(self.own, seed)
    }

    /// Hashes known keys in each way that the hash and the counters have. A build with another
    /// digest would find no entry by these seeds.
    pub(in crate::store) fn probe(self) -> u64 {
        let hasher = self.hasher();
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
}

impl<S: Default> Sharded<S> {
    pub(in crate::store) fn seeded(shards: impl Iterator<Item = S>, seeds: Seeds) -> Self {
        let shards: Box<[_]> = shards.map(Aligned).collect();
        let count = shards.len();
        Self::hashed_by(seeds.hasher(), shards.into(), count)
    }
}
