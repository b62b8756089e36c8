//! The answer of a store: [`Decision`], with the [`Usage`] of each quota.
//!
//! A decision has a line for each limit of its charge, and is that of the line that governs. If
//! there are others, all lines are in a box, each in its place.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::fmt;
use std::num::NonZero;
use std::ptr;
use std::time::{Duration, SystemTime};

use crate::quota::{Periods, Quota, Quotas, Span, rate};
use crate::window::MAX;

mod decide;
#[cfg(feature = "serde")]
mod kept;
mod limited;
mod usage;

pub(crate) use decide::{Ask, LineWindows, Merging, Ruling};
#[cfg(feature = "serde")]
pub(crate) use kept::KeptDecision;
pub use limited::RateLimited;
pub(crate) use limited::{Label, LimitName};
pub use usage::Usage;
pub(crate) use usage::system_time;

pub(crate) const MAX_LIMITS: usize = 8;

const MAX_INLINE: usize = 2;

/// The answer to a charge: whether it passed, and what the key has used.
///
/// Methods that return a single value are about one quota: if the charge was refused, the refusing
/// quota with the longest wait; otherwise the quota with the fewest tokens left.
/// [`usage`](Self::usage) has all quotas.
///
/// If several limits were charged ([`Limits`](crate::Limits)), these methods are about one limit:
/// if the charge was refused, the refusing limit with the longest wait; otherwise the limit with
/// the smallest fraction of its limit left. [`limits`](Self::limits) has the decisions of all.
///
/// ```
/// use std::time::{Duration, UNIX_EPOCH};
/// use tower_fixed_window::{Limiter, Quota};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tower_fixed_window::StoreError> {
/// let limiter = Limiter::new(Quota::per_day(2).and(Quota::per_week(10)));
/// let decision = limiter.check("alice").await?;
///
/// assert!(decision.is_allowed());
/// assert_eq!((decision.limit(), decision.used(), decision.remaining()), (2, 1, 1));
/// assert_eq!(decision.usage()[1].remaining(), 9);
///
/// assert_eq!(decision.granted(), 1);
/// assert!(!decision.is_local());
/// assert!(decision.reset_after() <= Duration::from_secs(86_400));
/// // At midnight, UTC.
/// assert_eq!(decision.reset_at().duration_since(UNIX_EPOCH).unwrap().as_secs() % 86_400, 0);
/// // It was not refused, and does not have to wait.
/// assert_eq!((decision.retry_after(), decision.retry_at()), (None, None));
/// assert_eq!((decision.ready_after(), decision.ready_at()), (Duration::ZERO, None));
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[must_use = "a decision limits nothing unless it is looked at: see `is_allowed` and `into_result`"]
pub struct Decision {
    /// The line that governs. Of several, with the time, the verdict and the store of all.
    line: DecidedLine,
    details: Option<Box<Details>>,
}

#[derive(Clone, Copy)]
struct DecidedLine {
    now: i64,
    /// The tokens taken, or those that a refused charge asked for.
    cost: u64,
    verdict: Verdict,
    /// In the order of the quotas. If [`LineDetails`] has the standings, only the governing quota's
    /// is here, at its position modulo [`MAX_INLINE`].
    inline: [Usage; MAX_INLINE],
    name: LimitName,
    periods: Periods,
    len: u8,
    governing: u8,
    /// A bit for each quota that refused.
    refusing: u8,
    /// A bit for each quota whose tokens were taken from a count that other keys share.
    shared: u8,
    /// `true` if the fallback of a store that failed decided.
    local: bool,
    shadow: bool,
}

/// The verdict on a charge. Of several, the greatest prevails: never is later than any instant.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Verdict {
    Passed,
    Reserved { ready_at: i64 },
    Refused { retry_at: i64 },
    RefusedForGood,
}

#[derive(Clone, Default)]
struct Details {
    /// All lines in their places of the charge, if there are several. A limit whose store failed, and
    /// that lets requests pass then, has no line.
    lines: [Option<DecidedLine>; MAX_LIMITS],
    /// Of several lines.
    governing: Option<u8>,
    /// Of lines that have some, with their places. Beside the lines, so that nothing is dropped
    /// where a line is written.
    of_lines: Vec<(usize, LineDetails)>,
}

#[derive(Clone)]
struct LineDetails {
    standings: [Usage; Quotas::MAX],
    /// The window that covers the tokens of each quota, if that is not the standing's.
    covered: Option<[Span; Quotas::MAX]>,
    /// That shared the quotas, if the fallback decided.
    nodes: NonZero<u32>,
}

/// What clients read of a refusal, beside the time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Refusal {
    standing: Usage,
    verdict: Verdict,
    /// Of the only quota that refused. `None`: the text names others, or the cost.
    period: Option<usize>,
}

#[derive(Clone, Copy)]
struct LineRef<'a>(&'a DecidedLine, Option<&'a LineDetails>);

impl Details {
    fn of_line(details: LineDetails) -> Option<Box<Self>> {
        Some(Box::new(Self { of_lines: vec![(0, details)], ..Self::default() }))
    }

    fn at(&self, place: usize) -> Option<&LineDetails> {
        self.of_lines.iter().find(|(of, _)| *of == place).map(|(_, details)| details)
    }
}

impl LineDetails {
    fn from_usage(usage: &[Usage]) -> Self {
        let mut standings = [Usage::NONE; Quotas::MAX];
        standings[..usage.len()].copy_from_slice(usage);
        Self { standings, covered: None, nodes: NonZero::<u32>::MIN }
    }
}

impl Refusal {
    /// Whether refusals that read like this have the same text.
    pub(crate) fn has_usual_text(&self) -> bool {
        self.period.is_some()
    }
}

impl<'a> LineRef<'a> {
    fn usage(self) -> &'a [Usage] {
        let Self(line, details) = self;
        let standings: &[Usage] = match details {
            Some(details) => &details.standings,
            None => &line.inline,
        };
        &standings[..line.len.into()]
    }

    fn covering_window(self, i: usize) -> Span {
        let covered = self.1.and_then(|details| details.covered);
        covered.map_or_else(|| self.usage()[i].span(), |covered| covered[i])
    }

    fn to_decision(self) -> Decision {
        let Self(line, details) = self;
        let details = details.and_then(|details| Details::of_line(details.clone()));
        Decision { line: *line, details }
    }
}

impl PartialEq for LineRef<'_> {
    fn eq(&self, other: &Self) -> bool {
        let bits = |line: &DecidedLine| (line.refusing, line.shared, line.local, line.governing);
        let count =
            |line: &DecidedLine| (line.name, line.periods, line.now, line.cost, line.verdict);
        bits(self.0) == bits(other.0)
            && count(self.0) == count(other.0)
            && self.usage() == other.usage()
            && (0..self.usage().len()).all(|i| self.covering_window(i) == other.covering_window(i))
    }
}

impl Decision {
    /// Returns whether the charge passed, immediately or as a reservation.
    pub fn is_allowed(&self) -> bool {
        self.line.is_allowed()
    }

    /// Returns the number of tokens taken: the cost of a charge that passed, or 0 for a refusal or
    /// a peek.
    pub fn granted(&self) -> u64 {
        if self.is_allowed() { self.line.cost } else { 0 }
    }

    /// If some tokens are left for a refused charge, these and its cost.
    pub(crate) fn left_and_cost(&self) -> Option<(u64, u64)> {
        // Most charges are of one token, which fits wherever any is left.
        if self.line.cost <= 1 || self.is_allowed() {
            return None;
        }
        let left = self.remaining();
        (0 < left && left < self.line.cost).then_some((left, self.line.cost))
    }

    /// Returns the quota's limit.
    pub fn limit(&self) -> u64 {
        self.line.governor().limit()
    }

    /// Returns the tokens used in the quota's window.
    pub fn used(&self) -> u64 {
        self.line.governor().used()
    }

    /// Returns the tokens left in the quota's window.
    pub fn remaining(&self) -> u64 {
        self.line.governor().remaining()
    }

    /// Returns when the quota's window ends.
    pub fn reset_at(&self) -> SystemTime {
        self.line.governor().reset_at()
    }

    /// Returns how long the quota's window still runs.
    pub fn reset_after(&self) -> Duration {
        self.until(self.reset_at_ms())
    }

    /// Returns how long to wait until a refused charge fits, if no other request takes tokens.
    /// Returns `None` if it was not refused, or can never fit, because its cost is above what the
    /// quota can grant.
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_at_ms().map(|at| self.until(at))
    }

    /// Returns the start of the first window in which a refused charge would fit, or `None` as
    /// [`retry_after`](Self::retry_after) does.
    pub fn retry_at(&self) -> Option<SystemTime> {
        self.retry_at_ms().map(system_time)
    }

    /// Returns the start of the window that covers a reservation, if that is a later window.
    pub fn ready_at(&self) -> Option<SystemTime> {
        self.ready_at_ms().map(system_time)
    }

    /// Returns how long a reservation has to wait, or zero if the tokens were available.
    pub fn ready_after(&self) -> Duration {
        self.ready_at_ms().map_or(Duration::ZERO, |at| self.until(at))
    }

    /// Returns the usage of each quota, in the order of the quotas.
    #[inline(always)]
    pub fn usage(&self) -> &[Usage] {
        match &self.details {
            None => &self.line.inline[..self.line.len.into()],
            Some(_) => self.governing_line().usage(),
        }
    }

    /// Returns the quotas that refused, as indexes into [`usage`](Self::usage).
    pub fn refusing(&self) -> impl Iterator<Item = usize> + use<> {
        let refusing = self.line.refusing;
        (0..Quotas::MAX).filter(move |i| refusing >> i & 1 == 1)
    }

    pub(crate) fn is_refused_for_good(&self) -> bool {
        self.line.verdict == Verdict::RefusedForGood
    }

    /// The position of the governing quota.
    pub(crate) fn governing(&self) -> usize {
        self.line.governing.into()
    }

    /// Returns whether this process decided in memory, because the store failed.
    pub fn is_local(&self) -> bool {
        self.line.local
    }

    /// Returns whether this is the decision of a limit in [shadow mode](crate::Limit::shadow),
    /// whose refusals a layer lets pass, as in the example of
    /// [`on_decision`](crate::FixedWindowLayer::on_decision).
    pub fn is_shadow(&self) -> bool {
        self.line.shadow
    }

    /// Converts a refusal into an error, for use with `?`, as in [the
    /// guide](crate::guide::keys#without-http).
    ///
    /// # Errors
    /// Returns [`RateLimited`] if the charge was refused. This error converts into the response
    /// that a layer makes: by `?` in an axum handler, elsewhere by `http::Response::from(error)`.
    pub fn into_result(self) -> Result<(), RateLimited> {
        self.passed().map(drop)
    }

    pub(crate) fn passed(self) -> Result<Self, RateLimited> {
        if self.is_allowed() { Ok(self) } else { Err(RateLimited(self)) }
    }

    /// Returns the decision of the limit with this name, if it was charged. If the charge was
    /// refused, limits that would have granted their cost took nothing, and are
    /// [`is_allowed`](Self::is_allowed).
    pub fn of(&self, name: &str) -> Option<Self> {
        self.lines().find(|(_, of)| of.0.name.text() == name).map(|(_, of)| of.to_decision())
    }

    /// Returns the name (or an empty one) and the decision of each limit that was charged, as in
    /// the example of [`Line`](crate::Line).
    pub fn limits(&self) -> impl Iterator<Item = (&str, Self)> {
        self.lines().map(|(_, of)| (of.0.name.text(), of.to_decision()))
    }

    /// Returns the name of the limit that the single values are about, as in the example of
    /// [`Limits`](crate::Limits). It is empty if the limit has none.
    pub fn name(&self) -> &str {
        self.line.name.text()
    }

    /// The name of a quota of the only limit, for clients, such as `login:5/minute`.
    pub(crate) fn policy(&self, i: usize) -> String {
        match (self.name(), self.rate(i)) {
            ("", rate) => rate,
            (name, rate) => format!("{name}:{rate}"),
        }
    }

    /// A quota of the only limit as text, such as `5/minute`.
    pub(crate) fn rate(&self, i: usize) -> String {
        let usage = self.usage()[i];
        rate(usage.limit, usage.length(), self.line.periods.of(i))
    }

    /// The quotas that refused.
    pub(crate) fn violated(&self) -> Vec<String> {
        let violated = |(_, of): (_, Self)| of.refusing().map(move |i| of.policy(i));
        self.limits().flat_map(violated).collect()
    }

    pub(crate) fn refusal(&self) -> Refusal {
        let Self { line, details } = self;
        let others = || self.lines().filter(|(_, of)| of.0.refusing > 0).count() > 1;
        let is_only = line.refusing.is_power_of_two()
            && self.left_and_cost().is_none()
            && !(details.is_some() && others());
        Refusal {
            standing: *line.governor(),
            verdict: line.verdict,
            period: is_only.then(|| line.periods.of(self.governing())),
        }
    }

    fn until(&self, at: i64) -> Duration {
        Duration::from_millis(at.saturating_sub(self.line.now).max(0) as u64)
    }

    pub(crate) fn now_ms(&self) -> i64 {
        self.line.now
    }

    pub(crate) fn retry_at_ms(&self) -> Option<i64> {
        match self.line.verdict {
            Verdict::Refused { retry_at } => Some(retry_at),
            _ => None,
        }
    }

    pub(crate) fn ready_at_ms(&self) -> Option<i64> {
        match self.line.verdict {
            Verdict::Reserved { ready_at } => Some(ready_at),
            _ => None,
        }
    }

    pub(crate) fn reset_at_ms(&self) -> i64 {
        self.line.governor().end
    }

    /// The first, if the quotas have changed since and are fewer.
    pub(crate) fn governing_of<'a>(&self, quotas: &'a Quotas) -> &'a Quota {
        let quotas = quotas.as_slice();
        quotas.get(self.governing()).unwrap_or(&quotas[0])
    }

    fn lines(&self) -> impl Iterator<Item = (usize, LineRef<'_>)> + Clone {
        (0..MAX_LIMITS).filter_map(|place| Some((place, self.line_at(place)?)))
    }

    pub(crate) fn governing_place(&self) -> usize {
        self.details.as_deref().and_then(|of| of.governing).unwrap_or(0).into()
    }

    #[inline(never)]
    fn governing_line(&self) -> LineRef<'_> {
        let details = self.line_at(self.governing_place()).and_then(|of| of.1);
        LineRef(&self.line, details)
    }

    /// `None` if the store of the line at this place failed, and lets requests pass then.
    pub(crate) fn at(&self, place: usize) -> Option<Cow<'_, Self>> {
        let of = self.line_at(place)?;
        let is_own = ptr::eq(of.0, &self.line);
        Some(if is_own { Cow::Borrowed(self) } else { Cow::Owned(of.to_decision()) })
    }

    fn line_at(&self, place: usize) -> Option<LineRef<'_>> {
        let details = self.details.as_deref();
        let line = match details.filter(|of| of.governing.is_some()) {
            Some(of) => of.lines.get(place)?.as_ref()?,
            None => (place == 0).then_some(&self.line)?,
        };
        Some(LineRef(line, details.and_then(|of| of.at(place))))
    }

    /// `None` as for [`at`](Self::at).
    pub(crate) fn waits_at(&self, place: usize) -> Option<bool> {
        self.line_at(place).map(|of| matches!(of.0.verdict, Verdict::Reserved { .. }))
    }

    pub(crate) fn refuses_at(&self, place: usize) -> bool {
        self.line_at(place).is_some_and(|of| !of.0.is_allowed())
    }

    pub(crate) fn map_lines(&self, mut change: impl FnMut(usize, Self) -> Self) -> Self {
        let charged = self.lines().last().map_or(0, |(place, _)| place + 1);
        let changed = self.lines().map(|(place, of)| (place, change(place, of.to_decision())));
        Self::of_lines(charged, changed).expect("a decision has a line")
    }

    /// The decision has one line.
    fn detail(&mut self, detail: impl FnOnce(&mut LineDetails)) {
        let new = || Details::of_line(LineDetails::from_usage(&self.line.inline));
        self.details = self.details.take().or_else(new);
        if let Some(of) = self.own_details() {
            detail(of);
        }
    }

    /// The decision has one line.
    fn own_details(&mut self) -> Option<&mut LineDetails> {
        self.details.as_deref_mut()?.of_lines.first_mut().map(|(_, of)| of)
    }

    fn each_line(&mut self, change: impl Fn(&mut DecidedLine)) {
        change(&mut self.line);
        let lines = self.details.iter_mut().flat_map(|of| &mut of.lines);
        lines.flatten().for_each(change);
    }

    /// The decision has one line.
    pub(crate) fn with_cost(mut self, cost: u64) -> Self {
        let more = cost.min(Quota::MAX_TOKENS) as i64 - self.granted() as i64;
        let add =
            |standing: &mut Usage| standing.used = standing.used.saturating_add(more).min(MAX);
        self.line.inline.iter_mut().for_each(add);
        self.own_details().into_iter().for_each(|of| of.standings.iter_mut().for_each(add));
        self.line.cost = cost;
        self.govern_by_tightest();
        self
    }

    /// From the start of the window that was charged to the end of the one that covers the tokens of
    /// a quota. `None`: other keys share their count, whose windows are not the key's, so that the
    /// window of the grid counts (S14).
    pub(crate) fn refundable_within(&self, i: usize) -> Option<Span> {
        let (own, line) = (self.line.shared >> i & 1 == 0, self.governing_line());
        let (start, end) = (line.usage()[i].start, line.covering_window(i).end);
        own.then_some(Span { start, end })
    }

    /// The decision has one line.
    pub(crate) fn note_shared(&mut self, quotas: u8) {
        self.line.shared |= quotas;
    }

    /// For a response that is handed on later than this was decided (S18).
    pub(crate) fn pass_time(&mut self, time: Duration) {
        let now = self.now_after(time);
        self.each_line(|line| line.now = now);
    }

    pub(crate) fn now_after(&self, time: Duration) -> i64 {
        self.line.now.saturating_add(i64::try_from(time.as_millis()).unwrap_or(i64::MAX))
    }

    pub(crate) fn into_shadow(mut self) -> Self {
        self.line.shadow = true;
        self
    }

    /// Of the fallback of a store that failed, under the quotas of one of `nodes`.
    pub(crate) fn into_local(mut self, nodes: NonZero<u32>) -> Self {
        self.each_line(|line| line.local = true);
        if nodes > NonZero::<u32>::MIN {
            self = self.map_lines(|_, mut of| {
                of.detail(|of| of.nodes = nodes);
                of
            });
        }
        self
    }

    /// If the fallback decided: how many nodes shared the quotas. The decision has one line.
    pub(crate) fn local_nodes(&self) -> Option<NonZero<u32>> {
        let nodes = || self.governing_line().1.map_or(NonZero::<u32>::MIN, |of| of.nodes);
        self.is_local().then(nodes)
    }

    #[inline(always)]
    fn govern_by(&mut self, i: usize) {
        self.line.governing = i as u8;
        if let Some((_, of)) = self.details.as_deref().and_then(|of| of.of_lines.first()) {
            self.line.inline[i % MAX_INLINE] = of.standings[i];
        }
    }

    #[inline(always)]
    fn govern_by_tightest(&mut self) {
        let (mut tightest, usage) = (0, self.usage());
        let tightness = |i: usize| (usage[i].remaining(), Reverse(usage[i].end));
        for i in 1..usage.len() {
            if tightness(i) < tightness(tightest) {
                tightest = i;
            }
        }
        self.govern_by(tightest);
    }
}

impl DecidedLine {
    fn is_allowed(&self) -> bool {
        matches!(self.verdict, Verdict::Passed | Verdict::Reserved { .. })
    }

    fn governor(&self) -> &Usage {
        &self.inline[usize::from(self.governing) % MAX_INLINE]
    }
}

impl PartialEq for Decision {
    fn eq(&self, other: &Self) -> bool {
        let of = |this: &Self| (this.line.now, this.line.verdict, this.governing_place());
        of(self) == of(other) && self.lines().eq(other.lines())
    }
}

impl Eq for Decision {}

impl fmt::Debug for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decision")
            .field("verdict", &self.line.verdict)
            .field("standings", &self.usage())
            .field("governing", &self.governing())
            .field("now", &self.line.now)
            .finish_non_exhaustive()
    }
}
