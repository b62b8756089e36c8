//! The tokens that a process has leased from a remote store (S34): [`Book`].

use std::sync::Arc;

use super::account::Account;
use super::cache::{Cache, Entries};
use super::charge::Charge;
use super::scope::Scope;
use super::stopwatch::Stopwatch;
use crate::decision::Decision;
use crate::key::Key;
use crate::quota::Quota;
use crate::window::{MAX, State};

mod flights;
mod idle;

pub(super) use flights::{Answer, Flights, Id, Waiter};
pub(super) use idle::{Idle, Owner};

/// A lease is at most this part of the tokens left.
pub(super) const SHARE: u64 = 16;
/// A lease that is spent within this part of the window makes the next one larger.
const HOT: i64 = 100;
/// And no longer than this, in milliseconds: in a long window it would have been returned.
const MAX_HOT: i64 = 10_000;
/// For how long it is remembered what a key demanded, in milliseconds, and for two windows at most.
const MAX_KEPT: i64 = 120_000;
/// Keys that were leased lately: some 11 MB.
const MAX_KEYS: usize = 100_000;

/// What is leased, and the requests that wait for a lease. Clones are the same one.
#[derive(Clone)]
pub(super) struct Book(Arc<Pages>);

struct Pages {
    leases: Cache<Lease>,
    flights: Flights,
    idle: Idle,
    time: Stopwatch,
}

/// Tokens of a key, taken from the store with one call and spent here. It is remembered for a while
/// after that, as the next lease depends on how soon it was spent.
#[derive(Clone, Copy, Default)]
pub(super) struct Lease {
    /// When its tokens expire, on this process's clock.
    pub(super) dies: i64,
    pub(super) left: u64,
    /// Under this limit they were taken; a lower one may not spend them.
    pub(super) limit: u64,
    /// The count after they were taken.
    pub(super) start: i64,
    pub(super) used: i64,
    /// By how much the store's clock is ahead of this process's, at least.
    pub(super) lag: i64,
    pub(super) taken: i64,
    /// How many tokens the key spends at once, by what was seen of it.
    pub(super) demand: u64,
}

impl Lease {
    /// The decision on a charge from these tokens.
    pub(super) fn decide(&self, now: i64, charge: &Charge<'_>) -> Decision {
        let (account, now) = (charge.account(), now + self.lag);
        let before =
            State { start: self.start, used: self.used - charge.cost() as i64, until: MAX };
        let windows = account.windows(|_, quota| account.window(now, quota, |_| Some(before)));
        charge.decide_over::<1>(now, &windows).0
    }

    fn is_alive(&self, now: i64) -> bool {
        now < self.dies
    }
}

/// The quota of a charge that a lease may decide: a single plain one, with room for leases.
pub(super) fn leasable<'a>(charge: &Charge<'a>) -> Option<&'a Quota> {
    let [quota] = charge.account().quotas().as_slice() else { return None };
    let plain = quota.capacity == quota.limit && !charge.is_peek() && !charge.is_up_to();
    let reserves = charge.may_reserve() && quota.max_reserved > 0;
    (plain && !reserves && quota.limit >= 2 * SHARE && charge.cost() > 0).then_some(quota)
}

impl Book {
    pub(super) fn new(time: Stopwatch) -> Self {
        Self(Arc::new(Pages {
            leases: Cache::new(MAX_KEYS, time),
            flights: Flights::default(),
            idle: Idle::new(time),
            time,
        }))
    }

    pub(super) fn flights(&self) -> &Flights {
        &self.0.flights
    }

    pub(super) fn idle(&self) -> &Idle {
        &self.0.idle
    }

    pub(super) fn now(&self) -> i64 {
        self.0.time.now()
    }

    /// The page of a key under a quota, locked.
    pub(super) fn open<'a>(&'a self, account: Account<'a>, quota: &'a Quota) -> Page<'a> {
        Page { entries: self.0.leases.entries(&account), quota }
    }

    /// Decides a charge from leased tokens, if they suffice.
    pub(super) fn spend(&self, charge: &Charge<'_>) -> Option<Decision> {
        let quota = leasable(charge)?;
        let mut page = self.open(charge.account(), quota);
        let mut lease = page.alive()?;
        if lease.left < charge.cost() || lease.limit > quota.limit {
            return None;
        }
        lease.left -= charge.cost();
        page.set(lease);
        let now = page.now();
        drop(page);
        charge.account().scope().observe().lease_spent(charge.cost());
        Some(lease.decide(now, charge))
    }

    /// Forgets what is leased: the count that it was taken from is gone.
    pub(super) fn reset(&self, scope: &Scope, key: &Key) {
        self.0.leases.entries_of(scope, key).clear();
    }
}

pub(super) struct Page<'a> {
    entries: Entries<'a, Lease>,
    quota: &'a Quota,
}

impl Page<'_> {
    pub(super) fn now(&self) -> i64 {
        self.entries.now()
    }

    /// A number of the key and the quota.
    pub(super) fn id(&self) -> u64 {
        self.entries.hash() ^ self.quota.identity()
    }

    /// The lease whose tokens may be spent, if any are left.
    pub(super) fn alive(&self) -> Option<Lease> {
        let (lease, _) = self.entries.get(self.quota)?;
        lease.is_alive(self.now()).then_some(lease)
    }

    /// `false`: it could not be kept.
    pub(super) fn set(&mut self, lease: Lease) -> bool {
        let kept = lease.taken + (2 * self.quota.window as i64).min(MAX_KEPT);
        let until = if lease.left > 0 { lease.dies.max(kept) } else { kept };
        self.entries.set(self.quota, until, lease)
    }

    /// How many tokens the next lease should have: twice as many if the last one was spent at once,
    /// else half as many.
    pub(super) fn demand(&self, max: u64) -> u64 {
        let Some((last, _)) = self.entries.get(self.quota) else { return 1 };
        if self.now() - last.taken <= (self.quota.window as i64 / HOT).min(MAX_HOT) {
            last.demand.saturating_mul(2).min(max)
        } else {
            (last.demand / 2).max(1)
        }
    }
}
