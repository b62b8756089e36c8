//! What a process remembers of a remote store's refusals (S34): [`Recall`].
//!
//! A refusal is remembered as the counts that it was decided on. Later charges are decided on them
//! anew, under the quotas of their own: as counts only grow while their window runs, a charge that
//! they refuse the store would refuse as well. Whatever else would pass here is for the store to
//! decide, and so is what depends on more than decisions show.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::account::Account;
use super::cache::{Cache, Entries};
use super::charge::Charge;
use super::scope::Scope;
use super::stopwatch::Stopwatch;
use crate::decision::{Decision, Usage};
use crate::key::Key;
use crate::quota::{Anchor, Quota, Quotas, Span};
use crate::window::{MAX, State};

mod seen;

use seen::Seen;

/// Quotas of refused keys: some 32 MB.
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
        decision: &Decision,
        sent: Sent,
        may_return: bool,
    ) {
        let lag = self.0.time.lag(decision, sent.at);
        let account = charge.account();
        if !account.quotas().iter().zip(decision.usage()).all(ends_as_here) {
            return;
        }
        let mut entries = self.0.seen.entries(&account);
        let changed = self.0.marks[sent.of].load(Ordering::Relaxed) != sent.mark;
        if changed || lag.end - lag.start >= MAX_ROUND_TRIP {
            return;
        }
        let until = (!decision.allowed()).then(|| {
            let until = holds_until(charge, decision) - lag.end;
            if may_return { until.min(sent.at + BRIEF) } else { until }
        });
        for (i, quota) in account.quotas().iter().enumerate() {
            let last = entries.get(quota);
            let until = until.or(last.map(|(_, until)| until));
            if let Some(until) = until.filter(|&until| until > entries.now()) {
                let last = last.map(|(last, _)| last);
                let seen = Seen::after(charge, decision, i, quota, (sent.at, &lag), last);
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
    states: [State; Quotas::MAX],
    /// Those with the latest ends that they can have.
    lasting: [State; Quotas::MAX],
    /// The time, by the store's clock: at least, and at most.
    now: Range<i64>,
}

impl Basis {
    fn get(entries: &Entries<'_, Seen>, charge: &Charge<'_>, may_return: bool) -> Option<Self> {
        let mut states = [State::default(); Quotas::MAX];
        let mut lasting = states;
        let (mut least, mut most) = (MAX, -MAX);
        for (i, quota) in charge.account().quotas().iter().enumerate() {
            let (seen, _) = entries.get(quota)?;
            // What was remembered for longer may be of before another limiter said so.
            let is_old = may_return && entries.now() >= seen.at + BRIEF;
            if is_old || !seen.holds_under(quota) {
                return None;
            }
            (states[i], lasting[i]) = (seen.state, seen.state);
            if !seen.exact {
                lasting[i].until = MAX;
            }
            (least, most) = (least.min(seen.lag[0]), most.max(seen.lag[1]));
        }
        Some(Self { states, lasting, now: entries.now() + least..entries.now() + most })
    }

    /// The refusal that follows from it.
    fn refusal(&self, charge: &Charge<'_>) -> Option<Decision> {
        let decision = self.decide(charge, &self.states);
        let refused = !decision.allowed()
            && self.now.end < holds_until(charge, &decision)
            // Whenever the states end.
            && (self.states == self.lasting || self.decide(charge, &self.lasting) == decision);
        refused.then_some(decision)
    }

    fn decide(&self, charge: &Charge<'_>, states: &[State; Quotas::MAX]) -> Decision {
        let (account, now) = (charge.account(), self.now.start);
        let windows = account.windows(|i, quota| account.window(now, quota, |_| Some(states[i])));
        charge.decide_over::<{ Quotas::MAX }>(now, &windows).0
    }
}

/// Whether the window ends where it does by this node's zone data: another end binds all nodes
/// (S35), but is not worked out here.
fn ends_as_here((quota, usage): (&Quota, &Usage)) -> bool {
    let Anchor::Calendar(calendar) = quota.anchor else { return true };
    let (start, _) = usage.count();
    calendar.around(start) == Span { start, end: usage.end() }
}

/// Until when a refusal is sure to be one, on the store's clock.
fn holds_until(charge: &Charge<'_>, decision: &Decision) -> i64 {
    match decision.retry_at_ms() {
        // That is when it fits without debt.
        Some(retry_at) if !charge.may_reserve() => retry_at,
        _ => decision.refusing().map(|i| decision.usage()[i].end()).max().unwrap_or(0),
    }
}
