//! Decisions for requests that have to wait until others have passed.

use super::Decision;
use super::details::Verdict;
use crate::quota::{Quota, Quotas, Span};
use crate::window::Window;

impl Decision {
    /// Returns when further tokens of one limit could all have passed, at the earliest.
    pub(crate) fn earliest_ms(&self, quotas: &Quotas, tokens: u64) -> i64 {
        let starts = quotas
            .iter()
            .enumerate()
            .map(|(i, quota)| self.covering_window_of(i, quota, tokens).start);
        starts.max().unwrap_or(self.now)
    }

    /// Returns the refusal, `later` milliseconds after this decision, of a request that would have
    /// to wait until further tokens have passed, its own included. `ahead` has each limit's name,
    /// its quotas and these tokens.
    pub(crate) fn refusal_behind<'a>(
        &self,
        ahead: impl Iterator<Item = (&'a str, &'a Quotas, u64)> + Clone,
        later: i64,
    ) -> Self {
        let governing = self.governing_limit();
        let ahead = ahead.map(|(name, quotas, tokens)| {
            let governs = governing.is_none_or(|governing| governing == name);
            (name, (quotas, tokens, governs))
        });
        let refusal = self.map_limits(ahead.clone(), |of, (quotas, tokens, _)| {
            of.refusal_in_limit(quotas, tokens, later, false)
        });
        if !refusal.allowed() {
            return refusal;
        }
        // By now there may be room. The limit that governs still refuses.
        self.map_limits(ahead, |of, (quotas, tokens, governs)| {
            of.refusal_in_limit(quotas, tokens, later, governs)
        })
    }

    /// Returns the decision of one limit when further tokens have passed: a refusal if they don't
    /// fit into the current windows, or in any case if `refuse`.
    fn refusal_in_limit(&self, quotas: &Quotas, tokens: u64, later: i64, refuse: bool) -> Self {
        let mut refusal = Self { cost: 0, now: self.now.saturating_add(later), ..self.clone() };
        let mut latest = (self.retry_at_ms().unwrap_or(refusal.now), self.reset_at_ms());
        for (i, quota) in quotas.iter().enumerate() {
            let (start, end) =
                (self.covering_window_of(i, quota, tokens).start, self.usage()[i].end());
            if start >= end {
                refusal.refusing |= 1 << i;
                if (start, end) > latest {
                    latest = (start, end);
                    refusal.govern_by(i);
                }
            }
        }
        if refusal.refusing == 0 && !refuse {
            return refusal;
        }
        refusal.refusing |= u8::from(refusal.refusing == 0) << refusal.governing;
        refusal.verdict = Verdict::Refused { retry_at: latest.0.max(refusal.now) };
        refusal
    }

    /// Returns the window of one quota that covers further tokens.
    fn covering_window_of(&self, i: usize, quota: &Quota, tokens: u64) -> Span {
        let usage = &self.usage()[i];
        // A count above the limit may end with its window (S5).
        let used = usage.used.min(quota.limit() as i64);
        Window::known(quota, usage.span(), used, None)
            .covering_window(tokens.min(Quota::MAX_TOKENS))
    }
}
