//! Several limits in one charge (S37): all of them grant it, or none takes anything. The decision
//! is that of the limit that governs, and its details have the decisions of all limits.

use std::borrow::Cow;
use std::mem;
use std::sync::Arc;

use super::details::{Details, LimitDecision, LimitDecisions, MAX_INLINE, Verdict};
use super::{Ask, Decision, Usage};
use crate::quota::{Quotas, Span};
use crate::window::{State, Window};

/// Merges the decisions of several limits into one.
pub(crate) struct Merging {
    /// A box that is written in place, since its content is large.
    details: Box<Details>,
    len: usize,
    now: i64,
    verdict: Verdict,
    local: bool,
    governing: Rank,
}

/// The rank of a limit's decision: the highest one governs.
struct Rank {
    allowed: bool,
    verdict: Verdict,
    end: i64,
    remaining: u64,
    limit: u64,
}

/// A limit in a charge of several: its name, the windows of its quotas, and its cost.
#[derive(Clone, Copy)]
pub(crate) struct LimitWindows<'w, 'a> {
    pub(crate) name: &'w Arc<str>,
    pub(crate) windows: &'w [Window<'a>],
    pub(crate) ask: Ask,
    /// A bit for each quota whose count other keys share.
    pub(crate) shared: u8,
}

impl Decision {
    /// Returns the decision of one limit, if this is one over several limits
    /// ([`Limits::charge`](crate::Limits::charge)) and that limit took part. In a refusal, limits
    /// that would have passed took nothing, and are [`allowed`](Self::allowed).
    pub fn of(&self, name: &str) -> Option<Self> {
        self.decided().find(|decided| &*decided.name == name).map(LimitDecision::to_decision)
    }

    /// Returns the decision of a limit. A decision over one limit is returned whatever the name.
    pub(crate) fn for_limit(&self, name: &str) -> Option<Cow<'_, Self>> {
        match self.governing_limit() {
            None => Some(Cow::Borrowed(self)),
            Some(_) => self.of(name).map(Cow::Owned),
        }
    }

    /// Changes the decisions of the named limits, each by the value beside its name. A decision
    /// over one limit is changed by the first value, whatever the name.
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
                merging.push(&decided.name, change(decided.to_decision(), by));
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
        self.decided().map(|decided| (&*decided.name, decided.to_decision()))
    }

    /// Returns for each limit its name, whether it passes, and whether it has to wait.
    pub(crate) fn verdicts(&self) -> impl Iterator<Item = (&Arc<str>, bool, bool)> {
        self.decided().map(|LimitDecision { name, verdict, .. }| {
            let waits = matches!(verdict, Verdict::Reserved { .. });
            (name, waits || *verdict == Verdict::Passed, waits)
        })
    }

    fn decided(&self) -> impl Iterator<Item = &LimitDecision> {
        let decided = match self.details.as_deref() {
            Some(Details::Limits(limits)) => &limits.decided[..],
            _ => &[],
        };
        decided.iter().map_while(Option::as_ref)
    }

    /// Returns the name of the limit that governs, if this is a decision over several limits: see
    /// the example of [`limits`](Self::limits).
    pub fn governing_limit(&self) -> Option<&str> {
        match self.details.as_deref() {
            Some(Details::Limits(limits)) => Some(&limits.governing().name),
            _ => None,
        }
    }
}

impl Decision {
    /// Decides a charge of several limits: all grant it, or none takes anything. Calls `write` with
    /// each limit's position, whether its cost is taken, and the states to write; if nothing is
    /// taken, these are the ones that have moved (S4).
    pub(crate) fn over_limits<const N: usize>(
        now: i64,
        limits: &[LimitWindows<'_, '_>],
        mut write: impl FnMut(usize, bool, [Option<State>; N]),
    ) -> Self {
        let fits = |limit: &LimitWindows<'_, '_>| {
            limit.windows.iter().all(|window| window.fits(limit.ask.cost, limit.ask.reserve))
        };
        let fit = limits.iter().all(fits);
        let late = fit && limits.iter().any(|limit| limit.ask.reserve) && are_too_late(limits);
        let is_peek = limits.iter().any(|limit| limit.ask.peek);
        let mut merging = Merging::new();
        for (i, limit) in limits.iter().enumerate() {
            // A late reservation is decided as if it passed, and then undone.
            let ask = Ask { peek: !late && (is_peek || !fit), ..limit.ask };
            let (mut decision, mut writes) = Self::over::<N>(now, limit.windows, ask);
            if late {
                decision = decision.undone();
            }
            if late || ask.peek {
                let settled = limit.windows.iter().map(|window| window.settled());
                writes = [None; N];
                writes.iter_mut().zip(settled).for_each(|(write, settled)| *write = settled);
            }
            if !is_peek {
                decision.shared = limit.shared;
                write(i, decision.granted() > 0, writes);
            }
            merging.push(limit.name, decision);
        }
        merging.done()
    }

    /// The same as [`note_states`](Self::note_states), for one of several limits.
    pub(crate) fn note_states_of(
        &mut self,
        limit: usize,
        had: [Option<State>; Quotas::MAX],
        writes: [Option<State>; Quotas::MAX],
    ) {
        self.amend_limit(limit, |of| of.note_states(had, writes));
    }

    /// Changes the details of a limit's decision, if that limit has refused.
    pub(crate) fn amend_refusal_of(&mut self, name: &Arc<str>, amend: impl FnOnce(&mut Self)) {
        let refuses =
            |verdict| matches!(verdict, Verdict::Refused { .. } | Verdict::RefusedForGood);
        let is_it = |of: &LimitDecision| Arc::ptr_eq(&of.name, name) && refuses(of.verdict);
        let limit = self.decided().position(is_it);
        if let Some(limit) = limit {
            self.amend_limit(limit, amend);
        }
    }

    fn amend_limit(&mut self, limit: usize, amend: impl FnOnce(&mut Self)) {
        let Some(Details::Limits(limits)) = self.details.as_deref_mut() else { return };
        let Some(Some(decided)) = limits.decided.get_mut(limit) else { return };
        let details = decided.details.take();
        let mut decision = decided.to_decision_with(details);
        amend(&mut decision);
        (decided.details, decided.refuser) = (decision.details, decision.refuser);
    }

    /// Refuses a reservation of several limits, if one of them would cover it only after the window
    /// has ended that covers it under another one (S13). Returns whether it did.
    pub(crate) fn refuse_late(decisions: &mut [Self]) -> bool {
        let taking = decisions.iter().enumerate().filter(|(_, decision)| decision.granted() > 0);
        let late = is_too_late(taking.flat_map(|(i, decision)| {
            let spans = |(j, usage): (usize, &Usage)| (usage.span(), decision.covering_window(j));
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
                let reserved =
                    mem::replace(decision, Self::new(0, 0, [Usage::NONE; MAX_INLINE], 0));
                *decision = reserved.undone();
            }
        }
        late
    }

    /// Returns the decision after its tokens were returned, since another limit refused: it takes
    /// nothing, and a reservation becomes a refusal.
    pub(crate) fn undone(self) -> Self {
        match self.verdict {
            Verdict::Reserved { .. } => self.into_refusal(),
            _ if self.granted() > 0 => self.with_cost(0),
            _ => self,
        }
    }
}

impl Merging {
    #[inline(always)]
    pub(crate) fn new() -> Self {
        // Only `default` creates the value in its box; others would be copied there.
        let details = Box::<Details>::default();
        let verdict = Verdict::Passed;
        let governing = Rank { allowed: true, verdict, end: 0, remaining: 0, limit: 0 };
        Self { details, len: 0, now: 0, verdict, local: false, governing }
    }

    #[inline]
    fn limits(&mut self) -> &mut LimitDecisions {
        let Details::Limits(limits) = &mut *self.details else { unreachable!("made so") };
        limits
    }

    /// Adds the decision of a limit, unless there are [`MAX_LIMITS`](super::MAX_LIMITS) already.
    #[inline(always)]
    pub(crate) fn push(&mut self, name: &Arc<str>, decision: Decision) {
        let rank = Rank::from_decision(&decision);
        let prevails = self.len == 0 || rank.prevails_over(&self.governing);
        let Decision { now, cost, verdict, inline, details, .. } = decision;
        let Decision { len, governing, refusing, shared, local, refuser, .. } = decision;
        self.now = self.now.max(now);
        // Refused for good prevails, then the latest retry.
        if verdict != Verdict::Passed {
            self.verdict = self.verdict.max(verdict);
        }
        self.local |= local;
        let at = self.len;
        let limits = self.limits();
        let Some(place) = limits.decided.get_mut(at) else { return };
        let name = Arc::clone(name);
        *place = Some(LimitDecision {
            name,
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
        });
        self.len += 1;
        if prevails {
            self.limits().governing = at as u8;
            self.governing = rank;
        }
    }

    /// Returns the decision over all limits, of which there is at least one.
    #[inline]
    pub(crate) fn done(mut self) -> Decision {
        let governing = self.limits().governing().to_decision_with(None);
        let Self { details, now, verdict, local, .. } = self;
        // Each limit has its own refuser; one in the decision over all would hide the others.
        Decision { now, verdict, local, details: Some(details), refuser: None, ..governing }
    }
}

impl LimitDecisions {
    pub(super) fn note_local(&mut self) {
        self.decided.iter_mut().flatten().for_each(|decided| decided.local = true);
    }
}

impl LimitDecision {
    fn to_decision(&self) -> Decision {
        self.to_decision_with(self.details.clone())
    }

    #[inline]
    fn to_decision_with(&self, details: Option<Box<Details>>) -> Decision {
        let Self { now, cost, verdict, inline, len, governing, .. } = *self;
        let Self { refusing, shared, local, refuser, .. } = *self;
        Decision {
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
}

impl Rank {
    #[inline(always)]
    fn from_decision(decision: &Decision) -> Self {
        Self {
            allowed: decision.allowed(),
            verdict: decision.verdict,
            end: decision.reset_at_ms(),
            remaining: decision.remaining(),
            limit: decision.limit(),
        }
    }

    /// Returns whether this limit refuses for longer or, if both pass, has the smaller part left.
    #[inline(always)]
    fn prevails_over(&self, other: &Self) -> bool {
        if !(self.allowed && other.allowed) {
            return !self.allowed && (other.allowed || self.refuses_longer(other));
        }
        // Compares the parts of the limits without a division. A limit of 0 has nothing left.
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

fn are_too_late(limits: &[LimitWindows<'_, '_>]) -> bool {
    let taking = limits.iter().enumerate().filter(|(_, limit)| limit.ask.cost > 0);
    is_too_late(taking.flat_map(|(i, limit)| {
        let windows = limit.windows.iter().enumerate();
        windows
            .map(move |(j, window)| ((i, j), window.span(), window.covering_window(limit.ask.cost)))
    }))
}

/// Returns whether a quota covers its tokens only after the window has ended that covers them under
/// another quota. Each item is a quota's position, its current window, and the covering one.
fn is_too_late(quotas: impl Iterator<Item = ((usize, usize), Span, Span)> + Clone) -> bool {
    let owed = quotas.clone().filter(|(_, window, covered)| covered.start > window.start);
    let Some((last, _, due)) = owed.max_by_key(|(_, _, covered)| covered.start) else {
        return false;
    };
    quotas.into_iter().any(|(quota, _, covered)| quota != last && covered.end <= due.start)
}
