//! A limit's quotas in force, with prepared headers and body: [`Settings`].

use bytes::Bytes;

use super::headers::PreparedHeaders;
use super::options::Options;
use super::rejection::prepare;
use crate::limiter::Limiter;
use crate::quota::Quotas;

/// The quotas in force, and the parts of responses that depend only on these.
pub(crate) struct Settings {
    generation: u64,
    pub(crate) quotas: Quotas,
    pub(crate) headers: PreparedHeaders,
    pub(crate) body: Bytes,
}

impl Settings {
    pub(crate) fn new(limiter: &Limiter, options: &Options) -> Self {
        let (name, live) = (limiter.name(), limiter.live());
        // Read before the quotas: if these change in between, the settings are made again.
        let generation = live.generation();
        let quotas = live.quotas();
        Self {
            generation,
            headers: PreparedHeaders::new(options.headers, name, quotas.as_slice()[0].limit()),
            body: prepare(name, &quotas, options.status),
            quotas,
        }
    }

    /// Returns whether the limit still has these quotas.
    #[inline]
    pub(crate) fn are_current(&self, limiter: &Limiter) -> bool {
        limiter.live().generation() == self.generation
    }
}
