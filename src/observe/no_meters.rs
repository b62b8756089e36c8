//! Without the feature `metrics`.

use super::count::{Event, Outcome};

#[derive(Default)]
pub(crate) struct Meters;

impl Meters {
    pub(super) fn count_outcome(&self, _: &str, _: Outcome) {}

    pub(super) fn count(&self, _: &str, _: Event, _: u64) {}

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
    pub(super) fn start() -> Self {
        Self
    }
}

#[cfg(feature = "saved")]
#[derive(Default)]
pub(crate) struct Saves;

#[cfg(feature = "saved")]
impl Saves {
    pub(crate) fn note(&self, _: u64, _: std::time::Duration) {}

    pub(crate) fn note_failure(&self) {}
}
