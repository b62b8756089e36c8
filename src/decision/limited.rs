//! A refused charge as an error, [`RateLimited`], and as the answer to requests that wait behind
//! others; and what a decision knows of its limits: [`Label`].

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use super::{Decision, Verdict};
use crate::observe;
use crate::quota::{Periods, Quota, Quotas};
use crate::window::Window;

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

impl Decision {
    /// When further tokens of one limit could all have passed, at the earliest, and the quota that
    /// lets them pass last. The decision has one line.
    pub(crate) fn earliest_ms(&self, quotas: &Quotas, tokens: u64) -> (i64, usize) {
        let at = |(i, quota): (usize, &Quota)| {
            let usage = &self.usage()[i];
            // A count above the limit may end with its window (S5).
            let window =
                Window::of_usage(quota, usage.span(), usage.used.min(quota.limit() as i64));
            let start = window.covering_window(tokens.min(Quota::MAX_TOKENS)).start;
            // A window that runs may begin later than now, if the clock has stepped back (S4).
            (if start < usage.end { self.now } else { start }, i)
        };
        quotas.iter().enumerate().map(at).max().unwrap_or((self.now, 0))
    }

    /// The refusal, `later` milliseconds after this decision, of a request that has to wait `after`
    /// this decision, for a quota of the limit at this place.
    pub(crate) fn refusal_behind(
        &self,
        (after, place, quota): (i64, usize, usize),
        later: i64,
    ) -> Self {
        self.map_lines(|at, mut of| {
            let retry_at = of.now.saturating_add(after);
            (of.cost, of.now) = (0, of.now.saturating_add(later));
            if of.verdict > (Verdict::Refused { retry_at }) {
                // The cost was another request's.
                (of.verdict, of.refusing) = (Verdict::Passed, 0);
            }
            if at == place {
                of.refusing |= 1 << quota;
                of.verdict = Verdict::Refused { retry_at: retry_at.max(of.now) };
                of.govern_by(quota);
            }
            of
        })
    }
}
