//! A shard: the part of a store in memory that is under one lock. Its table has entries of single
//! keys, and its overflow has entries that several keys share once the table is full.

use super::super::account::Account;
use super::super::sharded::{fingerprint, mix};
use super::super::table::{Bucket, Entry, Found, Slot, Table};
use super::time::Reading;
use crate::decision::{Ruling, Usage};
use crate::quota::{Anchor, Quota, SavedWindows, Span, fmix64};
use crate::window::{MAX, State, Window};

/// A quota uses one in this many of a shard's overflow entries.
const OVERFLOW_SHARE: u64 = 4;

/// Buckets of the table for each bucket of its overflow.
const PER_OVERFLOW: usize = 32;

pub(crate) struct Shard {
    pub(super) table: Table,
    overflow: Table,
    overflow_until: i64,
    pub(super) overflowed: u64,
    /// The latest of a call since the clock stepped back. Without tables the end of time, so that
    /// the first call takes the slow path.
    latest: i64,
    /// When the clock last stepped back, or 0. Windows that begin later than now are from before.
    stepped_back_at: i64,
}

impl Default for Shard {
    fn default() -> Self {
        let (table, overflow) = Default::default();
        let (latest, stepped_back_at, overflow_until, overflowed) = (MAX, 0, 0, 0);
        Self { table, overflow, overflow_until, overflowed, latest, stepped_back_at }
    }
}

#[derive(Clone, Copy)]
pub(super) enum CountedIn {
    Own(Slot),
    Free(Slot),
    /// A free entry, which starts with the count that the key has shared so far.
    Inheriting(Slot),
    /// An overflow entry, which lasts at least until this time once it is charged.
    Overflow(Slot, i64),
    None,
}

impl CountedIn {
    /// A key that was refused by a shared count inherits nothing.
    pub(super) fn is_own(&self, written: bool) -> bool {
        match self {
            Self::Own(_) | Self::Free(_) => true,
            Self::Inheriting(_) => written,
            Self::Overflow(..) | Self::None => false,
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Home {
    pub(super) hash: u64,
    pub(super) secret: u64,
}

impl Home {
    #[inline]
    pub(super) fn fingerprint(&self, quota: &Quota) -> u64 {
        fingerprint(self.hash, quota)
    }

    fn overflow_fingerprint(&self, quota: &Quota, entries: usize) -> u64 {
        let shares = (entries as u64 / OVERFLOW_SHARE).max(1);
        let secret = fmix64(self.hash % shares) ^ self.secret;
        mix([secret, secret.rotate_left(32)], quota.identity()).max(1)
    }
}

pub(super) fn max_bytes(shards: usize, buckets: usize) -> usize {
    let all = (buckets + overflow(buckets)).saturating_mul(shards);
    // A table may be doubling, and holds its old buckets until that is done.
    all.saturating_add(buckets.div_ceil(2)).saturating_mul(size_of::<Bucket>())
}

fn overflow(buckets: usize) -> usize {
    buckets.div_ceil(PER_OVERFLOW)
}

impl Shard {
    /// Returns the shard's time from now on: not before the latest, if both may be the same
    /// instant. `None` if the clock has stepped back, or if there are no tables yet.
    #[inline(always)]
    pub(super) fn advance(&mut self, now: Reading) -> Option<Reading> {
        let now = now.not_before(self.latest)?;
        self.latest = now.at;
        Some(now)
    }

    pub(super) fn is_unallocated(&self) -> bool {
        self.table.is_unallocated()
    }

    pub(super) fn allocate(&mut self, now: i64, max_buckets: usize) {
        self.latest = now;
        self.table = Table::new(1, max_buckets);
        self.prepare_overflow();
    }

    /// The clock may have been years ahead: overflow entries are pulled back, so that their keys
    /// don't wait that long.
    pub(super) fn step_back(&mut self, now: i64) {
        (self.latest, self.stepped_back_at) = (now, now);
        self.overflow.entries_mut().for_each(|entry| _ = pull_back(entry, now, |_| now));
        self.overflow_until = self.overflow.last_end();
    }

    /// Another shard has noticed the step.
    pub(super) fn follow_back(&mut self, now: i64) {
        if !self.is_unallocated() && now < self.latest {
            self.step_back(now);
        }
    }

    #[inline]
    pub(super) fn overflows_until(&self, now: i64) -> Option<i64> {
        (now < self.overflow_until).then_some(self.overflow_until)
    }

    /// Returns whether all places have to be located again.
    pub(super) fn grows_for(&mut self, places: &[CountedIn], now: i64) -> bool {
        let lacks =
            places.iter().any(|place| matches!(place, CountedIn::None)) && self.table.may_grow();
        if lacks {
            self.grow(now);
        }
        lacks
    }

    /// If the table can't grow, allocates the overflow, so that every charge is counted.
    fn grow(&mut self, now: i64) -> bool {
        let grows = self.table.grow(now);
        self.prepare_overflow();
        grows
    }

    fn prepare_overflow(&mut self) {
        if !self.table.may_grow() && self.overflow.is_unallocated() {
            let buckets = overflow(self.table.max_buckets);
            self.overflow = Table::new(buckets, buckets);
        }
    }

    /// `others` are the places of the key's other quotas, which are taken.
    #[inline(always)]
    pub(super) fn locate<'a>(
        &mut self,
        now: i64,
        account: &Account<'a>,
        quota: &'a Quota,
        home: &Home,
        saved: &SavedWindows,
        others: &[CountedIn],
    ) -> (CountedIn, Window<'a>) {
        let taken = |slot: &Slot| {
            others.iter().any(|other| match other {
                CountedIn::Own(other) | CountedIn::Free(other) | CountedIn::Inheriting(other) => {
                    slot.is(other)
                }
                CountedIn::Overflow(..) | CountedIn::None => false,
            })
        };
        let free = match self.table.find(home.fingerprint(quota), now, taken) {
            Found::Entry(slot) => {
                let mut state = state(self.table.get(slot));
                // A count that this process began ends as it began: the file has none of it.
                if let Anchor::Calendar(calendar) = quota.anchor
                    && state.until != calendar.around(state.start).end
                {
                    let end = calendar.only_end(state.start, state.until);
                    let end = end.or_else(|| saved.end_of(calendar, state.start));
                    state.end = end.unwrap_or_default();
                }
                let window = account.window(now, quota, Some(state));
                return (CountedIn::Own(slot), window);
            }
            Found::Free(slot) => Some(slot),
            Found::Full => None,
        };
        match free {
            Some(slot) if now >= self.overflow_until => {
                (CountedIn::Free(slot), account.window(now, quota, None))
            }
            Some(slot) => self.locate_overflow(now, account, quota, home, Some(slot), others),
            None if others.is_empty() && self.grow(now) => {
                self.locate(now, account, quota, home, saved, others)
            }
            // Growing would move the others' entries: `grows_for` locates all again.
            None if self.table.may_grow() => (CountedIn::None, account.window(now, quota, None)),
            None if self.pull_back_around(home.fingerprint(quota), now) => {
                self.locate(now, account, quota, home, saved, others)
            }
            None => self.locate_overflow(now, account, quota, home, None, others),
        }
    }

    #[cold]
    fn locate_overflow<'a>(
        &self,
        now: i64,
        account: &Account<'a>,
        quota: &'a Quota,
        home: &Home,
        free: Option<Slot>,
        others: &[CountedIn],
    ) -> (CountedIn, Window<'a>) {
        let taken = |slot: &Slot| {
            others.iter().any(|other| matches!(other, CountedIn::Overflow(s, _) if s.is(slot)))
        };
        let overflow = self.find_overflow(now, quota, home, taken);
        let count = match overflow {
            Found::Entry(slot) => Some(state(self.overflow.get(slot))),
            _ => None,
        };
        let count = count.filter(|count| now < count.until);
        let window = match count {
            Some(count) => Window::in_overflow(now, count, quota, account.shift(quota)),
            None => account.window(now, quota, None),
        };
        match (free, overflow) {
            // The key gets an entry of its own, with the count of the overflow.
            (Some(slot), _) if count.is_some() => (CountedIn::Inheriting(slot), window),
            (Some(slot), _) => (CountedIn::Free(slot), window),
            (None, Found::Entry(slot) | Found::Free(slot)) => {
                (CountedIn::Overflow(slot, window.overflow_until(now)), window)
            }
            // All overflow entries belong to other quotas: the key is refused for a window.
            (None, Found::Full) => {
                (CountedIn::None, Window::spent(now, quota, account.shift(quota)))
            }
        }
    }

    /// Lets windows of a clock that was ahead begin soon after it stepped back: they would keep their
    /// entries for too long. Returns whether there were any.
    fn pull_back_around(&mut self, fingerprint: u64, now: i64) -> bool {
        let (at, mut any) = (self.stepped_back_at, false);
        if at > 0 {
            // By whole windows, as the grid of an entry's quota isn't known here.
            let to = |entry: &Entry| {
                let Entry { start, until, .. } = *entry;
                at + (start - at).rem_euclid(until - start)
            };
            self.table.change_around(fingerprint, |entry| any |= pull_back(entry, now, to));
        }
        any
    }

    fn find_overflow(
        &self,
        now: i64,
        quota: &Quota,
        home: &Home,
        taken: impl Fn(&Slot) -> bool,
    ) -> Found {
        let fingerprint = home.overflow_fingerprint(quota, self.overflow.capacity());
        self.overflow.find(fingerprint, now, taken)
    }

    /// Returns `false` if the key shares a count, and no entry is free to take its place.
    pub(super) fn clear_count(&mut self, now: i64, account: &Account<'_>, home: &Home) -> bool {
        let quota = account.quotas.first();
        let overflows = now < self.overflow_until
            && match self.find_overflow(now, quota, home, |_| false) {
                Found::Entry(slot) => now < self.overflow.get(slot).until,
                Found::Free(_) => false,
                Found::Full => true,
            };
        match self.table.find(home.fingerprint(quota), now, |_| false) {
            Found::Entry(slot) if now >= self.overflow_until => self.table.clear(slot),
            Found::Free(_) | Found::Full if !overflows => {}
            Found::Full => return false,
            // Without an entry, the key would share a count, or inherit one.
            Found::Entry(slot) | Found::Free(slot) => {
                // To nothing used, whatever the plan. (A new count depends on the plan.)
                let new = account.window(now, quota, None).take(0);
                self.table.set(slot, State { used: -MAX, ..new });
            }
        }
        true
    }

    pub(super) fn state_at(&self, place: CountedIn) -> Option<State> {
        match place {
            CountedIn::Own(slot) => Some(state(self.table.get(slot))),
            _ => None,
        }
    }

    #[inline]
    pub(super) fn write(&mut self, now: i64, place: CountedIn, state: State) {
        match place {
            CountedIn::Own(slot) | CountedIn::Free(slot) | CountedIn::Inheriting(slot) => {
                self.table.set(slot, state);
            }
            CountedIn::Overflow(slot, least) => {
                let until = state.until.max(least);
                self.overflow.set(slot, State { start: now, until, ..state });
                self.overflow_until = self.overflow_until.max(until);
            }
            CountedIn::None => {}
        }
    }
}

/// The short path of nearly every charge: all of its quotas are plain, and have running windows in
/// entries of the key's own.
impl Shard {
    #[inline(always)]
    pub(super) fn charge_running(
        &mut self,
        now: Reading,
        quota: &Quota,
        fingerprint: u64,
        cost: u64,
    ) -> Option<(Ruling, State)> {
        let entry = self.table.entry_mut(fingerprint)?;
        let state = state(*entry);
        let ruling = Self::rule_running(now, quota, state, cost)?;
        entry.used = ruling.usage.used;
        Some((ruling, state))
    }

    #[inline(always)]
    pub(super) fn rule_running(
        now: Reading,
        quota: &Quota,
        state: State,
        cost: u64,
    ) -> Option<Ruling> {
        let window = Window::running(now.at, now.latest, state, quota)?;
        Some(Ruling::new(now.at, Usage::from_window(&window), cost))
    }

    /// Decides the first plain charge of a quota in a window, in the key's entry or in a free one.
    /// A refusal needs none. The flag says that the entry is new.
    ///
    /// `None` if the quota carries tokens over, the charge takes nothing, its window may be about
    /// to end, or the key may share a count.
    #[inline(always)]
    pub(super) fn charge_first(
        &mut self,
        now: Reading,
        account: &Account<'_>,
        home: &Home,
        cost: u64,
    ) -> Option<(Ruling, bool)> {
        let quota = account.quotas.first();
        let window = account.window(now.at, quota, None);
        let is_sure = now.is_exact() || !window.is_over_at(now.at, now.latest);
        if quota.capacity != quota.limit || cost == 0 || !is_sure {
            return None;
        }
        let (fingerprint, ruling) =
            (home.fingerprint(quota), Ruling::new(now.at, Usage::from_window(&window), cost));
        let is_over = |slot| self.table.get(slot).until <= now.at;
        if !ruling.passed() {
            let slot = self.table.entry(fingerprint, |_| false);
            let is_first = slot.is_none_or(is_over);
            return (is_first && self.overflows_until(now.at).is_none()).then_some((ruling, false));
        }
        let (slot, is_new) = match self.table.find(fingerprint, now.at, |_| false) {
            // On a calendar, the window may go on from the end that a file has of the last one.
            Found::Entry(slot) if is_over(slot) && !matches!(quota.anchor, Anchor::Calendar(_)) => {
                (slot, false)
            }
            Found::Free(slot) if self.overflows_until(now.at).is_none() => (slot, true),
            _ => return None,
        };
        // The count of a quota that carries nothing over ends with its window.
        let (Span { start, end: until }, used) = (window.span(), ruling.usage.used);
        self.table.set(slot, State { start, used, until, end: 0 });
        Some((ruling, is_new))
    }

    /// `None` unless the window runs at every instant that the reading may mean.
    #[inline(always)]
    pub(super) fn running(
        &self,
        now: Reading,
        quota: &Quota,
        home: &Home,
    ) -> Option<(Slot, Usage)> {
        if !quota.is_plain() {
            return None;
        }
        let slot = self.table.entry(home.fingerprint(quota), |_| false)?;
        let window = Window::running(now.at, now.latest, state(self.table.get(slot)), quota)?;
        Some((slot, Usage::from_window(&window)))
    }

    /// Takes tokens of a plain quota, whose window runs and has them.
    #[inline(always)]
    pub(super) fn take_running(&mut self, slot: Slot, cost: u64) {
        self.table.get_mut(slot).used += cost as i64;
    }
}

/// The parts that a file keeps: the tables, bucket by bucket.
#[cfg(feature = "saved")]
impl Shard {
    pub(super) fn buckets(&self) -> [&[Bucket]; 2] {
        [&self.table, &self.overflow].map(Table::buckets)
    }

    /// A window that begins later than now is of a clock that was ahead, which has stepped back.
    pub(super) fn restored(
        own: Vec<Bucket>,
        overflow: Vec<Bucket>,
        max_buckets: usize,
        now: i64,
    ) -> Self {
        if own.is_empty() {
            return Self::default();
        }
        // The number of overflow entries selects a key's entry, so it must not change while one runs.
        let buckets = overflow.len();
        let (table, overflow) =
            (Table::restored(own, max_buckets, now), Table::restored(overflow, buckets, now));
        let mut restored = Self { table, overflow, ..Self::default() };
        restored.step_back(now);
        if restored.overflow_until == 0 {
            restored.overflow = Table::default();
        }
        restored.prepare_overflow();
        restored
    }

    /// The smallest bound on buckets under which a shard may have tables of this size.
    pub(super) fn needed_buckets(&self) -> usize {
        let [own, overflow] = self.buckets().map(<[_]>::len);
        own.max((overflow * PER_OVERFLOW).saturating_sub(PER_OVERFLOW - 1))
    }
}

#[inline]
fn state(Entry { start, used, until, .. }: Entry) -> State {
    State { start, used, until, end: 0 }
}

/// Moves a window that begins a window or more ahead (S4), and returns whether it did. The count
/// stays.
fn pull_back(entry: &mut Entry, now: i64, to: impl Fn(&Entry) -> i64) -> bool {
    let lasts = entry.until.saturating_sub(entry.start);
    let is_ahead = lasts > 0 && entry.start.saturating_sub(now) >= lasts;
    if is_ahead {
        let to = to(entry);
        (entry.start, entry.until) = (to, to.saturating_add(lasts));
    }
    is_ahead
}
