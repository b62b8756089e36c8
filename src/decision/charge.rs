//! How a charge is decided over all quotas of a key (S6).

use crate::quota::{Quotas, Span};
use crate::window::{State, Window};

use super::standing::Usage;
use super::{Decision, Several, Verdict};

/// A charge over all quotas of a key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ask {
    pub(crate) cost: u64,
    pub(crate) reserve: bool,
    pub(crate) up_to: bool,
    /// Only look: the standings are those before the charge.
    pub(crate) peek: bool,
}

impl Ask {
    /// Whether it is for its cost, now, or not at all.
    #[inline]
    pub(crate) fn is_plain(&self) -> bool {
        !(self.reserve || self.up_to || self.peek)
    }
}

impl Decision {
    /// The same as [`over`](Self::over) for a plain charge in a [running](Window::running) window:
    /// the decision, and what is used then if that changes.
    #[inline(always)]
    pub(crate) fn running(now: i64, window: &Window<'_>, cost: u64) -> (Self, Option<i64>) {
        let mut governing = Usage::of(window);
        let (granted, verdict) = if window.fits(cost, false) {
            governing.used = window.used_after(cost);
            (cost, Verdict::Passed)
        } else if cost <= governing.limit() {
            (0, Verdict::Refused { retry_at: window.end() })
        } else {
            (0, Verdict::RefusedForGood)
        };
        let refusing = u8::from(verdict != Verdict::Passed);
        let (all, shared, local) = (None, 0, false);
        let decision = Self { now, granted, verdict, governing, all, refusing, shared, local };
        (decision, (granted > 0).then_some(governing.used))
    }

    /// All of them pass, or none (S6). `windows` has a window for each quota, at most `N`; with the
    /// decision come the states to write, in their order.
    #[inline(always)]
    pub(crate) fn over<const N: usize>(
        now: i64,
        windows: &[Window<'_>],
        ask: Ask,
    ) -> (Self, Option<[State; N]>) {
        let mut cost = ask.cost;
        if ask.up_to {
            let available = windows.iter().map(|window| window.available(ask.reserve)).min();
            // Nothing there: refused as if for the first token.
            cost = cost.min(available.unwrap_or(0).max(1));
        }
        let mut refusing = 0;
        for (i, window) in windows.iter().enumerate() {
            refusing |= u8::from(!window.fits(cost, ask.reserve)) << i;
        }
        let passes = refusing == 0 && !ask.peek;
        let mut writes = [State::default(); N];
        let mut governing = Usage::of(&windows[0]);
        let mut all = (windows.len() > 1).then(|| {
            let mut several = Several::new(windows.len());
            for (i, window) in windows.iter().enumerate() {
                several.standings[i] = Usage::of(window);
                several.covered[i] = window.span();
            }
            Box::new(several)
        });
        if passes {
            let standings = match &mut all {
                Some(several) => &mut several.standings[..],
                None => std::slice::from_mut(&mut governing),
            };
            for ((window, standing), write) in windows.iter().zip(standings).zip(&mut writes) {
                *write = window.take(cost);
                standing.used = write.used;
            }
        }
        let granted = if passes { cost } else { 0 };
        let (verdict, all) = match granted > 0 && ask.reserve {
            true => {
                let mut copies = [windows[0]; Quotas::MAX];
                copies[..windows.len()].copy_from_slice(windows);
                Self::reserved(copies, windows.len(), granted, governing, all)
            }
            false => (Verdict::Passed, all),
        };
        let (shared, local) = (0, false);
        let mut decision = Self { now, granted, verdict, governing, all, refusing, shared, local };
        if refusing == 0 {
            decision.govern_by_tightest();
        } else {
            decision.refuse(windows, cost, ask.reserve);
        }
        // A charge of nothing writes nothing (S8).
        (decision, (granted > 0).then_some(writes))
    }

    /// Finds out when what was taken is covered. It points to nothing of a decision, which would
    /// then be in memory instead of registers where nothing is reserved.
    #[inline(never)]
    fn reserved(
        windows: [Window<'_>; Quotas::MAX],
        len: usize,
        granted: u64,
        governing: Usage,
        all: Option<Box<Several>>,
    ) -> (Verdict, Option<Box<Several>>) {
        let mut covered = [Span::default(); Quotas::MAX];
        let mut latest = None;
        for (covered, window) in covered.iter_mut().zip(&windows[..len]) {
            *covered = window.covered(granted);
            if covered.start > window.start() {
                latest = latest.max(Some(covered.start));
            }
        }
        let Some(ready_at) = latest else { return (Verdict::Passed, all) };
        let mut all = all.unwrap_or_else(|| Box::new(Several::of_one(governing)));
        all.covered = covered;
        (Verdict::Reserved { ready_at }, Some(all))
    }

    #[inline(always)]
    fn refuse(&mut self, windows: &[Window<'_>], cost: u64, reserve: bool) {
        let mut latest = None;
        let refusing = self.refusing;
        for (i, window) in windows.iter().enumerate().filter(|(i, _)| refusing >> i & 1 == 1) {
            let verdict = match window.retry_at(cost, reserve) {
                Some(retry_at) => Verdict::Refused { retry_at },
                None => Verdict::RefusedForGood,
            };
            let rank = (verdict, window.end());
            if latest.is_none_or(|latest| rank > latest) {
                latest = Some(rank);
                self.verdict = verdict;
                self.govern_by(i);
            }
        }
    }
}

impl Several {
    /// That of a single quota.
    pub(super) fn of_one(standing: Usage) -> Self {
        let mut several = Self::new(1);
        several.standings[0] = standing;
        several.covered[0] = standing.span();
        several
    }

    fn new(len: usize) -> Self {
        Self {
            standings: [Usage::NONE; Quotas::MAX],
            covered: [Span::default(); Quotas::MAX],
            len: len as u8,
            governing: 0,
            refuser: None,
        }
    }
}
