//! The numbers of a decision that a kept receipt has, to correct the charge in another process.

use super::{Decision, Label, LimitName, Usage, Verdict};
use crate::quota::{Quotas, Span};
use crate::window::MAX;

/// The time, the tokens, a bit for each quota that took them from a count that other keys share;
/// and for each quota the window, its count, and the window that covers the tokens.
pub(crate) type KeptDecision = (i64, u64, u8, Vec<[i64; 5]>);

impl Decision {
    pub(crate) fn to_kept(&self) -> KeptDecision {
        let of = |(i, usage): (usize, &Usage)| {
            let covered = self.covering_window(i);
            let Span { start, end } = usage.span();
            [start, end, usage.used, covered.start, covered.end]
        };
        let windows = self.usage().iter().enumerate().map(of).collect();
        (self.now, self.granted(), self.overflow, windows)
    }

    /// Returns `None` if no decision can have these numbers.
    pub(crate) fn from_kept(name: LimitName, quotas: &Quotas, kept: &KeptDecision) -> Option<Self> {
        let &(now, granted, overflow, ref windows) = kept;
        if windows.len() != quotas.len()
            || overflow >> windows.len() > 0
            || !(0..=MAX).contains(&now)
            || !windows.iter().all(|window| is_possible(granted, window))
        {
            return None;
        }
        let label = Label { name, periods: quotas.periods };
        let mut decision = Self::new(label, now, granted, [Usage::NONE], windows.len());
        let mut covered = [Span::default(); Quotas::MAX];
        for (i, (quota, &[start, end, used, covered_start, covered_end])) in
            quotas.iter().zip(windows).enumerate()
        {
            decision.line_details_mut().usage[i] = Usage { limit: quota.limit, start, end, used };
            covered[i] = Span { start: covered_start, end: covered_end };
        }
        decision.line_details_mut().covered = Some(covered);
        let later = |[start, _, _, covered, _]: &[i64; 5]| (covered > start).then_some(*covered);
        if let Some(ready_at) = windows.iter().filter_map(later).max() {
            decision.verdict = Verdict::Reserved { ready_at };
        }
        decision.overflow = overflow;
        decision.govern_by_tightest();
        Some(decision)
    }
}

/// Returns whether the arithmetic can rely on these numbers.
fn is_possible(granted: u64, numbers: &[i64; 5]) -> bool {
    let &[start, end, used, covered_start, covered_end] = numbers;
    let is_window = |start: i64, end: i64| -MAX <= start && start <= end && end <= MAX;
    let is_covered = is_window(covered_start, covered_end) && start <= covered_start;
    is_window(start, end) && is_covered && (-MAX..=MAX).contains(&used) && granted <= MAX as u64
}
