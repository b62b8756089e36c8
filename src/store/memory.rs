//! Counters in this process's memory: [`MemoryStore`].
//!
//! A key's hash selects a shard, so that all of its quotas are charged under one lock, each in an
//! entry of the shard's table. A table doubles when it is full of keys whose windows run, up to its
//! part of `max_keys`. After that, new keys share entries. Shards are small, so that no charge
//! waits long while one grows. The key that a shard refused last is refused again without the lock.
//!
//! - `charging`: a charge, on the short path or over all of its lines, in `locked` shards.
//! - `shard`: a table of entries of single keys, and one of entries that keys share. `last_refused`
//!   is the copy that needs no lock; `time` reads the clock.
//! - `saved`: a thread that saves the counters of all shards to a file, in the `format` of that
//!   file.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Store;
use super::account::{Account, Scope};
use super::adjust::Adjust;
use super::charge::Charge;
use super::charged_quotas::ChargedQuotas;
use super::reply::{Reply, StoreError};
use super::sharded::Sharded;
use crate::decision::Decision;
use crate::key::Key;
use crate::quota::{Quotas, SavedWindows};

// First, since rustdoc shows methods in the order of modules.
mod creating;

mod charging;
#[cfg(feature = "saved")]
mod format;
mod last_refused;
mod locked;
#[cfg(feature = "saved")]
mod saved;
mod shard;
mod time;

#[cfg(feature = "saved")]
use saved::Saver;

use locked::{LockedShards, ShardLock};
use shard::{CountedIn, Home, Shard, max_bytes};
use time::{Reading, Time};

const MINUTE: i64 = 60_000;

/// A store of counters in memory: exact under concurrency, bounded in size, and without a
/// background task.
///
/// The counters end with the process; a new process grants full limits. With the feature `saved`,
/// `MemoryStore::open` keeps them in a file, for quotas of a day, a month or a year on one node.
///
/// Clones share their counters. One store can serve all limits, because the limit's name separates
/// them. A limit without a name has counters of its own, which it shares with its clones.
///
/// # Memory
///
/// A store holds `max_keys` entries, a million by default: one for each quota of each key in its
/// current window. For a million, it takes at most 36.6 MB, about 36 bytes each. With fewer keys,
/// it takes less: 33 kB while empty, up to 0.2 MB with the first few hundred keys, then about 35 to
/// 70 bytes per key. [`max_bytes`](Self::max_bytes) returns the bound of any size.
///
/// Entries are in shards, by the hash of their key. A shard's table doubles when a key finds no
/// room in it. In a store of a million entries, that request and others with keys in the shard wait
/// for about 0.1 ms. Other charges of one limit with
/// one or two quotas allocate nothing except for a key of more than 38 bytes; charges of more
/// quotas or limits allocate a list in the [`Decision`]. For resets, the store keeps the windows
/// that each name is charged under: a few hundred bytes, and at most 0.3 MB for 1,024 of them.
/// Beyond that, a reset is an error.
///
/// If running windows hold every entry that a new key could use, the key shares an overflow entry.
/// It never gets more than its limit, but may be refused although it has tokens left; other keys
/// keep their counts ([the guide](crate::guide::operating#memory), [S30]).
///
/// [S30]:
///     https://docs.rs/tower-fixed-window-conformance/latest/tower_fixed_window_conformance/rules/#s30
///
/// ```
/// use tower_fixed_window::testing::block_on;
/// use tower_fixed_window::{Limit, MemoryStore, Quota};
///
/// let store = MemoryStore::with_max_keys(100_000);
/// assert!(store.max_bytes() <= 3_750_000);
/// let plan = Quota::per_minute(5).and(Quota::per_hour(50));
/// let plan = Limit::new(plan).name("plan").store(store.clone());
/// let login = Quota::per_minute(5).name("login").store(store.clone());
/// block_on(plan.check("alice")).unwrap();
/// block_on(login.check("alice")).unwrap();
/// assert_eq!((store.live_entries(), store.overflowed()), (3, 0));
/// ```
#[derive(Clone)]
pub struct MemoryStore {
    memory: Arc<Memory>,
    #[cfg(feature = "saved")]
    saver: Option<Arc<Saver>>,
}

pub(crate) struct Memory {
    number: u64,
    shards: Sharded<ShardLock>,
    buckets: usize,
    charged: ChargedQuotas,
    windows: SavedWindows,
    time: Time,
    max_keys: usize,
    quiet_until: AtomicU64,
    #[cfg(feature = "saved")]
    error_if_broken: bool,
}

impl MemoryStore {
    /// Returns the most bytes that the counters can take: with all shards at their largest size,
    /// and one still with its old table. (If several threads double a shard at the same instant, 69
    /// kB more for each.)
    pub fn max_bytes(&self) -> usize {
        let Memory { shards, buckets, .. } = &*self.memory;
        max_bytes(shards.count, *buckets).saturating_add(shards.bytes())
    }

    /// Returns how many entries belong to keys whose windows run, without those that share overflow
    /// entries. Compare it with `max_keys` to see how full the store is.
    ///
    /// This scans every entry and locks one shard after the other. It takes about 2 ms for a
    /// million entries, during which a charge may wait up to 0.1 ms. Use it for metrics, not in
    /// requests.
    pub fn live_entries(&self) -> usize {
        let now = self.memory.time.now().at;
        self.memory.shards.iter().map(|shard| shard.lock().table.live(now)).sum()
    }

    /// Returns how many charges shared an overflow entry since the store was created. If it grows,
    /// a client sends requests with ever new keys, or `max_keys` is too small.
    pub fn overflowed(&self) -> u64 {
        self.memory.shards.iter().map(|shard| shard.lock().overflowed).sum()
    }

    /// Sets the [metrics](crate::guide::observing#metrics) with the label `store`, to this name.
    /// Call it when metrics are scraped, or on a timer: it takes as long as
    /// [`live_entries`](Self::live_entries).
    #[cfg(feature = "metrics")]
    pub fn record_metrics(&self, name: &str) {
        crate::observe::memory(name, self.live_entries(), self.memory.max_keys);
        #[cfg(feature = "saved")]
        if let Some(saver) = &self.saver {
            saver.saves.record(name);
        }
    }

    /// If a shard has a later time than the reading, takes the exact one: while this call waited
    /// for the lock, another may have given a key's entry to a new key. By the older reading, this
    /// key's window would still run, with nothing counted.
    #[inline(always)]
    fn advance<const L: usize>(&self, now: Reading, locked: &mut LockedShards<'_, L>) -> Reading {
        locked.advance(now).unwrap_or_else(|| self.now_again(locked))
    }

    #[cold]
    fn now_again<const L: usize>(&self, locked: &mut LockedShards<'_, L>) -> Reading {
        let now = self.memory.time.now();
        locked.shards().for_each(|shard| self.adopt_time(now, shard));
        now
    }

    /// Where the clock has stepped back, all shards follow: what was counted ahead ends a window
    /// from now also where no key is charged until then.
    fn adopt_time(&self, now: Reading, shard: &mut Shard) {
        if shard.is_unallocated() {
            shard.allocate(now.at, self.memory.buckets);
        } else if shard.advance(now).is_none() {
            shard.step_back(now.at);
            // To wait for one here could wait for ever. Its next charge notices by itself.
            let free = self.memory.shards.iter().filter_map(ShardLock::try_lock);
            free.for_each(|mut other| other.follow_back(now.at));
            self.memory
                .quiet_until
                .fetch_min(now.at.saturating_add(MINUTE).max(0) as u64, Ordering::Relaxed);
        }
    }

    fn find(&self, scope: &Scope, key: &Key) -> (i64, LockedShards<'_, 1>) {
        let now = self.memory.time.now();
        let (shard, hash) = self.memory.shards.shard_of(scope, key);
        let home = Home { hash, secret: self.memory.shards.secret(scope) };
        let mut locked = LockedShards::one(shard.lock(), home);
        (self.advance(now, &mut locked).at, locked)
    }
}

impl Store for MemoryStore {
    fn identity(&self) -> Option<String> {
        Some(format!("memory {}", self.memory.number))
    }

    #[inline(always)]
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        match self.rule(charge) {
            Ok(ruling) => Reply::now(ruling.into_decision(charge.account().label())),
            Err(undecided) => self.decide_other(charge, undecided),
        }
    }

    fn charges_together(&self) -> bool {
        true
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        let account = adjust.account;
        let Account { scope, quotas, key } = account;
        let (now, mut locked) = self.find(scope, key);
        let [(places, windows)] =
            locked.locate(now, &[(account, adjust.tokens)], &self.memory.windows);
        let shard = locked.shard_of(0);
        let states = places.map(|place| shard.state_at(place));
        let writes = adjust.apply_over(now, &states, &windows);
        // All of a true cost is counted, or nothing: a caller may repeat one that fails.
        let mut counts = places.iter().zip(&writes);
        let lost = !adjust.is_refund() && counts.any(|of| matches!(of, (CountedIn::None, Some(_))));
        for ((place, state), quota) in places.into_iter().zip(writes).zip(quotas) {
            // An overflow entry may hold other keys' tokens: a refund to it is dropped.
            let own = matches!(place, CountedIn::Own(_));
            if let Some(state) = state.filter(|_| !lost && (own || !adjust.is_refund())) {
                if !own {
                    self.memory.charged.note(scope, quota);
                }
                shard.write(now, place, state);
            }
        }
        let full = || StoreError::new("the store is full, and can't count a true cost");
        Reply::from(if lost { Err(full()) } else { Ok(()) })
    }

    /// Clears the key's own entries, also if this fails because of shared ones.
    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        let (now, mut locked) = self.find(scope, key);
        let (home, shard) = (locked.homes[0], locked.shard_of(0));
        self.memory.charged.look_at(scope, |charged, all| {
            let mut own = true;
            for quotas in charged.iter().map(|quota| Quotas::from(*quota)) {
                own &= shard.clear_count(now, &Account::new(scope, &quotas, key), &home);
            }
            Reply::from(match (all, own) {
                (true, true) => Ok(()),
                (true, false) => Err(StoreError::new(
                    "the store is full, and this key shares a count with others until it ends",
                )),
                (false, _) => Err(StoreError::new(
                    "there are too many quotas of different windows to find all counts of a key",
                )),
            })
        })
    }

    fn now_ms(&self) -> u64 {
        self.memory.time.now().at.max(0) as u64
    }

    fn is_shared(&self) -> bool {
        #[cfg(feature = "saved")]
        return self.saver.is_some();
        #[cfg(not(feature = "saved"))]
        false
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore").field("max_bytes", &self.max_bytes()).finish_non_exhaustive()
    }
}
