//! Several limits in one charge (S37): one step under the locks of all their shards, which are
//! taken in ascending order.

use std::array;

use super::super::charge::Charge;
use super::super::reply::Reply;
use super::super::table::Slot;
use super::shard::{CountedIn, Home, Shard};
use super::time::Reading;
use super::{Memory, MemoryStore};
use crate::decision::{Decision, LimitWindows, MAX_LIMITS, Merging, Ruling};
use crate::quota::Quotas;
use crate::sync::MutexGuard;
use crate::window::Window;

/// The keys of charges, and the locks of their shards. There are `N` charges, or up to
/// [`MAX_LIMITS`] if `N` is that: loops over few charges are unrolled.
struct LockedShards<'s, const N: usize> {
    homes: [Home; N],
    /// The charges in the order of their shards, as the remainders of a division by [`MAX_LIMITS`].
    order: [usize; N],
    /// The index in `shards` of each charge's lock.
    lock: [usize; N],
    len: usize,
    shards: [Option<MutexGuard<'s, Shard>>; N],
}

/// The places and windows of a charge.
type Found<'a> = ([CountedIn; Quotas::MAX], [Window<'a>; Quotas::MAX]);

impl MemoryStore {
    /// Returns `None` if two charges are of one scope, or if there are too many.
    pub(super) fn charge_several(&self, charges: &[Charge<'_>]) -> Option<Reply<Decision>> {
        Some(Reply::now(match charges.len() {
            1 => self.charge_together::<1>(charges)?,
            2 => self.charge_together::<2>(charges)?,
            3 => self.charge_together::<3>(charges)?,
            4 => self.charge_together::<4>(charges)?,
            5..=MAX_LIMITS => self.charge_together::<MAX_LIMITS>(charges)?,
            _ => return None,
        }))
    }

    #[inline(never)]
    fn charge_together<const N: usize>(&self, charges: &[Charge<'_>]) -> Option<Decision> {
        let mut locked = LockedShards::<N>::new(&self.memory, charges)?;
        // A request that waits for a window counts the time until it ends.
        let mut now = match charges.iter().any(Charge::may_reserve) {
            true => self.memory.time.now(),
            false => self.memory.time.recently(),
        };
        // As for one charge, an older reading could find a window whose entry is another key's.
        let mut enters = true;
        locked.shards().for_each(|shard| enters &= shard.enter(now.at));
        if !enters {
            now = self.all_now_again(&mut locked);
        }
        if let Some(decision) = locked.charge_running(now, charges) {
            return Some(decision);
        }
        Some(self.decide_together(charges, now, locked))
    }

    #[cold]
    fn all_now_again<const N: usize>(&self, locked: &mut LockedShards<'_, N>) -> Reading {
        let now = self.memory.time.now();
        locked.shards().for_each(|shard| self.go_by(now, shard));
        now
    }

    #[inline(never)]
    fn decide_together<const N: usize>(
        &self,
        charges: &[Charge<'_>],
        mut now: Reading,
        mut locked: LockedShards<'_, N>,
    ) -> Decision {
        let found = loop {
            let found = locked.locate(now, charges);
            // Near a boundary, only the exact time shows on which side of it this is.
            let is_over = |window: &Window<'_>| window.is_over_at(now.at, now.latest());
            let mut windows = found.iter().flat_map(|(_, windows)| windows);
            if now.is_exact() || !windows.any(is_over) {
                break found;
            }
            now = self.all_now_again(&mut locked);
        };
        let now = now.at;
        let limits: [LimitWindows<'_, '_>; N] = array::from_fn(|i| {
            let i = i.min(charges.len() - 1);
            let (places, windows) = &found[i];
            charges[i].with_windows(windows, shared(places))
        });
        let limits = &limits[..charges.len()];
        let mut taken = [false; N];
        let decision = Decision::over_limits::<{ Quotas::MAX }>(now, limits, |i, takes, states| {
            taken[i] = takes;
            let account = &charges[i].account;
            let shard = locked.shard_of(i);
            for ((quota, place), state) in account.quotas().iter().zip(&found[i].0).zip(states) {
                let Some(state) = state else { continue };
                match place {
                    CountedIn::Own(_) => {}
                    // A refused charge writes only to an entry that it has: another charge may take
                    // the free place.
                    CountedIn::Free(_) | CountedIn::Inheriting(_) if !takes => continue,
                    _ => _ = self.memory.counters.note(account.scope(), quota),
                }
                shard.write(now, *place, state);
            }
        });
        let overflows = locked.shards().any(|shard| shard.overflows_until(now).is_some());
        if overflows && !charges.iter().any(Charge::is_peek) {
            self.count_overflows(now, charges, &found, taken, locked);
        }
        decision
    }

    /// Counts the charges without entries of their own, as for one charge.
    #[cold]
    fn count_overflows<const N: usize>(
        &self,
        now: i64,
        charges: &[Charge<'_>],
        found: &[Found<'_>; N],
        taken: [bool; N],
        mut locked: LockedShards<'_, N>,
    ) {
        let mut latest = None;
        for (i, charge) in charges.iter().enumerate() {
            let account = &charge.account;
            let places = &found[i].0[..account.quotas().len()];
            let shard = locked.shard_of(i);
            let until = shard.overflows_until(now);
            if until.is_some() && !places.iter().all(|place| place.is_own(taken[i])) {
                shard.overflowed += 1;
                account.scope().observe().overflowed();
                latest = latest.max(until);
            }
        }
        // `log_overflow` takes the locks of all shards.
        drop(locked);
        if let Some(until) = latest {
            self.log_overflow(now, until);
        }
    }
}

/// Refuses charges in windows that run, which writes nothing. Not inlined, so that a charge that
/// passes needs no stack for it.
#[inline(never)]
fn refuse_running<const N: usize>(
    now: Reading,
    charges: &[Charge<'_>],
    running: &[Option<(Slot, Window<'_>)>; N],
) -> Decision {
    let mut merging = Merging::new();
    for (Charge { account, ask }, (_, window)) in charges.iter().zip(running.iter().flatten()) {
        // A charge that fits only reports its count.
        let cost = if window.fits(ask.cost, false) { 0 } else { ask.cost };
        let decision = Ruling::new(now.at, window, cost).into_decision();
        merging.push(account.scope().shared_name(), decision);
    }
    merging.done()
}

fn shared(places: &[CountedIn; Quotas::MAX]) -> u8 {
    let shared = places.iter().map(|place| u8::from(matches!(place, CountedIn::Shared(_))));
    shared.rev().fold(0, |bits, bit| bits << 1 | bit)
}

impl<'s, const N: usize> LockedShards<'s, N> {
    /// Returns `None` if two charges are of one scope.
    #[inline(always)]
    fn new(memory: &'s Memory, charges: &[Charge<'_>]) -> Option<Self> {
        let len = if N < MAX_LIMITS { N } else { charges.len().min(N) };
        let charges = &charges[..len];
        let (mut homes, mut places) = ([Home { hash: 0, scope: 0 }; N], [0; N]);
        for i in 0..len {
            let Charge { account, ask } = &charges[i];
            let scope = account.scope().id();
            for home in &homes[..i] {
                if home.scope == scope {
                    return None;
                }
            }
            let (shard, hash) = memory.shards.locate(account.scope(), account.key());
            homes[i] = Home { hash, scope };
            // Within a shard, what takes nothing is located last: it is given no place that another
            // charge then does not find its own entry in.
            let place = ((shard << 1 | usize::from(ask.cost == 0)) * MAX_LIMITS) | i;
            let mut at = i;
            while at > 0 && places[at - 1] > place {
                places[at] = places[at - 1];
                at -= 1;
            }
            places[at] = place;
        }
        let (mut lock, mut shards) = ([0; N], [const { None }; N]);
        let (mut last, mut locks) = (usize::MAX, 0);
        for place in &places[..len] {
            let shard = place / (2 * MAX_LIMITS);
            if shard != last {
                last = shard;
                shards[locks] = Some(memory.shards.at(shard).lock());
                locks += 1;
            }
            lock[place % MAX_LIMITS] = locks - 1;
        }
        Some(Self { homes, order: places, lock, len, shards })
    }

    fn shards(&mut self) -> impl Iterator<Item = &mut Shard> {
        self.shards.iter_mut().map_while(|shard| shard.as_deref_mut())
    }

    #[inline]
    fn shard_of(&mut self, charge: usize) -> &mut Shard {
        self.shards[self.lock[charge]].as_mut().expect("each charge has the lock of its shard")
    }

    /// Decides on the short path: each charge is plain, of one quota, in a window that runs.
    #[inline(always)]
    fn charge_running(&mut self, now: Reading, charges: &[Charge<'_>]) -> Option<Decision> {
        let charges = &charges[..self.len];
        let (mut running, mut pass) = ([None; N], true);
        for i in 0..self.len {
            let Charge { account, ask } = &charges[i];
            let [quota] = account.quotas().as_slice() else { return None };
            if !ask.is_plain() {
                return None;
            }
            let home = self.homes[i];
            let (slot, window) = self.shard_of(i).running(now, quota, &home)?;
            pass &= window.fits(ask.cost, false);
            running[i] = Some((slot, window));
        }
        if !pass {
            return Some(refuse_running(now, charges, &running));
        }
        let mut merging = Merging::new();
        for (i, Charge { account, ask }) in charges.iter().enumerate() {
            let (slot, window) = running[i].as_ref()?;
            let (decision, used) = Decision::running_passed(now.at, window, ask.cost);
            // For a charge of 0, `used` is the count that was found.
            self.shard_of(i).set_used(*slot, used);
            merging.push(account.scope().shared_name(), decision);
        }
        Some(merging.done())
    }

    /// Returns the places and windows of each charge. If a table grows for one of the charges, its
    /// entries move, and all are located again.
    fn locate<'a>(&mut self, now: Reading, charges: &[Charge<'a>]) -> [Found<'a>; N] {
        loop {
            let mut found: [Option<Found<'a>>; N] = [None; N];
            // The places of all quotas, grouped by shard.
            let mut places = [CountedIn::None; MAX_LIMITS * Quotas::MAX];
            let (mut first, mut end) = (0, 0);
            let (mut grew, mut lock) = (false, 0);
            for place in self.order.into_iter().take(self.len) {
                let charge = place % MAX_LIMITS;
                let (account, home) = (charges[charge].account, self.homes[charge]);
                if self.lock[charge] != lock {
                    (lock, first) = (self.lock[charge], end);
                }
                let shard = self.shard_of(charge);
                let begin = end;
                let windows = account.windows(|_, quota| {
                    let others = &places[first..end];
                    let (place, window) = shard.locate(now.at, &account, quota, &home, others);
                    places[end] = place;
                    end += 1;
                    window
                });
                let mut own = [CountedIn::None; Quotas::MAX];
                own[..end - begin].copy_from_slice(&places[begin..end]);
                found[charge] = Some((own, windows));
                grew |= shard.grows_for(&places[first..end], now.at);
            }
            if !grew {
                let first = found[0].expect("each charge was located");
                return found.map(|found| found.unwrap_or(first));
            }
        }
    }
}
