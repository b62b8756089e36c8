//! What a process knows of the counts of a store elsewhere (S34): [`Known`], a bounded table behind
//! locks. What finds no room in it is not known.
//!
//! A refusal is remembered as the states that it was decided on. Later charges are decided on them
//! anew, under the quotas of their own: as counts only grow while their window runs, a charge that
//! they refuse the store would refuse as well. What would pass here is for the store to decide.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use super::super::account::Account;
use super::super::charge::Charge;
use super::super::scope::Scope;
use super::super::sharded::{Sharded, fingerprint, shares};
use super::super::table::{Entry, Found, Slot, Table};
use super::stopwatch::{lag, passed};
use crate::decision::Decision;
use crate::key::Key;
use crate::quota::{Quota, Quotas};
use crate::sync::{self, Mutex, MutexGuard};
use crate::timer::Instant;
use crate::window::{MAX, State};

/// Counts: some 40 MB.
const MAX_FACTS: usize = 300_000;
/// How long a refusal is remembered where tokens may come back, in milliseconds.
const BRIEF: i64 = 1_000;
/// An answer that took longer is not remembered, in milliseconds.
const MAX_ROUND_TRIP: i64 = 1_024;
/// Keys share the marks that say that one of them has changed.
const MARKS: usize = 1_024;
/// Words of bits for scopes whose tokens may come back.
const RETURNING: usize = 64;

/// A count as the store last showed it, and until when it refuses. Times are of this process's
/// clock, except those of the state.
#[derive(Clone, Copy, Default)]
struct Fact {
    /// The hash of the key, by which a reset finds the facts of all its quotas.
    hash: u64,
    /// The store's state, or one that has ended if the store has none.
    state: State,
    /// By how much the store's clock is ahead of this process's: at least, and at most.
    lag: [i64; 2],
    /// When the store was asked for it.
    at: i64,
    /// Only a refusal sets this: other nodes return tokens of a count that was granted.
    refuses_until: i64,
}

/// A process's knowledge of a store.
pub(super) struct Known {
    since: Instant,
    shards: Sharded<Mutex<Table<Fact>>>,
    /// Buckets in a shard's table when it has grown.
    buckets: usize,
    /// How often this process has changed a key of each mark: what was asked before then is not
    /// remembered.
    marks: Box<[AtomicU64]>,
    /// A bit for scopes whose tokens may come back, here or on other nodes. Scopes may share one.
    returning: [AtomicU64; RETURNING],
}

/// The facts of a key, one for each quota, under the lock that they share.
struct Facts<'a> {
    now: i64,
    hash: u64,
    table: MutexGuard<'a, Table<Fact>>,
}

/// When a question is sent, and what had happened to its key before.
#[derive(Clone, Copy)]
pub(super) struct Sent {
    at: i64,
    of: usize,
    mark: u64,
}

impl Default for Known {
    /// Nothing yet.
    fn default() -> Self {
        let (shards, buckets) = shares(MAX_FACTS);
        Self {
            since: Instant::now(),
            shards: Sharded::new(shards),
            buckets,
            marks: (0..MARKS).map(|_| AtomicU64::new(0)).collect(),
            returning: [const { AtomicU64::new(0) }; RETURNING],
        }
    }
}

impl Known {
    /// Tokens of a scope may come back: to all of its limiters, since they share their counters.
    pub(super) fn expect_returns(&self, scope: &Scope) {
        if !self.expects_returns(scope) {
            let (of, bit) = returning_bit(scope);
            self.returning[of].fetch_or(bit, Ordering::Relaxed);
        }
    }

    pub(super) fn expects_returns(&self, scope: &Scope) -> bool {
        let (of, bit) = returning_bit(scope);
        self.returning[of].load(Ordering::Relaxed) & bit != 0
    }

    /// The facts of a key, locked.
    fn of(&self, scope: &Scope, key: &Key) -> Facts<'_> {
        let (table, hash) = self.shards.shard_of(scope, key);
        let mut table = sync::lock(table);
        if table.is_unallocated() {
            *table = Table::new(1, self.buckets);
        }
        Facts { now: passed(self.since), hash, table }
    }

    /// The refusal that follows from what is known, else when the store is called.
    pub(super) fn look(&self, charge: &Charge<'_>, may_return: bool) -> Result<Decision, Sent> {
        let account = charge.account();
        let facts = self.of(account.scope, account.key);
        let (seen, sent) = (facts.refusing(charge, may_return), self.sent(&facts));
        drop(facts);
        let refusal = seen.and_then(|(states, now)| refusal(charge, states, now)).ok_or(sent)?;
        account.scope().observe().refused_from_memory();
        Ok(refusal)
    }

    fn sent(&self, facts: &Facts<'_>) -> Sent {
        let of = facts.hash as usize % MARKS;
        Sent { at: facts.now, of, mark: self.marks[of].load(Ordering::Relaxed) }
    }

    /// Remembers a refusal, for a short while if tokens `may_return`. Another answer brings what is
    /// remembered of its quotas up to date.
    pub(super) fn note(
        &self,
        charge: &Charge<'_>,
        decision: &mut Decision,
        sent: Sent,
        may_return: bool,
    ) {
        // A store that does not show its states decides each time.
        let Some(states) = decision.take_states() else { return };
        let (account, lag) = (charge.account(), lag(self.since, decision, sent.at));
        let mut facts = self.of(account.scope, account.key);
        let changed = self.marks[sent.of].load(Ordering::Relaxed) != sent.mark;
        if changed || lag.end - lag.start >= MAX_ROUND_TRIP {
            return;
        }
        let until = holds_until(charge, decision).map(|until| {
            let until = until - lag.end;
            if may_return { until.min(sent.at + BRIEF) } else { until }
        });
        for (quota, state) in account.quotas().iter().zip(states) {
            let (state, mut fact) = (state.unwrap_or_default(), facts.get(quota));
            fact.refuses_until = until.unwrap_or(fact.refuses_until);
            if fact.refuses_until <= facts.now {
                continue;
            }
            (fact.state, fact.lag, fact.at) = (state, [lag.start, lag.end], sent.at);
            if !facts.set(quota, fact) {
                return;
            }
        }
    }

    /// Its counts were corrected: they refuse nothing for sure.
    pub(super) fn correct(&self, account: &Account<'_>) {
        let mut facts = self.of(account.scope, account.key);
        self.marks[self.sent(&facts).of].fetch_add(1, Ordering::Relaxed);
        for quota in account.quotas() {
            let fact = facts.get(quota);
            facts.set(quota, Fact { refuses_until: 0, ..fact });
        }
    }

    /// Forgets refusals and states of a key whose counts are gone. Answers on their way are
    /// outdated, too.
    pub(super) fn reset(&self, scope: &Scope, key: &Key) {
        let mut facts = self.of(scope, key);
        self.marks[self.sent(&facts).of].fetch_add(1, Ordering::Relaxed);
        facts.clear();
    }
}

impl Facts<'_> {
    /// The fact of a quota; if nothing is known, one that says nothing.
    fn get(&self, quota: &Quota) -> Fact {
        let Found::Entry(slot) = self.find(quota) else { return Fact::default() };
        let Entry { until, payload, .. } = self.table.get(slot);
        if self.now < until { payload } else { Fact::default() }
    }

    /// `false`: there is no room.
    fn set(&mut self, quota: &Quota, fact: Fact) -> bool {
        let (until, payload) = (fact.refuses_until, Fact { hash: self.hash, ..fact });
        loop {
            match self.find(quota) {
                Found::Entry(slot) if until <= self.now => self.table.clear(slot),
                _ if until <= self.now => {}
                Found::Entry(slot) | Found::Free(slot) => self.table.set(slot, until, payload),
                Found::Full if self.table.grow(self.now) => continue,
                Found::Full => return false,
            }
            return true;
        }
    }

    /// The states of all quotas of a charge, if each has refused, and the time by the store's
    /// clock: at least, and at most.
    fn refusing(
        &self,
        charge: &Charge<'_>,
        may_return: bool,
    ) -> Option<([Option<State>; Quotas::MAX], Range<i64>)> {
        let mut states = [None; Quotas::MAX];
        let (mut least, mut most) = (MAX, -MAX);
        for (state, quota) in states.iter_mut().zip(charge.account().quotas()) {
            let fact = self.get(quota);
            // An older fact may be from before a limiter expected returns.
            let is_old = may_return && self.now >= fact.at + BRIEF;
            if is_old || self.now >= fact.refuses_until {
                return None;
            }
            *state = Some(fact.state);
            (least, most) = (least.min(fact.lag[0]), most.max(fact.lag[1]));
        }
        Some((states, self.now + least..self.now + most))
    }

    /// Forgets all quotas. They are looked for in the whole table: resets are rare.
    fn clear(&mut self) {
        let of_key = |entry: &&mut Entry<Fact>| entry.payload.hash == self.hash;
        self.table.entries_mut().filter(of_key).for_each(|entry| *entry = Entry::default());
    }

    fn find(&self, quota: &Quota) -> Found {
        self.table.find(fingerprint(self.hash, quota), self.now, |_: &Slot| false)
    }
}

/// Where the bit of a scope is.
fn returning_bit(scope: &Scope) -> (usize, u64) {
    let id = scope.id() as usize;
    (id / 64 % RETURNING, 1 << (id % 64))
}

/// The refusal that follows from these states at this time.
fn refusal(
    charge: &Charge<'_>,
    states: [Option<State>; Quotas::MAX],
    now: Range<i64>,
) -> Option<Decision> {
    let (mut decision, _) = charge.decide_from(now.start, states);
    decision.take_states();
    let refused = holds_until(charge, &decision).is_some_and(|until| now.end < until);
    refused.then_some(decision)
}

/// Until when a refusal is sure to be one, on the store's clock. `None`: it passed, or no count
/// refuses it. A reservation that comes too late for one quota may pass once more is taken of that
/// one.
fn holds_until(charge: &Charge<'_>, decision: &Decision) -> Option<i64> {
    match decision.retry_at_ms() {
        _ if decision.allowed() => None,
        // At that time, the charge fits without debt.
        Some(retry_at) if !charge.may_reserve() => Some(retry_at),
        _ => {
            let cost =
                if charge.is_up_to() { 1 } else { charge.cost().min(Quota::MAX_TOKENS) as i64 };
            let refuses = |i: &usize| {
                let quota = &charge.account().quotas.as_slice()[*i];
                let debt = if charge.may_reserve() { quota.max_reserved } else { 0 };
                let (_, used) = decision.usage()[*i].count();
                quota.limit == 0 || cost > (quota.limit + debt) as i64 - used
            };
            decision.refusing().filter(refuses).map(|i| decision.usage()[i].end()).max()
        }
    }
}
