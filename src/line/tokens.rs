//! What a line knows of its tokens: what the last answer told, a charge in flight, and what was
//! granted and is not used yet.

use std::time::Duration;

use super::claim::{Term, Terms, Those, Tokens};
use crate::decision::Decision;
use crate::store::Reply;
use crate::timer::Instant;

/// The youngest requests ask later by this, at most.
const MOST_COURTESY: Duration = Duration::from_millis(50);

/// The last answer.
pub(super) struct Told {
    pub(super) decision: Decision,
    pub(super) terms: Terms,
    /// What was asked for, if that was all or nothing.
    pub(super) cost: Option<Tokens>,
    /// When it was asked. An instant that is a second after the store's answer is a second after
    /// this: a charge that is sent then has as far to go.
    pub(super) sent: Instant,
    /// Tokens may have come back since.
    pub(super) stale: bool,
    /// Those who joined before it have learned whether they have to wait.
    pub(super) judged: bool,
}

impl Told {
    /// When further tokens can have passed, at the earliest. `None`: never.
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
            // A limit of which nothing is known is no reason to wait.
            decision.map_or(i64::MIN, |decision| decision.earliest_ms(&term.quotas, tokens))
        })
    }

    /// Whether one of these limits delays a request of this cost, or quotas have changed.
    pub(super) fn waits_for(&self, limits: Those, cost: &Tokens) -> bool {
        if limits.is_none() || limits.is_all() {
            return limits.is_all();
        }
        let mut earliest = self.earliest_of_each(cost).enumerate();
        earliest.any(|(i, at)| limits.has(i) && at > self.decision.now_ms())
    }

    /// How much later a request asks on a store that serves other nodes, too, so that those with
    /// older ones go first.
    pub(super) fn courtesy(&self, age: Duration, max_wait: Duration) -> Duration {
        let window = self.decision.usage()[self.decision.governing()].window();
        let most = (window / 16).min(MOST_COURTESY).min(max_wait / 2);
        // A window more or less matters less to older ones.
        let rank = |age: Duration| (age.as_secs_f64() / window.as_secs_f64()).ln_1p();
        most.mul_f64((1.0 - rank(age) / rank(max_wait)).clamp(0.0, 1.0))
    }

    /// The refusal of a request that would be due then.
    pub(super) fn refusal(&self, tokens: &Tokens, now: Instant) -> Decision {
        let later = now.saturating_duration_since(self.sent).as_millis() as i64;
        let ahead = self.terms.iter().zip(tokens.costs());
        let ahead = ahead.map(|(term, tokens)| (&*term.name, &term.quotas, tokens));
        self.decision.refusal_behind(ahead, later)
    }
}

/// A charge in flight.
pub(super) struct Asked {
    pub(super) by: u64,
    /// The last one that it covers.
    pub(super) last: u64,
    pub(super) cost: Tokens,
    pub(super) terms: Terms,
    pub(super) sent: Instant,
    /// `None` while it is polled.
    pub(super) reply: Option<Reply<Decision>>,
    /// Who has polled it last, and is woken. `None`: it was not sent yet.
    pub(super) polled_by: Option<u64>,
    /// Tokens of these limits have come back meanwhile.
    pub(super) freed: Those,
}

/// Tokens that were granted to the first of the line.
pub(super) struct Hand {
    pub(super) decision: Decision,
    pub(super) terms: Terms,
    /// What others have got of it.
    pub(super) before: Tokens,
    pub(super) left: Tokens,
    /// Until then they are those of a window that is not over.
    pub(super) good_until: Instant,
}

impl Hand {
    /// The tokens of one request, if there are enough.
    pub(super) fn take(&mut self, cost: &Tokens) -> Option<Decision> {
        if !cost.fits(&self.left) {
            return None;
        }
        let part = self.part(&self.before, cost);
        self.left -= cost;
        self.before += cost;
        Some(part)
    }

    /// What is left of it.
    pub(super) fn rest(&self) -> Decision {
        self.part(&self.before, &self.left)
    }

    /// What the decision was before others got anything of what is left.
    pub(super) fn without_rest(&self) -> Decision {
        self.part(&self.before.none(), &self.before)
    }

    fn part(&self, before: &Tokens, cost: &Tokens) -> Decision {
        part(&self.decision, &self.terms, before, cost)
    }
}

/// The decision of one of the requests that a charge covers, after others have got `before`.
pub(super) fn part(decision: &Decision, terms: &Terms, before: &Tokens, cost: &Tokens) -> Decision {
    let parts = terms.iter().zip(before.costs().zip(cost.costs()));
    decision.part(parts.map(|(term, (before, cost))| (&*term.name, before, cost)))
}

/// How many tokens a decision has granted.
pub(super) fn granted(decision: &Decision, terms: &Terms) -> Tokens {
    match decision.governing_limit() {
        None => Tokens::One(decision.granted().into()),
        Some(_) => {
            let granted = |term: &Term| decision.for_limit(&term.name).map_or(0, |of| of.granted());
            Tokens::of(&terms.iter().map(granted).collect::<Vec<_>>())
        }
    }
}
