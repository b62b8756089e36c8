//! A shard with its lock, and the locked shards of a charge.

use super::super::charge::ChargeLine;
use super::super::sharded::Sharded;
use super::super::table::Slot;
use super::charging::Found;
use super::last_refused::LastRefused;
use super::shard::{CountedIn, Home, Shard};
use super::time::{Reading, Time};
use crate::decision::{Ask, Decision, MAX_LIMITS, Merging, Ruling};
use crate::quota::Quota;
use crate::sync::{self, Mutex, MutexGuard};
use crate::window::Window;

#[derive(Default)]
pub(super) struct LockedShard {
    shard: Mutex<Shard>,
    last_refused: LastRefused,
}

/// Two cache lines, so that shards stay as small as `max_bytes` says.
#[cfg(all(target_os = "linux", target_pointer_width = "64", not(tfw_shuttle)))]
const _: () = assert!(size_of::<LockedShard>() <= 128);

/// For a charge in a window that runs: the copy stays if it is of another key.
pub(super) struct LockedForCharge<'a> {
    shard: MutexGuard<'a, Shard>,
    last_refused: &'a LastRefused,
}

impl LockedShard {
    #[inline]
    pub(super) fn lock(&self) -> MutexGuard<'_, Shard> {
        self.lock_for_charge().into_any()
    }

    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, Shard>> {
        let shard = self.shard.try_lock().ok()?;
        self.last_refused.clear();
        Some(shard)
    }

    #[inline(always)]
    pub(super) fn lock_for_charge(&self) -> LockedForCharge<'_> {
        let Self { shard, last_refused } = self;
        LockedForCharge { shard: sync::lock(shard), last_refused }
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
}

impl<'a> LockedForCharge<'a> {
    #[inline(always)]
    pub(super) fn charge(
        &mut self,
        now: Reading,
        quota: &Quota,
        fingerprint: u64,
        cost: u64,
    ) -> Option<Ruling> {
        let entered = self.shard.enter(now)?;
        let (ruling, state) = self.shard.charge_running(entered, quota, fingerprint, cost)?;
        if ruling.passed() {
            if self.last_refused.is_of(fingerprint) {
                self.last_refused.clear();
            }
        } else if entered.at == now.at && !self.last_refused.is_of(fingerprint) {
            // Where the shard is ahead of the clock's last tick, so would be the copied refusal.
            self.last_refused.set(fingerprint, state);
        }
        Some(ruling)
    }

    #[inline(always)]
    pub(super) fn into_any(self) -> MutexGuard<'a, Shard> {
        self.last_refused.clear();
        self.shard
    }
}

impl From<Shard> for LockedShard {
    fn from(shard: Shard) -> Self {
        Self { shard: Mutex::new(shard), last_refused: LastRefused::default() }
    }
}

type Running<'a, const Q: usize> = ([Slot; Q], [Window<'a>; Q]);

/// Locks are taken in ascending order of shards. There are `L` lines, or up to [`MAX_LIMITS`] if
/// `L` is that.
pub(super) struct LockedShards<'s, const L: usize> {
    pub(super) homes: [Home; L],
    order: [usize; L],
    /// The index in `shards` of each line's lock.
    lock: [usize; L],
    len: usize,
    shards: [Option<MutexGuard<'s, Shard>>; L],
}

impl<'s> LockedShards<'s, 1> {
    #[inline(always)]
    pub(super) fn one(shard: MutexGuard<'s, Shard>, home: Home) -> Self {
        Self { homes: [home], order: [0], lock: [0], len: 1, shards: [Some(shard)] }
    }
}

impl<'s, const L: usize> LockedShards<'s, L> {
    #[inline(always)]
    pub(super) fn new(all: &'s Sharded<LockedShard>, lines: &[ChargeLine<'_>]) -> Self {
        let len = if L < MAX_LIMITS { L } else { lines.len() };
        let lines = &lines[..len];
        let (mut homes, mut places) = ([Home { hash: 0, scope: 0 }; L], [0; L]);
        for i in 0..len {
            let (account, cost) = &lines[i];
            let (shard, hash) = all.locate(account.scope(), account.key());
            homes[i] = Home { hash, scope: account.scope().id() };
            // A line that takes nothing comes last in its shard, or it could be given a place in
            // which another line then does not find its own entry.
            let place = ((shard << 1 | usize::from(*cost == 0)) * MAX_LIMITS) | i;
            let mut at = i;
            while at > 0 && places[at - 1] > place {
                places[at] = places[at - 1];
                at -= 1;
            }
            places[at] = place;
        }
        let (mut order, mut lock, mut shards) = ([0; L], [0; L], [const { None }; L]);
        let (mut last, mut locks) = (usize::MAX, 0);
        for at in 0..len {
            let shard = places[at] / (2 * MAX_LIMITS);
            order[at] = places[at] % MAX_LIMITS;
            if shard != last {
                last = shard;
                shards[locks] = Some(all.at(shard).lock());
                locks += 1;
            }
            lock[order[at]] = locks - 1;
        }
        Self { homes, order, lock, len, shards }
    }

    pub(super) fn shards(&mut self) -> impl Iterator<Item = &mut Shard> {
        self.shards.iter_mut().map_while(|shard| shard.as_deref_mut())
    }

    #[inline]
    pub(super) fn shard_of(&mut self, line: usize) -> &mut Shard {
        let lock = if L == 1 { 0 } else { self.lock[line] };
        self.shards[lock].as_mut().expect("each line has the lock of its shard")
    }

    /// Not before the latest of any.
    #[inline(always)]
    pub(super) fn enter(&mut self, now: Reading) -> Option<Reading> {
        let all = self.shards().try_fold(now, |now, shard| shard.enter(now))?;
        if L > 1 && all.at > now.at {
            self.shards().for_each(|shard| _ = shard.enter(all));
        }
        Some(all)
    }

    #[inline(always)]
    fn running<'a, const Q: usize>(
        &mut self,
        line: usize,
        now: Reading,
        (account, _): &ChargeLine<'a>,
    ) -> Option<Running<'a, Q>> {
        let quotas: &[Quota; Q] = account.quotas().as_slice().try_into().ok()?;
        let (home, shard) = (self.homes[line], self.shard_of(line));
        let (slot, window) = shard.running(now, &quotas[0], &home)?;
        let (mut slots, mut windows) = ([slot; Q], [window; Q]);
        for q in 1..Q {
            (slots[q], windows[q]) = shard.running(now, &quotas[q], &home)?;
        }
        Some((slots, windows))
    }

    #[inline(always)]
    pub(super) fn charge_running<const Q: usize>(
        &mut self,
        now: Reading,
        lines: &[ChargeLine<'_>],
    ) -> Option<Decision> {
        let lines = &lines[..self.len];
        let mut running = [self.running::<Q>(0, now, &lines[0])?; L];
        for i in 1..self.len {
            running[i] = self.running::<Q>(i, now, &lines[i])?;
        }
        let fit = |((_, cost), (_, windows)): (&ChargeLine<'_>, &Running<'_, Q>)| {
            windows.iter().all(|window| window.running_fits(*cost))
        };
        if !lines.iter().zip(&running).all(fit) {
            return Some(refuse_running(now, lines, &running));
        }
        let mut merging = Merging::new(L);
        for (i, (account, cost)) in lines.iter().enumerate() {
            let (slots, windows) = &running[i];
            let name = account.scope().limit_name();
            let (decision, used) = Decision::all_running(name, now.at, windows, *cost);
            // For a cost of 0, `used` is the count that was found.
            let shard = self.shard_of(i);
            slots.iter().zip(used).for_each(|(slot, used)| shard.set_used(*slot, used));
            if L == 1 {
                return Some(decision);
            }
            merging.push(decision);
        }
        Some(merging.done())
    }

    /// If a table grows for a line, its entries move, and all lines are located again.
    #[inline(always)]
    pub(super) fn locate<'a, const Q: usize>(
        &mut self,
        now: i64,
        lines: &[ChargeLine<'a>],
    ) -> [Found<'a, Q>; L] {
        loop {
            let mut found: Option<[Found<'a, Q>; L]> = None;
            let mut places = [[CountedIn::None; Q]; L];
            let (mut first, mut grew, mut lock) = (0, false, 0);
            for at in 0..self.len {
                let line = self.order[at];
                let ((account, _), home) = (lines[line], self.homes[line]);
                if self.lock[line] != lock {
                    (lock, first) = (self.lock[line], at);
                }
                let shard = self.shard_of(line);
                let windows = account.windows(|i, quota| {
                    let others = &places.as_flattened()[first * Q..at * Q + i];
                    let (place, window) = shard.locate(now, &account, quota, &home, others);
                    places[at][i] = place;
                    window
                });
                grew |= shard.grows_for(&places[at][..account.quotas().len()], now);
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
    running: &[Running<'_, Q>; L],
) -> Decision {
    let mut merging = Merging::new(L);
    for ((account, cost), (_, windows)) in lines.iter().zip(running) {
        // A line that fits only reports its counts.
        let fits = windows.iter().all(|window| window.running_fits(*cost));
        let (name, cost) = (account.scope().limit_name(), if fits { 0 } else { *cost });
        merging.push(if let [window] = &windows[..] {
            Ruling::new(now.at, window, cost).into_decision(name)
        } else {
            let ask = Ask { cost, reserve: false, peek: false };
            Decision::over::<Q>(name, now.at, windows, ask).0
        });
    }
    merging.done()
}
