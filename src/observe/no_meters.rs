//! Without the feature `metrics`.

use std::time::Duration;

use super::count::{Change, Event, Outcome, Timed};

#[derive(Default)]
pub(crate) struct Meters {}

impl Meters {
    pub(super) fn note_costs(&self) {}

    pub(super) fn has_costs(&self) -> bool {
        false
    }

    pub(super) fn count_outcome(&self, _: &str, _: Outcome) {}

    pub(super) fn count(&self, _: &str, _: Event, _: u64) {}

    pub(super) fn time(&self, _: &str, _: Timed, _: Duration) {}

    pub(super) fn wait(&self, _: &str, _: f64) {}

    pub(super) fn change(&self, _: &str, _: Change, _: Option<i64>) {}
}

#[cfg(feature = "redis")]
pub(crate) fn store_connected() {}

#[cfg(feature = "redis")]
pub(crate) fn store_checked() {}

/// The saves of a store.
#[cfg(feature = "saved")]
#[derive(Default)]
pub(crate) struct Saves;

#[cfg(feature = "saved")]
impl Saves {
    pub(crate) fn note(&self, _: u64, _: Duration) {}

    pub(crate) fn note_failure(&self) {}
}

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

    pub(super) fn took(&self) -> Duration {
        Duration::ZERO
    }
}
