//! How a charge is decided over all quotas of a key (S6).

use crate::quota::{Quotas, Span};
use crate::window::{State, Window};

use super::standing::Usage;
use super::{Decision, FEW, Several, Verdict};

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
    /// One that passed.
    #[inline]
    pub(super) fn new(now: i64, granted: u64, few: [Usage; FEW], len: usize) -> Self {
        let (verdict, all, governing) = (Verdict::Passed, None, 0);
        let (len, refusing, shared, local) = (len as u8, 0, 0, false);
        Self { now, granted, verdict, few, all, len, governing, refusing, shared, local }
    }

    /// The same as [`over`](Self::over) for a plain charge in a [running](Window::running) window:
    /// the decision, and what is used then if that changes.
    #[inline(always)]
    pub(crate) fn running(now: i64, window: &Window<'_>, cost: u64) -> (Self, Option<i64>) {
        let mut usage = Usage::of(window);
        let (granted, verdict) = if window.fits(cost, false) {
            usage.used = window.used_after(cost);
            (cost, Verdict::Passed)
        } else if cost <= usage.limit() {
            (0, Verdict::Refused { retry_at: window.end() })
        } else {
            (0, Verdict::RefusedForGood)
        };
        let refusing = u8::from(verdict != Verdict::Passed);
        let decision = Self::new(now, granted, [usage, Usage::NONE], 1);
        (Self { verdict, refusing, ..decision }, (granted > 0).then_some(usage.used))
    }

    /// The same over several windows, if the charge passes.
    #[inline(always)]
    pub(crate) fn all_running<const N: usize>(
        now: i64,
        windows: &[Window<'_>; N],
        cost: u64,
    ) -> Option<Self> {
        if !windows.iter().all(|window| window.fits(cost, false)) {
            return None;
        }
        let mut standings = [Usage::NONE; Quotas::MAX];
        for (standing, window) in standings.iter_mut().zip(windows) {
            *standing = Usage { used: window.used_after(cost), ..Usage::of(window) };
        }
        let mut decision = Self::new(now, cost, [standings[0], standings[1]], N);
        if N > FEW {
            decision.all = Some(Box::new(Several::of(&standings)));
        }
        decision.govern_by_tightest();
        Some(decision)
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
        let mut standings = [Usage::NONE; Quotas::MAX];
        for ((window, standing), write) in windows.iter().zip(&mut standings).zip(&mut writes) {
            *standing = Usage::of(window);
            if passes {
                *write = window.take(cost);
                standing.used = write.used;
            }
        }
        let granted = if passes { cost } else { 0 };
        let mut decision = Self::new(now, granted, [standings[0], standings[1]], windows.len());
        if N > FEW && windows.len() > FEW {
            decision.all = Some(Box::new(Several::of(&standings)));
        }
        if granted > 0 && ask.reserve {
            decision.reserve(windows);
        }
        if refusing == 0 {
            decision.govern_by_tightest();
        } else {
            decision.refusing = refusing;
            decision.refuse(windows, cost, ask.reserve);
        }
        // A charge of nothing writes nothing (S8).
        (decision, (granted > 0).then_some(writes))
    }

    /// Finds out when what was taken is covered.
    #[inline(never)]
    fn reserve(&mut self, windows: &[Window<'_>]) {
        let mut covered = [Span::default(); Quotas::MAX];
        let mut latest = None;
        for (covered, window) in covered.iter_mut().zip(windows) {
            *covered = window.covered(self.granted);
            if covered.start > window.start() {
                latest = latest.max(Some(covered.start));
            }
        }
        if let Some(ready_at) = latest {
            self.verdict = Verdict::Reserved { ready_at };
            Self::all(&mut self.all, &self.few).covered = Some(covered);
        }
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
    pub(super) fn of(usage: &[Usage]) -> Self {
        let mut standings = [Usage::NONE; Quotas::MAX];
        standings[..usage.len()].copy_from_slice(usage);
        Self { standings, covered: None, states: None, refuser: None }
    }
}
