//! What a process remembers of a remote store's refusals (S34): [`Recall`].
//!
//! A refusal is remembered as the states that it was decided on. Later charges are decided on them
//! anew, under the quotas of their own: as counts only grow while their window runs, a charge that
//! they refuse the store would refuse as well. Whatever would pass here is for the store to decide.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::account::Account;
use super::cache::{Cache, Entries};
use super::charge::Charge;
use super::scope::Scope;
use super::stopwatch::Stopwatch;
use crate::decision::Decision;
use crate::key::Key;
use crate::quota::{MAX_TOKENS, Quotas};
use crate::window::{MAX, State};

/// Quotas of refused keys: some 24 MB.
const MAX_ENTRIES: usize = 300_000;
/// How long a refusal is remembered where tokens may come back, in milliseconds.
const BRIEF: i64 = 1_000;
/// What comes later than that is not remembered, in milliseconds.
const MAX_ROUND_TRIP: i64 = 1_024;
/// Keys share the marks that say that one of them has changed.
const MARKS: usize = 1_024;
/// How a key is marked as changed.
const REFUND: u64 = 1;
const RESET: u64 = 1 << 32;

/// What a process remembers of a store. Clones are the same one.
#[derive(Clone)]
pub(super) struct Recall(Arc<Memory>);

struct Memory {
    time: Stopwatch,
    seen: Cache<Seen>,
    /// Of the names of limiters.
    refundable: Mutex<HashMap<u64, Weak<Refundable>>>,
    /// How often a key of each kind was changed by this process: what was asked before then is not
    /// remembered.
    marks: Box<[AtomicU64]>,
}

/// Whether tokens of a scope may come back, here or on other nodes.
#[derive(Default)]
pub(crate) struct Refundable(AtomicBool);

impl Refundable {
    pub(crate) fn set(&self) {
        if !self.get() {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    pub(super) fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// What the store has shown of a count.
#[derive(Clone, Copy, Default)]
struct Seen {
    /// Its state; where there is none, one that has ended.
    state: State,
    /// By how much the store's clock is ahead of this process's: at least, and at most.
    lag: [i64; 2],
    /// When it was asked for.
    at: i64,
}

/// When a question is sent, and what had happened to its key before.
#[derive(Clone, Copy)]
pub(super) struct Sent {
    at: i64,
    of: usize,
    mark: u64,
}

impl Recall {
    /// One that remembers nothing yet.
    pub(super) fn new(time: Stopwatch) -> Self {
        Self(Arc::new(Memory {
            time,
            seen: Cache::new(MAX_ENTRIES, time),
            refundable: Mutex::default(),
            marks: (0..MARKS).map(|_| AtomicU64::new(0)).collect(),
        }))
    }

    /// Shared by all limiters of a scope.
    pub(super) fn refundable(&self, scope: &Scope) -> Arc<Refundable> {
        let mut scopes = self.0.refundable.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = scopes.get(&scope.id()).and_then(Weak::upgrade) {
            return known;
        }
        if scopes.len() == scopes.capacity() {
            scopes.retain(|_, refundable| refundable.strong_count() > 0);
        }
        let refundable = Arc::default();
        scopes.insert(scope.id(), Arc::downgrade(&refundable));
        refundable
    }

    /// The refusal of a charge, if that is known, else when the store is called.
    pub(super) fn refusal(&self, charge: &Charge<'_>, may_return: bool) -> Result<Decision, Sent> {
        let account = charge.account();
        let entries = self.0.seen.entries(&account);
        let (basis, sent) = (Basis::get(&entries, charge, may_return), self.sent(&entries));
        drop(entries);
        let refusal = basis.and_then(|basis| basis.refusal(charge)).ok_or(sent)?;
        account.scope().observe().refused_from_memory();
        Ok(refusal)
    }

    fn sent(&self, entries: &Entries<'_, Seen>) -> Sent {
        let of = entries.hash() as usize % MARKS;
        Sent { at: entries.now(), of, mark: self.0.marks[of].load(Ordering::Relaxed) }
    }

    /// By how much the store's clock is ahead of this process's: at least, and at most.
    #[cfg(feature = "tokio")]
    pub(super) fn lag(&self, decision: &Decision, sent: Sent) -> Range<i64> {
        self.0.time.lag(decision, sent.at)
    }

    /// Whether the key was reset since.
    #[cfg(feature = "tokio")]
    pub(super) fn was_reset_since(&self, sent: Sent) -> bool {
        self.0.marks[sent.of].load(Ordering::Relaxed) / RESET != sent.mark / RESET
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
        // A store that does not show its states is asked each time.
        let Some(states) = decision.take_states() else { return };
        let (account, lag) = (charge.account(), self.0.time.lag(decision, sent.at));
        let mut entries = self.0.seen.entries(&account);
        let changed = self.0.marks[sent.of].load(Ordering::Relaxed) != sent.mark;
        if changed || lag.end - lag.start >= MAX_ROUND_TRIP {
            return;
        }
        let until = holds_until(charge, decision).map(|until| {
            let until = until - lag.end;
            if may_return { until.min(sent.at + BRIEF) } else { until }
        });
        for (i, quota) in account.quotas().iter().enumerate() {
            let last = entries.get(quota);
            let until = until.or(last.map(|(_, until)| until));
            if let Some(until) = until.filter(|&until| until > entries.now()) {
                let state = states[i].unwrap_or_default();
                let seen = Seen { state, lag: [lag.start, lag.end], at: sent.at };
                if !entries.set(quota, until, seen) {
                    return;
                }
            }
        }
    }

    /// Its counts were corrected.
    pub(super) fn forget(&self, account: &Account<'_>) {
        let mut entries = self.0.seen.entries(account);
        self.0.marks[self.sent(&entries).of].fetch_add(REFUND, Ordering::Relaxed);
        account.quotas().iter().for_each(|quota| entries.remove(quota));
    }

    /// Its counts are gone.
    pub(super) fn reset(&self, scope: &Scope, key: &Key) {
        let mut entries = self.0.seen.entries_of(scope, key);
        self.0.marks[self.sent(&entries).of].fetch_add(RESET, Ordering::Relaxed);
        entries.clear();
    }
}

/// What was seen of all quotas of a charge.
struct Basis {
    states: [Option<State>; Quotas::MAX],
    /// The time, by the store's clock: at least, and at most.
    now: Range<i64>,
}

impl Basis {
    fn get(entries: &Entries<'_, Seen>, charge: &Charge<'_>, may_return: bool) -> Option<Self> {
        let mut states = [None; Quotas::MAX];
        let (mut least, mut most) = (MAX, -MAX);
        for (state, quota) in states.iter_mut().zip(charge.account().quotas()) {
            let (seen, _) = entries.get(quota)?;
            // What was remembered for longer may be of before another limiter said so.
            if may_return && entries.now() >= seen.at + BRIEF {
                return None;
            }
            *state = Some(seen.state);
            (least, most) = (least.min(seen.lag[0]), most.max(seen.lag[1]));
        }
        Some(Self { states, now: entries.now() + least..entries.now() + most })
    }

    /// The refusal that follows from it.
    fn refusal(self, charge: &Charge<'_>) -> Option<Decision> {
        let (mut decision, _) = charge.decide_from(self.now.start, self.states);
        decision.take_states();
        let refused = holds_until(charge, &decision).is_some_and(|until| self.now.end < until);
        refused.then_some(decision)
    }
}

/// Until when a refusal is sure to be one, on the store's clock. `None`: it passed, or no count
/// refuses it. A reservation that comes too late for one quota may pass once more is taken of that one.
fn holds_until(charge: &Charge<'_>, decision: &Decision) -> Option<i64> {
    match decision.retry_at_ms() {
        _ if decision.allowed() => None,
        // That is when it fits without debt.
        Some(retry_at) if !charge.may_reserve() => Some(retry_at),
        _ => {
            let cost = if charge.is_up_to() { 1 } else { charge.cost().min(MAX_TOKENS) as i64 };
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
