//! Without the feature `metrics`.

use super::count::Count;

#[derive(Default)]
pub(crate) struct Meters;

impl Meters {
    #[inline]
    pub(super) fn count(&self, _: &str, _: Count, _: u64) {}

    #[inline]
    pub(super) fn time(&self, _: &str, _: Timing) {}
}

#[cfg(feature = "redis")]
pub(crate) fn store_connected() {}

#[cfg(feature = "redis")]
pub(crate) fn store_checked() {}

pub(crate) struct UnderWay;

impl UnderWay {
    pub(crate) fn new() -> Self {
        Self
    }
}

pub(crate) struct Timing;

impl Timing {
    #[inline]
    pub(super) fn start() -> Self {
        Self
    }
}
