//! A limit's quotas in force, with prepared headers: [`Settings`].

use std::sync::Arc;

use super::headers::PreparedHeaders;
use super::options::Options;
use crate::key::KeyExtractor;
use crate::limits::{CostFn, InForce, Limiter, PlanFn};
use crate::quota::Quotas;

/// A limit of the layer, its quotas in force, and the parts of responses that depend only on these.
pub(crate) struct Settings {
    pub(crate) limiter: Limiter,
    pub(crate) key: Arc<dyn KeyExtractor>,
    pub(crate) cost: Option<CostFn>,
    generation: u64,
    pub(crate) quotas: Quotas,
    /// Chooses the quotas of requests that differ: by plan, or for a key until an instant.
    pub(crate) plan: Option<PlanFn>,
    pub(crate) headers: PreparedHeaders,
}

impl Settings {
    pub(crate) fn new(limiter: &Limiter, options: &Options) -> Self {
        let (name, live) = (limiter.name(), limiter.live());
        limiter.end_changes();
        let InForce { generation, quotas, plan } = live.in_force();
        Self {
            key: Arc::clone(&live.limit().key),
            cost: live.limit().cost.clone(),
            generation,
            headers: PreparedHeaders::new(options.headers, name, quotas.as_slice()[0].limit()),
            quotas,
            plan,
            limiter: limiter.clone(),
        }
    }

    /// Returns whether the limit still has these quotas, and no change of these ends by itself.
    #[inline]
    pub(crate) fn are_current(&self) -> bool {
        self.limiter.live().is_of(self.generation)
    }

    /// Ends changes whose time is over, and returns whether the limit still has these quotas.
    pub(crate) fn are_current_now(&self) -> bool {
        self.limiter.end_changes();
        self.limiter.live().generation() == self.generation
    }
}
