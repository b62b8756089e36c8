//! A charge of several lines (S37): one step under the locks of all their shards, which are taken
//! in ascending order.

use std::array;

use super::super::charge::{Charge, ChargeLine};
use super::super::reply::Reply;
use super::super::table::Slot;
use super::shard::{CountedIn, Home, Shard};
use super::time::Reading;
use super::{Memory, MemoryStore};
use crate::decision::{Decision, LineWindows, MAX_LIMITS, Merging, Ruling};
use crate::quota::Quotas;
use crate::sync::MutexGuard;
use crate::window::Window;

/// The keys of lines, and the locks of their shards. There are `N` lines, or up to [`MAX_LIMITS`]
/// if `N` is that: loops over few lines are unrolled.
struct LockedShards<'s, const N: usize> {
    homes: [Home; N],
    /// The lines in the order of their shards, as the remainders of a division by [`MAX_LIMITS`].
    order: [usize; N],
    /// The index in `shards` of each line's lock.
    lock: [usize; N],
    len: usize,
    shards: [Option<MutexGuard<'s, Shard>>; N],
}

/// The places and windows of a line.
type Found<'a> = ([CountedIn; Quotas::MAX], [Window<'a>; Quotas::MAX]);

impl MemoryStore {
    /// Decides a charge of several lines.
    pub(super) fn charge_lines(&self, charge: Charge<'_>) -> Reply<Decision> {
        Reply::now(match charge.lines().len() {
            2 => self.charge_together::<2>(charge),
            3 => self.charge_together::<3>(charge),
            4 => self.charge_together::<4>(charge),
            _ => self.charge_together::<MAX_LIMITS>(charge),
        })
    }

    #[inline(never)]
    fn charge_together<const N: usize>(&self, charge: Charge<'_>) -> Decision {
        let mut lines = [(charge.account(), charge.cost()); N];
        lines.iter_mut().zip(charge.lines()).for_each(|(place, line)| *place = line);
        let len = if N < MAX_LIMITS { N } else { charge.lines().len().min(N) };
        let lines = &lines[..len];
        let mut locked = LockedShards::<N>::new(&self.memory, lines);
        // A request that waits for a window counts the time until it ends.
        let time = &self.memory.time;
        let now = if charge.may_reserve() { time.now() } else { time.recently() };
        // As for one line, an older reading could find a window whose entry is another key's.
        let now = locked.enter(now).unwrap_or_else(|| self.all_now_again(&mut locked));
        if charge.is_plain()
            && let Some(decision) = locked.charge_running(now, lines)
        {
            return decision;
        }
        self.decide_together(charge, lines, now, locked)
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
        charge: Charge<'_>,
        lines: &[ChargeLine<'_>],
        mut now: Reading,
        mut locked: LockedShards<'_, N>,
    ) -> Decision {
        let found = loop {
            let found = locked.locate(now, lines);
            // Near a boundary, only the exact time shows on which side of it this is.
            let is_over = |window: &Window<'_>| window.is_over_at(now.at, now.latest());
            let mut windows = found.iter().flat_map(|(_, windows)| windows);
            if now.is_exact() || !windows.any(is_over) {
                break found;
            }
            now = self.all_now_again(&mut locked);
        };
        let now = now.at;
        let windows: [LineWindows<'_, '_>; N] = array::from_fn(|i| {
            let i = i.min(lines.len() - 1);
            let (places, windows) = &found[i];
            charge.with_windows(lines[i], windows, shared(places))
        });
        let windows = windows.iter().take(lines.len()).copied();
        let mut taken = [false; N];
        let decision = Decision::over_lines(now, windows, |i, takes, states| {
            taken[i] = takes;
            let (account, _) = &lines[i];
            let shard = locked.shard_of(i);
            for ((quota, place), state) in account.quotas().iter().zip(&found[i].0).zip(states) {
                let Some(state) = state else { continue };
                match place {
                    CountedIn::Own(_) => {}
                    // A refused line writes only to an entry that it has: another line may take
                    // the free place.
                    CountedIn::Free(_) | CountedIn::Inheriting(_) if !takes => continue,
                    _ => _ = self.memory.counters.note(account.scope(), quota),
                }
                shard.write(now, *place, state);
            }
        });
        let overflows = locked.shards().any(|shard| shard.overflows_until(now).is_some());
        if overflows && !charge.is_peek() {
            self.count_overflows(now, lines, &found, taken, locked);
        }
        decision
    }

    /// Counts the lines without entries of their own, as for a charge of one.
    #[cold]
    fn count_overflows<const N: usize>(
        &self,
        now: i64,
        lines: &[ChargeLine<'_>],
        found: &[Found<'_>; N],
        taken: [bool; N],
        mut locked: LockedShards<'_, N>,
    ) {
        let mut latest = None;
        for (i, (account, _)) in lines.iter().enumerate() {
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

/// Refuses lines in windows that run, which writes nothing. Not inlined, so that a charge that
/// passes needs no stack for it.
#[inline(never)]
fn refuse_running<const N: usize>(
    now: Reading,
    lines: &[ChargeLine<'_>],
    running: &[Option<(Slot, Window<'_>)>; N],
) -> Decision {
    let mut merging = Merging::new(N);
    for ((account, cost), (_, window)) in lines.iter().zip(running.iter().flatten()) {
        // A line that fits only reports its count.
        let cost = if window.fits(*cost, false) { 0 } else { *cost };
        let ruling = Ruling::new(now.at, window, cost);
        merging.push(ruling.into_decision(account.scope().limit_name()));
    }
    merging.done()
}

fn shared(places: &[CountedIn; Quotas::MAX]) -> u8 {
    let shared = places.iter().map(|place| u8::from(matches!(place, CountedIn::Shared(_))));
    shared.rev().fold(0, |bits, bit| bits << 1 | bit)
}

impl<'s, const N: usize> LockedShards<'s, N> {
    #[inline(always)]
    fn new(memory: &'s Memory, lines: &[ChargeLine<'_>]) -> Self {
        let len = if N < MAX_LIMITS { N } else { lines.len() };
        let lines = &lines[..len];
        let (mut homes, mut places) = ([Home { hash: 0, scope: 0 }; N], [0; N]);
        for i in 0..len {
            let (account, cost) = &lines[i];
            let (shard, hash) = memory.shards.locate(account.scope(), account.key());
            homes[i] = Home { hash, scope: account.scope().id() };
            // Within a shard, what takes nothing is located last: it is given no place that another
            // line then does not find its own entry in.
            let place = ((shard << 1 | usize::from(*cost == 0)) * MAX_LIMITS) | i;
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
        Self { homes, order: places, lock, len, shards }
    }

    fn shards(&mut self) -> impl Iterator<Item = &mut Shard> {
        self.shards.iter_mut().map_while(|shard| shard.as_deref_mut())
    }

    /// Sets the time of all shards, as [`Shard::enter`] does: not before the latest of any.
    #[inline(always)]
    fn enter(&mut self, now: Reading) -> Option<Reading> {
        let all = self.shards().try_fold(now, |now, shard| shard.enter(now))?;
        if all.at > now.at {
            self.shards().for_each(|shard| _ = shard.enter(all));
        }
        Some(all)
    }

    #[inline]
    fn shard_of(&mut self, line: usize) -> &mut Shard {
        self.shards[self.lock[line]].as_mut().expect("each line has the lock of its shard")
    }

    /// Decides a plain charge on the short path: each line is of one quota, in a window that runs.
    #[inline(always)]
    fn charge_running(&mut self, now: Reading, lines: &[ChargeLine<'_>]) -> Option<Decision> {
        let lines = &lines[..self.len];
        let (mut running, mut pass) = ([None; N], true);
        for i in 0..self.len {
            let (account, cost) = &lines[i];
            let [quota] = account.quotas().as_slice() else { return None };
            let home = self.homes[i];
            let (slot, window) = self.shard_of(i).running(now, quota, &home)?;
            pass &= window.running_fits(*cost);
            running[i] = Some((slot, window));
        }
        if !pass {
            return Some(refuse_running(now, lines, &running));
        }
        let mut merging = Merging::new(N);
        for (i, (account, cost)) in lines.iter().enumerate() {
            let (slot, window) = running[i].as_ref()?;
            let name = account.scope().limit_name();
            let (decision, used) = Decision::running_passed(name, now.at, window, *cost);
            // For a cost of 0, `used` is the count that was found.
            self.shard_of(i).set_used(*slot, used);
            merging.push(decision);
        }
        Some(merging.done())
    }

    /// Returns the places and windows of each line. If a table grows for one of the lines, its
    /// entries move, and all are located again.
    fn locate<'a>(&mut self, now: Reading, lines: &[ChargeLine<'a>]) -> [Found<'a>; N] {
        loop {
            let mut found: [Option<Found<'a>>; N] = [None; N];
            // The places of all quotas, grouped by shard.
            let mut places = [CountedIn::None; MAX_LIMITS * Quotas::MAX];
            let (mut first, mut end) = (0, 0);
            let (mut grew, mut lock) = (false, 0);
            for place in self.order.into_iter().take(self.len) {
                let line = place % MAX_LIMITS;
                let ((account, _), home) = (lines[line], self.homes[line]);
                if self.lock[line] != lock {
                    (lock, first) = (self.lock[line], end);
                }
                let shard = self.shard_of(line);
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
                found[line] = Some((own, windows));
                grew |= shard.grows_for(&places[first..end], now.at);
            }
            if !grew {
                let first = found[0].expect("each line was located");
                return found.map(|found| found.unwrap_or(first));
            }
        }
    }
}
