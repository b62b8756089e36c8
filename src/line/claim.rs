//! The claim of a request in a line: tokens of one limit, or of several that are charged together
//! (S37).

use std::hash::{Hash, Hasher};
use std::ops::{AddAssign, Sub, SubAssign};
use std::sync::Arc;

use crate::key::Key;
use crate::quota::{Quota, Quotas};

/// A key under one of the layer's limits. Requests with the same counters wait in one line.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Counter {
    /// The limit's position in the layer.
    pub(crate) limit: usize,
    pub(crate) scope: u64,
    pub(crate) key: Key,
}

impl Hash for Counter {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // The key is enough: few equal keys are under different limits.
        self.key.hash(state);
    }
}

/// The name of a limit, and the quotas that decide a charge under it.
#[derive(PartialEq)]
pub(crate) struct Term {
    pub(crate) name: Arc<str>,
    pub(crate) quotas: Quotas,
}

/// The terms of a request, in the order of its line's counters.
pub(crate) type Terms = Arc<[Term]>;

/// The tokens that a request waits for, the counters to take them from, and the quotas.
pub(crate) struct Claim {
    pub(crate) counters: Arc<[Counter]>,
    pub(crate) terms: Terms,
    /// `true` if some quotas are the request's own, and not the limit's.
    pub(crate) own: bool,
    pub(crate) cost: Tokens,
}

/// A set of a line's limits, a bit for each.
#[derive(Clone, Copy)]
pub(super) struct LimitSet(u8);

impl LimitSet {
    pub(super) const NONE: Self = Self(0);
    pub(super) const ALL: Self = Self(u8::MAX);

    /// Creates the set of the limits whose flag is `true`.
    pub(super) fn from_flags(flags: impl Iterator<Item = bool>) -> Self {
        Self(flags.enumerate().fold(0, |bits, (i, flag)| bits | u8::from(flag) << i))
    }

    pub(super) fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(super) fn contains(self, limit: usize) -> bool {
        self.0 >> limit & 1 == 1
    }

    pub(super) fn is_all(self) -> bool {
        self.0 == u8::MAX
    }

    pub(super) fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// Numbers of tokens, one for each limit. All values in a line have the same number of limits.
#[derive(Clone, PartialEq)]
pub(crate) enum Tokens {
    One(u128),
    Several(Box<[u128]>),
}

impl Tokens {
    pub(crate) fn of(costs: &[u64]) -> Self {
        match *costs {
            [cost] => Self::One(cost.into()),
            ref costs => Self::Several(costs.iter().map(|cost| u128::from(*cost)).collect()),
        }
    }

    /// Returns zero tokens for each of these limits.
    pub(super) fn zeroed(&self) -> Self {
        self.map(self, |_, _| 0)
    }

    pub(super) fn per_limit(&self) -> &[u128] {
        match self {
            Self::One(tokens) => std::slice::from_ref(tokens),
            Self::Several(tokens) => tokens,
        }
    }

    /// Returns the cost for each limit, cut to what a charge can have.
    pub(super) fn costs(&self) -> impl Iterator<Item = u64> + Clone {
        self.per_limit().iter().map(|tokens| (*tokens).min(Quota::MAX_TOKENS.into()) as u64)
    }

    pub(super) fn is_zero(&self) -> bool {
        self.per_limit().iter().all(|tokens| *tokens == 0)
    }

    /// Returns whether `available` has at least these tokens for each limit.
    pub(super) fn fits_in(&self, available: &Self) -> bool {
        let mut limits = self.per_limit().iter().zip(available.per_limit());
        limits.all(|(tokens, available)| tokens <= available)
    }

    fn map(&self, other: &Self, op: impl Fn(u128, u128) -> u128) -> Self {
        match (self, other) {
            (Self::One(one), other) => Self::One(op(*one, other.per_limit()[0])),
            (Self::Several(several), other) => Self::Several(
                several
                    .iter()
                    .zip(other.per_limit())
                    .map(|(one, other)| op(*one, *other))
                    .collect(),
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
