//! What a line knows of its tokens: what the last answer told, a charge in flight, and what was
//! granted and is not used yet.

use std::time::Duration;

use crate::decision::Decision;
use crate::quota::Quotas;
use crate::store::Reply;
use crate::timer::Instant;

/// The youngest requests ask later by this, at most.
const MOST_COURTESY: Duration = Duration::from_millis(50);

/// The last answer.
pub(super) struct Told {
    pub(super) decision: Decision,
    pub(super) quotas: Quotas,
    /// What was asked for, if that was all or nothing.
    pub(super) cost: Option<u64>,
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
    pub(super) fn due(&self, tokens: u128) -> Option<Instant> {
        let tokens = u64::try_from(tokens).unwrap_or(u64::MAX);
        let exact = self.decision.retry_at_ms().filter(|_| self.cost == Some(tokens));
        let at = exact.unwrap_or_else(|| self.decision.earliest_ms(&self.quotas, tokens));
        let after = at.saturating_sub(self.decision.now_ms()).max(0);
        self.sent.checked_add(Duration::from_millis(after as u64))
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
    pub(super) fn refusal(&self, tokens: u128, now: Instant) -> Decision {
        let tokens = u64::try_from(tokens).unwrap_or(u64::MAX);
        let later = now.saturating_duration_since(self.sent).as_millis() as i64;
        self.decision.refusal_behind(&self.quotas, tokens, later)
    }
}

/// A charge in flight.
pub(super) struct Asked {
    pub(super) by: u64,
    /// The last one that it covers.
    pub(super) last: u64,
    pub(super) cost: u64,
    pub(super) quotas: Quotas,
    pub(super) sent: Instant,
    /// `None` while it is polled.
    pub(super) reply: Option<Reply<Decision>>,
    /// Who has polled it last, and is woken. `None`: it was not sent yet.
    pub(super) polled_by: Option<u64>,
    /// Tokens have come back meanwhile.
    pub(super) again: bool,
}

/// Tokens that were granted to the first of the line.
pub(super) struct Hand {
    pub(super) decision: Decision,
    pub(super) quotas: Quotas,
    /// What others have got of it.
    pub(super) before: u64,
    pub(super) left: u64,
    /// Until then they are those of a window that is not over.
    pub(super) good_until: Instant,
}

impl Hand {
    /// The tokens of one request, if there are enough.
    pub(super) fn take(&mut self, cost: u64) -> Option<Decision> {
        self.left = self.left.checked_sub(cost)?;
        let part = self.decision.part(self.before, cost);
        self.before += cost;
        Some(part)
    }

    /// What is left of it.
    pub(super) fn rest(&self) -> Decision {
        self.decision.part(self.before, self.left)
    }
}
