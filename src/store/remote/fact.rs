//! What a process knows of one count of a store elsewhere: [`Fact`].

// Without a runtime nothing is leased.
#![cfg_attr(not(feature = "tokio"), allow(dead_code))]

use super::super::account::Account;
use super::super::charge::Charge;
use crate::decision::Decision;
use crate::quota::Quota;
use crate::window::{MAX, State};

/// A lease is at most this part of the tokens left.
pub(super) const SHARE: u64 = 16;
/// A lease that is spent within this part of the window makes the next one larger.
const HOT: i64 = 100;
/// And no longer than this, in milliseconds: in a long window it would have been returned.
const MAX_HOT: i64 = 10_000;
/// For how long it is remembered what a key demanded, in milliseconds, and for two windows at most.
const MAX_KEPT: i64 = 120_000;

/// A count as the store last showed it, until when it refuses, and the tokens that are held of it.
/// Times are of this process's clock, but for the state's.
#[derive(Clone, Copy, Default)]
pub(super) struct Fact {
    /// Of the key: a reset finds all that is known of it, whatever its quotas are.
    pub(super) hash: u64,
    /// Where the store has none, one that has ended.
    pub(super) state: State,
    /// By how much the store's clock is ahead of this process's: at least, and at most.
    pub(super) lag: [i64; 2],
    /// When it was asked for.
    pub(super) at: i64,
    /// Only a refusal sets this: other nodes return tokens of a count that was granted.
    pub(super) refuses_until: i64,
    pub(super) lease: Lease,
}

/// Tokens taken from the count with one call, and spent here. It is remembered for a while after
/// that, as the next lease depends on how soon it was spent.
#[derive(Clone, Copy, Default)]
pub(super) struct Lease {
    /// When its tokens expire.
    pub(super) dies: i64,
    pub(super) left: u64,
    /// Under this limit they were taken; a lower one may not spend them. 0: nothing was.
    pub(super) limit: u64,
    pub(super) taken: i64,
    /// How many tokens the key spends at once, by what was seen of it.
    pub(super) demand: u64,
}

impl Fact {
    /// Until when it is worth remembering.
    pub(super) fn until(&self, quota: &Quota) -> i64 {
        self.refuses_until.max(self.lease.until(quota))
    }

    /// The decision on a charge that a lease may decide, from leased tokens.
    pub(super) fn decide(&self, now: i64, charge: &Charge<'_>) -> Decision {
        let (account, now, State { start, used, .. }) =
            (charge.account(), now + self.lag[0], self.state);
        let windows = account.windows(|_, quota| {
            // A true cost may have raised it since.
            let used = used.min(quota.limit as i64) - charge.cost() as i64;
            account.window(now, quota, |_| Some(State { start, used, until: MAX }))
        });
        charge.decide_over::<1>(now, &windows).0
    }
}

impl Lease {
    /// Whether its tokens may be spent, if any are left.
    pub(super) fn is_alive(&self, now: i64) -> bool {
        now < self.dies
    }

    /// How many tokens the next lease should have: twice as many if this one was spent at once,
    /// else half as many.
    pub(super) fn next(&self, now: i64, quota: &Quota, max: u64) -> u64 {
        if now >= self.until(quota) {
            1
        } else if now - self.taken <= (quota.window as i64 / HOT).min(MAX_HOT) {
            self.demand.saturating_mul(2).min(max)
        } else {
            (self.demand / 2).max(1)
        }
    }

    fn until(&self, quota: &Quota) -> i64 {
        let kept = self.taken + (2 * quota.window as i64).min(MAX_KEPT);
        match self {
            Self { limit: 0, .. } => 0,
            Self { left: 0, .. } => kept,
            Self { dies, .. } => kept.max(*dies),
        }
    }
}

/// The quota of a charge that a lease may decide: a single plain one, with room for leases.
pub(super) fn leasable<'a>(charge: &Charge<'a>) -> Option<&'a Quota> {
    let Account { quotas, .. } = charge.account();
    let [quota] = quotas.as_slice() else { return None };
    let plain = quota.capacity == quota.limit
        && !(charge.is_peek() || charge.is_up_to() || charge.ask.unleased);
    let reserves = charge.may_reserve() && quota.max_reserved > 0;
    (plain && !reserves && quota.limit >= 2 * SHARE && charge.cost() > 0).then_some(quota)
}
