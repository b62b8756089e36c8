//! What is under one lock of the store in memory: a table of keys that have an entry of their own,
//! and the overflow, whose entries are shared by those that found no room in it.

use super::super::account::{Account, shift};
use super::super::scope::Scope;
use super::super::sharded::fingerprint;
use super::super::table::{Bucket, Entry, Found, Slot, Table};
use crate::key::Key;
use crate::quota::{Quota, fmix64};
use crate::window::{MAX, State, Window};

mod running;
#[cfg(feature = "saved")]
mod saved;

#[cfg(feature = "saved")]
pub(super) use saved::{Part, Times};

/// Of a shard's overflow entries, the share that one quota uses.
const OVERFLOW_SHARE: u64 = 4;

/// Buckets of a table for each of its overflow.
const PER_OVERFLOW: usize = 32;

/// A count, in an entry that ends with it.
#[derive(Clone, Copy, Default)]
pub(super) struct Count {
    pub(super) start: i64,
    pub(super) used: i64,
}

pub(super) struct Shard {
    table: Table<Count>,
    overflow: Table<Count>,
    /// From here on no overflow entry is live.
    overflow_until: i64,
    /// How many charges have had no entry but these.
    pub(super) overflowed: u64,
    /// The latest time that a call went by, since the clock stepped back. Without tables it is
    /// later than any.
    latest: i64,
    /// Until here windows may begin that were opened before it did.
    ahead_until: i64,
}

impl Default for Shard {
    fn default() -> Self {
        let (table, overflow) = Default::default();
        let (latest, ahead_until, overflow_until, overflowed) = (MAX, 0, 0, 0);
        Self { table, overflow, overflow_until, overflowed, latest, ahead_until }
    }
}

/// Where a quota of a key is counted.
#[derive(Clone, Copy)]
pub(super) enum Place {
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

impl Place {
    /// Whether a charge found an entry of the key's own there. One that would inherit a count has
    /// none, if that count has refused it.
    pub(super) fn is_own(&self, written: bool) -> bool {
        match self {
            Self::Own(_) | Self::Free(_) => true,
            Self::Inheriting(_) => written,
            Self::Shared(_) | Self::None => false,
        }
    }
}

/// What a key's entries are found by.
#[derive(Clone, Copy)]
pub(super) struct Home {
    pub(super) hash: u64,
    pub(super) scope: u64,
}

impl Home {
    #[inline]
    fn fingerprint(&self, quota: &Quota) -> u64 {
        fingerprint(self.hash, quota)
    }

    /// The overflow entry of a quota that this key would share.
    fn shared_fingerprint(&self, quota: &Quota, entries: usize) -> u64 {
        let shares = (entries as u64 / OVERFLOW_SHARE).max(1);
        fmix64((self.hash % shares) ^ self.scope.rotate_left(32) ^ quota.identity()).max(1)
    }
}

/// The most that the tables of a number of shards take, each with this many buckets.
pub(super) fn max_bytes(shards: usize, buckets: usize) -> usize {
    let all = (buckets + overflow(buckets)).saturating_mul(shards);
    // One may have doubled, and is about to let go of what it had before.
    all.saturating_add(buckets.div_ceil(2)).saturating_mul(size_of::<Bucket<Count>>())
}

/// Buckets for the overflow of a table.
fn overflow(buckets: usize) -> usize {
    buckets.div_ceil(PER_OVERFLOW)
}

impl Shard {
    /// Takes note of the time. `false`: a clock that says `now` has stepped back, or there are no
    /// tables yet.
    #[inline]
    pub(super) fn enter(&mut self, now: i64) -> bool {
        let enters = now >= self.latest;
        if enters {
            self.latest = now;
        }
        enters
    }

    pub(super) fn is_unallocated(&self) -> bool {
        self.table.is_unallocated()
    }

    /// Takes memory when the first key comes.
    pub(super) fn allocate(&mut self, now: i64, max_buckets: usize) {
        self.latest = now;
        self.table = Table::new(1, max_buckets);
        self.prepare_overflow();
    }

    /// The clock was ahead, maybe by years, and keys that share entries are not to wait so long.
    pub(super) fn step_back(&mut self, now: i64) {
        self.ahead_until = self.ahead_until.max(self.latest);
        self.latest = now;
        self.overflow.entries_mut().for_each(|entry| pull_back(entry, now));
        self.overflow_until = self.overflow.last_end();
    }

    pub(super) fn live(&self, now: i64) -> usize {
        self.table.live(now)
    }

    /// Until when entries of the overflow are live, if any is.
    #[inline]
    pub(super) fn overflows_until(&self, now: i64) -> Option<i64> {
        (now < self.overflow_until).then_some(self.overflow_until)
    }

    /// The entries of all quotas of a key, and their windows.
    #[inline(always)]
    pub(super) fn locate_all<'a, const N: usize>(
        &mut self,
        now: i64,
        account: &Account<'a>,
        home: &Home,
    ) -> ([Place; N], [Window<'a>; N]) {
        loop {
            let mut places = [Place::None; N];
            let windows = account.windows(|i, quota| {
                let others = if N == 1 { &[] } else { &places[..i] };
                let (place, window) = self.locate(now, account, quota, home, others);
                places[i] = place;
                window
            });
            // For the first quota it has grown already.
            if N == 1 || !self.grows_for(&places[..account.quotas().len()], now) {
                return (places, windows);
            }
        }
    }

    /// Where there is no entry for one of these, makes room, or finds that it can't: either way all
    /// have to be looked for once more.
    pub(super) fn grows_for(&mut self, places: &[Place], now: i64) -> bool {
        let lacks =
            places.iter().any(|place| matches!(place, Place::None)) && self.table.may_grow();
        if lacks {
            self.grow(now);
        }
        lacks
    }

    /// A table that can't grow overflows, so that every charge is counted.
    fn grow(&mut self, now: i64) -> bool {
        let grows = self.table.grow(now);
        self.prepare_overflow();
        grows
    }

    /// Only a table that may not grow any more overflows.
    fn prepare_overflow(&mut self) {
        if !self.table.may_grow() && self.overflow.is_unallocated() {
            let buckets = overflow(self.table.max_buckets());
            self.overflow = Table::new(buckets, buckets);
        }
    }

    /// The entry of one quota of a key, and its window. `others` are the places of the key's
    /// other quotas, which are not free.
    #[inline(always)]
    pub(super) fn locate<'a>(
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
        let shift = account.shift(quota);
        let free = match self.table.find(home.fingerprint(quota), now, taken) {
            Found::Entry(slot) => {
                let window = Window::at(now, Some(state(self.table.get(slot))), quota, shift);
                return (Place::Own(slot), window);
            }
            Found::Free(slot) => Some(slot),
            Found::Full => None,
        };
        match free {
            Some(slot) if now >= self.overflow_until => {
                (Place::Free(slot), Window::at(now, None, quota, shift))
            }
            free => self.locate_elsewhere(now, account, quota, home, free, others),
        }
    }

    #[cold]
    fn locate_elsewhere<'a>(
        &mut self,
        now: i64,
        account: &Account<'_>,
        quota: &'a Quota,
        home: &Home,
        free: Option<Slot>,
        others: &[Place],
    ) -> (Place, Window<'a>) {
        let shift = account.shift(quota);
        if free.is_none() {
            if others.is_empty() && self.grow(now) {
                return self.locate(now, account, quota, home, others);
            }
            if self.table.may_grow() {
                // Where the others are would change: see `grows_for`.
                return (Place::None, Window::at(now, None, quota, shift));
            }
            if now < self.ahead_until {
                // Its entries are free again when the windows have passed that are there now.
                self.table.change_around(home.fingerprint(quota), |entry| pull_back(entry, now));
            }
        }
        let taken = |slot: &Slot| {
            others.iter().any(|other| matches!(other, Place::Shared(s) if s.is(slot)))
        };
        let shared = self.find_shared(now, quota, home, taken);
        let state = match shared {
            Found::Entry(slot) => Some(state(self.overflow.get(slot))),
            _ => None,
        };
        let window = Window::at(now, state, quota, shift);
        match (free, shared) {
            // An entry of its own has come free: it takes the shared count along.
            (Some(slot), Found::Entry(_)) if state.is_some_and(|state| now < state.until) => {
                (Place::Inheriting(slot), window.moved(now, shift))
            }
            (Some(slot), _) => (Place::Free(slot), window),
            (None, Found::Entry(slot) | Found::Free(slot)) => (Place::Shared(slot), window),
            // All overflow entries belong to other quotas: refused for a window.
            (None, Found::Full) => (Place::None, Window::spent(now, quota, shift)),
        }
    }

    fn find_shared(
        &self,
        now: i64,
        quota: &Quota,
        home: &Home,
        taken: impl Fn(&Slot) -> bool,
    ) -> Found {
        let fingerprint = home.shared_fingerprint(quota, self.overflow.capacity());
        self.overflow.find(fingerprint, now, taken)
    }

    /// Makes a key new under one quota. `false`: it may be counted where others are, too.
    pub(super) fn forget(
        &mut self,
        now: i64,
        scope: &Scope,
        key: &Key,
        quota: &Quota,
        home: &Home,
    ) -> bool {
        let found = self.table.find(home.fingerprint(quota), now, |_| false);
        if now >= self.overflow_until {
            if let Found::Entry(slot) = found {
                self.table.clear(slot);
            }
            return true;
        }
        let shares = match self.find_shared(now, quota, home, |_| false) {
            Found::Entry(slot) => now < self.overflow.get(slot).until,
            Found::Free(_) => false,
            Found::Full => true,
        };
        match found {
            // A new entry might inherit the count of an overflow entry: this one is kept, as new.
            Found::Entry(slot) => self.renew(now, slot, quota, shift(scope, key, quota)),
            Found::Free(slot) if shares => self.renew(now, slot, quota, shift(scope, key, quota)),
            _ => return !shares,
        }
        true
    }

    /// An entry with nothing used, under any plan of this counter: what it holds when it is new
    /// depends on the plan.
    fn renew(&mut self, now: i64, slot: Slot, quota: &Quota, shift: u64) {
        let State { start, until, .. } = Window::at(now, None, quota, shift).take(0);
        self.table.set(slot, until, Count { start, used: -MAX });
    }

    #[inline]
    pub(super) fn write(&mut self, now: i64, place: Place, state: State) {
        let State { start, used, until } = state;
        match place {
            Place::Own(slot) | Place::Free(slot) | Place::Inheriting(slot) => {
                self.table.set(slot, until, Count { start, used });
            }
            Place::Shared(slot) => {
                // It empties a full window after its last charge: only then have the windows of
                // all keys that share it ended, wherever these began.
                let until = until.saturating_add((now - start).max(0)).min(MAX);
                self.overflow.set(slot, until, Count { start: now.max(start), used });
                self.overflow_until = self.overflow_until.max(until);
            }
            Place::None => {}
        }
    }
}

#[inline]
fn state(entry: Entry<Count>) -> State {
    let Entry { until, payload: Count { start, used }, .. } = entry;
    State { start, used, until }
}

/// Has a window begin now that lies ahead by a window or more (S4). It keeps its count.
fn pull_back(entry: &mut Entry<Count>, now: i64) {
    let lasts = entry.until.saturating_sub(entry.payload.start);
    if lasts > 0 && entry.payload.start.saturating_sub(now) >= lasts {
        (entry.payload.start, entry.until) = (now, now + lasts);
    }
}
