//! A refused charge as an error, [`RateLimited`], and the limit that refused: [`Refuser`].

use std::error::Error;
use std::fmt;
use std::num::NonZero;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{Decision, LineRef};
use crate::quota::Quotas;

/// A refused charge as an error: [`Decision::into_result`]. [`Limiter::charge`] returns it, too.
///
/// [`Limiter::charge`]: crate::Limiter::charge
#[derive(Clone, PartialEq, Eq, Debug)]
#[doc(alias = "quota exceeded")]
pub struct RateLimited(Decision);

impl RateLimited {
    pub(super) fn new(refusal: Decision) -> Self {
        Self(refusal)
    }

    /// Returns the decision that refused, as in the example of
    /// [`Limiter::charge`](crate::Limiter::charge).
    pub fn decision(&self) -> &Decision {
        &self.0
    }

    /// Returns the decision, and the limits that refused, each with its place, as far as they are
    /// known.
    pub(crate) fn into_parts(self) -> (Decision, Vec<(usize, Refuser)>) {
        let refuser = |(place, LineRef(line, details)): (usize, LineRef<'_>)| match line.refuser {
            Some(kept) => Some((place, kept.refuser()?)),
            None => Some((place, details?.refuser.clone()?)),
        };
        let refusers = self.0.lines().filter_map(refuser).collect();
        (self.0, refusers)
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

/// The limit that refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Refuser {
    pub(crate) name: Box<str>,
    pub(crate) quotas: Quotas,
}

/// The number of a limit that is kept for as long as the process runs, so that its refusals refer
/// to it without an allocation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct KeptRefuser(NonZero<u16>);

impl KeptRefuser {
    /// Returns the number of a limit. `None`: as many limits are kept as may be, and refusals of
    /// others take a copy.
    pub(crate) fn of(name: &str, quotas: &Quotas) -> Option<Self> {
        /// More than an app writes down, in some 240 kB.
        const MOST: usize = 1_024;

        let mut kept = kept();
        let known = kept.iter().position(|of| *of.name == *name && of.quotas == *quotas);
        let index = match known {
            Some(index) => index,
            None if kept.len() < MOST => {
                kept.push(Refuser { name: name.into(), quotas: *quotas });
                kept.len() - 1
            }
            None => return None,
        };
        NonZero::new(index as u16 + 1).map(Self)
    }

    fn refuser(self) -> Option<Refuser> {
        kept().get(usize::from(self.0.get()) - 1).cloned()
    }
}

fn kept() -> MutexGuard<'static, Vec<Refuser>> {
    static KEPT: Mutex<Vec<Refuser>> = Mutex::new(Vec::new());
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}
