//! How a charge is decided over all quotas of a key (S6).

use crate::quota::{Quotas, Span};
use crate::window::{State, Window};

use super::Decision;
use super::beside::{All, FEW, Several, Verdict};
use super::standing::Usage;

/// A charge over all quotas of a key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ask {
    pub(crate) cost: u64,
    pub(crate) reserve: bool,
    pub(crate) up_to: bool,
    /// Only look: the standings are those before the charge.
    pub(crate) peek: bool,
    /// Tokens may be returned, which decides nothing here.
    pub(crate) refundable: bool,
    /// Nor does this: the tokens are taken from the store itself.
    pub(crate) unleased: bool,
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

    /// The same for a charge that is known to fit.
    #[inline(always)]
    pub(crate) fn running_passed(now: i64, window: &Window<'_>, cost: u64) -> (Self, i64) {
        let used = window.used() + cost as i64;
        let usage = Usage { used, ..Usage::of(window) };
        (Self::new(now, cost, [usage, Usage::NONE], 1), used)
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
            decision.all = Some(Box::new(All::Quotas(Several::of(&standings))));
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
    ) -> (Self, [Option<State>; N]) {
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
        let reserved = if refusing == 0 && ask.reserve && cost > 0 {
            Reserved::over(windows, cost)
        } else {
            None
        };
        if let Some(Reserved { late: true, short, .. }) = reserved {
            refusing = short;
        }
        let granted = if refusing == 0 && !ask.peek { cost } else { 0 };
        let mut writes = [None; N];
        let mut standings = [Usage::NONE; Quotas::MAX];
        for ((window, standing), write) in windows.iter().zip(&mut standings).zip(&mut writes) {
            *standing = Usage::of(window);
            // A charge of nothing takes nothing (S8), as does one that is refused.
            if granted > 0 {
                let state = window.take(granted);
                standing.used = state.used;
                *write = Some(state);
            } else if !ask.peek {
                *write = window.settled();
            }
        }
        let mut decision = Self::new(now, granted, [standings[0], standings[1]], windows.len());
        if N > FEW && windows.len() > FEW {
            decision.all = Some(Box::new(All::Quotas(Several::of(&standings))));
        }
        match reserved {
            _ if refusing == 0 => {
                decision.govern_by_tightest();
                if let Some(Reserved { ready_at, covered, .. }) = reserved.filter(|_| granted > 0) {
                    decision.verdict = Verdict::Reserved { ready_at };
                    decision.several().covered = Some(covered);
                }
            }
            Some(Reserved { ready_at, last, .. }) => {
                decision.refusing = refusing;
                decision.verdict = Verdict::Refused { retry_at: ready_at };
                decision.govern_by(last);
            }
            None => {
                decision.refusing = refusing;
                decision.refuse(windows, cost, ask.reserve);
            }
        }
        (decision, writes)
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

/// What is taken of later windows (S13).
struct Reserved {
    /// The window in which the tokens of each quota are covered.
    covered: [Span; Quotas::MAX],
    ready_at: i64,
    /// A bit for each quota whose tokens are short.
    short: u8,
    /// The one of these that is covered last.
    last: usize,
    /// A quota would count the tokens in a window that has ended when another one covers them.
    late: bool,
}

impl Reserved {
    /// `None`: nothing is.
    #[inline(never)]
    fn over(windows: &[Window<'_>], cost: u64) -> Option<Self> {
        let mut reserved = Self {
            covered: [Span::default(); Quotas::MAX],
            ready_at: 0,
            short: 0,
            last: 0,
            late: false,
        };
        let mut latest = None;
        for (i, window) in windows.iter().enumerate() {
            let covered = window.covered(cost);
            reserved.covered[i] = covered;
            if covered.start > window.start() {
                reserved.short |= 1 << i;
                let rank = (covered.start, window.end());
                if latest.is_none_or(|latest| rank > latest) {
                    (latest, reserved.last) = (Some(rank), i);
                }
            }
        }
        (reserved.ready_at, _) = latest?;
        let others = |i: usize| (0..windows.len()).filter(move |other| *other != i);
        let ends = |i: usize| others(i).map(|i| reserved.covered[i].end).min().unwrap_or(i64::MAX);
        // Each with the others: a window may end where it begins, when both saturate.
        reserved.late = (0..windows.len())
            .any(|i| reserved.short >> i & 1 == 1 && reserved.covered[i].start >= ends(i));
        Some(reserved)
    }
}

impl Several {
    pub(super) fn of(usage: &[Usage]) -> Self {
        let mut standings = [Usage::NONE; Quotas::MAX];
        standings[..usage.len()].copy_from_slice(usage);
        Self { standings, covered: None, states: None, refuser: None }
    }
}
