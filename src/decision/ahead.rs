//! Decisions for requests that have to wait until others have passed.

use super::{Decision, Verdict};
use crate::quota::{Quota, Quotas, Span};
use crate::window::Window;

impl Decision {
    /// Returns when further tokens of one limit could all have passed, at the earliest. The
    /// decision has one line.
    pub(crate) fn earliest_ms(&self, quotas: &Quotas, tokens: u64) -> i64 {
        let starts = quotas
            .iter()
            .enumerate()
            .map(|(i, quota)| self.covering_window_of(i, quota, tokens).start);
        starts.max().unwrap_or(self.line.now)
    }

    /// Returns the refusal, `later` milliseconds after this decision, of a request that would have
    /// to wait until further tokens have passed, its own included. `ahead` has the quotas of each
    /// line, and these tokens.
    pub(crate) fn refusal_behind<'a>(
        &self,
        ahead: impl Fn(usize) -> Option<(&'a Quotas, u64)>,
        later: i64,
    ) -> Self {
        let refuse = |governing: Option<usize>| {
            self.clone().map_lines(|place, of| match ahead(place) {
                Some((quotas, tokens)) => {
                    of.refusal_in_line(quotas, tokens, later, governing == Some(place))
                }
                None => of,
            })
        };
        let refusal = refuse(None);
        // By now there may be room. The line that governs still refuses.
        if refusal.allowed() { refuse(Some(self.governing_place())) } else { refusal }
    }

    /// Returns the decision of one line when further tokens have passed: a refusal if they don't
    /// fit into the current windows, or in any case if `refuse`.
    fn refusal_in_line(mut self, quotas: &Quotas, tokens: u64, later: i64, refuse: bool) -> Self {
        (self.line.cost, self.line.now) = (0, self.line.now.saturating_add(later));
        let mut latest = (self.retry_at_ms().unwrap_or(self.line.now), self.reset_at_ms());
        for (i, quota) in quotas.iter().enumerate() {
            let (start, end) =
                (self.covering_window_of(i, quota, tokens).start, self.usage()[i].end());
            if start >= end {
                self.line.refusing |= 1 << i;
                if (start, end) > latest {
                    latest = (start, end);
                    self.govern_by(i);
                }
            }
        }
        if self.line.refusing == 0 && !refuse {
            return self;
        }
        self.line.refusing |= u8::from(self.line.refusing == 0) << self.line.governing;
        self.line.verdict = Verdict::Refused { retry_at: latest.0.max(self.line.now) };
        self
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
