//! What a process knows of the counts of a store elsewhere (S34): [`Known`], a bounded table behind
//! locks. A count that finds no room is not remembered.
//!
//! A refusal is remembered as the states that it was decided on. Later charges are decided on them
//! anew, under their own quotas: as counts only grow while their window runs, the store would
//! refuse what they refuse. Otherwise the store decides.

use std::cell::OnceCell;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::super::account::{Account, Scope};
use super::super::charge::Charge;
use super::super::sharded::{Sharded, fingerprint, shares};
use super::super::table::{Entry, Found, Slot, Table};
use crate::decision::Decision;
use crate::key::Key;
use crate::quota::{Quota, Quotas};
use crate::sync::Instant;
use crate::sync::{self, Mutex, MutexGuard};
use crate::window::{MAX, State};

/// Some 30 MB.
const MAX_FACTS: usize = 300_000;
/// An answer that took longer is not remembered, in milliseconds.
const MAX_ROUND_TRIP: i64 = 1_024;
/// A smaller difference of two clocks may be the time between their readings.
const LEAST_SLEEP: Duration = Duration::from_millis(100);
/// Keys share the marks that say that one of them has changed.
const MARKS: usize = 1_024;

pub(super) struct Known {
    /// When the time of this process began, by its clock and by those that show whether it slept.
    since: Instant,
    clocks: [Duration; 2],
    shards: Sharded<Mutex<Table<Fact>>>,
    buckets: usize,
    /// How often this process has changed a key of each mark: what was asked before is not
    /// remembered.
    marks: Box<[AtomicU64]>,
}

#[derive(Clone, Copy, Default)]
struct Fact {
    /// Of the key: by it a reset finds the facts of all its quotas.
    hash: u64,
    /// One that has ended if the store has none.
    state: State,
    /// By how much the store's clock is ahead of this process's: at least, and at most.
    lag: [i64; 2],
    /// When the store was asked for it, by this process's clock.
    at: i64,
}

/// Of a key, one for each quota, under the lock that they share.
struct Facts<'a> {
    known: &'a Known,
    /// Read if needed: most charges pass, of keys that are not known.
    now: OnceCell<i64>,
    hash: u64,
    table: MutexGuard<'a, Table<Fact>>,
}

#[derive(Clone, Copy)]
pub(super) struct Sent {
    at: i64,
    of: usize,
    mark: u64,
}

impl Default for Known {
    fn default() -> Self {
        let (shards, buckets) = shares(MAX_FACTS);
        Self {
            since: Instant::now(),
            clocks: clocks(),
            shards: Sharded::new(shards),
            buckets,
            marks: (0..MARKS).map(|_| AtomicU64::new(0)).collect(),
        }
    }
}

impl Known {
    fn of(&self, scope: &Scope, key: &Key) -> Facts<'_> {
        let (table, hash) = self.shards.shard_of(scope, key);
        let mut table = sync::lock(table);
        if table.is_unallocated() {
            *table = Table::new(1, self.buckets);
        }
        Facts { known: self, now: OnceCell::new(), hash, table }
    }

    /// By facts younger than `remember`, in milliseconds. The error says when the store is called.
    pub(super) fn look(&self, charge: &Charge<'_>, remember: i64) -> Result<Decision, Sent> {
        let account = charge.account();
        let facts = self.of(account.scope, account.key);
        let (seen, sent) = (facts.refusing(charge, remember), self.sent(&facts));
        drop(facts);
        let (states, now) = seen.ok_or(sent)?;
        let windows: [_; Quotas::MAX] =
            account.windows(|i, quota| account.window(now.start, quota, |_| states[i]));
        let (decision, _) = charge.decide_line(now.start, &windows);
        if holds_until(charge, &decision).is_none_or(|until| until <= now.end) {
            return Err(sent);
        }
        account.scope().observe().refused_from_memory();
        Ok(decision)
    }

    fn sent(&self, facts: &Facts<'_>) -> Sent {
        let of = facts.hash as usize % MARKS;
        Sent { at: facts.now(), of, mark: self.marks[of].load(Ordering::Relaxed) }
    }

    pub(super) fn note(
        &self,
        place: usize,
        charge: &Charge<'_>,
        decision: &mut Decision,
        sent: Sent,
        remember: i64,
    ) {
        // A store that does not show its states decides each time.
        let Some(states) = decision.take_states(place) else { return };
        let Some(decision) = decision.at(place) else { return };
        let account = charge.account();
        let mut facts = self.of(account.scope, account.key);
        if decision.allowed() && account.quotas().iter().all(|quota| facts.get(quota).is_none()) {
            return;
        }
        let lag = self.lag(&decision, sent.at);
        let changed = self.marks[sent.of].load(Ordering::Relaxed) != sent.mark;
        if changed || lag.end - lag.start >= MAX_ROUND_TRIP {
            return;
        }
        let refused = holds_until(charge, &decision)
            .map(|until| (until - lag.end).min(sent.at.saturating_add(remember)));
        for (quota, state) in account.quotas().iter().zip(states) {
            // Other handles of the store may remember for longer.
            let known = facts.get(quota).map(|known| known.until);
            let Some(until) = known.max(refused) else { continue };
            let state = state.unwrap_or_default();
            let lag = [lag.start, lag.end];
            if !facts.set(quota, until, Fact { hash: facts.hash, state, lag, at: sent.at }) {
                return;
            }
        }
    }

    /// Also those of answers on their way.
    pub(super) fn correct(&self, account: &Account<'_>) {
        let mut facts = self.change(account.scope, account.key);
        for quota in account.quotas() {
            facts.set(quota, 0, Fact::default());
        }
    }

    /// Also those of answers on their way.
    pub(super) fn reset(&self, scope: &Scope, key: &Key) {
        let mut facts = self.change(scope, key);
        let hash = facts.hash;
        // In the whole table: resets are rare.
        let of_key = facts.table.entries_mut().filter(|entry| entry.payload.hash == hash);
        of_key.for_each(|entry| *entry = Entry::default());
    }

    fn change(&self, scope: &Scope, key: &Key) -> Facts<'_> {
        let facts = self.of(scope, key);
        self.marks[self.sent(&facts).of].fetch_add(1, Ordering::Relaxed);
        facts
    }

    /// The monotonic clock stands still while a machine is suspended, or a virtual one paused: that
    /// time is added.
    fn elapsed(&self) -> Duration {
        let asleep = || {
            let ([awake, all], [awake_now, all_now]) = (self.clocks, clocks());
            all_now.saturating_sub(all).saturating_sub(awake_now.saturating_sub(awake))
        };
        let is_sleep = |asleep: &Duration| *asleep >= LEAST_SLEEP;
        // A thread that is held up between the two readings seems to have slept, too.
        let asleep = Some(asleep()).filter(is_sleep).map(|first| first.min(asleep()));
        self.since.elapsed() + asleep.filter(is_sleep).unwrap_or_default()
    }

    /// In milliseconds, with the time for which this process slept.
    fn now(&self) -> i64 {
        let elapsed = self.elapsed();
        // `as_millis` would count in 128 bits.
        (elapsed.as_secs() * 1_000) as i64 + i64::from(elapsed.subsec_millis())
    }

    /// By how much the store's clock is ahead, at least and at most: the store read it between
    /// `sent_at` and now, when `decision` arrived. With the most, an end that the store has given
    /// comes early; with the least, the store's time is taken as late.
    fn lag(&self, decision: &Decision, sent_at: i64) -> Range<i64> {
        // Rounded up: no decision seems younger than it is.
        let received = self.elapsed().as_nanos().div_ceil(1_000_000) as i64;
        // Plus 1: the store's clock leaves out a fraction of a millisecond.
        decision.now_ms() - received..decision.now_ms() - sent_at + 1
    }
}

impl Facts<'_> {
    fn now(&self) -> i64 {
        *self.now.get_or_init(|| self.known.now())
    }

    fn get(&self, quota: &Quota) -> Option<Entry<Fact>> {
        let slot = self.table.entry(fingerprint(self.hash, quota), |_| false)?;
        Some(self.table.get(slot)).filter(|entry| self.now() < entry.until)
    }

    /// Returns `false` if there is no room.
    fn set(&mut self, quota: &Quota, until: i64, fact: Fact) -> bool {
        let now = self.now();
        loop {
            match self.find(quota) {
                Found::Entry(slot) if until <= now => self.table.clear(slot),
                _ if until <= now => {}
                Found::Entry(slot) | Found::Free(slot) => self.table.set(slot, until, fact),
                Found::Full if self.table.grow(now) => continue,
                Found::Full => return false,
            }
            return true;
        }
    }

    /// `None` unless each is known and young enough. The time is the store's: at least, and at
    /// most.
    fn refusing(
        &self,
        charge: &Charge<'_>,
        remember: i64,
    ) -> Option<([Option<State>; Quotas::MAX], Range<i64>)> {
        let mut states = [None; Quotas::MAX];
        let (mut least, mut most) = (MAX, -MAX);
        for (state, quota) in states.iter_mut().zip(charge.account().quotas()) {
            let fact = self.get(quota)?.payload;
            // A fact of the future is from before a clock was set back.
            if !(fact.at..fact.at.saturating_add(remember)).contains(&self.now()) {
                return None;
            }
            *state = Some(fact.state);
            (least, most) = (least.min(fact.lag[0]), most.max(fact.lag[1]));
        }
        Some((states, self.now() + least..self.now() + most))
    }

    fn find(&self, quota: &Quota) -> Found {
        self.table.find(fingerprint(self.hash, quota), self.now(), |_: &Slot| false)
    }
}

/// Until when a refusal is sure to be one, on the store's clock. `None`: it passed, or no count
/// refuses it. A reservation can be refused because one quota would count it earlier than another
/// one: it may pass when more tokens of the first are taken.
fn holds_until(charge: &Charge<'_>, decision: &Decision) -> Option<i64> {
    match decision.retry_at_ms() {
        _ if decision.allowed() => None,
        // At that time, the charge fits without debt.
        Some(retry_at) if !charge.may_reserve() => Some(retry_at),
        _ => {
            let cost = charge.cost().min(Quota::MAX_TOKENS) as i64;
            let refuses = |i: &usize| {
                let quota = &charge.account().quotas.as_slice()[*i];
                let debt = if charge.may_reserve() { quota.max_reserved } else { 0 };
                let left = (quota.limit + debt) as i64 - decision.usage()[*i].count();
                quota.limit == 0 || cost > left
            };
            decision.refusing().filter(refuses).map(|i| decision.usage()[i].end()).max()
        }
    }
}

/// Of one that stands still during sleep, and of one that goes on.
#[cfg(all(target_os = "linux", not(tfw_sim)))]
fn clocks() -> [Duration; 2] {
    use rustix::time::{ClockId, clock_gettime};

    [ClockId::Monotonic, ClockId::Boottime].map(|clock| {
        let time = clock_gettime(clock);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    })
}

/// The wall clock goes on. If it is set forward, refusals end early.
#[cfg(not(any(target_os = "linux", tfw_sim)))]
fn clocks() -> [Duration; 2] {
    use std::sync::LazyLock;
    use std::time::{Instant, SystemTime, UNIX_EPOCH};

    static START: LazyLock<Instant> = LazyLock::new(Instant::now);

    [START.elapsed(), SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()]
}

#[cfg(tfw_sim)]
fn clocks() -> [Duration; 2] {
    [Duration::ZERO; 2]
}
