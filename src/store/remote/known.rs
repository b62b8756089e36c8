//! The refusals of a store elsewhere that a process remembers (S34): [`Known`], behind locks. What
//! finds no room takes that of the others of its shard, which are then asked for once more.

use std::collections::HashMap;
use std::iter;
use std::time::Duration;

use super::super::account::Scope;
use super::super::charge::{Charge, line_windows};
use super::super::sharded::Sharded;
use crate::decision::{Decision, Usage};
use crate::key::Key;
use crate::observe::Event;
use crate::quota::{Quota, Quotas};
use crate::sync::{self, Instant, Mutex};
use crate::window::Window;

/// Keys, some 25 MB of them at most.
const KEYS_OF_A_SHARD: usize = 64;
const SHARDS: usize = 1_024;
/// Refusals of a key, for all plans that it is charged under, and costs.
const MAX_OF_A_KEY: usize = 4;
/// No refusal is remembered for longer.
pub(super) const MOST: Duration = Duration::from_secs(60);

pub(super) struct Known(Sharded<Mutex<OfShard>>);

/// How often this process has changed a key of the shard, since what was asked before is not
/// remembered, and the refusals of its keys.
type OfShard = (u64, HashMap<u64, Vec<Remembered>>);

#[derive(Clone)]
struct Remembered {
    quotas: Quotas,
    reserve: bool,
    cost: u64,
    refusal: Decision,
    sent: Instant,
    until: Instant,
}

/// When a charge was sent, how often a key of its shard had been changed then, and for how long its
/// handle remembers a refusal.
pub(super) type Sent = (Instant, u64, Duration);

impl Default for Known {
    fn default() -> Self {
        Self(Sharded::new(SHARDS))
    }
}

impl Known {
    /// By a refusal that was asked for less than `remember` ago. The error says when the store is
    /// called.
    pub(super) fn look(&self, charge: &Charge<'_>, remember: Duration) -> Result<Decision, Sent> {
        let (account, at) = (charge.account(), Instant::now());
        let (shard, hash) = self.0.shard_of(account.scope, account.key);
        let of_shard = sync::lock(shard);
        let (changes, refusals) = &*of_shard;
        let sent = (at, *changes, remember);
        let all = refusals.get(&hash).into_iter().flatten().filter(|of| of.is_young(at, remember));
        let mut refusing = all.clone().filter(|known| known.refuses(charge));
        let known = refusing.clone().find(|known| known.tells_when_passes(charge.cost()));
        // Further costs don't ask. If limits have changed, they may be told to wait too long.
        let any = || refusing.next().filter(|_| all.count() == MAX_OF_A_KEY);
        let known = known.or_else(any).ok_or(sent)?.clone();
        drop(of_shard);
        let refusal = known.decide(charge, at);
        // Refused beside a limit without reservations, while alone the charge could reserve.
        if refusal.is_allowed() {
            return Err(sent);
        }
        account.scope.observe().event(Event::RememberedRefusal, 1);
        Ok(refusal)
    }

    pub(super) fn note(&self, place: usize, charge: &Charge<'_>, decision: &Decision, sent: Sent) {
        let Some(refusal) = decision.at(place).filter(|of| !of.is_allowed()) else { return };
        let (account, (sent, changes_before, remember)) = (charge.account(), sent);
        // Decided after the charge was sent, by a clock that shows no part of a millisecond.
        let ends = refusal.usage().iter().map(|usage| usage.end).chain(refusal.retry_at_ms());
        let lasts = ends.min().unwrap_or_default().saturating_sub(refusal.now_ms() + 1).max(0);
        let known = Remembered {
            quotas: *account.quotas,
            reserve: charge.may_reserve(),
            cost: charge.cost(),
            until: sent + MOST.min(Duration::from_millis(lasts as u64)),
            refusal: refusal.clone(),
            sent,
        };
        let (shard, hash) = self.0.shard_of(account.scope, account.key);
        let (changes, refusals) = &mut *sync::lock(shard);
        if *changes != changes_before {
            return;
        }
        if refusals.len() >= KEYS_OF_A_SHARD && !refusals.contains_key(&hash) {
            refusals.clear();
        }
        let of_key = refusals.entry(hash).or_default();
        of_key.retain(|other| sent < other.until && !known.replaces(other));
        of_key.sort_by_key(|other| !other.is_young(sent, remember));
        of_key.truncate(MAX_OF_A_KEY - 1);
        of_key.push(known);
    }

    /// Also what is on its way.
    pub(super) fn forget(&self, scope: &Scope, key: &Key) {
        let (shard, hash) = self.0.shard_of(scope, key);
        let (changes, refusals) = &mut *sync::lock(shard);
        *changes += 1;
        refusals.remove(&hash);
    }
}

impl Remembered {
    fn is_young(&self, now: Instant, remember: Duration) -> bool {
        now < self.until && now.saturating_duration_since(self.sent) < remember
    }

    fn refuses(&self, charge: &Charge<'_>) -> bool {
        let of = (*charge.account().quotas, charge.may_reserve());
        self.cost <= charge.cost() && (self.quotas, self.reserve) == of
    }

    /// A count above the limit may end with its window (S5), or be what later windows carry.
    fn tells_when_passes(&self, cost: u64) -> bool {
        let mut of_quotas = self.quotas.iter().zip(self.refusal.usage());
        let ends = |(quota, usage): (&Quota, &Usage)| {
            quota.capacity() == quota.limit() && usage.used <= quota.limit() as i64
        };
        cost == self.cost || !self.reserve && of_quotas.all(ends)
    }

    fn replaces(&self, other: &Self) -> bool {
        (self.quotas, self.reserve) == (other.quotas, other.reserve) && self.cost <= other.cost
    }

    /// By the counts of the answer, at the time that it is by the store's clock.
    fn decide(mut self, charge: &Charge<'_>, at: Instant) -> Decision {
        self.refusal.pass_time(at.saturating_duration_since(self.sent));
        // Another limit may have refused a reservation that this one alone would grant.
        if charge.cost() == self.cost && !self.reserve {
            return self.refusal;
        }
        let usage = self.refusal.usage();
        let window = |i: usize, quota| Window::of_usage(quota, usage[i].span(), usage[i].used);
        let windows: [_; Quotas::MAX] = charge.account().windows(window);
        let line = line_windows(charge.line_at(0), &windows, 0);
        let (now, lines) = (self.refusal.now_ms(), iter::once(line));
        Decision::over_lines::<{ Quotas::MAX }>(now, charge.mode, lines, |_, _, _| {})
    }
}
