//! Keeps leased tokens, and returns unused ones (S34).
//!
//! A lease is taken from the shared count before a token of it is spent, and expires with its
//! window, counted from when it was asked for: so the store has granted each token that is spent,
//! in that window. The cost is that other nodes can't spend tokens leased to one node. So leases
//! are small: a part of the tokens left, and at most the key's heat, which doubles while leases are
//! spent at once and halves otherwise. Unused tokens are returned soon.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::super::account::Account;
use super::super::adjust::Adjust;
use super::super::charge::{Charge, OwnedCharge};
use super::super::freed;
use super::caller::Caller;
use super::fact::{Fact, Lease, SHARE, leasable};
use super::idle::Owner;
use super::known::{Facts, Sent};
use crate::decision::Decision;
use crate::quota::Quota;
use crate::timer::Instant;
use crate::window::State;

/// A lease unused for this part of the window is returned.
const IDLE: i64 = 16;
/// A lease unused for this many milliseconds is returned in any window.
const MAX_IDLE: i64 = 10_000;

/// How much longer a request waits for a shared call than for its own.
const MOMENT: Duration = Duration::from_millis(10);
/// When a call without a deadline is given up.
const NEVER: Duration = Duration::from_secs(365 * 86_400);

impl Caller {
    /// Locks the facts of a key.
    pub(super) fn facts(&self, account: &Account<'_>) -> Facts<'_> {
        self.node.known.of(account.scope, account.key)
    }

    /// Returns how long a request waits for a shared call.
    pub(super) fn max_wait(&self) -> Option<Duration> {
        self.policy.deadline.map(|deadline| deadline.saturating_add(MOMENT))
    }

    /// Returns when a shared call that begins now is given up.
    pub(super) fn give_up_at(&self) -> Instant {
        Instant::now() + self.max_wait().unwrap_or(NEVER).min(NEVER)
    }

    /// Returns the fact after a decision, with a lease of the tokens that it has granted.
    pub(super) fn fact_with_lease(
        &self,
        decision: &Decision,
        quota: &Quota,
        heat: u64,
        sent: Sent,
    ) -> Fact {
        let known = &self.node.known;
        let (lag, (start, used)) = (known.lag(decision, sent), decision.usage()[0].count());
        let (left, limit, until) = (decision.granted(), quota.limit, decision.reset_at_ms());
        Fact {
            // Without debt and rollover a count ends with its window.
            state: State { start, used, until },
            lag: [lag.start, lag.end],
            at: sent.at,
            lease: Lease { expires_at: until - lag.end, left, limit, taken_at: known.now(), heat },
            ..Fact::default()
        }
    }

    /// Keeps the tokens left of a lease, to be spent here. Returns how many of them to return to
    /// the store instead.
    pub(super) fn keep_lease(
        self: &Arc<Self>,
        owner: &Weak<Owner>,
        charge: &OwnedCharge,
        quota: &Quota,
        granted: u64,
        mut fact: Fact,
        sent: Sent,
    ) -> u64 {
        let account = charge.as_charge().account();
        let mut facts = self.facts(&account);
        let last = facts.get(quota);
        fact.refuses_until = last.refuses_until;
        let Fact { state, lease, .. } = &mut fact;
        if self.node.known.was_reset_since(sent) || !lease.can_be_spent_at(facts.now()) {
            // The tokens left are of a count that is gone.
            lease.left = 0;
            facts.set(quota, Fact { lease: *lease, ..last });
            return 0;
        }
        // Fewer tokens may have been left than this node had assumed.
        let before = lease.limit.saturating_sub(state.used.max(0) as u64) + granted;
        let mut excess = lease.left.saturating_sub((before / SHARE).max(1) - 1);
        lease.left -= excess;
        if last.lease.can_be_spent_at(facts.now()) && last.state.start == state.start {
            lease.left += last.lease.left;
            lease.limit = lease.limit.max(last.lease.limit);
        }
        let (left, taken_at) = (lease.left, lease.taken_at);
        let is_scheduled = left == 0
            || self.schedule_return(owner, facts.id(quota), charge.clone(), taken_at, quota);
        if !(is_scheduled && facts.set(quota, fact)) {
            excess += left;
            // The next lease is not larger, either.
            (fact.lease.left, fact.lease.heat) = (0, 0);
            facts.set(quota, fact);
        }
        excess
    }

    /// Returns unspent tokens to the store.
    pub(super) fn return_tokens(
        self: &Arc<Self>,
        charge: &Charge<'_>,
        decision: &Decision,
        tokens: u64,
    ) {
        if tokens > 0 {
            let account = charge.account();
            account.scope().observe().lease_returned(tokens);
            let returned = self.correct_counts(Adjust::refund(account, tokens, decision));
            freed::note_after(account.scope(), account.key(), returned).detach();
        }
    }

    /// Has a lease returned when it was unused for a while, or at once when its owner is gone.
    /// Returns `false` if there are too many leases.
    fn schedule_return(
        self: &Arc<Self>,
        owner: &Weak<Owner>,
        id: u64,
        charge: OwnedCharge,
        since: i64,
        quota: &Quota,
    ) -> bool {
        let (this, of, due) = (Arc::clone(self), Weak::clone(owner), since + max_idle(quota));
        self.node.idle.schedule_look(id, due, owner, move || this.return_if_idle(&of, charge, id))
    }

    fn return_if_idle(self: &Arc<Self>, owner: &Weak<Owner>, charge: OwnedCharge, id: u64) {
        let borrowed = charge.as_charge();
        let Some(quota) = leasable(&borrowed) else { return };
        let mut facts = self.facts(&borrowed.account());
        let (now, mut fact) = (facts.now(), facts.get(quota));
        let Lease { left, taken_at, .. } = fact.lease;
        if left == 0 || !fact.lease.can_be_spent_at(now) {
            return;
        }
        if now - taken_at >= max_idle(quota) || owner.strong_count() == 0 {
            fact.lease.left = 0;
            facts.set(quota, fact);
            drop(facts);
            self.return_tokens(&borrowed, &fact.decide(now, &borrowed), left);
        } else {
            drop(facts);
            self.schedule_return(owner, id, charge.clone(), taken_at, quota);
        }
    }
}

/// Returns how long a lease may be unused, in milliseconds.
fn max_idle(quota: &Quota) -> i64 {
    (quota.window as i64 / IDLE).clamp(1, MAX_IDLE)
}
