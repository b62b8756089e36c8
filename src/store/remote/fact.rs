//! A process's knowledge of one count of a store elsewhere: [`Fact`].

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
/// At most this many milliseconds: in a long window, an unspent lease would have been returned.
const MAX_HOT: i64 = 10_000;
/// How long a key's heat is remembered, in milliseconds, and for two windows at most.
const MAX_KEPT: i64 = 120_000;

/// A count as the store last showed it, until when it refuses, and the tokens leased from it. Times
/// are of this process's clock, except those of the state.
#[derive(Clone, Copy, Default)]
pub(super) struct Fact {
    /// The hash of the key, by which a reset finds the facts of all its quotas.
    pub(super) hash: u64,
    /// The store's state, or one that has ended if the store has none.
    pub(super) state: State,
    /// By how much the store's clock is ahead of this process's: at least, and at most.
    pub(super) lag: [i64; 2],
    /// When the store was asked for it.
    pub(super) at: i64,
    /// Only a refusal sets this: other nodes return tokens of a count that was granted.
    pub(super) refuses_until: i64,
    pub(super) lease: Lease,
}

/// Tokens taken from the count with one call, and spent here. A spent lease is remembered for a
/// while, as the next one depends on how soon it was spent.
#[derive(Clone, Copy, Default)]
pub(super) struct Lease {
    /// When the tokens expire.
    pub(super) expires_at: i64,
    pub(super) left: u64,
    /// The limit that the tokens were taken under: a lower one may not spend them. 0 if none were.
    pub(super) limit: u64,
    pub(super) taken_at: i64,
    /// How many tokens the key spends at once, as far as was seen.
    pub(super) heat: u64,
}

impl Fact {
    /// Returns until when the fact is worth remembering.
    pub(super) fn remembered_until(&self, quota: &Quota) -> i64 {
        self.refuses_until.max(self.lease.remembered_until(quota))
    }

    /// Returns the decision on a charge that spends leased tokens.
    pub(super) fn decide(&self, now: i64, charge: &Charge<'_>) -> Decision {
        let (account, now, State { start, used, .. }) =
            (charge.account(), now + self.lag[0], self.state);
        let windows = account.windows(|_, quota| {
            // A settled cost may have raised the count since.
            let used = used.min(quota.limit as i64) - charge.cost() as i64;
            account.window(now, quota, |_| Some(State { start, used, until: MAX }))
        });
        charge.decide_over::<1>(now, &windows).0
    }
}

impl Lease {
    /// Returns whether the lease still runs. `Facts::spend` also looks at its tokens and its limit;
    /// a new window, a reset and `return_if_idle` end a lease before its time.
    pub(super) fn can_be_spent_at(&self, now: i64) -> bool {
        now < self.expires_at
    }

    /// Returns how many tokens the next lease should have: twice as many if this one was spent at
    /// once, else half as many.
    pub(super) fn next_heat(&self, now: i64, quota: &Quota, max: u64) -> u64 {
        if now >= self.remembered_until(quota) {
            1
        } else if now - self.taken_at <= (quota.window as i64 / HOT).min(MAX_HOT) {
            self.heat.saturating_mul(2).min(max)
        } else {
            (self.heat / 2).max(1)
        }
    }

    fn remembered_until(&self, quota: &Quota) -> i64 {
        let kept = self.taken_at + (2 * quota.window as i64).min(MAX_KEPT);
        match self {
            Self { limit: 0, .. } => 0,
            Self { left: 0, .. } => kept,
            Self { expires_at, .. } => kept.max(*expires_at),
        }
    }
}

/// Returns the quota of a charge that may spend leased tokens: a single plain one, with room for
/// leases.
pub(super) fn leasable<'a>(charge: &Charge<'a>) -> Option<&'a Quota> {
    let Account { quotas, .. } = charge.account();
    let [quota] = quotas.as_slice() else { return None };
    let plain = quota.capacity == quota.limit
        && !(charge.is_peek() || charge.is_up_to() || charge.ask.unleased);
    let reserves = charge.may_reserve() && quota.max_reserved > 0;
    (plain && !reserves && quota.limit >= 2 * SHARE && charge.cost() > 0).then_some(quota)
}
