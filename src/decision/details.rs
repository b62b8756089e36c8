//! Details of a decision that don't fit into the decision itself, and its verdict.

use std::sync::Arc;

use super::refuser::{KeptRefuser, Refuser};
use super::standing::Usage;
use crate::quota::{Quotas, Span};
use crate::window::State;

/// The number of quotas that a decision holds without an allocation.
pub(super) const MAX_INLINE: usize = 2;

/// The details of one limit's quotas, or the decisions of several limits.
#[derive(Clone)]
#[allow(clippy::large_enum_variant, reason = "in a box of its own, each would cost another one")]
pub(super) enum Details {
    Quotas(QuotaDetails),
    Limits(LimitDecisions),
}

#[derive(Clone)]
pub(super) struct QuotaDetails {
    pub(super) standings: [Usage; Quotas::MAX],
    /// The window that covers the tokens of each quota, if that is not the standing's.
    pub(super) covered: Option<[Span; Quotas::MAX]>,
    /// The state that a remote store keeps for each quota, if the store told it.
    pub(super) states: Option<[Option<State>; Quotas::MAX]>,
    /// The limit that refused, for charges without a layer, if none is [kept](Refuser) for it.
    pub(super) refuser: Option<Refuser>,
}

impl Default for Details {
    /// Returns the details of several limits, before the first decision.
    #[inline(always)]
    fn default() -> Self {
        Self::Limits(LimitDecisions::default())
    }
}

impl Details {
    /// Returns the details of the governing limit's quotas, if its standings are not inline.
    pub(super) fn for_governing_limit(&self) -> Option<&QuotaDetails> {
        match self {
            Self::Quotas(quotas) => Some(quotas),
            Self::Limits(limits) => match limits.governing().details.as_deref() {
                Some(Self::Quotas(quotas)) => Some(quotas),
                _ => None,
            },
        }
    }

    /// Takes the limits that refused, as far as they were noted.
    pub(super) fn take_refusers(&mut self) -> Vec<Refuser> {
        match self {
            Self::Quotas(quotas) => quotas.refuser.take().into_iter().collect(),
            Self::Limits(limits) => {
                let of_limit = |of: &mut LimitDecision| match (of.refuser, &mut of.details) {
                    (Some(kept), _) => kept.refuser().into_iter().collect(),
                    (None, Some(details)) => details.take_refusers(),
                    (None, None) => Vec::new(),
                };
                limits.decided.iter_mut().flatten().flat_map(of_limit).collect()
            }
        }
    }
}

/// How many limits one charge can have.
pub(crate) const MAX_LIMITS: usize = 8;

/// The decisions of several limits.
#[derive(Clone, Default)]
pub(super) struct LimitDecisions {
    pub(super) decided: [Option<LimitDecision>; MAX_LIMITS],
    pub(super) governing: u8,
}

/// The decision of one of several limits: a [`Decision`](super::Decision) with a name. A type that
/// contains itself would be dropped by a call even if there is nothing to drop.
#[derive(Clone)]
pub(super) struct LimitDecision {
    pub(super) name: Arc<str>,
    pub(super) now: i64,
    pub(super) cost: u64,
    pub(super) verdict: Verdict,
    pub(super) inline: [Usage; MAX_INLINE],
    /// The details of the limit's own quotas.
    pub(super) details: Option<Box<Details>>,
    pub(super) len: u8,
    pub(super) governing: u8,
    pub(super) refusing: u8,
    pub(super) shared: u8,
    pub(super) local: bool,
    /// The limit itself, if it refused and is kept. Otherwise the details may have a copy.
    pub(super) refuser: Option<KeptRefuser>,
}

/// The verdict on a charge. Of several, the greatest prevails: never is later than any instant.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Verdict {
    Passed,
    Reserved { ready_at: i64 },
    Refused { retry_at: i64 },
    RefusedForGood,
}

impl LimitDecisions {
    pub(super) fn governing(&self) -> &LimitDecision {
        self.decided[usize::from(self.governing)].as_ref().expect("one of them governs")
    }
}
