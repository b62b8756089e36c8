//! A refused charge as an error: [`RateLimited`].

use std::error::Error;
use std::fmt;

use super::Decision;

/// A refused charge as an error: [`Decision::into_result`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RateLimited(pub(super) Decision);

impl RateLimited {
    /// The decision that refused.
    pub fn decision(&self) -> &Decision {
        &self.0
    }
}

impl fmt::Display for RateLimited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let decision = &self.0;
        write!(f, "rate limit exceeded: {} of {} used", decision.used(), decision.limit())?;
        match decision.retry_after() {
            Some(after) => write!(f, ", retry in {after:?}"),
            None => f.write_str(", and it can never fit"),
        }
    }
}

impl Error for RateLimited {}
