//! What a decision says of requests in a line: a charge may cover several of them, and those behind
//! have to wait.

use super::Decision;
use super::beside::Verdict;
use crate::quota::{MAX_TOKENS, Quota, Quotas, Span};
use crate::window::Window;

impl Decision {
    /// The decision of one of the requests that a charge covers, after others have got `before`
    /// tokens of it.
    pub(crate) fn part(&self, before: u64, cost: u64) -> Self {
        let mut part = self.clone().with_cost(before + cost);
        part.granted = cost;
        part
    }

    /// The end of the first of the windows that the tokens were taken from, in milliseconds.
    pub(crate) fn good_until_ms(&self) -> i64 {
        self.usage().iter().map(|usage| usage.end()).min().unwrap_or(0)
    }

    /// When further tokens could all have passed, at the earliest.
    pub(crate) fn earliest_ms(&self, quotas: &Quotas, tokens: u64) -> i64 {
        let starts =
            quotas.iter().enumerate().map(|(i, quota)| self.covers(i, quota, tokens).start);
        starts.chain(self.retry_at_ms()).max().unwrap_or(self.now)
    }

    /// The refusal of a request that would have to wait until further tokens have passed, its own
    /// among them, `later` milliseconds after this decision.
    pub(crate) fn refusal_behind(&self, quotas: &Quotas, tokens: u64, later: i64) -> Self {
        let mut refusal = Self { granted: 0, now: self.now.saturating_add(later), ..self.clone() };
        let mut latest = (self.retry_at_ms().unwrap_or(refusal.now), self.reset_at_ms());
        for (i, quota) in quotas.iter().enumerate() {
            let (start, end) = (self.covers(i, quota, tokens).start, self.usage()[i].end());
            if start >= end {
                refusal.refusing |= 1 << i;
                if (start, end) > latest {
                    latest = (start, end);
                    refusal.govern_by(i);
                }
            }
        }
        refusal.refusing |= u8::from(refusal.refusing == 0) << refusal.governing;
        refusal.verdict = Verdict::Refused { retry_at: latest.0.max(refusal.now) };
        refusal
    }

    /// The window of one quota in which further tokens are covered.
    fn covers(&self, i: usize, quota: &Quota, tokens: u64) -> Span {
        let usage = &self.usage()[i];
        // A count above the limit may end with its window (S5).
        let used = usage.used.min(quota.limit() as i64);
        Window::known(quota, usage.span(), used, None).covered(tokens.min(MAX_TOKENS))
    }
}
