//! Counters in this process's memory.
//!
//! A sharded lock around a flat table. A key's hash chooses the shard, so that all of its quotas are
//! charged under one lock. Each quota of the key has a 64-bit fingerprint, and an entry in one of the
//! two buckets that this chooses. One that has expired is free. So there is nothing to sweep, and a
//! charge looks at two buckets at most, whatever the table holds.
//!
//! When both buckets of a key are full of keys whose windows run, the shard's table is doubled, until
//! it has its part of `max_keys`. Shards are small, so that nobody waits long while one grows.

use std::fmt;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

// The simulated network (tests/sim) replays a run from its seed: hashes are always the same there, and
// the system's clock begins with each store.
#[cfg(tfw_sim)]
use foldhash::quality::FixedState as RandomState;
#[cfg(not(tfw_sim))]
use foldhash::quality::RandomState;

use super::{Account, Adjust, Charge, Remote, Reply, Scope, Store, StoreError, instant};
use crate::clock::{Clock, SystemClock};
use crate::decision::Decision;
use crate::key::Key;
use crate::observe;
use crate::quota::{Anchor, Quota, Quotas, fmix64};
use crate::sync::{Mutex, MutexGuard};
use crate::window::{MAX, State, Window, stagger};

mod cache;
mod counters;

pub(crate) use cache::{Entries, Entry};
use counters::Counters;

/// Entries in a bucket. With two buckets to choose from, 16-way buckets hold `max_keys` at 10/11 full
/// with few left over: of a million keys 0.04%, of ten thousand 0.13% (medians).
const WAYS: usize = 16;
/// With so many free entries in the first of its buckets, a key doesn't look at the second one. A table
/// fills as well as if it always did (by simulation), and most keys are found at the first look.
const SPARSE: usize = 10;
/// Fingerprint, `until`, `start`, `used`: what a charge reads and writes lies together.
type Cells = [u64; 4];
type Bucket = [Cells; WAYS];

/// A shard has so many of a small store's keys, as long as there are enough shards to keep threads
/// apart, and at most so many of a large one's: to double its table then takes some 0.4 ms.
const KEYS_OF_A_SHARD: (usize, usize) = (1_024, 8_192);
const SHARDS_FOR_THREADS: usize = 64;
/// Of stores that are larger than anybody's memory.
const MOST_SHARDS: usize = 16_384;
/// The operator is told of the overflow once in that time, at most.
const MINUTE: i64 = 60_000;
/// Of a shard's overflow entries, the share that one quota uses.
const OVERFLOW_SHARE: u64 = 4;

/// Counters in memory: exact under concurrency, bounded by construction, without a task in the
/// background.
///
/// Clones share their counters. Quotas are kept apart by the name of the layer or limiter (and
/// those without a name by themselves), so one store can serve them all.
///
/// # Memory
///
/// A store holds `max_keys` entries, a million unless set, one for each quota of each key in its
/// current window. It takes at most 36.3 bytes per entry of `max_keys` (32 bytes in a table that
/// is 10/11 full, and 1/32 of that for the overflow), up to 1.1 kB of rounding for each of its shards,
/// and half a shard's table while it doubles: 36.6 MB for a million, see
/// [`max_bytes`](Self::max_bytes). With fewer keys it takes what they need: at first half a kilobyte for
/// each of the 128 shards of a million entries, then some 35 to 70 bytes a key. A shard's table
/// doubles when a key finds no room in it. That takes the one request some 0.4 ms in a store of a
/// million, and holds up those whose keys are in the same shard. Otherwise a charge of one quota
/// allocates nothing; that of several, the list of their standings in the [`Decision`]. For resets the
/// store also notes the windows that each name is charged under: a few hundred bytes, and no more than
/// 0.3 MB for 1,024 of them, past which a reset is an error.
///
/// When every entry a new key could use is taken by a key whose window still runs, it shares one of
/// a fixed set of overflow entries with others. It may then be limited too early, never too late,
/// and nobody who has an entry loses its count: a flood of keys can't buy fresh counts. An overflow
/// entry empties when no charge has passed in it for a full window. The operator is told of it once
/// in that time, and at most once a minute: see [`overflowed`](Self::overflowed).
///
/// ```
/// use tower_fixed_window::{FixedWindowLayer, MemoryStore, Quota};
///
/// let store = MemoryStore::with_max_keys(100_000);
/// let login = FixedWindowLayer::new(Quota::per_minute(5)).name("login").store(store.clone());
/// let search = FixedWindowLayer::new(Quota::per_minute(30)).name("search").store(store);
/// # let _ = (login, search);
/// ```
#[derive(Clone)]
pub struct MemoryStore(Arc<Inner>);

struct Inner {
    shards: Box<[Mutex<Shard>]>,
    /// Buckets in a shard's table when it has grown.
    buckets: usize,
    hasher: RandomState,
    /// Another for each store.
    id: u64,
    counters: Counters,
    time: Time,
    max_keys: usize,
    /// When the operator may be told of the overflow again.
    quiet_until: AtomicU64,
}

/// The system's clock is called directly, others through a pointer.
enum Time {
    #[cfg_attr(tfw_sim, allow(dead_code))]
    System,
    Other(Box<dyn Clock>),
}

#[cfg(tfw_sim)]
struct Simulated(crate::timer::Instant);

#[cfg(tfw_sim)]
impl Clock for Simulated {
    fn now_ms(&self) -> u64 {
        1_700_000_000_000 + self.0.elapsed().as_millis() as u64
    }
}

impl MemoryStore {
    /// A store of a million entries.
    pub fn new() -> Self {
        Self::with_max_keys(1_000_000)
    }

    /// A store of `max_keys` entries; two quotas of one key take two.
    ///
    /// # Panics
    /// If `max_keys` is 0.
    pub fn with_max_keys(max_keys: usize) -> Self {
        #[cfg(tfw_sim)]
        return Self::build(
            max_keys,
            Time::Other(Box::new(Simulated(crate::timer::Instant::now()))),
        );
        #[cfg(not(tfw_sim))]
        Self::build(max_keys, Time::System)
    }

    /// A store of a million entries that reads another clock: for tests.
    pub fn with_clock(clock: impl Clock) -> Self {
        Self::new().clock(clock)
    }

    /// The same, with another clock and without counters.
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        Self(Arc::new(Inner {
            shards: shards(self.0.shards.len()),
            buckets: self.0.buckets,
            hasher: RandomState::default(),
            id: new_id(),
            counters: Counters::default(),
            time: Time::Other(Box::new(clock)),
            max_keys: self.0.max_keys,
            quiet_until: AtomicU64::new(0),
        }))
    }

    fn build(max_keys: usize, time: Time) -> Self {
        assert!(
            max_keys > 0,
            "a store of no keys can't count: write MemoryStore::with_max_keys(100_000)"
        );
        let few = (max_keys / KEYS_OF_A_SHARD.0).min(SHARDS_FOR_THREADS).next_power_of_two();
        let many = (max_keys / KEYS_OF_A_SHARD.1).min(MOST_SHARDS).next_power_of_two();
        let count = many.max(few);
        let entries = max_keys.saturating_add(max_keys / 10).div_ceil(count);
        Self(Arc::new(Inner {
            shards: shards(count),
            buckets: entries.div_ceil(WAYS),
            hasher: RandomState::default(),
            id: new_id(),
            counters: Counters::default(),
            time,
            max_keys,
            quiet_until: AtomicU64::new(0),
        }))
    }

    /// The most memory that the counters can take, in bytes: when all shards have as many entries as
    /// they may, and one has just doubled and is about to let go of what it had before. (Where several
    /// threads do so in one instant, 138 kB more for each.)
    pub fn max_bytes(&self) -> usize {
        let (table, shards) = (self.0.buckets, self.0.shards.len());
        let buckets =
            (table + overflow(table)).saturating_mul(shards).saturating_add(table.div_ceil(2));
        let heads = shards * size_of::<Mutex<Shard>>();
        buckets.saturating_mul(size_of::<Bucket>()).saturating_add(heads)
    }

    /// How many entries are taken by keys whose windows still run: beside `max_keys`, how full the
    /// store is. Keys that share overflow entries are not in it.
    ///
    /// It looks at every entry, and holds each of the shards meanwhile: about 2 ms for a million
    /// entries, and up to 0.1 ms during which a charge may wait. For a metric, not for a request.
    ///
    /// ```
    /// use tower_fixed_window::testing::block_on;
    /// use tower_fixed_window::{Limiter, MemoryStore, Quota};
    ///
    /// let store = MemoryStore::new();
    /// let limiter = Limiter::new(Quota::per_minute(5).and(Quota::per_hour(50))).store(store.clone());
    /// block_on(limiter.check("alice")).unwrap();
    /// assert_eq!(store.len(), 2); // an entry for each quota
    /// ```
    pub fn len(&self) -> usize {
        let now = self.now();
        self.0.shards.iter().map(|shard| lock(shard).table.live(now)).sum()
    }

    /// Whether no key's window runs. It looks at entries until it finds one.
    pub fn is_empty(&self) -> bool {
        let now = self.now();
        self.0.shards.iter().all(|shard| lock(shard).table.live(now) == 0)
    }

    /// How many charges were left without an entry of their own since the store was made: 0 as long as
    /// it was large enough. If it grows, somebody sends requests under ever new keys, or `max_keys` is
    /// too small.
    ///
    /// ```
    /// use tower_fixed_window::testing::block_on;
    /// use tower_fixed_window::{Limiter, MemoryStore, Quota};
    ///
    /// let store = MemoryStore::with_max_keys(100);
    /// let limiter = Limiter::new(Quota::per_minute(5)).store(store.clone());
    /// for invented in 0..1_000 {
    ///     block_on(limiter.check(invented)).unwrap();
    /// }
    /// assert!(store.overflowed() > 0);
    /// ```
    pub fn overflowed(&self) -> u64 {
        self.0.shards.iter().map(|shard| lock(shard).overflowed).sum()
    }

    /// Sets the gauges `tower_fixed_window_tracked_keys` and `tower_fixed_window_max_keys`, under the
    /// label `store` with this name: call it where your metrics are read, or on a timer. It costs
    /// what [`len`](Self::len) costs. An example is in `docs/observing.md`.
    #[cfg(feature = "metrics")]
    #[cfg_attr(docsrs, doc(cfg(feature = "metrics")))]
    pub fn record_metrics(&self, name: &str) {
        observe::memory(name, self.len(), self.0.max_keys);
    }

    /// Counts a charge without entries of its own, and tells the operator, unless that was done a
    /// short while ago.
    #[cold]
    fn count_overflow(
        &self,
        now: i64,
        mut shard: MutexGuard<'_, Shard>,
        scope: &Scope,
        places: &[Place],
        written: bool,
    ) {
        let own = |place: &Place| match place {
            Place::Own(_) | Place::Free(_) => true,
            // Not if that count has refused it.
            Place::Inheriting(_) => written,
            Place::Shared(_) | Place::None => false,
        };
        if !places.iter().all(own) {
            shard.overflowed += 1;
            let next = shard.overflow_until.max(now.saturating_add(MINUTE)) as u64;
            // What follows takes the locks of all shards.
            drop(shard);
            scope.observe().overflowed();
            let cell = &self.0.quiet_until;
            let told = cell.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |quiet_until| {
                (quiet_until <= now as u64).then_some(next)
            });
            if told.is_ok() {
                observe::overflow(self.0.max_keys, self.overflowed());
            }
        }
    }

    #[inline]
    fn now(&self) -> i64 {
        instant(match &self.0.time {
            Time::System => SystemClock.now_ms(),
            Time::Other(clock) => clock.now_ms(),
        })
    }

    /// The time once more, where it seems to have gone back.
    #[cold]
    fn now_again(&self, shard: &mut Shard) -> i64 {
        let now = self.now();
        if now < shard.latest {
            shard.step_back(now);
            self.0
                .quiet_until
                .fetch_min(now.saturating_add(MINUTE).max(0) as u64, Ordering::Relaxed);
        }
        now
    }

    /// A charge of at most `N` quotas.
    #[inline(always)]
    fn decide<const N: usize>(&self, charge: Charge<'_>) -> Decision {
        let (now, mut shard, home) = self.find(&charge.account());
        let mut places = [Place::None; N];
        let (mut decision, writes) = loop {
            let answer = charge.decide_over::<N>(now, |account, i, quota| {
                let others = if N == 1 { &[] } else { &places[..i] };
                let (place, window) = shard.locate(now, account, quota, &home, others);
                places[i] = place;
                window
            });
            // For the first quota it has grown already.
            if N == 1 || !shard.grows_for(&places[..charge.account().quotas().len()], now) {
                break answer;
            }
        };
        let written = writes.is_some();
        let Account { scope, quotas, .. } = charge.account();
        for (i, (place, state)) in places.into_iter().zip(writes.into_iter().flatten()).enumerate()
        {
            if !matches!(place, Place::Own(_))
                && let Some(quota) = quotas.as_slice().get(i)
            {
                self.know(scope, quota);
            }
            shard.write(now, place, state);
        }
        if now < shard.overflow_until && !charge.is_peek() {
            // A copy: where it is not needed, the places are in registers.
            let places = places;
            let places = &places[..quotas.len()];
            for i in (0..places.len()).filter(|&i| matches!(places[i], Place::Shared(_))) {
                decision.note_shared(i);
            }
            self.count_overflow(now, shard, scope, places, written);
        }
        decision
    }

    /// Apart, so that the usual charge has no stack to make ready for it.
    #[inline(never)]
    fn charge_several(&self, charge: Charge<'_>) -> Reply<Decision> {
        Reply::now(self.decide::<{ Quotas::MAX }>(charge))
    }

    /// The time, the shard of an account, locked, and where in it the account is.
    #[inline(always)]
    fn find(&self, account: &Account<'_>) -> (i64, MutexGuard<'_, Shard>, Home) {
        self.find_key(account.scope(), account.key())
    }

    #[inline(always)]
    fn find_key(&self, scope: &Scope, key: &Key) -> (i64, MutexGuard<'_, Shard>, Home) {
        let mut now = self.now();
        let hash = self.0.hasher.hash_one((scope.id(), key.as_bytes()));
        let shard = (hash >> 32) as usize & (self.0.shards.len() - 1);
        let mut guard = lock(&self.0.shards[shard]);
        // While this call waited, another may have gone by a later time and given this key's entry
        // to a new one. By the older reading its window would still run, with nothing counted.
        if now < guard.latest {
            now = self.now_again(&mut guard);
        }
        guard.latest = guard.latest.max(now);
        if guard.table.buckets.is_empty() {
            guard.allocate(self.0.buckets);
        }
        (now, guard, Home { hash, scope: scope.id() })
    }

    /// Notes that a scope is charged under this counter, for resets to find it. `false`: there are too
    /// many to note.
    #[inline]
    pub(crate) fn know(&self, scope: &Scope, quota: &Quota) -> bool {
        // Of this store, as far as the scope can see.
        let mark = quota.identity() ^ self.0.id;
        scope.is_marked(mark) || self.0.counters.add(scope.id(), quota) && scope.mark(mark)
    }

    /// The counters of a scope that are known, and whether these are all.
    pub(crate) fn known<T>(&self, scope: &Scope, look: impl FnOnce(&[Quota], bool) -> T) -> T {
        self.0.counters.of(scope.id(), look)
    }
}

#[inline]
fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    // A panic can't happen under the lock; if it did, the counters would be as good as before.
    shard.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn new_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    fmix64(NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Buckets for the overflow of a table.
fn overflow(buckets: usize) -> usize {
    buckets.div_ceil(32)
}

fn shards(count: usize) -> Box<[Mutex<Shard>]> {
    (0..count).map(|_| Mutex::default()).collect()
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

impl Store for MemoryStore {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        match charge.account().quotas().len() {
            1 => Reply::now(self.decide::<1>(charge)),
            _ => self.charge_several(charge),
        }
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        let (now, mut shard, home) = self.find(&adjust.account());
        let mut places = [Place::None; Quotas::MAX];
        let writes = loop {
            let writes = adjust.apply_over(now, |account, i, quota| {
                let (place, window) = shard.locate(now, account, quota, &home, &places[..i]);
                places[i] = place;
                window
            });
            if !shard.grows_for(&places[..adjust.account().quotas().len()], now) {
                break writes;
            }
        };
        let Account { scope, quotas, .. } = adjust.account();
        for ((place, state), quota) in places.into_iter().zip(writes).zip(quotas) {
            // What an overflow entry holds is not known to be this key's: a refund to it is dropped.
            let own = matches!(place, Place::Own(_));
            if let Some(state) = state.filter(|_| own || !adjust.is_refund()) {
                if !own {
                    self.know(scope, quota);
                }
                shard.write(now, place, state);
            }
        }
        Reply::now(())
    }

    /// What a key has an entry of its own for is forgotten, also where this fails because the rest can't
    /// be.
    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        let (now, mut shard, home) = self.find_key(scope, key);
        self.known(scope, |counters, all| {
            let mut own = true;
            for quota in counters {
                own &= shard.forget(now, quota, &home, || match quota.anchor {
                    Anchor::Staggered => stagger(scope.name(), key.as_bytes()),
                    _ => 0,
                });
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

    fn is_shared(&self) -> bool {
        false
    }

    fn remote(&self) -> Option<&Remote> {
        None
    }
}

/// Where a key's entries are.
struct Home {
    hash: u64,
    scope: u64,
}

impl Home {
    #[inline]
    fn fingerprint(&self, quota: &Quota) -> u64 {
        // 0 is an empty entry.
        fmix64(self.hash ^ quota.identity()).max(1)
    }

    /// The overflow entry of a quota that this key would share: its fingerprint, and a hash.
    fn overflow(&self, quota: &Quota, entries: usize) -> u64 {
        let shares = (entries as u64 / OVERFLOW_SHARE).max(1);
        fmix64((self.hash % shares) ^ self.scope.rotate_left(32) ^ quota.identity()).max(1)
    }
}

/// An entry, and the fingerprint it has or should have.
#[derive(Clone, Copy)]
struct Slot {
    bucket: u32,
    way: u32,
    fingerprint: u64,
}

impl Slot {
    #[inline]
    fn is(&self, other: &Slot) -> bool {
        (self.bucket, self.way) == (other.bucket, other.way)
    }
}

#[derive(Clone, Copy)]
enum Place {
    /// The key's own entry.
    Own(Slot),
    /// An entry that it could have.
    Free(Slot),
    /// The same, if it takes a count along that it has shared so far.
    Inheriting(Slot),
    /// An entry that it shares.
    Shared(Slot),
    None,
}

#[derive(Default)]
struct Shard {
    table: Table,
    overflow: Table,
    /// From here on no overflow entry is live.
    overflow_until: i64,
    /// How many charges have had no entry but these.
    overflowed: u64,
    /// The latest time that a call went by, since the clock stepped back.
    latest: i64,
    /// Until here windows may begin that were opened before it did.
    ahead_until: i64,
}

impl Shard {
    /// The clock was ahead, maybe by years, and keys that share entries are not to wait so long.
    fn step_back(&mut self, now: i64) {
        self.ahead_until = self.ahead_until.max(self.latest);
        self.latest = now;
        for bucket in 0..self.overflow.buckets.len() {
            self.overflow.pull_back(bucket, now);
        }
        let ends = (0..self.overflow.buckets.len()).flat_map(|bucket| self.overflow.ends(bucket));
        self.overflow_until = ends.max().unwrap_or(0);
    }

    /// Memory is taken when the first key comes.
    #[cold]
    fn allocate(&mut self, most: usize) {
        self.table = Table::new(1, most);
        self.prepare_overflow();
    }

    /// Where there is no entry for one of these, makes room, or finds that it can't: either way all have
    /// to be looked for once more.
    #[inline]
    fn grows_for(&mut self, places: &[Place], now: i64) -> bool {
        let lacks =
            places.iter().any(|place| matches!(place, Place::None)) && self.table.may_grow();
        if lacks {
            self.grow(now);
        }
        lacks
    }

    #[cold]
    fn grow(&mut self, now: i64) -> bool {
        let grows = self.table.grow(now);
        if !grows {
            // Mostly it is so already. In some tables of a few buckets the keys don't find room in more of
            // them: what is not to be grown any more overflows, and nobody goes uncounted.
            self.table.most = self.table.buckets.len();
        }
        self.prepare_overflow();
        grows
    }

    /// Only a table that may not grow any more overflows.
    fn prepare_overflow(&mut self) {
        if !self.table.may_grow() && self.overflow.buckets.is_empty() {
            let buckets = overflow(self.table.most);
            self.overflow = Table::new(buckets, buckets);
        }
    }

    /// The entry of one quota of a key, and its window. `others` are the places of the key's
    /// other quotas, which are not free.
    #[inline(always)]
    fn locate<'a>(
        &mut self,
        now: i64,
        account: &Account<'_>,
        quota: &'a Quota,
        home: &Home,
        others: &[Place],
    ) -> (Place, Window<'a>) {
        let taken = |slot: &Slot| {
            others.iter().any(|other| match other {
                Place::Own(other) | Place::Free(other) | Place::Inheriting(other) => slot.is(other),
                Place::Shared(_) | Place::None => false,
            })
        };
        let place = self.table.find(home.fingerprint(quota), now, taken);
        let shift = account.shift(quota);
        match place {
            Place::Own(slot) => (place, Window::at(now, Some(self.table.get(slot)), quota, shift)),
            _ if now < self.overflow_until || matches!(place, Place::None) => {
                let (place, window) =
                    self.locate_elsewhere(now, account, quota, home, place, others);
                (place, window)
            }
            _ => (place, Window::at(now, None, quota, shift)),
        }
    }

    #[cold]
    fn locate_elsewhere<'a>(
        &mut self,
        now: i64,
        account: &Account<'_>,
        quota: &'a Quota,
        home: &Home,
        place: Place,
        others: &[Place],
    ) -> (Place, Window<'a>) {
        let shift = account.shift(quota);
        if matches!(place, Place::None) {
            if others.is_empty() && self.grow(now) {
                return self.locate(now, account, quota, home, others);
            }
            if self.table.may_grow() {
                // Where the others are would change: see `grows_for`.
                return (place, Window::at(now, None, quota, shift));
            }
        }
        if now < self.ahead_until && matches!(place, Place::None) {
            // Its entries are free again when the windows have passed that are there now.
            let (buckets, _) = self.table.choices(home.fingerprint(quota));
            buckets.into_iter().for_each(|bucket| self.table.pull_back(bucket, now));
        }
        let fingerprint = home.overflow(quota, self.overflow.buckets.len() * WAYS);
        let taken = |slot: &Slot| {
            others.iter().any(|other| matches!(other, Place::Shared(s) if s.is(slot)))
        };
        let shared = self.overflow.find(fingerprint, now, taken);
        let state = match shared {
            Place::Own(slot) => Some(self.overflow.get(slot)),
            _ => None,
        };
        let window = Window::at(now, state, quota, shift);
        match (place, shared) {
            // An entry of its own has come free: it takes the shared count along.
            (Place::Free(slot), Place::Own(_)) if state.is_some_and(|state| now < state.until) => {
                (Place::Inheriting(slot), window.moved(now, shift))
            }
            (Place::Free(_), _) => (place, window),
            (_, Place::Own(slot) | Place::Free(slot)) => (Place::Shared(slot), window),
            // All overflow entries belong to other quotas: refused for a window.
            _ => (Place::None, Window::spent(now, quota, shift)),
        }
    }

    /// Makes a key new under one quota. `false`: it may be counted where others are, too.
    fn forget(&mut self, now: i64, quota: &Quota, home: &Home, shift: impl Fn() -> u64) -> bool {
        let place = self.table.find(home.fingerprint(quota), now, |_| false);
        if now >= self.overflow_until {
            if let Place::Own(slot) = place {
                self.table.clear(slot);
            }
            return true;
        }
        let fingerprint = home.overflow(quota, self.overflow.buckets.len() * WAYS);
        let shares = match self.overflow.find(fingerprint, now, |_| false) {
            Place::Own(slot) => now < self.overflow.get(slot).until,
            Place::Free(_) => false,
            _ => true,
        };
        // Under any plan of this counter: what it holds when it is new depends on the plan.
        let fresh = || State { used: -MAX, ..Window::at(now, None, quota, shift()).take(0) };
        match place {
            // A new entry might inherit the count of an overflow entry: this one is kept, as new.
            Place::Own(slot) => {
                self.table.set(slot, fresh());
                true
            }
            Place::Free(slot) if shares => {
                self.table.set(slot, fresh());
                true
            }
            _ => !shares,
        }
    }

    #[inline]
    fn write(&mut self, now: i64, place: Place, state: State) {
        match place {
            Place::Own(slot) | Place::Free(slot) | Place::Inheriting(slot) => {
                self.table.set(slot, state);
            }
            Place::Shared(slot) => {
                // It empties a full window after its last charge: only then have the windows of
                // all who share it ended, wherever these began.
                let until = state.until.saturating_add((now - state.start).max(0)).min(MAX);
                let start = now.max(state.start);
                self.overflow.set(slot, State { start, until, ..state });
                self.overflow_until = self.overflow_until.max(until);
            }
            Place::None => {}
        }
    }
}

#[derive(Default)]
struct Table {
    buckets: Box<[Bucket]>,
    /// So many buckets it may have.
    most: usize,
}

impl Table {
    fn new(buckets: usize, most: usize) -> Self {
        Self { buckets: vec![[[0; 4]; WAYS]; buckets].into(), most }
    }

    fn may_grow(&self) -> bool {
        self.buckets.len() < self.most
    }

    /// Moves what is live into twice as many buckets. `false`: there may be no more.
    #[cold]
    fn grow(&mut self, now: i64) -> bool {
        let mut size = self.buckets.len();
        while size < self.most {
            // By halves of the most, so that the last step is as large as the others.
            let mut next = self.most;
            while next.div_ceil(2) > size {
                next = next.div_ceil(2);
            }
            size = next;
            if let Some(larger) = self.moved(size, now) {
                *self = larger;
                return true;
            }
        }
        false
    }

    /// `None`: something found no room, which is seen in tables of a few buckets only.
    fn moved(&self, buckets: usize, now: i64) -> Option<Self> {
        // With half of all entries free, fewer will do: what is in its first bucket is found sooner.
        const PLENTY: usize = 4;

        let mut larger = Self::new(buckets, self.most);
        for &[fingerprint, until, start, used] in self.buckets.iter().flatten() {
            if until as i64 > now {
                let Place::Free(slot) = larger.free(fingerprint, now, PLENTY, |_| false) else {
                    return None;
                };
                let [start, used, until] = [start, used, until].map(|n| n as i64);
                larger.set(slot, State { start, used, until });
            }
        }
        Some(larger)
    }

    /// The entry of a fingerprint, else the one that it should have.
    #[inline(always)]
    fn find(&self, fingerprint: u64, now: i64, taken: impl Fn(&Slot) -> bool) -> Place {
        let (buckets, first) = self.choices(fingerprint);
        for bucket in buckets {
            let entries = &self.buckets[bucket];
            for i in 0..WAYS {
                let way = (first + i) % WAYS;
                let slot = Slot { bucket: bucket as u32, way: way as u32, fingerprint };
                // One that another quota of the key has been given was expired: it is no loss.
                if entries[way][0] == fingerprint && !taken(&slot) {
                    return Place::Own(slot);
                }
            }
        }
        self.free(fingerprint, now, SPARSE, taken)
    }

    /// The buckets of a fingerprint. They fill from a way that it chooses as well: mostly the first look
    /// finds it.
    #[inline]
    fn choices(&self, fingerprint: u64) -> ([usize; 2], usize) {
        let buckets = [self.bucket(fingerprint as u32), self.bucket((fingerprint >> 32) as u32)];
        (buckets, (fingerprint >> 16) as usize % WAYS)
    }

    /// A free entry in the first of two buckets while there are plenty, then in the emptier one.
    fn free(
        &self,
        fingerprint: u64,
        now: i64,
        plenty: usize,
        taken: impl Fn(&Slot) -> bool,
    ) -> Place {
        let (buckets, first) = self.choices(fingerprint);
        // In a flood there is none, and that is all it has to find out.
        if buckets.iter().all(|&bucket| self.ends(bucket).all(|until| until > now)) {
            return Place::None;
        }
        let free = |bucket: usize| {
            let ways = (0..WAYS).map(move |i| (first + i) % WAYS);
            let free = ways.filter(move |&way| self.buckets[bucket][way][1] as i64 <= now);
            let slot = move |way| Slot { bucket: bucket as u32, way: way as u32, fingerprint };
            free.map(slot).filter(|slot| !taken(slot))
        };
        let [a, b] = buckets;
        let room = free(a).count();
        let chosen = if room < plenty && free(b).count() > room { b } else { a };
        free(chosen).next().map_or(Place::None, Place::Free)
    }

    /// When the states of a bucket end: 0 for an entry without one.
    fn ends(&self, bucket: usize) -> impl Iterator<Item = i64> {
        self.buckets[bucket].iter().map(|&[_, until, ..]| until as i64)
    }

    /// Has the windows begin now that lie ahead by a window or more (S4). They keep their counts.
    #[cold]
    fn pull_back(&mut self, bucket: usize, now: i64) {
        for [_, until, start, _] in &mut self.buckets[bucket] {
            let lasts = (*until as i64).saturating_sub(*start as i64);
            if lasts > 0 && (*start as i64).saturating_sub(now) >= lasts {
                (*start, *until) = (now as u64, (now + lasts) as u64);
            }
        }
    }

    fn live(&self, now: i64) -> usize {
        let ends = (0..self.buckets.len()).flat_map(|bucket| self.ends(bucket));
        ends.filter(|&until| until > now).count()
    }

    #[inline]
    fn bucket(&self, hash: u32) -> usize {
        ((u64::from(hash) * self.buckets.len() as u64) >> 32) as usize
    }

    #[inline]
    fn get(&self, slot: Slot) -> State {
        let entries = &self.buckets[slot.bucket as usize];
        let [_, until, start, used] = entries[slot.way as usize % WAYS].map(|n| n as i64);
        State { start, used, until }
    }

    fn clear(&mut self, slot: Slot) {
        self.set(Slot { fingerprint: 0, ..slot }, State::default());
    }

    #[inline]
    fn set(&mut self, slot: Slot, state: State) {
        let State { start, used, until } = state;
        self.buckets[slot.bucket as usize][slot.way as usize % WAYS] =
            [slot.fingerprint, until as u64, start as u64, used as u64];
    }
}
