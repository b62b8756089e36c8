//! The answer of a store: [`Decision`], with the [`Usage`] of each quota.

use std::array;
use std::cmp::Reverse;
use std::fmt;

use crate::quota::{Quota, Quotas, Span};
use crate::window::{MAX, State};

// First, since rustdoc shows methods in the order of modules.
mod reading;

mod ahead;
mod beside;
mod charge;
#[cfg(feature = "serde")]
mod kept;
mod limited;
mod standing;
mod together;

use beside::{All, FEW, Several, Verdict};
pub(crate) use beside::{MAX_LIMITS, Refuser};
pub(crate) use charge::Ask;
#[cfg(feature = "serde")]
pub(crate) use kept::KeptDecision;
pub use limited::RateLimited;
pub use standing::Usage;
pub(crate) use standing::system_time;
pub(crate) use together::{Line, Merging};

/// Whether a charge passed, and the standing of the key.
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
    granted: u64,
    verdict: Verdict,
    /// The standings of one or two quotas, in their order. Where `all` has them, only the governing
    /// quota's, at its position modulo [`FEW`].
    few: [Usage; FEW],
    /// All standings, where there are more or some tokens were reserved, or those of several
    /// limits.
    all: Option<Box<All>>,
    len: u8,
    governing: u8,
    /// A bit for each quota that refused.
    refusing: u8,
    /// A bit for each quota whose tokens were taken from a count that other keys share.
    shared: u8,
    /// Whether it was made by the fallback of a store that failed.
    local: bool,
}

impl Decision {
    /// Notes whose refusal it is, in memory of its own: what passes has none of that to carry.
    #[cold]
    pub(crate) fn note_refuser(&mut self, name: &str, quotas: &Quotas) {
        self.several().refuser = Some(Refuser { name: name.into(), quotas: *quotas });
    }

    /// Moves few standings to where all are: of several limits, those of the one that governs.
    fn several(&mut self) -> &mut Several {
        let of_limits = matches!(self.all.as_deref(), Some(All::Limits(_)));
        let all = match (of_limits, &mut self.all) {
            (true, Some(all)) => {
                let All::Limits(limits) = &mut **all else { unreachable!("looked at just now") };
                limits.all_mut()
            }
            (_, all) => all,
        };
        let all = all.get_or_insert_with(|| Box::new(All::Quotas(Several::of(&self.few))));
        let All::Quotas(several) = &mut **all else { unreachable!("a limit has no limits") };
        several
    }

    /// All standings, where these are not few: of several limits, those of the one that governs.
    #[inline(always)]
    fn beside(&self) -> Option<&Several> {
        match &self.all {
            None => None,
            Some(all) => all.several(),
        }
    }

    #[inline(always)]
    fn govern_by(&mut self, i: usize) {
        self.governing = i as u8;
        if let Some(several) = self.beside() {
            self.few[i % FEW] = several.standings[i];
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

    /// The standing of the quota that governs.
    #[inline]
    fn governor(&self) -> &Usage {
        &self.few[self.governing() % FEW]
    }

    fn standings_mut(&mut self) -> &mut [Usage] {
        match self.all.as_deref_mut() {
            Some(All::Quotas(several)) => &mut several.standings[..self.len.into()],
            _ => &mut self.few[..self.len.into()],
        }
    }

    /// The refusal of a charge whose reservation was returned: it can be met when the reservation
    /// would have been.
    pub(crate) fn into_refusal(self) -> Self {
        let Verdict::Reserved { ready_at } = self.verdict else { return self };
        let (mut bits, mut latest) = (0, None);
        for (i, standing) in self.usage().iter().enumerate() {
            let covered = self.covered(i).start;
            bits |= u8::from(covered > standing.span().start) << i;
            latest = latest.or((covered == ready_at).then_some(i));
        }
        let mut refusal = self.with_cost(0);
        refusal.verdict = Verdict::Refused { retry_at: ready_at };
        refusal.refusing = bits;
        refusal.govern_by(latest.unwrap_or(0));
        refusal
    }

    /// The same after the charge was corrected to another cost.
    pub(crate) fn with_cost(mut self, cost: u64) -> Self {
        let more = cost.min(Quota::MAX_TOKENS) as i64 - self.granted as i64;
        for standing in self.standings_mut() {
            standing.used = standing.used.saturating_add(more).min(MAX);
        }
        self.granted = cost;
        self.govern_by_tightest();
        self
    }

    /// The window in which the tokens of a quota are covered (S13).
    fn covered(&self, i: usize) -> Span {
        let covered = self.beside().and_then(|several| several.covered);
        covered.map_or_else(|| self.usage()[i].span(), |covered| covered[i])
    }

    /// Until when the tokens of a quota can be refunded: the end of the window that covers them.
    /// `None`: they come from a count that other keys share, which has windows of its own, so that
    /// the window of the grid counts (S14).
    pub(crate) fn refundable_until(&self, i: usize) -> Option<i64> {
        let own = self.shared >> i & 1 == 0;
        own.then(|| self.covered(i).end)
    }

    /// Notes that a quota's tokens were taken from a count that other keys share.
    pub(crate) fn note_shared(&mut self, i: usize) {
        self.shared |= 1 << i;
    }

    /// Notes what a store elsewhere keeps from here on, for the process that asked it: what it had,
    /// and what it writes.
    pub(crate) fn note_states(
        &mut self,
        had: [Option<State>; Quotas::MAX],
        writes: [Option<State>; Quotas::MAX],
    ) {
        let states = array::from_fn(|i| writes[i].or(had[i]));
        self.several().states = Some(states);
    }

    /// What was noted, once: what is handed on has no need of it.
    pub(crate) fn take_states(&mut self) -> Option<[Option<State>; Quotas::MAX]> {
        let Some(All::Quotas(all)) = self.all.as_deref_mut() else { return None };
        let states = all.states.take();
        if usize::from(self.len) <= FEW && all.covered.is_none() && all.refuser.is_none() {
            self.all = None;
        }
        states
    }

    pub(crate) fn into_local(mut self) -> Self {
        self.local = true;
        if let Some(All::Limits(limits)) = self.all.as_deref_mut() {
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

    /// The end of the window of the quota that governs, in milliseconds.
    #[inline]
    pub(crate) fn reset_at_ms(&self) -> i64 {
        self.governor().end()
    }
}

impl PartialEq for Decision {
    fn eq(&self, other: &Self) -> bool {
        let bits = |of: &Self| (of.refusing, of.shared, of.local);
        let count = |of: &Self| (of.now, of.granted, of.verdict, of.governing());
        let covered = |i| self.covered(i) == other.covered(i);
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
