//! Several limits in one charge (S37): all of them pass, or none takes anything. The decision over
//! all is that of the limit that governs, and has those of the others beside it.

use std::borrow::Cow;
use std::mem;
use std::sync::Arc;

use super::beside::{All, Decided, FEW, Limits, Verdict};
use super::{Ask, Decision, Usage};
use crate::quota::{Quotas, Span};
use crate::window::{State, Window};

/// Decisions of limits that become one.
pub(crate) struct Merging {
    /// Written in place, since it is large.
    all: Box<All>,
    len: usize,
    now: i64,
    verdict: Verdict,
    local: bool,
    governing: Rank,
}

/// By which one limit governs in place of another.
struct Rank {
    allowed: bool,
    verdict: Verdict,
    end: i64,
    remaining: u64,
    limit: u64,
}

/// One limit of a charge of several: its name, the windows of its quotas, and its cost.
#[derive(Clone, Copy)]
pub(crate) struct Line<'w, 'a> {
    pub(crate) name: &'w Arc<str>,
    pub(crate) windows: &'w [Window<'a>],
    pub(crate) ask: Ask,
    /// A bit for each quota that is counted where other keys are.
    pub(crate) shared: u8,
}

impl Decision {
    /// Returns the decision of one limit, if this is one over several limits
    /// ([`Limits::charge`](crate::Limits::charge)) and that limit took part. In a refusal, limits
    /// that would have passed took nothing, and are [`allowed`](Self::allowed).
    pub fn of(&self, name: &str) -> Option<Self> {
        self.decided().find(|decided| &*decided.name == name).map(Decided::decision)
    }

    /// What was decided of a limit: all, where there is one limit.
    pub(crate) fn for_limit(&self, name: &str) -> Option<Cow<'_, Self>> {
        match self.governing_limit() {
            None => Some(Cow::Borrowed(self)),
            Some(_) => self.of(name).map(Cow::Owned),
        }
    }

    /// Changes the decisions of the named limits, each by what stands beside its name. Where there
    /// is one limit, its name does not matter.
    pub(super) fn map_limits<'a, T>(
        &self,
        mut named: impl Iterator<Item = (&'a str, T)>,
        mut change: impl FnMut(Self, T) -> Self,
    ) -> Self {
        if self.governing_limit().is_none() {
            return named.next().map_or_else(|| self.clone(), |(_, by)| change(self.clone(), by));
        }
        let mut merging = Merging::new();
        for (name, by) in named {
            if let Some(decided) = self.decided().find(|decided| &*decided.name == name) {
                merging.push(&decided.name, change(decided.decision(), by));
            }
        }
        if merging.len == 0 { self.clone() } else { merging.done() }
    }

    /// Returns the name and the decision of each limit, if this is one over several limits.
    ///
    /// ```
    /// use tower_fixed_window::testing::block_on;
    /// use tower_fixed_window::{Limits, Line, Quota};
    ///
    /// let limits = Limits::new([
    ///     Quota::per_minute(600).name("requests"),
    ///     Quota::per_hour(200_000).name("tokens"),
    /// ]);
    /// let lines = [Line::new("requests", "acme", 1), Line::new("tokens", "acme", 60_000)];
    /// let decision = block_on(limits.check(lines))?;
    ///
    /// let left: Vec<_> = decision.limits().map(|(name, of)| (name, of.remaining())).collect();
    /// assert_eq!(left, [("requests", 599), ("tokens", 140_000)]);
    /// assert_eq!(decision.governing_limit(), Some("tokens"));
    /// # Ok::<_, tower_fixed_window::StoreError>(())
    /// ```
    pub fn limits(&self) -> impl Iterator<Item = (&str, Self)> {
        self.decided().map(|decided| (&*decided.name, decided.decision()))
    }

    /// The names of the limits, and of each whether it passes, and later or now.
    pub(crate) fn verdicts(&self) -> impl Iterator<Item = (&Arc<str>, bool, bool)> {
        self.decided().map(|Decided { name, verdict, .. }| {
            let waits = matches!(verdict, Verdict::Reserved { .. });
            (name, waits || *verdict == Verdict::Passed, waits)
        })
    }

    fn decided(&self) -> impl Iterator<Item = &Decided> {
        let decided = match self.all.as_deref() {
            Some(All::Limits(limits)) => &limits.decided[..],
            _ => &[],
        };
        decided.iter().map_while(Option::as_ref)
    }

    /// Returns the name of the limit that governs, if this is a decision over several limits: see
    /// the example of [`limits`](Self::limits).
    pub fn governing_limit(&self) -> Option<&str> {
        match self.all.as_deref() {
            Some(All::Limits(limits)) => Some(&limits.governing().name),
            _ => None,
        }
    }
}

impl Decision {
    /// All limits pass, or none takes anything. `write` is called with each line, whether its cost
    /// is taken, and what to write: if nothing is taken, what has moved (S4).
    pub(crate) fn over_limits<const N: usize>(
        now: i64,
        lines: &[Line<'_, '_>],
        mut write: impl FnMut(usize, bool, [Option<State>; N]),
    ) -> Self {
        let fits = |line: &Line<'_, '_>| {
            line.windows.iter().all(|window| window.fits(line.ask.cost, line.ask.reserve))
        };
        let fit = lines.iter().all(fits);
        let late = fit && lines.iter().any(|line| line.ask.reserve) && are_late(lines);
        let is_peek = lines.iter().any(|line| line.ask.peek);
        let mut merging = Merging::new();
        for (i, line) in lines.iter().enumerate() {
            // What is late is worked out as if it passed.
            let ask = Ask { peek: !late && (is_peek || !fit), up_to: false, ..line.ask };
            let (mut decision, mut writes) = Self::over::<N>(now, line.windows, ask);
            if late {
                decision = decision.undone();
            }
            if late || ask.peek {
                let settled = line.windows.iter().map(|window| window.settled());
                writes = [None; N];
                writes.iter_mut().zip(settled).for_each(|(write, settled)| *write = settled);
            }
            if !is_peek {
                decision.shared = line.shared;
                write(i, decision.granted > 0, writes);
            }
            merging.push(line.name, decision);
        }
        merging.done()
    }

    /// Notes of one of the limits what a store elsewhere keeps from here on: what it had, and what
    /// it writes.
    pub(crate) fn note_states_of(
        &mut self,
        limit: usize,
        had: [Option<State>; Quotas::MAX],
        writes: [Option<State>; Quotas::MAX],
    ) {
        self.amend(limit, |of| of.note_states(had, writes));
    }

    /// Adds to the decision of a limit, if that limit has refused.
    pub(crate) fn amend_refusal_of(&mut self, name: &Arc<str>, amend: impl FnOnce(&mut Self)) {
        let refuses =
            |verdict| matches!(verdict, Verdict::Refused { .. } | Verdict::RefusedForGood);
        let is_it = |of: &Decided| Arc::ptr_eq(&of.name, name) && refuses(of.verdict);
        let limit = self.decided().position(is_it);
        if let Some(limit) = limit {
            self.amend(limit, amend);
        }
    }

    fn amend(&mut self, limit: usize, amend: impl FnOnce(&mut Self)) {
        let Some(All::Limits(limits)) = self.all.as_deref_mut() else { return };
        let Some(Some(decided)) = limits.decided.get_mut(limit) else { return };
        let all = decided.all.take();
        let mut of = decided.with(all);
        amend(&mut of);
        decided.all = of.all;
    }

    /// Refuses what was reserved of several limits, if one of them would count it in a window that
    /// has ended when another one covers it (S13).
    pub(crate) fn refuse_late(decisions: &mut [Self]) -> bool {
        let taking = decisions.iter().enumerate().filter(|(_, decision)| decision.granted > 0);
        let late = too_late(taking.flat_map(|(i, decision)| {
            let spans = |(j, usage): (usize, &Usage)| (usage.span(), decision.covered(j));
            decision
                .usage()
                .iter()
                .enumerate()
                .map(spans)
                .enumerate()
                .map(move |(j, (window, covered))| ((i, j), window, covered))
        }));
        if late {
            for decision in decisions {
                let reserved = mem::replace(decision, Self::new(0, 0, [Usage::NONE; FEW], 0));
                *decision = reserved.undone();
            }
        }
        late
    }

    /// What it is when its tokens were returned, since another limit refused: a look at the count,
    /// or the refusal of what was reserved.
    pub(crate) fn undone(self) -> Self {
        match self.verdict {
            Verdict::Reserved { .. } => self.into_refusal(),
            _ if self.granted > 0 => self.with_cost(0),
            _ => self,
        }
    }
}

impl Merging {
    #[inline(always)]
    pub(crate) fn new() -> Self {
        // By `default`, it is made where it stays; others would be copied there.
        let all = Box::<All>::default();
        let verdict = Verdict::Passed;
        let governing = Rank { allowed: true, verdict, end: 0, remaining: 0, limit: 0 };
        Self { all, len: 0, now: 0, verdict, local: false, governing }
    }

    #[inline]
    fn limits(&mut self) -> &mut Limits {
        let All::Limits(limits) = &mut *self.all else { unreachable!("made so") };
        limits
    }

    /// Adds the decision of a limit. What is beyond the most is left out.
    #[inline(always)]
    pub(crate) fn push(&mut self, name: &Arc<str>, decision: Decision) {
        let rank = Rank::of(&decision);
        let prevails = self.len == 0 || rank.prevails_over(&self.governing);
        let Decision { now, granted, verdict, few, all, .. } = decision;
        let Decision { len, governing, refusing, shared, local, .. } = decision;
        self.now = self.now.max(now);
        // Refused for good is the last, then the latest time.
        if verdict != Verdict::Passed {
            self.verdict = self.verdict.max(verdict);
        }
        self.local |= local;
        let at = self.len;
        let limits = self.limits();
        let Some(place) = limits.decided.get_mut(at) else { return };
        let name = Arc::clone(name);
        *place = Some(Decided {
            name,
            now,
            granted,
            verdict,
            few,
            all,
            len,
            governing,
            refusing,
            shared,
            local,
        });
        self.len += 1;
        if prevails {
            self.limits().governing = at as u8;
            self.governing = rank;
        }
    }

    /// The decision over all of them, of which there is at least one.
    #[inline]
    pub(crate) fn done(mut self) -> Decision {
        let governing = self.limits().governing().with(None);
        let Self { all, now, verdict, local, .. } = self;
        Decision { now, verdict, local, all: Some(all), ..governing }
    }
}

impl Limits {
    pub(super) fn all_mut(&mut self) -> &mut Option<Box<All>> {
        let governing = self.decided[usize::from(self.governing)].as_mut();
        &mut governing.expect("one of them governs").all
    }

    pub(super) fn note_local(&mut self) {
        self.decided.iter_mut().flatten().for_each(|decided| decided.local = true);
    }
}

impl Decided {
    fn decision(&self) -> Decision {
        self.with(self.all.clone())
    }

    #[inline]
    fn with(&self, all: Option<Box<All>>) -> Decision {
        let Self { now, granted, verdict, few, len, governing, refusing, shared, local, .. } =
            *self;
        Decision { now, granted, verdict, few, all, len, governing, refusing, shared, local }
    }
}

impl Rank {
    #[inline(always)]
    fn of(decision: &Decision) -> Self {
        Self {
            allowed: decision.allowed(),
            verdict: decision.verdict,
            end: decision.reset_at_ms(),
            remaining: decision.remaining(),
            limit: decision.limit(),
        }
    }

    /// Whether this limit refuses for longer, or if both pass, has the smaller part left.
    #[inline(always)]
    fn prevails_over(&self, other: &Self) -> bool {
        if !(self.allowed && other.allowed) {
            return !self.allowed && (other.allowed || self.refuses_longer(other));
        }
        // Compares the parts of the limits without a division. Of a limit of 0, nothing is left.
        let times = |left: u64, limit: u64| u128::from(left) * u128::from(limit.max(1));
        let left = times(self.remaining, other.limit);
        let others_left = times(other.remaining, self.limit);
        left < others_left || left == others_left && self.end > other.end
    }

    #[inline(never)]
    fn refuses_longer(&self, other: &Self) -> bool {
        (self.verdict, self.end) > (other.verdict, other.end)
    }
}

fn are_late(lines: &[Line<'_, '_>]) -> bool {
    let taking = lines.iter().enumerate().filter(|(_, line)| line.ask.cost > 0);
    too_late(taking.flat_map(|(i, line)| {
        let windows = line.windows.iter().enumerate();
        windows.map(move |(j, window)| ((i, j), window.span(), window.covered(line.ask.cost)))
    }))
}

/// Whether a quota covers its tokens when the window has ended in which another one counts them.
/// Each has a position, the window that runs, and the one that covers the tokens.
fn too_late(quotas: impl Iterator<Item = ((usize, usize), Span, Span)> + Clone) -> bool {
    let owed = quotas.clone().filter(|(_, window, covered)| covered.start > window.start);
    let Some((last, _, due)) = owed.max_by_key(|(_, _, covered)| covered.start) else {
        return false;
    };
    quotas.into_iter().any(|(quota, _, covered)| quota != last && covered.end <= due.start)
}
