//! Counters in this process's memory.
//!
//! A sharded lock around a flat table. A key's hash chooses the shard, so that all of its quotas are
//! charged under one lock. Each quota of the key has a 64-bit fingerprint, and an entry in one of the
//! two buckets that this chooses. Entries are never moved, and one that has expired is free. So there
//! is nothing to sweep, and a charge looks at two buckets at most, whatever the table holds.

use std::fmt;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use foldhash::quality::RandomState;

use super::{Account, Adjust, Charge, Reply, Store, instant};
use crate::clock::{Clock, SystemClock};
use crate::decision::Decision;
use crate::observe;
use crate::quota::{Quota, Quotas, fmix64};
use crate::sync::{Mutex, MutexGuard};
use crate::window::{MAX, State, Window};

/// Entries in a bucket. With two buckets to choose from, a table of 16-way buckets holds its
/// `max_keys` at 8/9 full with practically none left over (0.0014% in a simulation).
const WAYS: usize = 16;
/// The fingerprints, then the ends of the states, then the rest of them: a search for an entry, or
/// for a free one, reads no more than it needs.
type Bucket = [u64; WAYS * 4];
const EMPTY: Bucket = [0; WAYS * 4];

const MOST_SHARDS: usize = 64;
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
/// current window. It takes at most 37.125 bytes per entry of `max_keys` (32 bytes in a table that
/// is 8/9 full, and 1/32 of that for the overflow), and up to 1.1 kB of rounding for each of its
/// shards, of which there are at most 64: 37.2 MB for a million. That is reached only as keys come:
/// see [`max_bytes`](Self::max_bytes). A charge of one quota allocates nothing;
/// that of several, the list of their standings in the [`Decision`].
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
    /// Buckets in a shard's table, and in its overflow.
    buckets: usize,
    overflow_buckets: usize,
    hasher: RandomState,
    time: Time,
    max_keys: usize,
    /// When the operator may be told of the overflow again.
    quiet_until: AtomicU64,
}

/// The system's clock is called directly, others through a pointer.
enum Time {
    System,
    Other(Box<dyn Clock>),
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
            overflow_buckets: self.0.overflow_buckets,
            hasher: RandomState::default(),
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
        let count = (max_keys / 1_024).next_power_of_two().min(MOST_SHARDS);
        let entries = max_keys.saturating_add(max_keys / 8).div_ceil(count);
        Self(Arc::new(Inner {
            shards: shards(count),
            buckets: entries.div_ceil(WAYS),
            overflow_buckets: entries.div_ceil(32).div_ceil(WAYS),
            hasher: RandomState::default(),
            time,
            max_keys,
            quiet_until: AtomicU64::new(0),
        }))
    }

    /// The most memory that the counters can take, in bytes. It is taken as keys come, a shard (a
    /// 64th of it in a store of more than 65,000 keys) at a time.
    pub fn max_bytes(&self) -> usize {
        let buckets = self.0.buckets + self.0.overflow_buckets;
        self.0.shards.len() * (buckets * size_of::<Bucket>() + size_of::<Mutex<Shard>>())
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

    /// How many charges have found no entry of their own since the store was made: 0 as long as it
    /// was large enough. If it grows, somebody sends requests under ever new keys, or `max_keys` is
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

    /// Counts a charge without entries of its own, and tells the operator, unless that was done a
    /// short while ago.
    #[cold]
    fn count_overflow(&self, now: i64, mut shard: MutexGuard<'_, Shard>, places: &[Place]) {
        const MINUTE: i64 = 60_000;

        if places.iter().any(|place| matches!(place, Place::Shared(..) | Place::None)) {
            shard.overflowed += 1;
            let next = shard.overflow_until.max(now.saturating_add(MINUTE)) as u64;
            // What follows takes the locks of all shards.
            drop(shard);
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

    /// The time, the shard of an account, locked, and where in it the account is.
    #[inline]
    fn find(&self, account: &Account<'_>) -> (i64, MutexGuard<'_, Shard>, Home) {
        let mut now = self.now();
        let hash = self.0.hasher.hash_one((account.scope().id(), account.key().as_bytes()));
        let shard = (hash >> 58) as usize & (self.0.shards.len() - 1);
        let mut guard = lock(&self.0.shards[shard]);
        // While this call waited, another may have gone by a later time and given this key's entry
        // to a new one. By the older reading its window would still run, with nothing counted.
        if now < guard.latest {
            now = self.now();
        }
        guard.latest = guard.latest.max(now);
        guard.allocate(&self.0);
        (now, guard, Home { hash, scope: account.scope().id() })
    }
}

#[inline]
fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    // A panic can't happen under the lock; if it did, the counters would be as good as before.
    shard.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
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
    #[inline]
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        let (now, mut shard, home) = self.find(&charge.account());
        let mut places = [Place::None; Quotas::MAX];
        let (decision, writes) = charge.decide_over(now, |account, i, quota| {
            let (place, window) = shard.locate(now, account, quota, &home, &places[..i]);
            places[i] = place;
            window
        });
        if let Some(writes) = writes {
            let quotas = charge.account().quotas().iter();
            for ((place, state), quota) in places.into_iter().zip(writes).zip(quotas) {
                shard.write(now, place, home.fingerprint(quota), state);
            }
        }
        if now < shard.overflow_until {
            self.count_overflow(now, shard, &places[..charge.account().quotas().len()]);
        }
        Reply::now(decision)
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        let (now, mut shard, home) = self.find(&adjust.account());
        let mut places = [Place::None; Quotas::MAX];
        let writes = adjust.apply_over(now, |account, i, quota| {
            let (place, window) = shard.locate(now, account, quota, &home, &places[..i]);
            places[i] = place;
            window
        });
        let quotas = adjust.account().quotas().iter();
        for ((place, state), quota) in places.into_iter().zip(writes).zip(quotas) {
            // What an overflow entry holds is not known to be this key's: a refund to it is dropped.
            let own = matches!(place, Place::Own(_));
            if let Some(state) = state.filter(|_| own || !adjust.is_refund()) {
                shard.write(now, place, home.fingerprint(quota), state);
            }
        }
        Reply::now(())
    }

    fn reset(&self, account: Account<'_>) -> Reply<()> {
        let (now, mut shard, home) = self.find(&account);
        for quota in account.quotas() {
            let (place, _) = shard.locate(now, &account, quota, &home, &[]);
            let fingerprint = home.fingerprint(quota);
            if now < shard.overflow_until {
                // A new entry might inherit the count of an overflow entry: this one is kept, as new.
                let window = Window::at(now, None, quota, account.shift(quota));
                if matches!(place, Place::Own(_) | Place::Free(_)) {
                    shard.write(now, place, fingerprint, window.take(0));
                }
            } else if let Place::Own(slot) = place {
                shard.table.set(slot, 0, State::default());
            }
        }
        Reply::now(())
    }

    fn is_shared(&self) -> bool {
        false
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

/// An entry: its bucket and its way in it.
type Slot = (u32, u32);

#[derive(Clone, Copy, PartialEq)]
enum Place {
    /// The key's own entry.
    Own(Slot),
    /// An entry that it could have.
    Free(Slot),
    /// An entry that it shares.
    Shared(Slot, u64),
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
    /// The latest time that a call went by.
    latest: i64,
}

impl Shard {
    /// Memory is taken when the first key comes.
    #[inline]
    fn allocate(&mut self, inner: &Inner) {
        if self.table.0.is_empty() {
            self.table.0 = vec![EMPTY; inner.buckets].into_boxed_slice();
        }
        if self.overflow.0.is_empty() {
            self.overflow.0 = vec![EMPTY; inner.overflow_buckets].into_boxed_slice();
        }
    }

    /// The entry of one quota of a key, and its window. `others` are the places of the key's
    /// other quotas, which are not free.
    #[inline]
    fn locate<'a>(
        &self,
        now: i64,
        account: &Account<'_>,
        quota: &'a Quota,
        home: &Home,
        others: &[Place],
    ) -> (Place, Window<'a>) {
        let taken = |slot| {
            others.iter().any(|other| matches!(other, Place::Own(s) | Place::Free(s) if *s == slot))
        };
        let place = self.table.find(home.fingerprint(quota), now, taken);
        let shift = account.shift(quota);
        match place {
            Place::Own(slot) => (place, Window::at(now, Some(self.table.get(slot)), quota, shift)),
            _ if now < self.overflow_until || place == Place::None => {
                self.locate_overflow(now, quota, home, place, shift, others)
            }
            _ => (place, Window::at(now, None, quota, shift)),
        }
    }

    #[cold]
    fn locate_overflow<'a>(
        &self,
        now: i64,
        quota: &'a Quota,
        home: &Home,
        place: Place,
        shift: u64,
        others: &[Place],
    ) -> (Place, Window<'a>) {
        let fingerprint = home.overflow(quota, self.overflow.0.len() * WAYS);
        let taken =
            |slot| others.iter().any(|other| matches!(other, Place::Shared(s, _) if *s == slot));
        let shared = self.overflow.find(fingerprint, now, taken);
        let state = match shared {
            Place::Own(slot) => Some(self.overflow.get(slot)),
            _ => None,
        };
        let window = Window::at(now, state, quota, shift);
        match (place, shared) {
            // An entry of its own has come free: it takes the shared count along.
            (Place::Free(_), Place::Own(_)) if state.is_some_and(|state| now < state.until) => {
                (place, Window::with_used(now, quota, shift, window.used()))
            }
            (Place::Free(_), _) => (place, window),
            (_, Place::Own(slot) | Place::Free(slot)) => (Place::Shared(slot, fingerprint), window),
            // All overflow entries belong to other quotas: refused for a window.
            _ => {
                let spent = (quota.limit + quota.max_reserved) as i64;
                (Place::None, Window::with_used(now, quota, shift, spent))
            }
        }
    }

    #[inline]
    fn write(&mut self, now: i64, place: Place, fingerprint: u64, state: State) {
        match place {
            Place::Own(slot) | Place::Free(slot) => self.table.set(slot, fingerprint, state),
            Place::Shared(slot, fingerprint) => {
                // It empties a full window after its last charge: only then have the windows of
                // all who share it ended, wherever these began.
                let until = state.until.saturating_add((now - state.start).max(0)).min(MAX);
                let start = now.max(state.start);
                self.overflow.set(slot, fingerprint, State { start, until, ..state });
                self.overflow_until = self.overflow_until.max(until);
            }
            Place::None => {}
        }
    }
}

#[derive(Default)]
struct Table(Box<[Bucket]>);

impl Table {
    /// The entry of a fingerprint, else the one that it should have.
    #[inline]
    fn find(&self, fingerprint: u64, now: i64, taken: impl Fn(Slot) -> bool) -> Place {
        let buckets = [self.bucket(fingerprint as u32), self.bucket((fingerprint >> 32) as u32)];
        // Entries fill from a way that the fingerprint chooses: mostly the first look finds it.
        let first = (fingerprint >> 16) as usize % WAYS;
        for bucket in buckets {
            let fingerprints = &self.0[bucket][..WAYS];
            for i in 0..WAYS {
                let way = (first + i) % WAYS;
                let slot = (bucket as u32, way as u32);
                // One that another quota of the key has been given was expired: it is no loss.
                if fingerprints[way] == fingerprint && !taken(slot) {
                    return Place::Own(slot);
                }
            }
        }
        self.free(buckets, first, now, taken)
    }

    /// A free entry in the emptier of two buckets.
    fn free(
        &self,
        buckets: [usize; 2],
        first: usize,
        now: i64,
        taken: impl Fn(Slot) -> bool,
    ) -> Place {
        // In a flood there is none, and that is all it has to find out.
        if buckets.iter().all(|&bucket| self.ends(bucket).iter().all(|&until| until as i64 > now)) {
            return Place::None;
        }
        let free = |bucket: usize| {
            let slots = (0..WAYS).map(move |i| (bucket as u32, ((first + i) % WAYS) as u32));
            slots.filter(|&slot| self.is_free(slot, now) && !taken(slot))
        };
        let [a, b] = buckets;
        let emptier = if free(b).count() > free(a).count() { b } else { a };
        free(emptier).next().map_or(Place::None, Place::Free)
    }

    /// When the states of a bucket end: 0 for an entry without one.
    fn ends(&self, bucket: usize) -> &[u64] {
        &self.0[bucket][WAYS..2 * WAYS]
    }

    fn live(&self, now: i64) -> usize {
        let slots = (0..self.0.len() as u32).flat_map(|b| (0..WAYS as u32).map(move |w| (b, w)));
        slots.filter(|&slot| !self.is_free(slot, now)).count()
    }

    fn is_free(&self, (bucket, way): Slot, now: i64) -> bool {
        self.ends(bucket as usize)[way as usize] as i64 <= now
    }

    #[inline]
    fn bucket(&self, hash: u32) -> usize {
        ((u64::from(hash) * self.0.len() as u64) >> 32) as usize
    }

    #[inline]
    fn get(&self, (bucket, way): Slot) -> State {
        let (bucket, way) = (&self.0[bucket as usize], way as usize);
        let at = 2 * (WAYS + way);
        State {
            start: bucket[at] as i64,
            used: bucket[at + 1] as i64,
            until: bucket[WAYS + way] as i64,
        }
    }

    #[inline]
    fn set(&mut self, (bucket, way): Slot, fingerprint: u64, state: State) {
        let (bucket, way) = (&mut self.0[bucket as usize], way as usize);
        bucket[way] = fingerprint;
        bucket[WAYS + way] = state.until as u64;
        let at = 2 * (WAYS + way);
        bucket[at] = state.start as u64;
        bucket[at + 1] = state.used as u64;
    }
}
