//! Keeps leased tokens, and returns unused ones (S34).
//!
//! A lease is taken from the shared count before a token of it is spent, and dies with its window,
//! counted from when it was asked for: so what passes was granted by the store, in that window.
//! What it costs is that tokens leased to one node are not there for another. So leases are small:
//! a part of what is left, and no more than the key's demand, which doubles while leases are spent
//! at once and halves when they are not; and unused tokens are returned soon.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::super::account::Account;
use super::super::adjust::Adjust;
use super::super::charge::{Charge, OwnedCharge};
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
/// And after so long in any case, in milliseconds.
const MAX_IDLE: i64 = 10_000;

/// What a request waits longer for a shared call than for its own.
const MOMENT: Duration = Duration::from_millis(10);
/// A call without a deadline is not given up.
const NEVER: Duration = Duration::from_secs(365 * 86_400);

impl Caller {
    /// What is known of a key, locked.
    pub(super) fn facts(&self, account: &Account<'_>) -> Facts<'_> {
        self.node.known.of(account.scope, account.key)
    }

    /// How long a request waits for a shared call.
    pub(super) fn longest(&self) -> Option<Duration> {
        self.policy.deadline.map(|deadline| deadline.saturating_add(MOMENT))
    }

    /// When a shared call that begins now is given up.
    pub(super) fn until(&self) -> Instant {
        Instant::now() + self.longest().unwrap_or(NEVER).min(NEVER)
    }

    /// What is known after a decision, with a lease of what it has granted.
    pub(super) fn leased(
        &self,
        decision: &Decision,
        quota: &Quota,
        demand: u64,
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
            lease: Lease { dies: until - lag.end, left, limit, taken: known.now(), demand },
            ..Fact::default()
        }
    }

    /// Keeps what is left of a lease, to be spent until it is due. Returns how many tokens to give
    /// up instead.
    pub(super) fn keep(
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
        if self.node.known.was_reset_since(sent) || !lease.is_alive(facts.now()) {
            // The rest is of a count that is gone.
            lease.left = 0;
            facts.set(quota, Fact { lease: *lease, ..last });
            return 0;
        }
        // What was left may have been less than this node thought.
        let before = lease.limit.saturating_sub(state.used.max(0) as u64) + granted;
        let mut excess = lease.left.saturating_sub((before / SHARE).max(1) - 1);
        lease.left -= excess;
        if last.lease.is_alive(facts.now()) && last.state.start == state.start {
            lease.left += last.lease.left;
            lease.limit = lease.limit.max(last.lease.limit);
        }
        let (left, taken) = (lease.left, lease.taken);
        let is_looked_after =
            left == 0 || self.look_after(owner, facts.id(quota), charge.clone(), taken, quota);
        if !(is_looked_after && facts.set(quota, fact)) {
            excess += left;
            // Nor are more tokens asked for next time.
            (fact.lease.left, fact.lease.demand) = (0, 0);
            facts.set(quota, fact);
        }
        excess
    }

    /// Returns tokens that were not spent.
    pub(super) fn give_back(
        self: &Arc<Self>,
        charge: &Charge<'_>,
        decision: &Decision,
        tokens: u64,
    ) {
        if tokens > 0 {
            charge.account().scope().observe().lease_returned(tokens);
            let adjust = Adjust::refund(charge.account(), tokens, decision);
            self.correct(adjust).detach();
        }
    }

    /// Returns what is left of a lease when it was unused for a while, or at once when its owner is
    /// gone. `false`: there are too many leases to look after.
    fn look_after(
        self: &Arc<Self>,
        owner: &Weak<Owner>,
        id: u64,
        charge: OwnedCharge,
        since: i64,
        quota: &Quota,
    ) -> bool {
        let (this, of, due) = (Arc::clone(self), Weak::clone(owner), since + idle(quota));
        self.node.idle.look_after(id, due, owner, move || this.look_at_lease(&of, charge, id))
    }

    fn look_at_lease(self: &Arc<Self>, owner: &Weak<Owner>, charge: OwnedCharge, id: u64) {
        let borrowed = charge.as_charge();
        let Some(quota) = leasable(&borrowed) else { return };
        let mut facts = self.facts(&borrowed.account());
        let (now, mut fact) = (facts.now(), facts.get(quota));
        let Lease { left, taken, .. } = fact.lease;
        if left == 0 || !fact.lease.is_alive(now) {
            return;
        }
        if now - taken >= idle(quota) || owner.strong_count() == 0 {
            fact.lease.left = 0;
            facts.set(quota, fact);
            drop(facts);
            self.give_back(&borrowed, &fact.decide(now, &borrowed), left);
        } else {
            drop(facts);
            self.look_after(owner, id, charge.clone(), taken, quota);
        }
    }
}

/// For how long a lease may lie, in milliseconds.
fn idle(quota: &Quota) -> i64 {
    (quota.window as i64 / IDLE).clamp(1, MAX_IDLE)
}
