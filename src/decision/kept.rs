//! The numbers of a decision that a kept receipt has, to correct the charge in another process.

use super::{Decision, Details, Label, LimitName, LineDetails, MAX_INLINE, Usage, Verdict};
use crate::quota::{Anchor, Quota, Quotas, Span};
use crate::window::MAX;

const DAY_MS: i64 = 86_400_000;

/// The time, the tokens, a bit for each quota that took them from a count that other keys share;
/// and for each quota the window, its count, and the window that covers the tokens.
pub(crate) type KeptDecision = (i64, u64, u8, Vec<[i64; 5]>);

impl Decision {
    pub(crate) fn to_kept(&self) -> KeptDecision {
        let of = |(i, usage): (usize, &Usage)| {
            let covered = self.governing_line().covering_window(i);
            let Span { start, end } = usage.span();
            [start, end, usage.used, covered.start, covered.end]
        };
        let windows = self.usage().iter().enumerate().map(of).collect();
        (self.line.now, self.granted(), self.line.shared, windows)
    }

    /// Returns `None` if no decision under these quotas can have these numbers.
    pub(crate) fn from_kept(name: LimitName, quotas: &Quotas, kept: &KeptDecision) -> Option<Self> {
        let &(now, granted, shared, ref windows) = kept;
        let is_possible = |(quota, window)| is_possible(quota, now, granted, window);
        if windows.len() != quotas.len()
            || shared >> windows.len() > 0
            || !(0..=MAX).contains(&now)
            || !quotas.iter().zip(windows).all(is_possible)
        {
            return None;
        }
        let mut details = LineDetails::from_usage(&[]);
        let mut covered = [Span::default(); Quotas::MAX];
        for (i, (quota, &[start, end, used, covered_start, covered_end])) in
            quotas.iter().zip(windows).enumerate()
        {
            details.standings[i] = Usage { limit: quota.limit, start, end, used };
            covered[i] = Span { start: covered_start, end: covered_end };
        }
        details.covered = Some(covered);
        let later = |[start, _, _, covered, _]: &[i64; 5]| (covered > start).then_some(*covered);
        let verdict = match windows.iter().filter_map(later).max() {
            Some(ready_at) => Verdict::Reserved { ready_at },
            None => Verdict::Passed,
        };
        let label = Label { name, periods: quotas.periods() };
        let mut decision = Self::new(label, now, granted, [Usage::NONE; MAX_INLINE], windows.len());
        (decision.line.verdict, decision.line.shared) = (verdict, shared);
        decision.details = Some(Box::new(Details::Line(details)));
        decision.govern_by_tightest();
        Some(decision)
    }
}

fn is_possible(quota: &Quota, now: i64, granted: u64, numbers: &[i64; 5]) -> bool {
    let &[start, end, used, covered_start, covered_end] = numbers;
    let length = quota.window as i64;
    // Windows of a calendar differ in length, by the days of months and years and by changes of the
    // clock. The first window of a key that came from a shared count begins late.
    let (most, calendar) = match quota.anchor {
        Anchor::Calendar(calendar) => (length + 2 * DAY_MS, Some(calendar)),
        _ => (length, None),
    };
    let is_window = |start: i64, end: i64| {
        let is_length = |length: i64| match calendar {
            Some(days) => length <= most || days.around(start) == Span { start, end },
            None => length == most || length < most && end == MAX,
        };
        (-most..=MAX).contains(&start) && (start..=MAX).contains(&end) && is_length(end - start)
    };
    // After the clock stepped back by less than a window, it is at most one window earlier.
    let runs = start.saturating_sub(2 * most) <= now && now <= end;

    // All of the tokens are covered within this number of windows.
    let limit = quota.limit as i64;
    let windows =
        (used.saturating_sub(limit).max(0) as u64).div_ceil(quota.limit.max(1)).max(1) as i64;
    let latest = windows.saturating_mul(most).saturating_add(start).min(MAX);
    let is_covered = if covered_start > start {
        let on_grid = calendar.is_some() || covered_start.saturating_sub(start) % length == 0;
        quota.max_reserved > 0
            && (covered_start <= latest || end == MAX)
            && (on_grid || covered_start == MAX)
    } else {
        (covered_start, covered_end) == (start, end)
    };
    let least_used = (limit - quota.capacity as i64).min(0);
    let most_used = if granted == 0 { MAX } else { limit + quota.max_reserved as i64 };
    is_window(start, end)
        && is_window(covered_start, covered_end)
        && runs
        && is_covered
        && granted <= Quota::MAX_TOKENS
        && (least_used + granted as i64..=most_used).contains(&used)
}
