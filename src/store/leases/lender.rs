//! Keeps leased tokens, and returns unused ones.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::super::adjust::Adjust;
use super::super::book::{Book, Lease, Owner, SHARE, leasable};
use super::super::charge::{Charge, OwnedCharge};
use super::super::front::Front;
use super::super::recall::Sent;
use crate::decision::Decision;
use crate::quota::Quota;
use crate::timer::Instant;

/// A lease unused for this part of the window is returned.
const IDLE: i64 = 16;
/// And after so long in any case, in milliseconds.
const MAX_IDLE: i64 = 10_000;

/// What a request waits longer for a shared call than for its own.
const MOMENT: Duration = Duration::from_millis(10);
/// A call without a deadline is not given up.
const NEVER: Duration = Duration::from_secs(365 * 86_400);

/// What leases are made of. The tasks that look after them don't own them.
#[derive(Clone)]
pub(super) struct Lender {
    pub(super) front: Front,
    pub(super) book: Book,
    /// The largest lease.
    pub(super) max: u64,
    pub(super) owner: Weak<Owner>,
}

impl Lender {
    /// How long a request waits for a shared call.
    pub(super) fn longest(&self) -> Option<Duration> {
        let longest = self.front.guard.remote.longest();
        longest.map(|longest| longest.saturating_add(MOMENT))
    }

    /// When a shared call that begins now is given up.
    pub(super) fn until(&self) -> Instant {
        Instant::now() + self.longest().unwrap_or(NEVER).min(NEVER)
    }

    /// A lease of what a decision has granted.
    pub(super) fn lease(
        &self,
        decision: &Decision,
        quota: &Quota,
        demand: u64,
        sent: Sent,
    ) -> Lease {
        let lag = self.front.recall().lag(decision, sent);
        let (start, used) = decision.usage()[0].count();
        Lease {
            dies: decision.reset_at_ms() - lag.end,
            left: decision.granted(),
            limit: quota.limit,
            start,
            used,
            lag: lag.start,
            taken: self.book.now(),
            demand,
        }
    }

    /// Keeps what is left of a lease, to be spent until it is due. Returns how many tokens to give
    /// up instead.
    pub(super) fn keep(
        &self,
        charge: &OwnedCharge,
        quota: &Quota,
        granted: u64,
        mut lease: Lease,
        sent: Sent,
    ) -> u64 {
        let account = charge.as_charge().account();
        let mut page = self.book.open(account, quota);
        if self.front.recall().was_reset_since(sent) || page.now() >= lease.dies {
            // The rest is of a count that is gone.
            lease.left = 0;
            page.set(lease);
            return 0;
        }
        // What was left may have been less than this node thought.
        let before = lease.limit.saturating_sub(lease.used.max(0) as u64) + granted;
        let mut excess = lease.left.saturating_sub((before / SHARE).max(1) - 1);
        lease.left -= excess;
        if let Some(last) = page.alive().filter(|last| last.start == lease.start) {
            lease.left += last.left;
            lease.limit = lease.limit.max(last.limit);
        }
        let is_looked_after = |lease: &Lease| {
            lease.left == 0 || self.look_after(page.id(), charge.clone(), lease.taken, quota)
        };
        if !(is_looked_after(&lease) && page.set(lease)) {
            excess += lease.left;
            // Nor are more tokens asked for next time.
            (lease.left, lease.demand) = (0, 0);
            page.set(lease);
        }
        excess
    }

    /// Returns tokens that were not spent.
    pub(super) fn give_back(&self, charge: &Charge<'_>, decision: &Decision, tokens: u64) {
        if tokens > 0 {
            charge.account().scope().observe().lease_returned(tokens);
            let adjust = Adjust::refund(charge.account(), tokens, decision);
            self.front.correct(adjust).detach();
        }
    }

    /// Returns what is left of a lease when it was unused for a while. `false`: there are too many
    /// leases to look after.
    fn look_after(&self, id: u64, charge: OwnedCharge, since: i64, quota: &Quota) -> bool {
        let (this, due) = (self.clone(), since + idle(quota));
        self.book.idle().look_after(id, due, &self.owner, move || this.look(charge, id))
    }

    fn look(self, charge: OwnedCharge, id: u64) {
        let borrowed = charge.as_charge();
        let Some(quota) = leasable(&borrowed) else { return };
        let mut page = self.book.open(borrowed.account(), quota);
        let now = page.now();
        let Some(lease) = page.alive().filter(|lease| lease.left > 0) else { return };
        if now - lease.taken >= idle(quota) || self.owner.strong_count() == 0 {
            page.set(Lease { left: 0, ..lease });
            drop(page);
            self.give_back(&borrowed, &lease.decide(now, &borrowed), lease.left);
        } else {
            drop(page);
            self.look_after(id, charge.clone(), lease.taken, quota);
        }
    }

    /// Who may spend what is leased.
    pub(super) fn owned(front: Front, book: Book, max: u64) -> (Self, Arc<Owner>) {
        let owner = book.idle().owner();
        (Self { front, book, max, owner: Arc::downgrade(&owner) }, owner)
    }
}

/// For how long a lease may lie, in milliseconds.
fn idle(quota: &Quota) -> i64 {
    (quota.window as i64 / IDLE).clamp(1, MAX_IDLE)
}
