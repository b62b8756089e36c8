//! The answer of a store: [`Decision`], with the [`Usage`] of each quota.

use std::array;
use std::cmp::Reverse;
use std::fmt;

use crate::quota::{Quota, Quotas, Span};
use crate::window::{MAX, State};

// First, since rustdoc shows methods in the order of modules.
mod reading;

mod ahead;
mod charge;
mod details;
#[cfg(feature = "serde")]
mod kept;
mod limited;
mod refuser;
mod standing;
mod together;

pub(crate) use charge::{Ask, Ruling};
pub(crate) use details::MAX_LIMITS;
use details::{Details, MAX_INLINE, QuotaDetails, Verdict};
#[cfg(feature = "serde")]
pub(crate) use kept::KeptDecision;
pub use limited::RateLimited;
pub(crate) use refuser::{KeptRefuser, Refuser};
pub use standing::Usage;
pub(crate) use standing::system_time;
pub(crate) use together::{LimitWindows, Merging};

/// The answer to a charge: whether it passed, and the standing of the key.
///
/// If several quotas were charged, one of them *governs*, and the methods with a single value are
/// about that quota: on a refusal the refusing quota with the latest retry, otherwise the one with
/// the fewest tokens left. [`usage`](Self::usage) returns all of them.
///
/// ```
/// use std::time::Duration;
/// use tower_fixed_window::{Limiter, Quota};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tower_fixed_window::StoreError> {
/// let limiter = Limiter::new(Quota::per_day(2).and(Quota::per_week(10)));
/// let decision = limiter.check("alice").await?;
///
/// assert!(decision.allowed());
/// assert_eq!((decision.limit(), decision.used(), decision.remaining()), (2, 1, 1));
/// assert_eq!(decision.usage()[1].remaining(), 9);
///
/// assert_eq!(decision.granted(), 1);
/// assert!(!decision.is_local() && !decision.exceeds_capacity());
/// assert_eq!(decision.reset_at(), decision.decided_at() + decision.reset_after());
/// // It was not refused, and does not have to wait.
/// assert_eq!((decision.retry_after(), decision.retry_at()), (None, None));
/// assert_eq!((decision.ready_after(), decision.ready_at()), (Duration::ZERO, None));
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[must_use = "a decision limits nothing unless it is looked at: see `allowed` and `into_result`"]
pub struct Decision {
    now: i64,
    /// The tokens taken, or those that a refused charge asked for.
    cost: u64,
    verdict: Verdict,
    /// The standings of one or two quotas, in their order. If `details` has the standings, only the
    /// governing quota's is here, at its position modulo [`MAX_INLINE`].
    inline: [Usage; MAX_INLINE],
    /// All standings, if there are more, if some tokens were reserved, or if there are several
    /// limits.
    details: Option<Box<Details>>,
    len: u8,
    governing: u8,
    /// A bit for each quota that refused.
    refusing: u8,
    /// A bit for each quota whose tokens were taken from a count that other keys share.
    shared: u8,
    /// `true` if the fallback of a store that failed decided.
    local: bool,
    /// The limit that refused, for charges without a layer.
    refuser: Option<KeptRefuser>,
}

impl Decision {
    /// Notes the limit that refused, if it is kept.
    #[inline]
    pub(crate) fn note_kept_refuser(&mut self, refuser: KeptRefuser) {
        self.refuser = Some(refuser);
    }

    /// Notes a copy of the limit that refused in a box: decisions that pass stay small.
    #[cold]
    pub(crate) fn note_refuser(&mut self, name: &str, quotas: &Quotas) {
        self.quota_details_mut().refuser = Some(Refuser { name: name.into(), quotas: *quotas });
    }

    /// Returns the details of the quotas of one limit's decision, after moving inline standings
    /// there if there are none yet.
    fn quota_details_mut(&mut self) -> &mut QuotaDetails {
        let details = self.details.get_or_insert_with(|| {
            Box::new(Details::Quotas(QuotaDetails::from_usage(&self.inline)))
        });
        let Details::Quotas(quotas) = &mut **details else { unreachable!("a limit has no limits") };
        quotas
    }

    /// Returns the details of the governing limit's quotas; `None` if all standings are inline.
    #[inline(always)]
    fn quota_details(&self) -> Option<&QuotaDetails> {
        match &self.details {
            None => None,
            Some(details) => details.for_governing_limit(),
        }
    }

    #[inline(always)]
    fn govern_by(&mut self, i: usize) {
        self.governing = i as u8;
        if let Some(details) = self.quota_details() {
            self.inline[i % MAX_INLINE] = details.standings[i];
        }
    }

    #[inline(always)]
    fn govern_by_tightest(&mut self) {
        let (mut tightest, usage) = (0, self.usage());
        let tightness = |i: usize| (usage[i].remaining(), Reverse(usage[i].end()));
        for i in 1..usage.len() {
            if tightness(i) < tightness(tightest) {
                tightest = i;
            }
        }
        self.govern_by(tightest);
    }

    /// Returns the standing of the quota that governs.
    #[inline]
    fn governor(&self) -> &Usage {
        &self.inline[self.governing() % MAX_INLINE]
    }

    fn standings_mut(&mut self) -> &mut [Usage] {
        match self.details.as_deref_mut() {
            Some(Details::Quotas(details)) => &mut details.standings[..self.len.into()],
            _ => &mut self.inline[..self.len.into()],
        }
    }

    /// Returns the refusal of a charge whose reservation was returned. Its retry is when the
    /// reservation would have been ready.
    pub(crate) fn into_refusal(self) -> Self {
        let Verdict::Reserved { ready_at } = self.verdict else { return self };
        let (mut bits, mut latest) = (0, None);
        for (i, standing) in self.usage().iter().enumerate() {
            let covered = self.covering_window(i).start;
            bits |= u8::from(covered > standing.span().start) << i;
            latest = latest.or((covered == ready_at).then_some(i));
        }
        let mut refusal = self.with_cost(0);
        refusal.verdict = Verdict::Refused { retry_at: ready_at };
        refusal.refusing = bits;
        refusal.govern_by(latest.unwrap_or(0));
        refusal
    }

    /// Returns the decision after its charge was corrected to another cost.
    pub(crate) fn with_cost(mut self, cost: u64) -> Self {
        let more = cost.min(Quota::MAX_TOKENS) as i64 - self.granted() as i64;
        for standing in self.standings_mut() {
            standing.used = standing.used.saturating_add(more).min(MAX);
        }
        self.cost = cost;
        self.govern_by_tightest();
        self
    }

    /// Returns the window that covers the tokens of a quota (S13).
    fn covering_window(&self, i: usize) -> Span {
        let covered = self.quota_details().and_then(|details| details.covered);
        covered.map_or_else(|| self.usage()[i].span(), |covered| covered[i])
    }

    /// Returns until when the tokens of a quota can be refunded: the end of the window that covers
    /// them. `None`: the tokens come from a count that other keys share. Its windows are not the
    /// key's, so that the window of the grid counts (S14).
    pub(crate) fn refundable_until(&self, i: usize) -> Option<i64> {
        let own = self.shared >> i & 1 == 0;
        own.then(|| self.covering_window(i).end)
    }

    /// Notes that a quota's tokens were taken from a count that other keys share.
    pub(crate) fn note_shared(&mut self, i: usize) {
        self.shared |= 1 << i;
    }

    /// Notes the states that a remote store keeps from here on, for the process that called it: the
    /// states that the store writes, or else those that it had.
    pub(crate) fn note_states(
        &mut self,
        had: [Option<State>; Quotas::MAX],
        writes: [Option<State>; Quotas::MAX],
    ) {
        let states = array::from_fn(|i| writes[i].or(had[i]));
        self.quota_details_mut().states = Some(states);
    }

    /// Returns the noted states once, and removes them: users of the decision don't need them.
    pub(crate) fn take_states(&mut self) -> Option<[Option<State>; Quotas::MAX]> {
        let Some(Details::Quotas(details)) = self.details.as_deref_mut() else { return None };
        let states = details.states.take();
        if usize::from(self.len) <= MAX_INLINE
            && details.covered.is_none()
            && details.refuser.is_none()
        {
            self.details = None;
        }
        states
    }

    /// Marks the decision as one of the fallback.
    pub(crate) fn into_local(mut self) -> Self {
        self.local = true;
        if let Some(Details::Limits(limits)) = self.details.as_deref_mut() {
            limits.note_local();
        }
        self
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

    /// Returns the end of the governing quota's window, in milliseconds.
    #[inline]
    pub(crate) fn reset_at_ms(&self) -> i64 {
        self.governor().end()
    }
}

impl PartialEq for Decision {
    fn eq(&self, other: &Self) -> bool {
        let bits = |of: &Self| (of.refusing, of.shared, of.local);
        let count = |of: &Self| (of.now, of.cost, of.verdict, of.governing());
        let covered = |i| self.covering_window(i) == other.covering_window(i);
        bits(self) == bits(other)
            && count(self) == count(other)
            && self.usage() == other.usage()
            && self.limits().eq(other.limits())
            && (0..self.usage().len()).all(covered)
    }
}

impl Eq for Decision {}

impl fmt::Debug for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decision")
            .field("verdict", &self.verdict)
            .field("standings", &self.usage())
            .field("governing", &self.governing())
            .field("now", &self.now)
            .finish_non_exhaustive()
    }
}
