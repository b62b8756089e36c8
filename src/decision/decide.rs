//! Decides a charge: over all quotas of a key (S6), over all limits (S37), and behind requests that
//! wait (S13).

use std::iter;

use super::{Decision, Details, Label, MAX_INLINE, Usage, Verdict};
use crate::quota::{Quota, Quotas, Span};
use crate::window::{State, Window};

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Mode {
    pub(crate) reserve: bool,
    /// `true` if nothing is taken: the decision reports the use before the charge.
    pub(crate) peek: bool,
}

impl Decision {
    #[inline]
    pub(super) fn new<const N: usize>(
        label: Label,
        now: i64,
        cost: u64,
        usage: [Usage; N],
        len: usize,
    ) -> Self {
        let inline = [usage[0], if N > 1 { usage[1] } else { Usage::NONE }];
        let mut decision = Self {
            now,
            cost,
            verdict: Verdict::Passed,
            inline,
            name: label.name,
            periods: label.periods,
            len: len as u8,
            governing: 0,
            refusing: 0,
            overflow: 0,
            local: false,
            shadow: false,
            details: None,
        };
        if N > MAX_INLINE && len > MAX_INLINE {
            decision.line_details_mut().usage[..N].copy_from_slice(&usage);
        }
        decision
    }

    /// [`over`](Self::over) for a plain charge in [running](Window::running) windows, with this
    /// use before it. `fits` is whether all grant it.
    #[inline(always)]
    pub(crate) fn all_running<const N: usize>(
        label: Label,
        now: i64,
        usage: [Usage; N],
        cost: u64,
        fits: bool,
    ) -> Self {
        let taken = if fits { cost as i64 } else { 0 };
        let usage = usage.map(|usage| Usage { used: usage.used + taken, ..usage });
        let mut decision = Self::new(label, now, cost, usage, N);
        if !fits {
            let ranks = usage.iter().map(|usage| (usage.verdict(cost), usage.end));
            decision.refuse(ranks.enumerate().filter(|(_, (of, _))| *of != Verdict::Passed));
        } else if N > 1 {
            decision.govern_by_tightest();
        }
        decision
    }

    /// All quotas grant the charge, or none does (S6). `windows` has one for each quota, at most
    /// `N`. Returns the states to write in the same order.
    #[inline(always)]
    fn over<const N: usize>(
        now: i64,
        LineWindows { label, windows, cost, .. }: LineWindows<'_, '_>,
        mode: Mode,
    ) -> (Self, [Option<State>; N]) {
        let mut refusing = 0;
        for (i, window) in windows.iter().enumerate() {
            refusing |= u8::from(!window.fits(cost, mode.reserve)) << i;
        }
        let granted = if refusing == 0 && !mode.peek { cost } else { 0 };
        let mut writes = [None; N];
        let mut usage = [Usage::NONE; N];
        for ((window, usage), write) in windows.iter().zip(&mut usage).zip(&mut writes) {
            *usage = Usage::from_window(window);
            // A charge of 0 takes nothing (S8), and neither does a refused one.
            if granted > 0 {
                let state = window.take(granted);
                usage.used = state.used;
                *write = Some(state);
            } else if !mode.peek {
                *write = window.moved();
            }
        }
        let mut decision = Self::new(label, now, granted, usage, windows.len());
        if refusing > 0 {
            decision.cost = cost;
            let refusing = windows.iter().enumerate().filter(|(i, _)| refusing >> i & 1 == 1);
            decision.refuse(refusing.map(|(i, window)| {
                let verdict = match window.retry_at(cost, mode.reserve) {
                    Some(retry_at) => Verdict::Refused { retry_at },
                    None => Verdict::RefusedForGood,
                };
                (i, (verdict, window.end))
            }));
        } else {
            decision.govern_by_tightest();
            if mode.reserve
                && granted > 0
                && let Some((covered, ready_at)) = reservation(windows, cost)
            {
                decision.verdict = Verdict::Reserved { ready_at };
                decision.line_details_mut().covered = Some(covered);
            }
        }
        (decision, writes)
    }

    /// Refuses by these quotas, each with its verdict and the end of its window.
    #[inline(always)]
    fn refuse(&mut self, refusing: impl Iterator<Item = (usize, (Verdict, i64))>) {
        let mut latest = None;
        for (i, rank) in refusing {
            self.refusing |= 1 << i;
            if latest.is_none_or(|latest| rank > latest) {
                (latest, self.verdict) = (Some(rank), rank.0);
                self.govern_by(i);
            }
        }
    }
}

/// A plain charge in a [running](Window::running) window, small enough for registers: a
/// [`Decision`] is made of it where the reply will be.
#[derive(Clone, Copy)]
pub(crate) struct Ruling {
    now: i64,
    cost: u64,
    pub(crate) usage: Usage,
    verdict: Verdict,
}

impl Ruling {
    #[inline(always)]
    pub(crate) fn new(now: i64, mut usage: Usage, cost: u64) -> Self {
        let verdict = usage.verdict(cost);
        if verdict == Verdict::Passed {
            usage.used += cost as i64;
        }
        Self { now, cost, usage, verdict }
    }

    #[inline]
    pub(crate) fn passed(&self) -> bool {
        self.verdict == Verdict::Passed
    }

    #[inline(always)]
    pub(crate) fn into_decision(self, label: Label) -> Decision {
        let Self { now, cost, usage, verdict } = self;
        let refusing = u8::from(!self.passed());
        let mut decision = Decision::new(label, now, cost, [usage], 1);
        (decision.verdict, decision.refusing) = (verdict, refusing);
        decision
    }
}

/// The windows that cover a charge's tokens, and when the last of them begins. `None`: the current
/// ones cover all tokens (S13).
#[inline(never)]
fn reservation(windows: &[Window<'_>], cost: u64) -> Option<([Span; Quotas::MAX], i64)> {
    let mut covered = [Span::default(); Quotas::MAX];
    covered.iter_mut().zip(windows).for_each(|(of, window)| *of = window.covering_window(cost));
    let later = covered.iter().zip(windows).filter(|(of, window)| of.start > window.start);
    let ready_at = later.map(|(of, _)| of.start).max()?;
    Some((covered, ready_at))
}

#[derive(Clone, Copy)]
pub(crate) struct LineWindows<'w, 'a> {
    pub(crate) label: Label,
    pub(crate) windows: &'w [Window<'a>],
    pub(crate) cost: u64,
    /// A bit for each quota whose count other keys share.
    pub(crate) overflow: u8,
}

impl Decision {
    /// All lines grant the charge, or none takes anything. Calls `write` with each line's place,
    /// whether its cost is taken, and the states to write; if nothing is taken, these are the ones
    /// that have moved (S4).
    #[inline(always)]
    pub(crate) fn over_lines<'w, 'a: 'w, const N: usize>(
        now: i64,
        mode: Mode,
        mut lines: impl ExactSizeIterator<Item = LineWindows<'w, 'a>> + Clone,
        mut write: impl FnMut(usize, bool, [Option<State>; N]),
    ) -> Self {
        let fits = |line: LineWindows<'_, '_>| {
            line.windows.iter().all(|window| window.fits(line.cost, mode.reserve))
        };
        // The first line's own decision says whether it fits.
        let mut others_fit = lines.clone().skip(1).all(fits);
        let all_late =
            others_fit && mode.reserve && lines.clone().all(fits) && are_too_late(lines.clone());
        Self::of_lines(lines.len(), |place| {
            let line = lines.next()?;
            let fits_beside = !others_fit && fits(line);
            let is_late = all_late || fits_beside && mode.reserve && are_too_late(iter::once(line));
            // A late reservation is decided as if it passed, and then undone.
            let peek = !is_late && (mode.peek || fits_beside);
            let (mut decision, mut writes) = Self::over::<N>(now, line, Mode { peek, ..mode });
            others_fit &= decision.is_allowed();
            if is_late {
                decision = decision.undone();
            }
            if !mode.peek {
                if is_late || fits_beside {
                    let moved = line.windows.iter().map(|window| window.moved());
                    writes = [None; N];
                    writes.iter_mut().zip(moved).for_each(|(write, moved)| *write = moved);
                }
                decision.overflow |= line.overflow;
                write(place, decision.granted() > 0, writes);
            }
            Some(decision)
        })
        .expect("a charge has a line")
    }

    /// The refusal of a reservation that one limit would cover only after the end of the window
    /// that covers it under another (S13). `None` if it is in time.
    pub(crate) fn late_refusal(&self) -> Option<Self> {
        let taking = self.lines().filter(|(_, of)| of.granted() > 0);
        let windows = taking.flat_map(|(place, of)| {
            let usage = of.usage().iter().enumerate();
            usage.map(move |(i, usage)| ((place, i), usage.span(), of.covering_window(i)))
        });
        is_too_late(windows).then(|| self.map_lines(|_, of| of.undone()))
    }

    /// A line after its tokens were returned, since the reservation is too late. If it was one, it
    /// becomes a refusal until it would have been ready.
    fn undone(self) -> Self {
        if self.granted() == 0 {
            return self;
        }
        let later = self.usage().iter().enumerate().filter_map(|(i, usage)| {
            let retry_at = self.covering_window(i).start;
            (retry_at > usage.start).then_some((i, (Verdict::Refused { retry_at }, usage.end)))
        });
        let (cost, later) = (self.cost, later.collect::<Vec<_>>());
        let mut undone = self.with_cost(0);
        if !later.is_empty() {
            undone.cost = cost;
            undone.refuse(later.into_iter());
        }
        undone
    }

    /// A line that would have passed, after its tokens were returned.
    pub(crate) fn returned(self) -> Self {
        let mut returned = self.with_cost(0);
        returned.verdict = Verdict::Passed;
        returned.line_details_mut().covered = None;
        returned
    }
}

impl Decision {
    /// The decision of those of a charge's lines that are decided. `None` if there are none.
    #[inline(always)]
    pub(crate) fn of_lines(
        charged: usize,
        mut decide: impl FnMut(usize) -> Option<Self>,
    ) -> Option<Self> {
        if charged == 1 {
            return decide(0);
        }
        // Only `default` creates the value in its box; others would be copied there.
        let mut all = Box::<Details>::default();
        for (place, line) in all.lines[..charged].iter_mut().enumerate() {
            *line = decide(place);
        }
        Self::of_all(all, charged)
    }

    fn of_all(mut all: Box<Details>, charged: usize) -> Option<Self> {
        let (mut now, mut verdict, mut local) = (i64::MIN, Verdict::Passed, false);
        let mut governing: Option<(usize, &Self)> = None;
        for (place, of) in all.lines[..charged].iter().enumerate() {
            let Some(of) = of else { continue };
            // Refused for good prevails, then the latest retry.
            (now, verdict, local) = (now.max(of.now), verdict.max(of.verdict), local | of.local);
            if governing.is_none_or(|(_, governing)| of.prevails_over(governing)) {
                governing = Some((place, of));
            }
        }
        let (place, line) = governing?;
        let merged = Self { now, verdict, local, details: None, ..*line };
        if let Some(of) = &line.details {
            all.line = of.line.clone();
        }
        all.governing = Some(place as u8);
        Some(Self { details: Some(all), ..merged })
    }

    /// Returns whether this line refuses for longer or, if both pass, has the smaller part left.
    #[inline(always)]
    fn prevails_over(&self, other: &Self) -> bool {
        if !(self.is_allowed() && other.is_allowed()) {
            return !self.is_allowed() && (other.is_allowed() || self.refuses_longer(other));
        }
        let (own, others) = (self.governor(), other.governor());
        // Compares the parts of the limits without a division. A limit of 0 has nothing left.
        let times = |left: u64, limit: u64| u128::from(left) * u128::from(limit.max(1));
        let left = times(own.remaining(), others.limit());
        let others_left = times(others.remaining(), own.limit());
        left < others_left || left == others_left && own.end > others.end
    }

    #[inline(never)]
    fn refuses_longer(&self, other: &Self) -> bool {
        (self.verdict, self.governor().end) > (other.verdict, other.governor().end)
    }
}

fn are_too_late<'w, 'a: 'w>(lines: impl Iterator<Item = LineWindows<'w, 'a>> + Clone) -> bool {
    let taking = lines.enumerate().filter(|(_, line)| line.cost > 0);
    is_too_late(taking.flat_map(|(place, line)| {
        let windows = line.windows.iter().enumerate();
        windows
            .map(move |(i, window)| ((place, i), window.span(), window.covering_window(line.cost)))
    }))
}

/// Returns whether a quota covers its tokens after the end of the window that covers them under
/// another. An item is a quota's position, its current window, and the covering one.
fn is_too_late(quotas: impl Iterator<Item = ((usize, usize), Span, Span)> + Clone) -> bool {
    let owed = quotas.clone().filter(|(_, window, covered)| covered.start > window.start);
    let Some((last, _, due)) = owed.max_by_key(|(_, _, covered)| covered.start) else {
        return false;
    };
    quotas.into_iter().any(|(quota, _, covered)| quota != last && covered.end <= due.start)
}

impl Decision {
    /// When further tokens of one limit could all have passed, at the earliest, and the quota that
    /// lets them pass last, or that governs. The decision has one line.
    pub(crate) fn earliest_ms(&self, quotas: &Quotas, tokens: u128) -> (i64, usize) {
        let tokens = tokens.min(Quota::MAX_TOKENS.into()) as u64;
        let later = quotas.iter().enumerate().filter_map(|(i, quota)| {
            let usage = &self.usage()[i];
            // A count above the limit may end with its window (S5).
            let used = usage.used.min(quota.limit() as i64);
            let start = Window::of_usage(quota, usage.span(), used).covering_window(tokens).start;
            // A window that runs may begin later than now, if the clock has stepped back (S4). Nobody
            // waits for a limit of 0: it was another's, or was raised since.
            (start >= usage.end && quota.limit() > 0).then_some((start, i))
        });
        later.max().unwrap_or((self.now, self.governing_index()))
    }

    /// The refusal of a request that waits for these tokens, which this quota lets pass last, at this
    /// time. The limit passes if it refused nothing, or another request only, and is not the last. The
    /// decision has one line.
    pub(crate) fn behind(mut self, (at, quota): (i64, usize), tokens: u128, last: bool) -> Self {
        let is_exceeded = |of: &Usage| of.end > self.now && u128::from(of.remaining()) < tokens;
        let exceeded = self.refusing().filter(|i| at > self.now && is_exceeded(&self.usage()[*i]));
        self.refusing = exceeded.fold(0, |bits, i| bits | 1 << i);
        (self.cost, self.verdict) = (0, Verdict::Passed);
        self.govern_by_tightest();
        if self.refusing > 0 || last {
            self.refusing |= 1 << quota;
            self.verdict = Verdict::Refused { retry_at: at.max(self.now) };
            self.govern_by(quota);
        }
        self
    }
}
