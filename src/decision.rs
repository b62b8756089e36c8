//! What a store answers: [`Decision`], with the [`Usage`] of each quota.

use std::cmp::Reverse;
use std::error::Error;
use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::quota::{MAX_TOKENS, Quotas};
use crate::window::{MAX, State, Window};

/// Whether a charge passed, and how the key stands.
///
/// Where several quotas were charged, one of them *speaks* through the single-valued accessors: on
/// a refusal the refusing one that is met last, else the one with the fewest tokens left.
/// [`usage`](Self::usage) has them all.
///
/// ```
/// use tower_fixed_window::{Limiter, Quota};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tower_fixed_window::StoreError> {
/// let limiter = Limiter::new(Quota::per_day(2).and(Quota::per_week(10)));
/// let decision = limiter.check("alice").await?;
///
/// assert!(decision.allowed());
/// assert_eq!((decision.limit(), decision.used(), decision.remaining()), (2, 1, 1));
/// assert_eq!(decision.usage()[1].remaining(), 9);
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[must_use = "a decision limits nothing unless it is looked at: see `allowed` and `into_result`"]
pub struct Decision {
    now: i64,
    granted: u64,
    verdict: Verdict,
    /// The standing that speaks, where it is read most.
    speaker: Usage,
    /// All of them, where there are several or some were reserved: most decisions have none of that
    /// to carry.
    all: Option<Box<Several>>,
    /// A bit for each quota that refused.
    refusing: u8,
    /// A bit for each quota whose tokens were taken from a count that other keys share.
    shared: u8,
    /// Whether it was made by the fallback of a store that failed.
    local: bool,
}

#[derive(Clone)]
struct Several {
    standings: [Usage; Quotas::MAX],
    /// The start of the window in which the tokens of each are covered.
    covered: [i64; Quotas::MAX],
    len: u8,
    speaker: u8,
    /// Only of a refusal, and only where it was asked for without a layer.
    refuser: Option<Refuser>,
}

/// Whose refusal it is, for a response to it.
#[derive(Clone, Debug)]
pub(crate) struct Refuser {
    pub(crate) name: Box<str>,
    pub(crate) quotas: Quotas,
}

/// In the order in which one prevails over another: never is later than any instant.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Verdict {
    Passed,
    Reserved { ready_at: i64 },
    Refused { retry_at: i64 },
    RefusedForGood,
}

/// How one quota of a key stands.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    limit: u64,
    /// Milliseconds.
    window: u64,
    start: i64,
    used: i64,
}

/// What is asked of all the quotas of a key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ask {
    pub(crate) cost: u64,
    pub(crate) reserve: bool,
    pub(crate) up_to: bool,
    /// Only look: the standings are those before the charge.
    pub(crate) peek: bool,
}

impl Decision {
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
        let standing = |window: &Window<'_>, used| Usage {
            limit: window.quota().limit,
            window: window.quota().window,
            start: window.start(),
            used,
        };
        let mut speaker = standing(&windows[0], windows[0].used());
        let mut all = (windows.len() > 1).then(|| {
            let mut several = Several::new(windows.len());
            for (i, window) in windows.iter().enumerate() {
                several.standings[i] = standing(window, window.used());
                several.covered[i] = window.start();
            }
            Box::new(several)
        });
        if passes {
            let standings = match &mut all {
                Some(several) => &mut several.standings[..],
                None => std::slice::from_mut(&mut speaker),
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
                Self::reserved(copies, windows.len(), granted, speaker, all)
            }
            false => (Verdict::Passed, all),
        };
        let (shared, local) = (0, false);
        let mut decision = Self { now, granted, verdict, speaker, all, refusing, shared, local };
        if refusing == 0 {
            decision.speak_tightest();
        } else {
            decision.refuse(windows, cost, ask.reserve);
        }
        // A charge of nothing writes nothing (S8).
        (decision, (granted > 0).then_some(writes))
    }

    /// Finds out when what was taken is covered. It points to nothing of a decision, which would then
    /// be in memory instead of registers where nothing is reserved.
    #[inline(never)]
    fn reserved(
        windows: [Window<'_>; Quotas::MAX],
        len: usize,
        granted: u64,
        speaker: Usage,
        all: Option<Box<Several>>,
    ) -> (Verdict, Option<Box<Several>>) {
        let mut covered = [0; Quotas::MAX];
        let mut latest = None;
        for (covered, window) in covered.iter_mut().zip(&windows[..len]) {
            *covered = window.covered_at(granted);
            if *covered > window.start() {
                latest = latest.max(Some(*covered));
            }
        }
        let Some(ready_at) = latest else { return (Verdict::Passed, all) };
        let mut all = all.unwrap_or_else(|| {
            let mut several = Several::new(1);
            several.standings[0] = speaker;
            Box::new(several)
        });
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
                self.speak(i);
            }
        }
    }

    /// Notes whose refusal it is, in memory of its own: what passes has none of that to carry.
    #[cold]
    pub(crate) fn note_refuser(&mut self, name: &str, quotas: &Quotas) {
        let speaker = self.speaker;
        let all = self.all.get_or_insert_with(|| {
            let mut several = Several::new(1);
            several.standings[0] = speaker;
            several.covered[0] = speaker.start;
            Box::new(several)
        });
        all.refuser = Some(Refuser { name: name.into(), quotas: *quotas });
    }

    fn speak(&mut self, i: usize) {
        if let Some(several) = &mut self.all {
            several.speaker = i as u8;
            self.speaker = several.standings[i];
        }
    }

    #[inline]
    fn speak_tightest(&mut self) {
        if let Some(several) = &self.all {
            let tightness = |i: &usize| {
                let standing = &several.standings[*i];
                (Reverse(standing.remaining()), standing.end(), Reverse(*i))
            };
            let tightest = (0..several.len.into()).max_by_key(tightness);
            self.speak(tightest.unwrap_or(0));
        }
    }

    /// Whether the charge passed, at once or as a reservation.
    #[inline]
    pub fn allowed(&self) -> bool {
        matches!(self.verdict, Verdict::Passed | Verdict::Reserved { .. })
    }

    /// The tokens that were taken: the cost, or what was there where less was acceptable; 0 on a
    /// refusal and for a peek.
    pub fn granted(&self) -> u64 {
        self.granted
    }

    /// The limit of the quota that speaks.
    #[inline]
    pub fn limit(&self) -> u64 {
        self.speaker.limit()
    }

    /// Tokens taken in the window of the quota that speaks.
    #[inline]
    pub fn used(&self) -> u64 {
        self.speaker.used()
    }

    /// Tokens left in the window of the quota that speaks.
    #[inline]
    pub fn remaining(&self) -> u64 {
        self.speaker.remaining()
    }

    /// When the window of the quota that speaks ends.
    pub fn reset_at(&self) -> SystemTime {
        self.speaker.reset_at()
    }

    /// How long the window of the quota that speaks still runs.
    pub fn reset_after(&self) -> Duration {
        self.until(self.speaker.end())
    }

    /// On a refusal: how long to wait until the same charge fits, if nobody else asks. `None` if it
    /// was not refused, or can never fit ([`exceeds_capacity`](Self::exceeds_capacity)).
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_at_ms().map(|at| self.until(at))
    }

    /// On a refusal: the start of the first window in which the same charge would fit.
    pub fn retry_at(&self) -> Option<SystemTime> {
        self.retry_at_ms().map(system_time)
    }

    /// Whether the charge was refused for good: it is larger than the quota can ever grant.
    pub fn exceeds_capacity(&self) -> bool {
        self.verdict == Verdict::RefusedForGood
    }

    /// For a reservation that has to wait: the start of the window in which it is covered.
    pub fn ready_at(&self) -> Option<SystemTime> {
        self.ready_at_ms().map(system_time)
    }

    /// For a reservation: how long to wait; zero if the tokens were there.
    pub fn ready_after(&self) -> Duration {
        self.ready_at_ms().map_or(Duration::ZERO, |at| self.until(at))
    }

    /// When this was decided, on the store's clock.
    pub fn decided_at(&self) -> SystemTime {
        system_time(self.now)
    }

    /// How each quota stands, in the order of the quotas.
    #[inline]
    pub fn usage(&self) -> &[Usage] {
        match &self.all {
            Some(several) => &several.standings[..several.len.into()],
            None => std::slice::from_ref(&self.speaker),
        }
    }

    fn standings_mut(&mut self) -> &mut [Usage] {
        match &mut self.all {
            Some(several) => &mut several.standings[..several.len.into()],
            None => std::slice::from_mut(&mut self.speaker),
        }
    }

    /// The quotas that refused, by their position in [`usage`](Self::usage).
    pub fn refusing(&self) -> impl Iterator<Item = usize> + use<> {
        let refusing = self.refusing;
        (0..Quotas::MAX).filter(move |i| refusing >> i & 1 == 1)
    }

    /// The position in [`usage`](Self::usage) of the quota that speaks.
    pub fn governing(&self) -> usize {
        self.all.as_ref().map_or(0, |several| several.speaker.into())
    }

    /// An error if the charge was refused, for those who pass it on with `?`.
    ///
    /// ```
    /// use tower_fixed_window::{Limiter, Quota, RateLimited};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tower_fixed_window::StoreError> {
    /// let limiter = Limiter::new(Quota::per_day(1));
    /// assert!(limiter.check("alice").await?.into_result().is_ok());
    ///
    /// let error: RateLimited = limiter.check("alice").await?.into_result().unwrap_err();
    /// assert!(error.to_string().starts_with("rate limit exceeded: 1 of 1 used, retry in "));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`RateLimited`] if it was refused. It is a response by itself, as a layer's refusal is: in a handler
    /// of axum by `?`, elsewhere by `http::Response::from(error)`.
    pub fn into_result(self) -> Result<(), RateLimited> {
        self.passed().map(drop)
    }

    /// The same, with the decision.
    pub(crate) fn passed(self) -> Result<Self, RateLimited> {
        if self.allowed() { Ok(self) } else { Err(RateLimited(self)) }
    }

    /// The refusal of a charge whose reservation was returned: it can be met when the reservation
    /// would have been.
    pub(crate) fn into_refusal(self) -> Self {
        let Verdict::Reserved { ready_at } = self.verdict else { return self };
        let (mut bits, mut latest) = (0, None);
        for (i, standing) in self.usage().iter().enumerate() {
            let covered_at = self.covered_at(i);
            bits |= u8::from(covered_at > standing.start) << i;
            latest = latest.or((covered_at == ready_at).then_some(i));
        }
        let mut refusal = self.with_cost(0);
        refusal.verdict = Verdict::Refused { retry_at: ready_at };
        refusal.refusing = bits;
        refusal.speak(latest.unwrap_or(0));
        refusal
    }

    /// The same after the charge was corrected to another cost.
    pub(crate) fn with_cost(mut self, cost: u64) -> Self {
        let more = cost.min(MAX_TOKENS) as i64 - self.granted as i64;
        for standing in self.standings_mut() {
            standing.used = standing.used.saturating_add(more).min(MAX);
        }
        self.granted = cost;
        self.speak_tightest();
        self
    }

    /// The start of the window in which the tokens of a quota are covered (S13).
    fn covered_at(&self, i: usize) -> i64 {
        self.all.as_ref().map_or(self.speaker.start, |several| several.covered[i])
    }

    /// Until when the tokens of a quota can be given back: the end of the window in which they are
    /// covered. `None`: they were taken from a count that other keys share, which has windows of its
    /// own, so that the window of the grid counts (S14).
    pub(crate) fn refundable_until(&self, i: usize) -> Option<i64> {
        let own = self.shared >> i & 1 == 0;
        own.then(|| self.covered_until(i))
    }

    /// The end of the window in which the tokens of a quota are covered.
    fn covered_until(&self, i: usize) -> i64 {
        self.covered_at(i).saturating_add(self.usage()[i].window as i64).min(MAX)
    }

    /// The end of the first of the windows in which what was taken is covered (S13).
    pub(crate) fn good_until_ms(&self) -> i64 {
        (0..self.usage().len()).map(|i| self.covered_until(i)).min().unwrap_or(0)
    }

    /// Notes that a quota's tokens were taken from a count that other keys share.
    pub(crate) fn note_shared(&mut self, i: usize) {
        self.shared |= 1 << i;
    }

    pub(crate) fn into_local(mut self) -> Self {
        self.local = true;
        self
    }

    /// Whether it was made in this process's memory, in place of a store that failed.
    pub fn is_local(&self) -> bool {
        self.local
    }

    #[inline]
    pub(crate) fn now_ms(&self) -> i64 {
        self.now
    }

    #[inline]
    pub(crate) fn retry_at_ms(&self) -> Option<i64> {
        match self.verdict {
            Verdict::Refused { retry_at } => Some(retry_at),
            _ => None,
        }
    }

    #[inline]
    pub(crate) fn ready_at_ms(&self) -> Option<i64> {
        match self.verdict {
            Verdict::Reserved { ready_at } => Some(ready_at),
            _ => None,
        }
    }

    /// The end of the window of the quota that speaks, in milliseconds.
    #[inline]
    pub(crate) fn reset_at_ms(&self) -> i64 {
        self.speaker.end()
    }

    fn until(&self, at: i64) -> Duration {
        Duration::from_millis(at.saturating_sub(self.now).max(0) as u64)
    }
}

fn system_time(ms: i64) -> SystemTime {
    let since = Duration::from_millis(ms.unsigned_abs());
    let time = if ms < 0 { UNIX_EPOCH.checked_sub(since) } else { UNIX_EPOCH.checked_add(since) };
    // Not every system's time reaches 285,000 years.
    time.unwrap_or(UNIX_EPOCH)
}

impl PartialEq for Decision {
    fn eq(&self, other: &Self) -> bool {
        let bits = |of: &Self| (of.refusing, of.shared, of.local);
        let count = |of: &Self| (of.now, of.granted, of.verdict, of.governing());
        let covered = |i| self.covered_at(i) == other.covered_at(i);
        bits(self) == bits(other)
            && count(self) == count(other)
            && self.usage() == other.usage()
            && (0..self.usage().len()).all(covered)
    }
}

impl Eq for Decision {}

impl fmt::Debug for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decision")
            .field("verdict", &self.verdict)
            .field("standings", &self.usage())
            .field("speaking", &self.governing())
            .field("now", &self.now)
            .finish_non_exhaustive()
    }
}

impl Several {
    fn new(len: usize) -> Self {
        let none = Usage { limit: 0, window: 0, start: 0, used: 0 };
        let covered = [0; Quotas::MAX];
        let standings = [none; Quotas::MAX];
        Self { standings, covered, len: len as u8, speaker: 0, refuser: None }
    }
}

impl Usage {
    /// The limit.
    #[inline]
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// The length of the window.
    pub fn window(&self) -> Duration {
        Duration::from_millis(self.window)
    }

    /// Tokens taken in this window; more than the limit in debt, 0 while rolled-over tokens are
    /// left.
    #[inline]
    pub fn used(&self) -> u64 {
        self.used.max(0) as u64
    }

    /// Tokens left in this window; more than the limit while rolled-over tokens are left.
    #[inline]
    pub fn remaining(&self) -> u64 {
        (self.limit as i64).saturating_sub(self.used).max(0) as u64
    }

    /// When the window ends.
    pub fn reset_at(&self) -> SystemTime {
        system_time(self.end())
    }

    #[inline]
    pub(crate) fn end(&self) -> i64 {
        self.start.saturating_add(self.window as i64).min(MAX)
    }

    /// The start of the window, and what is counted in it, as a store keeps them.
    #[inline]
    pub(crate) fn count(&self) -> (i64, i64) {
        (self.start, self.used)
    }
}

impl fmt::Debug for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limit, window, start, used } = self;
        write!(f, "{used} of {limit} in [{start}, +{window})")
    }
}

/// A refused charge as an error: [`Decision::into_result`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[doc(alias = "quota exceeded")]
pub struct RateLimited(Decision);

impl RateLimited {
    /// The decision that refused.
    pub fn decision(&self) -> &Decision {
        &self.0
    }

    /// The decision, and whose it is, if that is known.
    pub(crate) fn into_parts(mut self) -> (Decision, Option<Refuser>) {
        let refuser = self.0.all.as_mut().and_then(|all| all.refuser.take());
        (self.0, refuser)
    }
}

impl fmt::Display for RateLimited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let decision = &self.0;
        write!(f, "rate limit exceeded: {} of {} used", decision.used(), decision.limit())?;
        match decision.retry_after() {
            Some(after) => write!(f, ", retry in {after:?}"),
            None => f.write_str(", and it can never fit"),
        }
    }
}

impl Error for RateLimited {}
