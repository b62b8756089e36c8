//! What a decision says, and what it has no room for.

use std::sync::Arc;

use super::standing::Usage;
use crate::quota::{Quotas, Span};
use crate::window::State;

/// How many quotas a decision has room for without an allocation.
pub(super) const FEW: usize = 2;

#[derive(Clone)]
#[allow(clippy::large_enum_variant, reason = "in a box of its own, each would cost another one")]
pub(super) enum All {
    Quotas(Several),
    Limits(Limits),
}

#[derive(Clone)]
pub(super) struct Several {
    pub(super) standings: [Usage; Quotas::MAX],
    /// The window in which the tokens of each are covered, where that is not the standing's.
    pub(super) covered: Option<[Span; Quotas::MAX]>,
    /// What the store keeps of each from here on, as far as it is elsewhere and said so.
    pub(super) states: Option<[Option<State>; Quotas::MAX]>,
    /// Only of a refusal, and only where it was asked for without a layer.
    pub(super) refuser: Option<Refuser>,
}

impl Default for All {
    /// Of several limits, before the first decision.
    #[inline(always)]
    fn default() -> Self {
        Self::Limits(Limits::default())
    }
}

impl All {
    pub(super) fn several(&self) -> Option<&Several> {
        match self {
            Self::Quotas(several) => Some(several),
            Self::Limits(limits) => match limits.governing().all.as_deref() {
                Some(Self::Quotas(several)) => Some(several),
                _ => None,
            },
        }
    }
}

impl All {
    /// The limits that refused, as far as they were noted.
    pub(super) fn take_refusers(&mut self) -> Vec<Refuser> {
        match self {
            Self::Quotas(several) => several.refuser.take().into_iter().collect(),
            Self::Limits(limits) => {
                let all = limits.decided.iter_mut().flatten().filter_map(|of| of.all.as_mut());
                all.flat_map(|all| all.take_refusers()).collect()
            }
        }
    }
}

/// How many limits one charge can have.
pub(crate) const MAX_LIMITS: usize = 8;

/// The decisions of several limits.
#[derive(Clone, Default)]
pub(super) struct Limits {
    pub(super) decided: [Option<Decided>; MAX_LIMITS],
    pub(super) governing: u8,
}

/// The decision of one of them. It is no [`Decision`]: a type that contains itself is dropped by a
/// call, also where there is nothing to drop.
#[derive(Clone)]
pub(super) struct Decided {
    pub(super) name: Arc<str>,
    pub(super) now: i64,
    pub(super) granted: u64,
    pub(super) verdict: Verdict,
    pub(super) few: [Usage; FEW],
    /// Of its own quotas.
    pub(super) all: Option<Box<All>>,
    pub(super) len: u8,
    pub(super) governing: u8,
    pub(super) refusing: u8,
    pub(super) shared: u8,
    pub(super) local: bool,
}

/// Whose refusal it is, for a response to it.
#[derive(Clone, Debug)]
pub(crate) struct Refuser {
    pub(crate) name: Box<str>,
    pub(crate) quotas: Quotas,
}

/// In the order in which one prevails over another: never is later than any instant.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Verdict {
    Passed,
    Reserved { ready_at: i64 },
    Refused { retry_at: i64 },
    RefusedForGood,
}

impl Limits {
    pub(super) fn governing(&self) -> &Decided {
        self.decided[usize::from(self.governing)].as_ref().expect("one of them governs")
    }
}
