//! The claim of a request that may have to wait: tokens of one limit, or of several that are
//! charged together (S37).

use std::sync::Arc;

use crate::key::Key;
use crate::quota::{Quota, Quotas};
use crate::timer::Instant;

/// A key under one of the layer's limits. Requests with the same counters wait in one line.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Counter {
    /// The limit's position in the layer.
    pub(crate) limit: usize,
    pub(crate) key: Key,
}

/// The quotas that decide a request's charge, in the order of its line's counters.
pub(crate) type Terms = Arc<[Quotas]>;

/// The tokens that a request waits for, the counters to take them from, and the quotas.
pub(crate) struct Claim {
    pub(crate) counters: Arc<[Counter]>,
    pub(crate) terms: Terms,
    pub(crate) cost: Tokens,
    /// When the request arrived: it may have waited in another line.
    pub(crate) arrived: Instant,
}

/// Numbers of tokens, one for each limit. All values in a line have the same number of limits.
#[derive(Clone, PartialEq)]
pub(crate) enum Tokens {
    One(u128),
    Several(Box<[u128]>),
}

impl Tokens {
    pub(crate) fn of(costs: impl ExactSizeIterator<Item = u64>) -> Self {
        let (len, mut costs) = (costs.len(), costs.map(u128::from));
        match len {
            1 => Self::One(costs.next().unwrap_or(0)),
            _ => Self::Several(costs.collect()),
        }
    }

    /// Returns zero tokens for each of these limits.
    pub(super) fn zeroed(&self) -> Self {
        match self {
            Self::One(_) => Self::One(0),
            Self::Several(tokens) => Self::Several(vec![0; tokens.len()].into()),
        }
    }

    /// Returns the cost for each limit, cut to what a charge can have.
    pub(super) fn costs(&self) -> impl Iterator<Item = u64> + Clone {
        let tokens = match self {
            Self::One(tokens) => std::slice::from_ref(tokens),
            Self::Several(tokens) => tokens,
        };
        tokens.iter().map(|tokens| (*tokens).min(Quota::MAX_TOKENS.into()) as u64)
    }

    /// Returns whether the limits could ever grant these tokens at once.
    pub(super) fn can_be_granted(&self, terms: &Terms) -> bool {
        terms.iter().zip(self.costs()).all(|(quotas, tokens)| quotas.can_grant(tokens))
    }

    pub(super) fn add(&mut self, more: &Self) {
        self.change(more, |tokens, more| *tokens += more);
    }

    pub(super) fn subtract(&mut self, less: &Self) {
        self.change(less, |tokens, less| *tokens -= less);
    }

    fn change(&mut self, by: &Self, change: impl Fn(&mut u128, u128)) {
        match (self, by) {
            (Self::One(tokens), Self::One(by)) => change(tokens, *by),
            (Self::Several(tokens), Self::Several(by)) => {
                tokens.iter_mut().zip(by).for_each(|(tokens, by)| change(tokens, *by));
            }
            _ => unreachable!("a line's requests have the same limits"),
        }
    }
}
