//! What responses under a limit's current quotas have in common.

use bytes::Bytes;

use super::headers::PreparedHeaders;
use super::options::Options;
use super::rejection::prepare;
use crate::limiter::Limiter;
use crate::quota::Quotas;

/// The quotas in force, with what responses under them have in common.
pub(crate) struct Settings {
    generation: u64,
    pub(crate) quotas: Quotas,
    pub(crate) headers: PreparedHeaders,
    pub(crate) body: Bytes,
}

impl Settings {
    pub(crate) fn new(limiter: &Limiter, options: &Options) -> Self {
        let (name, live) = (limiter.name(), limiter.live());
        // Read before the quotas, which may change meanwhile.
        let generation = live.generation();
        let quotas = live.quotas();
        Self {
            generation,
            headers: PreparedHeaders::new(options.headers, name, quotas.as_slice()[0].limit()),
            body: prepare(name, &quotas, options.status),
            quotas,
        }
    }

    /// Whether the limit still has these quotas.
    #[inline]
    pub(crate) fn are_current(&self, limiter: &Limiter) -> bool {
        limiter.live().generation() == self.generation
    }
}
