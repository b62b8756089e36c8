//! What is kept of a decision whose charge passed, to correct the charge in another process.

use super::standing::Usage;
use super::{Decision, FEW, Several, Verdict};
use crate::quota::{MAX_TOKENS, Quotas, Span};
use crate::window::MAX;

/// The numbers of a decision: when it was made, the tokens, which quotas took them from a count
/// that other keys share, and of each quota the window, what is used in it, and the window that
/// covers the tokens.
pub(crate) type KeptDecision = (i64, u64, u8, Vec<[i64; 5]>);

impl Decision {
    pub(crate) fn to_kept(&self) -> KeptDecision {
        let of = |(i, usage): (usize, &Usage)| {
            let (Span { start, end }, covered) = (usage.span(), self.covered(i));
            [start, end, usage.used, covered.start, covered.end]
        };
        (self.now, self.granted, self.shared, self.usage().iter().enumerate().map(of).collect())
    }

    /// `None`: there can't be such a decision under these quotas.
    pub(crate) fn from_kept(quotas: &Quotas, kept: &KeptDecision) -> Option<Self> {
        let &(now, granted, shared, ref windows) = kept;
        let is_instant = |at: &i64| (0..=MAX).contains(at);
        let are_windows = windows.iter().all(|[start, end, used, covered @ ..]| {
            [start, end].into_iter().chain(covered).all(is_instant)
                && start <= end
                && covered[0] <= covered[1]
                && (-MAX..=MAX).contains(used)
        });
        if windows.len() != quotas.len()
            || !are_windows
            || !is_instant(&now)
            || granted > MAX_TOKENS
        {
            return None;
        }
        let mut several = Several::of(&[]);
        let mut covered = [Span::default(); Quotas::MAX];
        for (i, (quota, &[start, end, used, covered_start, covered_end])) in
            quotas.iter().zip(windows).enumerate()
        {
            several.standings[i] = Usage { limit: quota.limit, start, end, used };
            covered[i] = Span { start: covered_start, end: covered_end };
        }
        several.covered = Some(covered);
        let later = |[start, _, _, covered, _]: &[i64; 5]| (covered > start).then_some(*covered);
        let verdict = match windows.iter().filter_map(later).max() {
            Some(ready_at) => Verdict::Reserved { ready_at },
            None => Verdict::Passed,
        };
        let decision = Self::new(now, granted, [Usage::NONE; FEW], windows.len());
        let mut decision = Self { verdict, all: Some(Box::new(several)), shared, ..decision };
        decision.govern_by_tightest();
        Some(decision)
    }
}
