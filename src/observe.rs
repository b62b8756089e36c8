//! What the crate reports to operators: a log through `tracing`, and counters and timings through
//! `metrics`. Only these files use the two crates. Without `metrics` nothing is counted, and
//! warnings that no subscriber of `tracing` shows go to standard error.
//!
//! No key reaches these files, so none can be logged (S26).

mod count;
mod log;
#[cfg(feature = "metrics")]
mod meters;
#[cfg(not(feature = "metrics"))]
#[path = "observe/no_meters.rs"]
mod meters;
mod scope;

pub(crate) use count::{Change, Meanwhile, Outcome};
#[cfg(feature = "saved")]
pub(crate) use log::{
    counts_broken, counts_loaded, counts_not_saved, counts_saved, counts_saved_again,
};
pub(crate) use log::{doubt, mistake, overflow};
#[cfg(feature = "saved")]
pub(crate) use meters::Saves;
#[cfg(feature = "metrics")]
pub(crate) use meters::memory;
pub(crate) use meters::{Meters, UnderWay};
#[cfg(feature = "redis")]
pub(crate) use meters::{store_checked, store_connected};
pub(crate) use scope::Observed;

/// `true` if requests without a fault are reported.
pub(crate) const ON: bool = cfg!(any(feature = "tracing", feature = "metrics"));
