//! The last answer of the store to a request of a line: [`LastAnswer`].

use std::time::Duration;

use super::claim::{Terms, Tokens};
use crate::decision::Decision;
use crate::timer::Instant;

/// The longest delay of a charge in favor of other nodes.
const MOST_COURTESY: Duration = Duration::from_millis(50);

/// The last answer of the store. It says when further tokens can pass.
pub(super) struct LastAnswer {
    pub(super) decision: Decision,
    pub(super) terms: Terms,
    /// The tokens that were charged.
    pub(super) cost: Tokens,
    /// When the charge was sent. Times in the decision count from here: a charge sent a second
    /// later reaches the store a second later.
    pub(super) sent: Instant,
    /// How long the answer took.
    pub(super) took: Duration,
}

impl LastAnswer {
    pub(super) fn refuses(&self) -> bool {
        !self.decision.allowed()
    }

    /// Returns when these further tokens can have passed, at the earliest; `None`: never.
    pub(super) fn due(&self, tokens: &Tokens) -> Option<Instant> {
        let exact = self.cost == *tokens;
        let costs = self.cost.costs().zip(tokens.costs());
        let after = self.terms.iter().zip(costs).enumerate().map(|(place, (quotas, costs))| {
            let (cost, tokens) = costs;
            // A limit without a decision is no reason to wait.
            let Some(of) = self.decision.at(place) else { return 0 };
            // Fewer tokens may pass before.
            let retry_at = of.retry_at_ms().filter(|_| cost <= tokens);
            let at = match retry_at {
                Some(retry_at) if exact => retry_at,
                _ => of.earliest_ms(quotas, tokens).max(retry_at.unwrap_or(0)),
            };
            // By the limit's own clock: limits that are charged in turns have different ones.
            at.saturating_sub(of.now_ms())
        });
        let after = after.max().unwrap_or(0).max(0);
        self.sent.checked_add(Duration::from_millis(after as u64))
    }

    /// Returns by how much a head that is due then delays its charge in favor of other nodes: the
    /// older it is, the less. So the store's nearest node does not serve all of its line first.
    pub(super) fn courtesy(&self, age: Duration, max_wait: Duration) -> Duration {
        let window = self.window();
        let most = (window / 16).min(MOST_COURTESY).min(max_wait / 2);
        most.div_f64(1.0 + age.div_duration_f64(window))
    }

    /// Returns the window of the quota that governs.
    pub(super) fn window(&self) -> Duration {
        self.decision.usage()[self.decision.governing()].window()
    }

    /// Returns the refusal of a request that is due when these further tokens have passed.
    pub(super) fn refusal(&self, tokens: &Tokens, now: Instant) -> Decision {
        let later = now.saturating_duration_since(self.sent).as_millis() as i64;
        let ahead = |place| Some((self.terms.get(place)?, tokens.costs().nth(place)?));
        self.decision.refusal_behind(ahead, later)
    }
}
