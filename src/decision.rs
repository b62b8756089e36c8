//! What a store answers: [`Decision`], with the [`Standing`] of each quota.

use std::error::Error;
use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::quota::Quotas;
use crate::window::{MAX, State, Window, covered_at};

/// Whether a charge passed, and how the key stands.
///
/// Where several quotas were charged, one of them *speaks* through the single-valued accessors: on
/// a refusal the refusing one that is met last, else the one with the fewest tokens left.
/// [`standings`](Self::standings) has them all.
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
/// assert_eq!(decision.standings()[1].remaining(), 9);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    now: i64,
    granted: u64,
    verdict: Verdict,
    standings: [Standing; Quotas::MAX],
    len: u8,
    speaker: u8,
    /// A bit for each quota that refused.
    refusing: u8,
    /// Whether it was made in memory in place of a store that failed.
    stand_in: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    Passed,
    Reserved { ready_at: i64 },
    Refused { retry_at: i64 },
    RefusedForGood,
}

/// How one quota of a key stands.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Standing {
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

/// The states to write after a charge that passed, in the order of its quotas.
pub(crate) type Writes = [State; Quotas::MAX];

impl Decision {
    /// All of them pass, or none (S6). `windows` has a window for each quota.
    #[inline]
    pub(crate) fn over(now: i64, windows: &[Window<'_>], ask: Ask) -> (Self, Option<Writes>) {
        let mut cost = ask.cost;
        if ask.up_to {
            let available = windows.iter().map(|window| window.available(ask.reserve)).min();
            // Nothing there: refused as if for the first token.
            cost = cost.min(available.unwrap_or(0).max(1));
        }
        let mut decision = Self {
            now,
            granted: 0,
            verdict: Verdict::Passed,
            standings: [Standing::NONE; Quotas::MAX],
            len: windows.len() as u8,
            speaker: 0,
            refusing: 0,
            stand_in: false,
        };
        for (i, window) in windows.iter().enumerate() {
            decision.standings[i] = Standing::of(window);
            decision.refusing |= u8::from(!window.fits(cost, ask.reserve)) << i;
        }
        if decision.refusing != 0 {
            decision.refuse(windows, cost, ask.reserve);
            return (decision, None);
        }
        if ask.peek {
            decision.speak_tightest();
            return (decision, None);
        }
        decision.granted = cost;
        let mut writes = [State::default(); Quotas::MAX];
        let mut ready_at = None;
        for (i, window) in windows.iter().enumerate() {
            let state = window.take(cost);
            let standing = &mut decision.standings[i];
            standing.used = state.used;
            let covered_at = standing.covered_at();
            if ask.reserve && cost > 0 && covered_at > standing.start {
                ready_at = ready_at.max(Some(covered_at));
            }
            writes[i] = state;
        }
        if let Some(ready_at) = ready_at {
            decision.verdict = Verdict::Reserved { ready_at };
        }
        decision.speak_tightest();
        // A charge of nothing writes nothing (S8).
        (decision, (cost > 0).then_some(writes))
    }

    #[cold]
    fn refuse(&mut self, windows: &[Window<'_>], cost: u64, reserve: bool) {
        let mut latest = None;
        for (i, window) in windows.iter().enumerate().filter(|(i, _)| self.refusing >> i & 1 == 1) {
            // Never is later than any instant.
            let retry = window.retry_at(cost, reserve).map_or((1, 0), |at| (0, at));
            let rank = (retry, self.standings[i].end());
            if latest.is_none_or(|latest| rank > latest) {
                latest = Some(rank);
                self.speaker = i as u8;
            }
        }
        self.verdict = match latest {
            Some(((0, retry_at), _)) => Verdict::Refused { retry_at },
            _ => Verdict::RefusedForGood,
        };
    }

    #[inline]
    fn speak_tightest(&mut self) {
        for i in 1..self.len as usize {
            let (this, speaker) = (&self.standings[i], self.speaker());
            let tighter = this.remaining() < speaker.remaining()
                || this.remaining() == speaker.remaining() && this.end() > speaker.end();
            if tighter {
                self.speaker = i as u8;
            }
        }
    }

    #[inline]
    fn speaker(&self) -> &Standing {
        &self.standings[self.speaker as usize]
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
        self.speaker().limit()
    }

    /// Tokens taken in the window of the quota that speaks.
    #[inline]
    pub fn used(&self) -> u64 {
        self.speaker().used()
    }

    /// Tokens left in the window of the quota that speaks.
    #[inline]
    pub fn remaining(&self) -> u64 {
        self.speaker().remaining()
    }

    /// When the window of the quota that speaks ends.
    pub fn reset_at(&self) -> SystemTime {
        self.speaker().reset_at()
    }

    /// How long the window of the quota that speaks still runs.
    pub fn reset_after(&self) -> Duration {
        self.until(self.speaker().end())
    }

    /// On a refusal: how long to wait until the same charge fits, if nobody else asks. `None` if it
    /// was not refused, or can never fit ([`is_final`](Self::is_final)).
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_at_ms().map(|at| self.until(at))
    }

    /// On a refusal: the start of the first window in which the same charge would fit.
    pub fn retry_at(&self) -> Option<SystemTime> {
        self.retry_at_ms().map(system_time)
    }

    /// Whether the charge was refused for good: it is larger than the quota can ever grant.
    pub fn is_final(&self) -> bool {
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
    pub fn standings(&self) -> &[Standing] {
        &self.standings[..self.len as usize]
    }

    /// The quotas that refused, by their position in [`standings`](Self::standings).
    pub fn refusing(&self) -> impl Iterator<Item = usize> + use<> {
        let refusing = self.refusing;
        (0..Quotas::MAX).filter(move |i| refusing >> i & 1 == 1)
    }

    /// The position in [`standings`](Self::standings) of the quota that speaks.
    pub fn speaking(&self) -> usize {
        self.speaker as usize
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
    /// [`RateLimited`] if it was refused.
    pub fn into_result(self) -> Result<Self, RateLimited> {
        if self.allowed() { Ok(self) } else { Err(RateLimited(self)) }
    }

    /// Marks it as made in place of a store that failed: what it took is returned to memory.
    pub(crate) fn standing_in(mut self) -> Self {
        self.stand_in = true;
        self
    }

    /// Whether it was made in this process's memory, in place of a store that failed.
    pub fn is_stand_in(&self) -> bool {
        self.stand_in
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

    pub(crate) fn ready_at_ms(&self) -> Option<i64> {
        match self.verdict {
            Verdict::Reserved { ready_at } => Some(ready_at),
            _ => None,
        }
    }

    /// The end of the window of the quota that speaks, in milliseconds.
    #[inline]
    pub(crate) fn reset_at_ms(&self) -> i64 {
        self.speaker().end()
    }

    fn until(&self, at: i64) -> Duration {
        Duration::from_millis(at.saturating_sub(self.now).max(0) as u64)
    }
}

fn system_time(ms: i64) -> SystemTime {
    let since = Duration::from_millis(ms.unsigned_abs());
    if ms < 0 { UNIX_EPOCH - since } else { UNIX_EPOCH + since }
}

impl fmt::Debug for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decision")
            .field("verdict", &self.verdict)
            .field("standings", &self.standings())
            .field("speaking", &self.speaker)
            .field("now", &self.now)
            .finish_non_exhaustive()
    }
}

impl Standing {
    const NONE: Self = Self { limit: 0, window: 0, start: 0, used: 0 };

    #[inline]
    fn of(window: &Window<'_>) -> Self {
        Self {
            limit: window.quota().limit,
            window: window.quota().window,
            start: window.start(),
            used: window.used(),
        }
    }

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

    fn covered_at(&self) -> i64 {
        covered_at(self.start, self.used, self.limit, self.window)
    }

    /// Until when what was taken here can be given back: the end of the window in which it is
    /// covered (S14).
    pub(crate) fn refundable_until(&self) -> i64 {
        self.covered_at().saturating_add(self.window as i64).min(MAX)
    }
}

impl fmt::Debug for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limit, window, start, used } = self;
        write!(f, "{used} of {limit} in [{start}, +{window})")
    }
}

/// A refused charge as an error: [`Decision::into_result`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RateLimited(Decision);

impl RateLimited {
    /// The decision that refused.
    pub fn decision(&self) -> &Decision {
        &self.0
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
