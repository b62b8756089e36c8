//! A shard with its lock, and the locked shards of a charge.

use std::{array, mem, ptr};

use super::super::charge::ChargeLine;
use super::super::sharded::Sharded;
use super::super::table::Slot;
use super::charging::Located;
use super::last_refused::LastRefused;
use super::shard::{CountedIn, Home, Shard};
use super::time::{Reading, Time};
use crate::decision::{Decision, MAX_LIMITS, Ruling, Usage};
use crate::quota::{Quota, SavedWindows};
use crate::sync::{self, Mutex, MutexGuard};

#[derive(Default)]
pub(crate) struct ShardLock {
    shard: Mutex<Shard>,
    last_refused: LastRefused,
}

/// Two cache lines, so that shards stay as small as `max_bytes` says.
#[cfg(all(target_os = "linux", target_pointer_width = "64", not(tfw_shuttle)))]
const _: () = assert!(size_of::<ShardLock>() <= 128);

impl ShardLock {
    /// Clears the copy of the last refusal: what is locked here may change.
    #[inline]
    pub(super) fn lock(&self) -> MutexGuard<'_, Shard> {
        let shard = sync::lock(&self.shard);
        self.last_refused.clear();
        shard
    }

    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, Shard>> {
        let shard = sync::try_lock(&self.shard)?;
        self.last_refused.clear();
        Some(shard)
    }

    /// Refuses a plain charge of one plain quota without the lock, if the last one that was refused
    /// is of the same key. A clock that has stepped back within the window is left to the next call
    /// that takes the lock.
    #[inline(always)]
    pub(super) fn refuse_again(
        &self,
        time: &Time,
        quota: &Quota,
        fingerprint: u64,
        cost: u64,
    ) -> Option<Ruling> {
        // Most charges are of another key, and load no more than this.
        if !self.last_refused.is_of(fingerprint) {
            return None;
        }
        let state = self.last_refused.get(fingerprint)?;
        // After the copy, so that no refusal is of an earlier time than the copied one.
        let now = time.recently();
        let ruling = Shard::rule_running(now, quota, state, cost)?;
        (!ruling.passed()).then_some(ruling)
    }

    /// Charges a window that runs, or returns the locked shard. The copy stays if it is of another
    /// key.
    #[inline(always)]
    pub(super) fn charge(
        &self,
        now: Reading,
        quota: &Quota,
        fingerprint: u64,
        cost: u64,
    ) -> Result<Ruling, MutexGuard<'_, Shard>> {
        let mut shard = sync::lock(&self.shard);
        let charged = shard.advance(now).and_then(|entered| {
            Some((entered, shard.charge_running(entered, quota, fingerprint, cost)?))
        });
        let Some((entered, (ruling, state))) = charged else {
            self.last_refused.clear();
            return Err(shard);
        };
        if ruling.passed() {
            if self.last_refused.is_of(fingerprint) {
                self.last_refused.clear();
            }
        } else if entered.at == now.at && !self.last_refused.is_of(fingerprint) {
            // Where the shard is ahead of the clock's last tick, so would be the copied refusal.
            self.last_refused.set(fingerprint, state);
        }
        Ok(ruling)
    }
}

impl From<Shard> for ShardLock {
    fn from(shard: Shard) -> Self {
        Self { shard: Mutex::new(shard), last_refused: LastRefused::default() }
    }
}

type Running<const Q: usize> = ([Slot; Q], [Usage; Q]);

/// Locks are taken in ascending order of shards. There are `L` lines, or up to [`MAX_LIMITS`] if
/// `L` is that.
pub(super) struct LockedShards<'s, const L: usize> {
    pub(super) homes: [Home; L],
    /// The index in `shards` of each line's lock: how many lines have a shard before its own.
    lock: [usize; L],
    len: usize,
    shards: [Option<MutexGuard<'s, Shard>>; L],
}

impl<'s> LockedShards<'s, 1> {
    #[inline(always)]
    pub(super) fn one(shard: MutexGuard<'s, Shard>, home: Home) -> Self {
        Self { homes: [home], lock: [0], len: 1, shards: [Some(shard)] }
    }
}

impl<'s, const L: usize> LockedShards<'s, L> {
    /// No keys, and no locks.
    #[inline(always)]
    pub(super) fn none() -> Self {
        let homes = [Home { hash: 0, secret: 0 }; L];
        Self { homes, lock: [0; L], len: 0, shards: [const { None }; L] }
    }

    /// Locks the shards of lines. In its place, since moving all this is measurable.
    #[inline(always)]
    pub(super) fn lock(&mut self, all: &'s Sharded<ShardLock>, lines: &[ChargeLine<'_>]) {
        self.len = if L < MAX_LIMITS { L } else { lines.len() };
        let (mut shards, mut ascending) = ([None; L], [None; L]);
        for (i, (account, _)) in lines[..self.len].iter().enumerate() {
            let scope = account.scope;
            let (shard, hash) = all.shard_of(scope, account.key);
            (shards[i], self.homes[i]) = (Some(shard), Home { hash, secret: all.secret(scope) });
        }
        // A thread that has locked a shard locks only later ones. They lie in a row, so that their
        // addresses tell.
        let address = |shard: Option<&ShardLock>| shard.map(ptr::from_ref);
        for i in 0..self.len {
            let before = |of: &&Option<&ShardLock>| address(**of) < address(shards[i]);
            self.lock[i] = shards[..self.len].iter().filter(before).count();
            ascending[self.lock[i]] = shards[i];
        }
        for (locked, shard) in self.shards.iter_mut().zip(ascending) {
            if let Some(shard) = shard {
                // There is none yet; dropping it would check that at run time.
                mem::forget(locked.replace(shard.lock()));
            }
        }
    }

    pub(super) fn shards(&mut self) -> impl Iterator<Item = &mut Shard> {
        self.shards.iter_mut().filter_map(|shard| shard.as_deref_mut())
    }

    #[inline]
    pub(super) fn shard_of(&mut self, line: usize) -> &mut Shard {
        let lock = if L == 1 { 0 } else { self.lock[line] };
        self.shards[lock].as_mut().expect("each line has the lock of its shard")
    }

    /// Not before the latest of any.
    #[inline(always)]
    pub(super) fn advance(&mut self, now: Reading) -> Option<Reading> {
        let all = self.shards().try_fold(now, |now, shard| shard.advance(now))?;
        if L > 1 && all.at > now.at {
            self.shards().for_each(|shard| _ = shard.advance(all));
        }
        Some(all)
    }

    #[inline(always)]
    pub(super) fn charge_all_running<const Q: usize>(
        &mut self,
        now: Reading,
        lines: &[ChargeLine<'_>],
    ) -> Option<Decision> {
        let lines = &lines[..if L < MAX_LIMITS { L } else { self.len }];
        // The first line outside of the loops, so that the compiler knows its place. It fills the
        // unused ones.
        let mut running = [self.running::<Q>(now, 0, &lines[0])?; L];
        for i in 1..lines.len() {
            running[i] = self.running::<Q>(now, i, &lines[i])?;
        }
        let fit = |((_, cost), (_, usage)): (&ChargeLine<'_>, &Running<Q>)| {
            usage.iter().all(|usage| *cost <= usage.remaining())
        };
        if !lines.iter().zip(&running).all(fit) {
            return Some(refuse_running(now, lines, &running));
        }
        for (i, (_, cost)) in lines.iter().enumerate() {
            let (shard, (slots, _)) = (self.shard_of(i), &running[i]);
            slots.iter().for_each(|slot| shard.take_running(*slot, *cost));
        }
        Decision::of_lines(lines.len(), |i| {
            let ((account, cost), (_, usage)) = (&lines[i], running[i]);
            Some(Decision::all_running(account.label(), now.at, usage, *cost, true))
        })
    }

    #[inline(always)]
    fn running<const Q: usize>(
        &mut self,
        now: Reading,
        line: usize,
        (account, _): &ChargeLine<'_>,
    ) -> Option<Running<Q>> {
        let quotas: &[Quota; Q] = account.quotas.as_slice().try_into().ok()?;
        let (home, shard) = (self.homes[line], self.shard_of(line));
        let (mut slots, mut usage) = ([Slot::default(); Q], [Usage::NONE; Q]);
        for i in 0..Q {
            (slots[i], usage[i]) = shard.running(now, &quotas[i], &home)?;
        }
        Some((slots, usage))
    }

    /// If a table grows for a line, its entries move, and all lines are located again.
    #[inline(always)]
    pub(super) fn locate<'a, const Q: usize>(
        &mut self,
        now: i64,
        lines: &[ChargeLine<'a>],
        saved: &SavedWindows,
    ) -> [Located<'a, Q>; L] {
        let mut order: [usize; L] = array::from_fn(|line| line);
        // Within a shard, a line that takes nothing comes last: otherwise it could be given a place
        // in which another line then does not find its own entry.
        order[..self.len].sort_by_key(|line| (self.lock[*line], lines[*line].1 == 0));
        loop {
            let mut found: Option<[Located<'a, Q>; L]> = None;
            let mut places = [[CountedIn::None; Q]; L];
            let (mut first, mut grew, mut lock) = (0, false, 0);
            for at in 0..self.len {
                let line = order[at];
                let ((account, _), home) = (lines[line], self.homes[line]);
                if self.lock[line] != lock {
                    (lock, first) = (self.lock[line], at);
                }
                let shard = self.shard_of(line);
                let windows = account.windows(|i, quota| {
                    let others = &places.as_flattened()[first * Q..at * Q + i];
                    let (place, window) = shard.locate(now, &account, quota, &home, saved, others);
                    places[at][i] = place;
                    window
                });
                grew |= shard.grows_for(&places[at][..account.quotas.len()], now);
                let of = (places[at], windows);
                found.get_or_insert([of; L])[line] = of;
            }
            if !grew {
                return found.expect("a charge has a line");
            }
        }
    }
}

/// Writes nothing. Not inlined, so that a charge that passes needs no stack for it.
#[inline(never)]
fn refuse_running<const L: usize, const Q: usize>(
    now: Reading,
    lines: &[ChargeLine<'_>],
    running: &[Running<Q>; L],
) -> Decision {
    let lines = if L < MAX_LIMITS { &lines[..L] } else { lines };
    let decided = Decision::of_lines(lines.len(), |i| {
        let ((account, cost), (_, usage)) = (&lines[i], &running[i]);
        let fits = usage.iter().all(|of| *cost <= of.remaining());
        // A line that fits only reports its counts.
        let cost = if fits { 0 } else { *cost };
        Some(Decision::all_running(account.label(), now.at, *usage, cost, fits))
    });
    decided.expect("a charge has a line")
}
