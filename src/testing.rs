//! Tests of limits and of stores.
//!
//! [`ask`] sends one request through a layer. [`conformance`] checks a [`Store`] of your own.
//! [`replay`], which is part of that, runs traces in the format of `vectors.json`.
//!
//! ```
//! use tower_fixed_window::MemoryStore;
//! use tower_fixed_window::testing::{block_on, conformance};
//!
//! conformance(MemoryStore::with_clock, |job| block_on(job));
//! ```

use std::sync::Mutex;

use crate::clock::ManualClock;
use crate::store::Store;

mod ask;
mod block_on;
mod contract;
mod races;
mod replay;

pub use ask::{Hello, ask, ask_around};
pub use block_on::{Job, block_on};
pub use replay::{Failure, Report, replay};

/// The shared traces, each with the expected answer of every step, for [`replay`].
pub const VECTORS: &str = include_str!("testing/vectors.json");

/// The traces for windows of a calendar, for [`replay`]: months, years and time zones.
#[cfg(feature = "time-zones")]
#[cfg_attr(docsrs, doc(cfg(feature = "time-zones")))]
pub const CALENDAR_VECTORS: [&str; 2] =
    [include_str!("testing/calendar-vectors.json"), include_str!("testing/calendar-rules.json")];

/// Checks a store against the contract of [`Store`]: the arithmetic on all shared traces (with the
/// feature `time-zones` also those of calendars), atomic steps under concurrency, the identity of
/// counters, and their life.
///
/// `new` creates an empty store that reads the given clock. `block_on` waits for a future on the
/// current thread: [`block_on`] of this module, or a runtime's.
///
/// # Panics
/// If the store breaks the contract, with a message that says how.
pub fn conformance<S: Store>(
    new: impl Fn(ManualClock) -> S + Send + Sync,
    block_on: impl Fn(Job<'_>) + Send + Sync,
) {
    #[cfg_attr(not(feature = "time-zones"), allow(unused_mut))]
    let mut vectors = vec![VECTORS];
    #[cfg(feature = "time-zones")]
    vectors.extend(CALENDAR_VECTORS);
    for vectors in vectors {
        let report = Mutex::new(None);
        block_on(Box::pin(async {
            let replayed = replay(vectors, &new).await.expect("the shared traces are well-formed");
            *report.lock().expect("no panic") = Some(replayed);
        }));
        let report = report.into_inner().expect("no panic").expect("block_on waits");
        assert!(report.failures.is_empty(), "{report}");
    }
    block_on(Box::pin(contract::check(&new)));
    races::exact(&new, &block_on);
    races::all_or_nothing(&new, &block_on);
    races::refunds_once(&new, &block_on);
}
