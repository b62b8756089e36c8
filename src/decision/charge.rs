//! The decision of a charge over all quotas of a key (S6).

use crate::quota::{Quotas, Span};
use crate::window::{State, Window};

use super::Decision;
use super::details::{Details, MAX_INLINE, QuotaDetails, Verdict};
use super::standing::Usage;

/// The tokens that a charge asks for, and its options.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ask {
    pub(crate) cost: u64,
    pub(crate) reserve: bool,
    /// `true` if nothing is taken: the standings are those before the charge.
    pub(crate) peek: bool,
}

impl Ask {
    /// Returns whether the charge takes all of its cost now, or nothing.
    #[inline]
    pub(crate) fn is_plain(&self) -> bool {
        !(self.reserve || self.peek)
    }
}

impl Decision {
    /// Creates the decision of a charge that passed.
    #[inline]
    pub(super) fn new(now: i64, cost: u64, inline: [Usage; MAX_INLINE], len: usize) -> Self {
        let (verdict, details, governing) = (Verdict::Passed, None, 0);
        let (len, refusing, shared, local, refuser) = (len as u8, 0, 0, false, None);
        Self {
            now,
            cost,
            verdict,
            inline,
            details,
            len,
            governing,
            refusing,
            shared,
            local,
            refuser,
        }
    }

    /// The same as [`over`](Self::over) for a plain charge that fits in a
    /// [running](Window::running) window. Returns the decision and the new count.
    #[inline(always)]
    pub(crate) fn running_passed(now: i64, window: &Window<'_>, cost: u64) -> (Self, i64) {
        let used = window.used() + cost as i64;
        let usage = Usage { used, ..Usage::from_window(window) };
        (Self::new(now, cost, [usage, Usage::NONE], 1), used)
    }

    /// The same as [`running_passed`](Self::running_passed) over several windows; `None` if the
    /// charge is refused.
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
            *standing = Usage { used: window.used_after(cost), ..Usage::from_window(window) };
        }
        let mut decision = Self::new(now, cost, [standings[0], standings[1]], N);
        if N > MAX_INLINE {
            decision.details =
                Some(Box::new(Details::Quotas(QuotaDetails::from_usage(&standings))));
        }
        decision.govern_by_tightest();
        Some(decision)
    }

    /// Decides a charge over all quotas: all grant it, or none does (S6). `windows` has a window
    /// for each quota, at most `N`. Returns the decision and the states to write, in the same
    /// order.
    #[inline(always)]
    pub(crate) fn over<const N: usize>(
        now: i64,
        windows: &[Window<'_>],
        ask: Ask,
    ) -> (Self, [Option<State>; N]) {
        let (cost, mut refusing) = (ask.cost, 0);
        for (i, window) in windows.iter().enumerate() {
            refusing |= u8::from(!window.fits(cost, ask.reserve)) << i;
        }
        let reserved = if refusing == 0 && ask.reserve && cost > 0 {
            Reservation::find(windows, cost)
        } else {
            None
        };
        if let Some(Reservation { late: true, short, .. }) = reserved {
            refusing = short;
        }
        let granted = if refusing == 0 && !ask.peek { cost } else { 0 };
        let mut writes = [None; N];
        let mut standings = [Usage::NONE; Quotas::MAX];
        for ((window, standing), write) in windows.iter().zip(&mut standings).zip(&mut writes) {
            *standing = Usage::from_window(window);
            // A charge of 0 takes nothing (S8), and neither does a refused one.
            if granted > 0 {
                let state = window.take(granted);
                standing.used = state.used;
                *write = Some(state);
            } else if !ask.peek {
                *write = window.settled();
            }
        }
        let mut decision = Self::new(now, granted, [standings[0], standings[1]], windows.len());
        if N > MAX_INLINE && windows.len() > MAX_INLINE {
            decision.details =
                Some(Box::new(Details::Quotas(QuotaDetails::from_usage(&standings))));
        }
        match reserved {
            _ if refusing == 0 => {
                decision.govern_by_tightest();
                if let Some(Reservation { ready_at, covered, .. }) =
                    reserved.filter(|_| granted > 0)
                {
                    decision.verdict = Verdict::Reserved { ready_at };
                    decision.quota_details_mut().covered = Some(covered);
                }
            }
            Some(Reservation { ready_at, last, .. }) => {
                (decision.refusing, decision.cost) = (refusing, cost);
                decision.verdict = Verdict::Refused { retry_at: ready_at };
                decision.govern_by(last);
            }
            None => {
                (decision.refusing, decision.cost) = (refusing, cost);
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

/// The decision of a plain charge in a [running](Window::running) window, small enough for
/// registers: a [`Decision`] is made of it where the reply will be.
#[derive(Clone, Copy)]
pub(crate) struct Ruling {
    now: i64,
    cost: u64,
    usage: Usage,
    verdict: Verdict,
}

impl Ruling {
    /// Decides the charge.
    #[inline(always)]
    pub(crate) fn new(now: i64, window: &Window<'_>, cost: u64) -> Self {
        let mut usage = Usage::from_window(window);
        let verdict = if window.running_fits(cost) {
            usage.used += cost as i64;
            Verdict::Passed
        } else if cost <= usage.limit() {
            Verdict::Refused { retry_at: window.end() }
        } else {
            Verdict::RefusedForGood
        };
        Self { now, cost, usage, verdict }
    }

    /// Returns the new count.
    #[inline]
    pub(crate) fn used(&self) -> i64 {
        self.usage.used
    }

    #[inline]
    pub(crate) fn passed(&self) -> bool {
        self.verdict == Verdict::Passed
    }

    #[inline(always)]
    pub(crate) fn into_decision(self) -> Decision {
        let Self { now, cost, usage, verdict } = self;
        let refusing = u8::from(!self.passed());
        let decision = Decision::new(now, cost, [usage, Usage::NONE], 1);
        Decision { verdict, refusing, ..decision }
    }
}

/// Tokens taken from later windows (S13).
struct Reservation {
    /// The window that covers the tokens of each quota.
    covered: [Span; Quotas::MAX],
    ready_at: i64,
    /// A bit for each quota whose tokens are short.
    short: u8,
    /// The short quota whose tokens are covered last.
    last: usize,
    /// `true` if one quota covers the tokens only after the window has ended that covers them under
    /// another quota.
    late: bool,
}

impl Reservation {
    /// Returns `None` if the current windows cover all tokens.
    #[inline(never)]
    fn find(windows: &[Window<'_>], cost: u64) -> Option<Self> {
        let mut reserved = Self {
            covered: [Span::default(); Quotas::MAX],
            ready_at: 0,
            short: 0,
            last: 0,
            late: false,
        };
        let mut latest = None;
        for (i, window) in windows.iter().enumerate() {
            let covered = window.covering_window(cost);
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
        // Each quota is compared with the others only: its own window may end where it begins, if
        // both saturate.
        reserved.late = (0..windows.len())
            .any(|i| reserved.short >> i & 1 == 1 && reserved.covered[i].start >= ends(i));
        Some(reserved)
    }
}

impl QuotaDetails {
    pub(super) fn from_usage(usage: &[Usage]) -> Self {
        let mut standings = [Usage::NONE; Quotas::MAX];
        standings[..usage.len()].copy_from_slice(usage);
        Self { standings, covered: None, states: None, refuser: None }
    }
}
