//! The tokens of a line: the last answer, a charge in flight, and tokens granted but not used yet.

use std::time::Duration;

use super::claim::{LimitSet, Term, Terms, Tokens};
use crate::decision::Decision;
use crate::store::Reply;
use crate::timer::Instant;

/// The longest delay of a charge in favor of other nodes, for the youngest requests.
const MOST_COURTESY: Duration = Duration::from_millis(50);

/// The last answer of the store.
pub(super) struct LastAnswer {
    pub(super) decision: Decision,
    pub(super) terms: Terms,
    /// The tokens that were charged, if all or none were to be granted.
    pub(super) cost: Option<Tokens>,
    /// When the charge was sent. Times in the decision count from here: a charge sent a second
    /// later reaches the store a second later.
    pub(super) sent: Instant,
    /// `true` if tokens may have come back since.
    pub(super) stale: bool,
    /// `true` once the requests that joined before this answer were judged by it.
    pub(super) judged: bool,
}

impl LastAnswer {
    /// Returns when these further tokens can have passed, at the earliest; `None`: never.
    pub(super) fn due(&self, tokens: &Tokens) -> Option<Instant> {
        let exact = self.decision.retry_at_ms().filter(|_| self.cost.as_ref() == Some(tokens));
        let at = exact.unwrap_or_else(|| self.earliest_ms(tokens));
        let after = at.saturating_sub(self.decision.now_ms()).max(0);
        self.sent.checked_add(Duration::from_millis(after as u64))
    }

    fn earliest_ms(&self, tokens: &Tokens) -> i64 {
        self.earliest_of_each(tokens).max().unwrap_or(self.decision.now_ms())
    }

    fn earliest_of_each(&self, tokens: &Tokens) -> impl Iterator<Item = i64> {
        self.terms.iter().zip(tokens.costs()).map(|(term, tokens)| {
            let decision = self.decision.for_limit(&term.name);
            // A limit without a decision is no reason to wait.
            decision.map_or(i64::MIN, |decision| decision.earliest_ms(&term.quotas, tokens))
        })
    }

    /// Returns whether one of these limits delays a request of this cost. All limits, after a
    /// change of quotas, always do.
    pub(super) fn waits_for(&self, limits: LimitSet, cost: &Tokens) -> bool {
        if limits.is_empty() || limits.is_all() {
            return limits.is_all();
        }
        let mut earliest = self.earliest_of_each(cost).enumerate();
        earliest.any(|(i, at)| limits.contains(i) && at > self.decision.now_ms())
    }

    /// Returns by how much a head delays its charge on a store shared with other nodes, so that
    /// nodes with older requests go first.
    pub(super) fn courtesy_delay(&self, age: Duration, max_wait: Duration) -> Duration {
        let window = self.decision.usage()[self.decision.governing()].window();
        let most = (window / 16).min(MOST_COURTESY).min(max_wait / 2);
        // A logarithm: the older a request is, the less one more window of age counts.
        let rank = |age: Duration| (age.as_secs_f64() / window.as_secs_f64()).ln_1p();
        most.mul_f64((1.0 - rank(age) / rank(max_wait)).clamp(0.0, 1.0))
    }

    /// Returns the refusal of a request that is due when these further tokens have passed.
    pub(super) fn refusal(&self, tokens: &Tokens, now: Instant) -> Decision {
        let later = now.saturating_duration_since(self.sent).as_millis() as i64;
        let ahead = self.terms.iter().zip(tokens.costs());
        let ahead = ahead.map(|(term, tokens)| (&*term.name, &term.quotas, tokens));
        self.decision.refusal_behind(ahead, later)
    }
}

/// A charge in flight.
pub(super) struct ChargeInFlight {
    pub(super) sender: u64,
    /// The last request that the charge covers.
    pub(super) last_covered: u64,
    pub(super) cost: Tokens,
    pub(super) terms: Terms,
    pub(super) sent: Instant,
    /// `None` while a request polls it.
    pub(super) reply: Option<Reply<Decision>>,
    /// The request that polled the reply last, which is woken by it. `None`: the charge was not
    /// sent yet.
    pub(super) polled_by: Option<u64>,
    /// The limits whose tokens may have come back since the charge was started.
    pub(super) freed: LimitSet,
}

/// Tokens that were granted to the first requests of a line.
pub(super) struct Grant {
    pub(super) decision: Decision,
    pub(super) terms: Terms,
    /// Tokens already given to requests.
    pub(super) given: Tokens,
    pub(super) left: Tokens,
    /// When the first of the tokens' windows ends.
    pub(super) valid_until: Instant,
}

impl Grant {
    /// Takes the tokens of one request, if enough are left.
    pub(super) fn take_part(&mut self, cost: &Tokens) -> Option<Decision> {
        if !cost.fits_in(&self.left) {
            return None;
        }
        let part = self.part(&self.given, cost);
        self.left -= cost;
        self.given += cost;
        Some(part)
    }

    /// Returns the decision over the tokens that are left.
    pub(super) fn unused_part(&self) -> Decision {
        self.part(&self.given, &self.left)
    }

    /// Returns the decision over the tokens that were given.
    pub(super) fn used_part(&self) -> Decision {
        self.part(&self.given.zeroed(), &self.given)
    }

    fn part(&self, before: &Tokens, cost: &Tokens) -> Decision {
        part_decision(&self.decision, &self.terms, before, cost)
    }
}

/// Returns the decision for one of the requests that a charge covers; those before it got `before`.
pub(super) fn part_decision(
    decision: &Decision,
    terms: &Terms,
    before: &Tokens,
    cost: &Tokens,
) -> Decision {
    let parts = terms.iter().zip(before.costs().zip(cost.costs()));
    decision.part_of_request(parts.map(|(term, (before, cost))| (&*term.name, before, cost)))
}

/// Returns how many tokens of this cost a decision has granted. A limit whose store failed has no
/// decision, and does not limit a charge that has passed.
pub(super) fn granted_tokens(decision: &Decision, terms: &Terms, cost: &Tokens) -> Tokens {
    match decision.governing_limit() {
        None => Tokens::One(decision.granted().into()),
        Some(_) => {
            let granted = |(term, cost): (&Term, u64)| match decision.for_limit(&term.name) {
                Some(of) => of.granted(),
                None if decision.allowed() => cost,
                None => 0,
            };
            Tokens::of(&terms.iter().zip(cost.costs()).map(granted).collect::<Vec<_>>())
        }
    }
}
