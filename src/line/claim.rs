//! What a request asks for while it waits: tokens of one limit, or of several that are decided
//! together (S37).

use std::hash::{Hash, Hasher};
use std::ops::{AddAssign, Sub, SubAssign};
use std::sync::Arc;

use crate::key::Key;
use crate::quota::{Quota, Quotas};

/// A key under one of the layer's limits. Requests that have these in common wait in one line.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Counter {
    /// The limit's position in the layer.
    pub(crate) limit: usize,
    pub(crate) scope: u64,
    pub(crate) key: Key,
}

impl Hash for Counter {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // Of equal keys, few are under different limits.
        self.key.hash(state);
    }
}

/// The name and the quotas of a limit that decides.
#[derive(PartialEq)]
pub(crate) struct Term {
    pub(crate) name: Arc<str>,
    pub(crate) quotas: Quotas,
}

/// What a request is decided by, in the order of its line's counters.
pub(crate) type Terms = Arc<[Term]>;

pub(crate) struct Claim {
    pub(crate) counters: Arc<[Counter]>,
    pub(crate) terms: Terms,
    /// Whether some quotas are the request's, and not the limit's.
    pub(crate) own: bool,
    pub(crate) cost: Tokens,
}

/// Some of the limits of a line, a bit each.
#[derive(Clone, Copy)]
pub(super) struct Those(u8);

impl Those {
    pub(super) const NONE: Self = Self(0);
    pub(super) const ALL: Self = Self(u8::MAX);

    /// Those limits of a line for which this is so.
    pub(super) fn of(are: impl Iterator<Item = bool>) -> Self {
        Self(are.enumerate().fold(0, |bits, (i, is)| bits | u8::from(is) << i))
    }

    pub(super) fn and(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }

    pub(super) fn has(self, limit: usize) -> bool {
        self.0 >> limit & 1 == 1
    }

    pub(super) fn is_all(self) -> bool {
        self.0 == u8::MAX
    }

    pub(super) fn is_none(self) -> bool {
        self.0 == 0
    }
}

/// Tokens of each limit. All that meet in a line have as many limits.
#[derive(Clone, PartialEq)]
pub(crate) enum Tokens {
    One(u128),
    Several(Box<[u128]>),
}

impl Tokens {
    /// Of one limit, or of several.
    pub(crate) fn of(costs: &[u64]) -> Self {
        match *costs {
            [cost] => Self::One(cost.into()),
            ref costs => Self::Several(costs.iter().map(|cost| u128::from(*cost)).collect()),
        }
    }

    /// No tokens of as many limits.
    pub(super) fn none(&self) -> Self {
        self.map(self, |_, _| 0)
    }

    pub(super) fn each(&self) -> &[u128] {
        match self {
            Self::One(tokens) => std::slice::from_ref(tokens),
            Self::Several(tokens) => tokens,
        }
    }

    /// Of each limit, as a charge can have them.
    pub(super) fn costs(&self) -> impl Iterator<Item = u64> + Clone {
        self.each().iter().map(|tokens| (*tokens).min(Quota::MAX_TOKENS.into()) as u64)
    }

    pub(super) fn is_none(&self) -> bool {
        self.each().iter().all(|tokens| *tokens == 0)
    }

    /// Whether others have as many of each.
    pub(super) fn fits(&self, others: &Self) -> bool {
        self.each().iter().zip(others.each()).all(|(tokens, others)| tokens <= others)
    }

    fn map(&self, other: &Self, op: impl Fn(u128, u128) -> u128) -> Self {
        match (self, other) {
            (Self::One(one), other) => Self::One(op(*one, other.each()[0])),
            (Self::Several(several), other) => Self::Several(
                several.iter().zip(other.each()).map(|(one, other)| op(*one, *other)).collect(),
            ),
        }
    }
}

impl AddAssign<&Self> for Tokens {
    fn add_assign(&mut self, more: &Self) {
        *self = self.map(more, |tokens, more| tokens + more);
    }
}

impl SubAssign<&Self> for Tokens {
    fn sub_assign(&mut self, less: &Self) {
        *self = self.map(less, u128::saturating_sub);
    }
}

impl Sub for &Tokens {
    type Output = Tokens;

    fn sub(self, less: Self) -> Tokens {
        self.map(less, u128::saturating_sub)
    }
}
