//! Decides a charge: over all quotas of a key (S6), and over all limits (S37).

use super::{DecidedLine, Decision, Details, Label, LineDetails, MAX_INLINE, Usage, Verdict};
use crate::quota::{Quotas, Span};
use crate::window::{State, Window};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Ask {
    pub(crate) cost: u64,
    pub(crate) reserve: bool,
    /// `true` if nothing is taken: the standings are those before the charge.
    pub(crate) peek: bool,
}

impl Decision {
    #[inline]
    pub(super) fn new(
        label: Label,
        now: i64,
        cost: u64,
        inline: [Usage; MAX_INLINE],
        len: usize,
    ) -> Self {
        let line = DecidedLine {
            now,
            cost,
            verdict: Verdict::Passed,
            inline,
            name: label.name,
            periods: label.periods,
            len: len as u8,
            governing: 0,
            refusing: 0,
            shared: 0,
            local: false,
            shadow: false,
        };
        Self { line, details: None }
    }

    /// [`over`](Self::over) for a plain charge in [running](Window::running) windows, with these
    /// standings before it. `fits` is whether all grant it.
    #[inline(always)]
    pub(crate) fn all_running<const N: usize>(
        label: Label,
        now: i64,
        usage: [Usage; N],
        cost: u64,
        fits: bool,
    ) -> Self {
        let taken = if fits { cost as i64 } else { 0 };
        let mut standings = [Usage::NONE; Quotas::MAX];
        for (standing, usage) in standings.iter_mut().zip(usage) {
            *standing = Usage { used: usage.used + taken, ..usage };
        }
        let mut decision = Self::new(label, now, cost, [standings[0], standings[1]], N);
        if N > MAX_INLINE {
            decision.details = Details::of_line(LineDetails::from_usage(&standings));
        }
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
    pub(crate) fn over<const N: usize>(
        label: Label,
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
                *write = window.moved();
            }
        }
        let inline = [standings[0], standings[1]];
        let mut decision = Self::new(label, now, granted, inline, windows.len());
        if N > MAX_INLINE && windows.len() > MAX_INLINE {
            decision.details = Details::of_line(LineDetails::from_usage(&standings));
        }
        match reserved {
            _ if refusing == 0 => {
                decision.govern_by_tightest();
                if let Some(Reservation { ready_at, covered, .. }) =
                    reserved.filter(|_| granted > 0)
                {
                    decision.line.verdict = Verdict::Reserved { ready_at };
                    decision.detail(|of| of.covered = Some(covered));
                }
            }
            Some(Reservation { ready_at, last, .. }) => {
                (decision.line.refusing, decision.line.cost) = (refusing, cost);
                decision.line.verdict = Verdict::Refused { retry_at: ready_at };
                decision.govern_by(last);
            }
            None => {
                decision.line.cost = cost;
                let refusing = windows.iter().enumerate().filter(|(i, _)| refusing >> i & 1 == 1);
                decision.refuse(refusing.map(|(i, window)| {
                    let verdict = match window.retry_at(cost, ask.reserve) {
                        Some(retry_at) => Verdict::Refused { retry_at },
                        None => Verdict::RefusedForGood,
                    };
                    (i, (verdict, window.end))
                }));
            }
        }
        (decision, writes)
    }

    /// Refuses by these quotas, each with its verdict and the end of its window.
    #[inline(always)]
    fn refuse(&mut self, refusing: impl Iterator<Item = (usize, (Verdict, i64))>) {
        let mut latest = None;
        for (i, rank) in refusing {
            self.line.refusing |= 1 << i;
            if latest.is_none_or(|latest| rank > latest) {
                (latest, self.line.verdict) = (Some(rank), rank.0);
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
        let mut decision = Decision::new(label, now, cost, [usage, Usage::NONE], 1);
        (decision.line.verdict, decision.line.refusing) = (verdict, refusing);
        decision
    }
}

/// Tokens taken from later windows (S13).
struct Reservation {
    covered: [Span; Quotas::MAX],
    ready_at: i64,
    /// A bit for each quota whose tokens are short.
    short: u8,
    /// The short quota whose tokens are covered last.
    last: usize,
    /// `true` if one quota covers the tokens after the end of the window that covers them under
    /// another.
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
            if covered.start > window.start {
                reserved.short |= 1 << i;
                let rank = (covered.start, window.end);
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

#[derive(Clone, Copy)]
pub(crate) struct LineWindows<'w, 'a> {
    pub(crate) label: Label,
    pub(crate) windows: &'w [Window<'a>],
    pub(crate) ask: Ask,
    /// A bit for each quota whose count other keys share.
    pub(crate) shared: u8,
}

impl Decision {
    /// All lines grant the charge, or none takes anything. Calls `write` with each line's place,
    /// whether its cost is taken, and the states to write; if nothing is taken, these are the ones
    /// that have moved (S4).
    #[inline(always)]
    pub(crate) fn over_lines<'w, 'a: 'w, const N: usize>(
        now: i64,
        lines: impl ExactSizeIterator<Item = LineWindows<'w, 'a>> + Clone,
        mut write: impl FnMut(usize, bool, [Option<State>; N]),
    ) -> Self {
        let fits = |line: LineWindows<'_, '_>| {
            line.windows.iter().all(|window| window.fits(line.ask.cost, line.ask.reserve))
        };
        // Whether the first one fits, its decision says.
        let mut fit = lines.clone().skip(1).all(fits);
        let reserves = lines.clone().any(|line| line.ask.reserve);
        let late = fit && reserves && lines.clone().all(fits) && are_too_late(lines.clone());
        let is_peek = lines.clone().any(|line| line.ask.peek);
        let mut merging = Merging::new(lines.len());
        for (place, line) in lines.enumerate() {
            let fits_beside = !fit && fits(line);
            // A late reservation is decided as if it passed, and then undone.
            let ask = Ask { peek: !late && (is_peek || fits_beside), ..line.ask };
            let (mut decision, mut writes) = Self::over::<N>(line.label, now, line.windows, ask);
            fit &= decision.is_allowed();
            if late {
                decision = decision.undone();
            }
            if !is_peek {
                if late || fits_beside {
                    let moved = line.windows.iter().map(|window| window.moved());
                    writes = [None; N];
                    writes.iter_mut().zip(moved).for_each(|(write, moved)| *write = moved);
                }
                decision.note_shared(line.shared);
                write(place, decision.granted() > 0, writes);
            }
            merging.push(place, decision);
        }
        merging.done()
    }

    /// The refusal of a reservation that one limit would cover only after the end of the window
    /// that covers it under another (S13). `None` if it is in time.
    pub(crate) fn late_refusal(&self) -> Option<Self> {
        let taking = self.lines().filter(|(_, of)| of.0.is_allowed() && of.0.cost > 0);
        let windows = taking.flat_map(|(place, of)| {
            let usage = of.usage().iter().enumerate();
            usage.map(move |(i, usage)| ((place, i), usage.span(), of.covering_window(i)))
        });
        is_too_late(windows).then(|| self.map_lines(|_, of| of.undone()))
    }

    /// A line after its tokens were returned, since the reservation is too late: it becomes a
    /// refusal.
    pub(crate) fn undone(self) -> Self {
        match self.line.verdict {
            Verdict::Reserved { ready_at } => self.into_refusal(ready_at),
            _ if self.granted() > 0 => self.with_cost(0),
            _ => self,
        }
    }

    /// A line that would have passed, after its tokens were returned.
    pub(crate) fn returned(self) -> Self {
        let mut returned = self.with_cost(0);
        returned.line.verdict = Verdict::Passed;
        returned.own_details().into_iter().for_each(|of| of.covered = None);
        returned
    }

    /// The retry is when the reservation would have been ready.
    fn into_refusal(self, ready_at: i64) -> Self {
        let (mut bits, mut latest) = (0, None);
        for (i, standing) in self.usage().iter().enumerate() {
            let covered = self.governing_line().covering_window(i).start;
            bits |= u8::from(covered > standing.span().start) << i;
            latest = latest.or((covered == ready_at).then_some(i));
        }
        let mut refusal = self.with_cost(0);
        refusal.line.verdict = Verdict::Refused { retry_at: ready_at };
        refusal.line.refusing = bits;
        refusal.govern_by(latest.unwrap_or(0));
        refusal
    }
}

impl Decision {
    /// The decision of those of a charge's lines that are decided, each with its place. `None` if
    /// there are none.
    pub(crate) fn of_lines(
        charged: usize,
        decided: impl Iterator<Item = (usize, Self)>,
    ) -> Option<Self> {
        let mut decided = decided.peekable();
        decided.peek()?;
        let mut merging = Merging::new(charged);
        decided.for_each(|(place, of)| merging.push(place, of));
        Some(merging.done())
    }
}

pub(crate) struct Merging {
    only: Option<Decision>,
    /// All lines: a box that is written in place, since its content is large.
    all: Option<Box<Details>>,
    now: i64,
    verdict: Verdict,
    local: bool,
}

impl Merging {
    /// `lines` is how many there are at most.
    #[inline(always)]
    pub(crate) fn new(lines: usize) -> Self {
        // Only `default` creates the value in its box; others would be copied there.
        let all = (lines > 1).then(Box::<Details>::default);
        let (now, verdict, local) = (i64::MIN, Verdict::Passed, false);
        Self { only: None, all, now, verdict, local }
    }

    #[inline(always)]
    pub(crate) fn push(&mut self, place: usize, decision: Decision) {
        let Some(all) = self.all.as_deref_mut() else {
            self.only = Some(decision);
            return;
        };
        let Decision { line, details } = decision;
        self.now = self.now.max(line.now);
        self.local |= line.local;
        // Refused for good prevails, then the latest retry.
        if line.verdict != Verdict::Passed {
            self.verdict = self.verdict.max(line.verdict);
        }
        let governing = all.governing.and_then(|place| all.lines[usize::from(place)].as_ref());
        if governing.is_none_or(|governing| line.prevails_over(governing)) {
            all.governing = Some(place as u8);
        }
        all.lines[place] = Some(line);
        if let Some(details) = details {
            all.add(place, *details);
        }
    }

    #[inline(always)]
    pub(crate) fn done(self) -> Decision {
        let Self { only, all, now, verdict, local } = self;
        let Some(all) = all else { return only.expect("there is a line") };
        let line = all.governing.and_then(|place| all.lines[usize::from(place)]);
        let line = line.expect("there is a line");
        Decision { line: DecidedLine { now, verdict, local, ..line }, details: Some(all) }
    }
}

impl Details {
    #[cold]
    fn add(&mut self, place: usize, line: Self) {
        self.of_lines.extend(line.of_lines.into_iter().map(|(_, of)| (place, of)));
    }
}

impl DecidedLine {
    /// Whether this line refuses for longer or, if both pass, has the smaller part left.
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
    let taking = lines.enumerate().filter(|(_, line)| line.ask.cost > 0);
    is_too_late(taking.flat_map(|(place, line)| {
        let windows = line.windows.iter().enumerate();
        windows.map(move |(i, window)| {
            ((place, i), window.span(), window.covering_window(line.ask.cost))
        })
    }))
}

/// Whether a quota covers its tokens after the end of the window that covers them under another. An
/// item is a quota's position, its current window, and the covering one.
fn is_too_late(quotas: impl Iterator<Item = ((usize, usize), Span, Span)> + Clone) -> bool {
    let owed = quotas.clone().filter(|(_, window, covered)| covered.start > window.start);
    let Some((last, _, due)) = owed.max_by_key(|(_, _, covered)| covered.start) else {
        return false;
    };
    quotas.into_iter().any(|(quota, _, covered)| quota != last && covered.end <= due.start)
}
