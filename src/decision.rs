//! The answer of a store: [`Decision`], with the [`Usage`] of each quota.
//!
//! A decision has a line for each limit of its charge, and is that of the line that governs. If
//! there are others, all lines are in a box, each in its place.

use std::cmp::Reverse;
use std::fmt;
use std::num::NonZero;
use std::time::{Duration, SystemTime};

use crate::quota::{Periods, Quota, Quotas, Span, rate};
use crate::window::MAX;

mod decide;
#[cfg(feature = "serde")]
mod kept;
mod limited;
mod usage;

pub(crate) use decide::{LineWindows, Mode, Ruling};
#[cfg(feature = "serde")]
pub(crate) use kept::KeptDecision;
pub use limited::RateLimited;
pub(crate) use limited::{Label, LimitName};
pub use usage::Usage;
pub(crate) use usage::system_time;

pub(crate) const MAX_LIMITS: usize = 8;

const MAX_INLINE: usize = 2;

/// The answer to a charge: whether it passed ([`is_allowed`](Self::is_allowed)), and what the key
/// has used.
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
    // The line that governs, with the time, the verdict and the store of all.
    now: i64,
    /// The tokens taken, or those that a refused charge asked for.
    cost: u64,
    verdict: Verdict,
    /// In the order of the quotas. If [`LineDetails`] has them all, only the governing quota's
    /// is here, at its position modulo [`MAX_INLINE`].
    inline: [Usage; MAX_INLINE],
    name: LimitName,
    periods: Periods,
    len: u8,
    governing: u8,
    /// A bit for each quota that refused.
    refusing: u8,
    /// A bit for each quota whose tokens were taken from a count that other keys share.
    overflow: u8,
    /// `true` if the fallback of a store that failed decided.
    local: bool,
    shadow: bool,
    details: Option<Box<Details>>,
}

/// The verdict on a charge. Of several, the greatest prevails: never is later than any instant.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Verdict {
    Passed,
    Reserved { ready_at: i64 },
    Refused { retry_at: i64 },
    RefusedForGood,
}

#[derive(Clone, Default)]
struct Details {
    /// All lines in their places of the charge, if there are several. A limit whose store failed, and
    /// that lets requests pass then, has no line.
    lines: [Option<Decision>; MAX_LIMITS],
    /// The line that governs, if there are several.
    governing: Option<u8>,
    /// Details of the governing line. Boxed, so that an allocator has a fast size for several lines.
    line: Option<Box<LineDetails>>,
}

#[derive(Clone)]
struct LineDetails {
    usage: [Usage; Quotas::MAX],
    /// The window that covers the tokens of each quota, if that is not the one of its use.
    covered: Option<[Span; Quotas::MAX]>,
    /// The nodes that shared the quotas, if the fallback decided.
    nodes: NonZero<u32>,
}

impl Decision {
    /// Returns whether the charge passed, immediately or as a reservation.
    pub fn is_allowed(&self) -> bool {
        matches!(self.verdict, Verdict::Passed | Verdict::Reserved { .. })
    }

    /// Returns the number of tokens taken: the cost of a charge that passed, or 0 for a refusal or
    /// a peek.
    pub fn granted(&self) -> u64 {
        if self.is_allowed() { self.cost } else { 0 }
    }

    /// If some tokens are left for a refused charge, these and its cost.
    pub(crate) fn left_and_cost(&self) -> Option<(u64, u64)> {
        // Most charges are of one token, which fits wherever any is left.
        if self.cost <= 1 || self.is_allowed() {
            return None;
        }
        let left = self.remaining();
        (0 < left && left < self.cost).then_some((left, self.cost))
    }

    /// Returns the quota's limit.
    pub fn limit(&self) -> u64 {
        self.governor().limit()
    }

    /// Returns the tokens used in the quota's window.
    pub fn used(&self) -> u64 {
        self.governor().used()
    }

    /// Returns the tokens left in the quota's window.
    pub fn remaining(&self) -> u64 {
        self.governor().remaining()
    }

    /// Returns when the quota's window ends.
    pub fn reset_at(&self) -> SystemTime {
        self.governor().reset_at()
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
        let usage = self.line_details().map_or(&self.inline[..], |of| &of.usage);
        &usage[..self.len.into()]
    }

    /// Returns the quotas that refused, as indexes into [`usage`](Self::usage).
    pub fn refusing(&self) -> impl Iterator<Item = usize> + use<> {
        let refusing = self.refusing;
        (0..Quotas::MAX).filter(move |i| refusing >> i & 1 == 1)
    }

    /// The position of the governing quota.
    pub(crate) fn governing_index(&self) -> usize {
        self.governing.into()
    }

    /// Returns whether this process decided in memory, because the store failed.
    pub fn is_local(&self) -> bool {
        self.local
    }

    /// Returns whether this is the decision of a limit in [shadow mode](crate::Limit::shadow),
    /// whose refusals a layer lets pass, as in the example of
    /// [`on_decision`](crate::FixedWindowLayer::on_decision).
    pub fn is_shadow(&self) -> bool {
        self.shadow
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
        self.lines().find(|(_, of)| of.name() == name).map(|(_, of)| of.clone())
    }

    /// Returns the name (or an empty one) and the decision of each limit that was charged, as in
    /// the example of [`Line`](crate::Line).
    pub fn limits(&self) -> impl Iterator<Item = (&str, Self)> {
        self.lines().map(|(_, of)| (of.name(), of.clone()))
    }

    /// Returns the name of the limit that the single values are about, as in the example of
    /// [`Limits`](crate::Limits). It is empty if the limit has none.
    pub fn name(&self) -> &str {
        self.name.text()
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
        rate(usage.limit, usage.length(), self.periods.of(i))
    }

    /// The quotas that refused.
    pub(crate) fn violated(&self) -> Vec<String> {
        self.lines().flat_map(|(_, of)| of.refusing().map(|i| of.policy(i))).collect()
    }

    /// Returns what the text of a refusal by one quota is made of, beside the time. `None`: it names
    /// others, or the cost.
    pub(crate) fn refusal(&self) -> Option<(Usage, Verdict, usize)> {
        let others = || self.lines().filter(|(_, of)| of.refusing > 0).count() > 1;
        let is_only = self.refusing.is_power_of_two()
            && self.left_and_cost().is_none()
            && !(self.details.is_some() && others());
        is_only.then(|| (*self.governor(), self.verdict, self.periods.of(self.governing_index())))
    }

    fn until(&self, at: i64) -> Duration {
        Duration::from_millis(at.saturating_sub(self.now).max(0) as u64)
    }

    pub(crate) fn now_ms(&self) -> i64 {
        self.now
    }

    pub(crate) fn retry_at_ms(&self) -> Option<i64> {
        match self.verdict {
            Verdict::Refused { retry_at } => Some(retry_at),
            _ => None,
        }
    }

    pub(crate) fn ready_at_ms(&self) -> Option<i64> {
        match self.verdict {
            Verdict::Reserved { ready_at } => Some(ready_at),
            _ => None,
        }
    }

    pub(crate) fn reset_at_ms(&self) -> i64 {
        self.governor().end
    }

    /// The first, if the quotas have changed since and are fewer.
    pub(crate) fn governing_quota<'a>(&self, quotas: &'a Quotas) -> &'a Quota {
        let quotas = quotas.as_slice();
        quotas.get(self.governing_index()).unwrap_or(&quotas[0])
    }

    pub(crate) fn lines(&self) -> impl Iterator<Item = (usize, &Self)> + Clone {
        (0..MAX_LIMITS).filter_map(|place| Some((place, self.at(place)?)))
    }

    pub(crate) fn governing_line(&self) -> usize {
        self.details.as_deref().and_then(|of| of.governing).unwrap_or(0).into()
    }

    fn line_details(&self) -> Option<&LineDetails> {
        self.details.as_deref()?.line.as_deref()
    }

    pub(crate) fn at(&self, place: usize) -> Option<&Self> {
        match self.details.as_deref() {
            Some(of) if of.governing.is_some() => of.lines.get(place)?.as_ref(),
            _ => (place == 0).then_some(self),
        }
    }

    fn covering_window(&self, i: usize) -> Span {
        let covered = self.line_details().and_then(|of| of.covered);
        covered.map_or_else(|| self.usage()[i].span(), |covered| covered[i])
    }

    pub(crate) fn map_lines(&self, mut change: impl FnMut(usize, Self) -> Self) -> Self {
        let charged = self.lines().last().map_or(0, |(place, _)| place + 1);
        let changed = |place| Some(change(place, self.at(place)?.clone()));
        Self::of_lines(charged, changed).expect("a decision has a line")
    }

    fn line_details_mut(&mut self) -> &mut LineDetails {
        let new = || {
            let mut usage = [Usage::NONE; Quotas::MAX];
            usage[..MAX_INLINE].copy_from_slice(&self.inline);
            Box::new(LineDetails { usage, covered: None, nodes: NonZero::<u32>::MIN })
        };
        self.details.get_or_insert_default().line.get_or_insert_with(new)
    }

    fn each_line(&mut self, change: impl Fn(&mut Self)) {
        change(self);
        self.details.iter_mut().flat_map(|of| &mut of.lines).flatten().for_each(change);
    }

    /// The decision has one line.
    pub(crate) fn with_cost(mut self, cost: u64) -> Self {
        let more = cost.min(Quota::MAX_TOKENS) as i64 - self.granted() as i64;
        let add = |usage: &mut Usage| usage.used = usage.used.saturating_add(more).min(MAX);
        self.inline.iter_mut().for_each(add);
        if self.details.is_some() {
            self.line_details_mut().usage.iter_mut().for_each(add);
        }
        self.cost = cost;
        self.govern_by_tightest();
        self
    }

    /// From the start of the window that was charged to the end of the one that covers the tokens of
    /// a quota. `None`: other keys share their count, whose windows are not the key's, so that the
    /// window of the grid counts (S14).
    pub(crate) fn refundable_within(&self, i: usize) -> Option<Span> {
        let (start, end) = (self.usage()[i].start, self.covering_window(i).end);
        (self.overflow >> i & 1 == 0).then_some(Span { start, end })
    }

    /// For a response that is handed on later than this was decided (S18).
    pub(crate) fn pass_time(&mut self, time: Duration) {
        let now = self.now_after(time);
        self.each_line(|of| of.now = now);
    }

    pub(crate) fn now_after(&self, time: Duration) -> i64 {
        self.now.saturating_add(i64::try_from(time.as_millis()).unwrap_or(i64::MAX))
    }

    pub(crate) fn with_shadow(mut self, shadow: bool) -> Self {
        self.shadow = shadow;
        self
    }

    /// Marks a decision of the fallback of a store that failed, under the quotas of one of `nodes`.
    pub(crate) fn into_local(mut self, nodes: NonZero<u32>) -> Self {
        self.each_line(|of| {
            of.local = true;
            if nodes > NonZero::<u32>::MIN {
                of.line_details_mut().nodes = nodes;
            }
        });
        self
    }

    /// If the fallback decided: how many nodes shared the quotas. The decision has one line.
    pub(crate) fn local_nodes(&self) -> Option<NonZero<u32>> {
        let nodes = || self.line_details().map_or(NonZero::<u32>::MIN, |of| of.nodes);
        self.is_local().then(nodes)
    }

    #[inline(always)]
    fn govern_by(&mut self, i: usize) {
        self.governing = i as u8;
        if let Some(of) = self.details.as_deref().and_then(|of| of.line.as_ref()) {
            self.inline[i % MAX_INLINE] = of.usage[i];
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

    fn governor(&self) -> &Usage {
        &self.inline[usize::from(self.governing) % MAX_INLINE]
    }
}

impl PartialEq for Decision {
    fn eq(&self, other: &Self) -> bool {
        let all = |this: &Self| (this.now, this.verdict, this.governing_line());
        let line = |(place, of): (usize, &Self)| {
            let bits = (of.refusing, of.overflow, of.local, of.governing);
            let count = (of.name, of.periods, of.now, of.cost, of.verdict);
            let windows = of.usage().iter().enumerate();
            let windows: Vec<_> =
                windows.map(|(i, usage)| (*usage, of.covering_window(i))).collect();
            (place, bits, count, windows)
        };
        all(self) == all(other) && self.lines().map(line).eq(other.lines().map(line))
    }
}

impl Eq for Decision {}

impl fmt::Debug for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decision")
            .field("verdict", &self.verdict)
            .field("usage", &self.usage())
            .field("governing", &self.governing_index())
            .field("now", &self.now)
            .finish_non_exhaustive()
    }
}
