//! How a charge is decided in memory: the short path of nearly every charge, and one step under the
//! locks of all shards of its lines (S37).

use std::array;
use std::sync::atomic::Ordering;

use super::super::account::Account;
use super::super::charge::{Charge, ChargeLine, line_windows};
use super::super::reply::Reply;
use super::super::sharded::fingerprint;
use super::locked::LockedShards;
use super::shard::{CountedIn, Home, Shard};
use super::time::Reading;
use super::{MINUTE, MemoryStore};
use crate::decision::{Decision, MAX_LIMITS, Ruling};
use crate::observe::{self, Event};
use crate::quota::Quotas;
use crate::sync::MutexGuard;
use crate::window::Window;

/// A charge that the short path does not decide. If it is a plain one of one quota, its shard is
/// locked at this time, found by this hash.
pub(crate) type Undecided<'s> = Option<(Reading, MutexGuard<'s, Shard>, u64)>;

pub(super) type Located<'a, const Q: usize> = ([CountedIn; Q], [Window<'a>; Q]);

impl MemoryStore {
    /// The ruling of a usual charge stays in registers until its decision is made where the reply
    /// will be. The error is for [`decide_other`](Self::decide_other): a reply would be moved,
    /// which is measurable.
    #[inline(always)]
    pub(crate) fn rule(&self, charge: Charge<'_>) -> Result<Ruling, Undecided<'_>> {
        let Account { scope, quotas, key } = charge.account();
        let quota = quotas.first();
        if quotas.len() > 1 || charge.len() > 1 || !charge.is_plain() {
            return Err(None);
        }
        let ((shard, hash), time) = (self.memory.shards.shard_of(scope, key), &self.memory.time);
        if !quota.is_plain() {
            return Err(Some((time.recently(), shard.lock(), hash)));
        }
        let (fingerprint, cost) = (fingerprint(hash, quota), charge.cost());
        if let Some(ruling) = shard.refuse_again(time, quota, fingerprint, cost) {
            return Ok(ruling);
        }
        let now = time.recently();
        let charged = shard.charge(now, quota, fingerprint, cost);
        charged.map_err(|shard| Some((now, shard, hash)))
    }

    /// Decides a charge for which [`rule`](Self::rule) has no ruling.
    #[inline(always)]
    pub(crate) fn decide_other(
        &self,
        charge: Charge<'_>,
        undecided: Undecided<'_>,
    ) -> Reply<Decision> {
        match undecided {
            Some((now, shard, hash)) => self.charge_locked(charge, now, shard, hash),
            None => self.charge_lines(charge),
        }
    }

    #[inline(never)]
    fn charge_single(&self, charge: Charge<'_>) -> Reply<Decision> {
        let Account { scope, key, .. } = charge.account();
        let (shard, hash) = self.memory.shards.shard_of(scope, key);
        self.charge_locked(charge, self.time_for(&charge), shard.lock(), hash)
    }

    /// A reservation tells a wait, which needs the exact time.
    #[inline(always)]
    fn time_for(&self, charge: &Charge<'_>) -> Reading {
        let time = &self.memory.time;
        if charge.may_reserve() { time.now() } else { time.recently() }
    }

    #[inline(never)]
    fn charge_locked(
        &self,
        charge: Charge<'_>,
        now: Reading,
        shard: MutexGuard<'_, Shard>,
        hash: u64,
    ) -> Reply<Decision> {
        let home = Home { hash, secret: self.memory.shards.secret(charge.account().scope) };
        let mut locked = LockedShards::one(shard, home);
        let now = self.advance(now, &mut locked);
        let (account, cost) = charge.line_at(0);
        if charge.is_plain()
            && let Some((ruling, is_new)) =
                locked.shard_of(0).charge_first(now, &account, &home, cost)
        {
            if is_new {
                // Under the lock, so that a reset or a save that finds the entry finds its quota.
                self.memory.charged.note(account.scope, account.quotas.first());
            }
            return Reply::now(ruling.into_decision(account.label()));
        }
        self.decide::<1, 1>(charge, &[(account, cost)], now, locked)
    }

    /// Loops over few lines and quotas are unrolled.
    #[inline(never)]
    fn charge_lines(&self, charge: Charge<'_>) -> Reply<Decision> {
        const ALL: usize = Quotas::MAX;
        match (charge.len(), charge.account().quotas.len()) {
            (1, 1) => self.charge_single(charge),
            (1, 2) => self.charge_several::<1, 2, 2>(charge),
            (1, 3) => self.charge_several::<1, 3, 3>(charge),
            (1, _) => self.charge_several::<1, ALL, ALL>(charge),
            (2, _) => self.charge_several::<2, 1, ALL>(charge),
            (3, _) => self.charge_several::<3, 1, ALL>(charge),
            (4, _) => self.charge_several::<4, 1, ALL>(charge),
            _ => self.charge_several::<MAX_LIMITS, 1, ALL>(charge),
        }
    }

    /// Decides a charge of `L` lines, or up to [`MAX_LIMITS`] if `L` is that: at once if each is of
    /// `R` quotas whose windows run, otherwise as lines of up to `Q` quotas.
    #[inline(never)]
    fn charge_several<const L: usize, const R: usize, const Q: usize>(
        &self,
        charge: Charge<'_>,
    ) -> Reply<Decision> {
        let len = if L < MAX_LIMITS { L } else { charge.len().min(L) };
        // The first line fills the unused places.
        let lines: [_; L] = array::from_fn(|i| charge.line_at(if i < len { i } else { 0 }));
        let lines = &lines[..len];
        let mut locked = LockedShards::<L>::none();
        locked.lock(&self.memory.shards, lines);
        let now = self.advance(self.time_for(&charge), &mut locked);
        if charge.is_plain()
            && let Some(decision) = locked.charge_all_running::<R>(now, lines)
        {
            return Reply::now(decision);
        }
        self.decide::<L, Q>(charge, lines, now, locked)
    }

    #[inline(always)]
    fn decide<const L: usize, const Q: usize>(
        &self,
        charge: Charge<'_>,
        lines: &[ChargeLine<'_>],
        mut now: Reading,
        mut locked: LockedShards<'_, L>,
    ) -> Reply<Decision> {
        let lines = if L < MAX_LIMITS { &lines[..L] } else { lines };
        let found = loop {
            let found = locked.locate::<Q>(now.at, lines, &self.memory.windows);
            // Near a boundary, only the exact time shows on which side of it this is.
            let is_over = |window: &Window<'_>| window.is_over_at(now.at, now.latest);
            let mut windows = found.iter().flat_map(|(_, windows)| windows);
            if now.is_exact() || !windows.any(is_over) {
                break found;
            }
            now = self.now_again(&mut locked);
        };
        let now = now.at;
        let windows = (0..lines.len()).map(|i| {
            let (places, windows) = &found[i];
            line_windows(lines[i], windows, overflow_bits(places))
        });
        let mut taken = [false; L];
        let decision = Decision::over_lines::<Q>(now, charge.mode, windows, |i, takes, states| {
            taken[i] = takes;
            let (account, _) = &lines[i];
            let shard = locked.shard_of(i);
            for ((quota, place), state) in account.quotas.iter().zip(&found[i].0).zip(states) {
                let Some(state) = state else { continue };
                match place {
                    CountedIn::Own(_) => {}
                    // A refused line writes only to its own entry: another line may take the free
                    // place.
                    CountedIn::Free(_) | CountedIn::Inheriting(_) if !takes => continue,
                    _ => self.memory.charged.note(account.scope, quota),
                }
                shard.write(now, *place, state);
            }
        });
        let overflows = locked.shards().any(|shard| shard.overflows_until(now).is_some());
        if overflows && !charge.is_peek() {
            self.count_overflows(now, lines, &found, taken, locked);
        }
        Reply::now(decision)
    }

    #[cold]
    fn count_overflows<const L: usize, const Q: usize>(
        &self,
        now: i64,
        lines: &[ChargeLine<'_>],
        found: &[Located<'_, Q>; L],
        taken: [bool; L],
        mut locked: LockedShards<'_, L>,
    ) {
        let mut latest = None;
        for (i, (account, _)) in lines.iter().enumerate() {
            let places = &found[i].0[..account.quotas.len()];
            let shard = locked.shard_of(i);
            let until = shard.overflows_until(now);
            if until.is_some() && !places.iter().all(|place| place.is_own(taken[i])) {
                shard.overflowed += 1;
                account.scope.observe().event(Event::Overflow, 1);
                latest = latest.max(until);
            }
        }
        // `overflowed` takes the locks of all shards.
        drop(locked);
        let Some(until) = latest else { return };
        let next = until.max(now.saturating_add(MINUTE)) as u64;
        let is_first =
            self.memory.quiet_until.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |quiet| {
                (quiet <= now as u64).then_some(next)
            });
        if is_first.is_ok() {
            observe::overflow(self.memory.max_keys, self.overflowed());
        }
    }
}

fn overflow_bits(places: &[CountedIn]) -> u8 {
    let overflows = places.iter().map(|place| u8::from(matches!(place, CountedIn::Overflow(..))));
    overflows.rev().fold(0, |bits, bit| bits << 1 | bit)
}
