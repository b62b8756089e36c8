//! A refused charge as an error, [`RateLimited`], and what a decision knows of its limits:
//! [`Label`].

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use super::Decision;
use crate::observe;
use crate::quota::Periods;

/// A refused charge as an error, which [`Decision::into_result`] and [`Limiter::charge`] return.
///
/// [`Limiter::charge`]: crate::Limiter::charge
#[derive(Clone, PartialEq, Eq, Debug)]
#[doc(alias = "quota exceeded")]
pub struct RateLimited(pub(crate) Decision);

impl RateLimited {
    /// Returns the decision that refused, as in the example of
    /// [`Limiter::charge`](crate::Limiter::charge).
    pub fn decision(&self) -> &Decision {
        &self.0
    }
}

impl fmt::Display for RateLimited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let decision = &self.0;
        write!(f, "rate limit exceeded: {} of {} used", decision.used(), decision.limit())?;
        if let Some((left, cost)) = decision.left_and_cost() {
            write!(f, ", {left} left for a cost of {cost}")?;
        }
        match decision.retry_after() {
            Some(after) => write!(f, ", retry in {after:?}"),
            None => f.write_str(", and it can never fit"),
        }
    }
}

impl Error for RateLimited {}

/// A limit's name and quotas as clients read them, beside its use.
#[derive(Clone, Copy)]
pub(crate) struct Label {
    pub(crate) name: LimitName,
    pub(crate) periods: Periods,
}

/// A name, or none. Names are kept while the process runs: a decision that owned its name would
/// count references to it with each request. A pointer to a text is one word instead of two.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct LimitName(Option<&'static &'static str>);

impl LimitName {
    /// Limits beyond the most have no name in decisions, and the log says so.
    pub(crate) fn interned(name: &str) -> Self {
        /// In some 5 MB.
        const MOST: usize = 65_535;
        static NAMES: Mutex<BTreeMap<&str, &&str>> = Mutex::new(BTreeMap::new());

        if name.is_empty() {
            return Self::default();
        }
        let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
        if !names.contains_key(name) && names.len() < MOST {
            let name = Box::leak(Box::new(&*String::from(name).leak()));
            names.insert(name, name);
        }
        let found = names.get(name).copied();
        drop(names);
        if found.is_none() {
            observe::mistake(&format_args!(
                "this process has made limits of more than {MOST} names, and decisions don't have \
                 those of later ones: name a limit after what it limits, not after its clients"
            ));
        }
        Self(found)
    }

    pub(crate) fn text(self) -> &'static str {
        self.0.map_or("", |name| name)
    }
}
