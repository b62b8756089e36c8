//! The conformance suite for stores of [`tower_fixed_window`].
//!
//! [`conformance`] checks a [`Store`] of your own against the contract. [`replay`], which is part of
//! that, runs traces in the format of `traces/vectors.json`. The [`rules`] say what is checked.
//!
//! ```
//! use tower_fixed_window::MemoryStore;
//! use tower_fixed_window::testing::block_on;
//! use tower_fixed_window_conformance::conformance;
//!
//! conformance(|clock| MemoryStore::new().clock(clock), |job| block_on(job));
//! ```

use std::future::Future;
use std::pin::Pin;
use std::sync::Mutex;

use tower_fixed_window::{ManualClock, Store};

// The first definition of a link wins: in the repository the pages are files.
/// The rules by number, which the contract and all traces follow.
///
/// [many_nodes]: https://docs.rs/tower-fixed-window/latest/tower_fixed_window/guide/many_nodes/
/// [memory]: https://docs.rs/tower-fixed-window/latest/tower_fixed_window/guide/operating/#memory
/// [ordering]: https://docs.rs/tower-fixed-window/latest/tower_fixed_window/guide/ordering/
#[doc = include_str!("../semantics.md")]
pub mod rules {}

mod contract;
mod in_order;
mod races;
mod replay;

pub use replay::{Failure, Report, replay};

/// Something to wait for, handed to the runtime that a store needs.
pub type Job<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// The shared traces, each with the expected answer of every step, for [`replay`].
pub const VECTORS: &str = include_str!("../traces/vectors.json");

/// The traces of several limits in one charge, for [`replay`].
pub const TOGETHER_VECTORS: &str = include_str!("../traces/together-vectors.json");

/// The traces for windows of a calendar, for [`replay`]: months, years and time zones.
#[cfg(feature = "time-zones")]
pub const CALENDAR_VECTORS: [&str; 2] = [
    include_str!("../traces/calendar-vectors.json"),
    include_str!("../traces/calendar-rules.json"),
];

/// Checks a store against the contract of [`Store`]: the arithmetic on all shared traces (with the
/// feature `time-zones` also those of calendars), atomic steps under concurrency, the identity of
/// counters, and their life. Traces of several limits are charged in one step if the store can do
/// that, and also one limit after the other.
///
/// `new` creates an empty store that reads the given clock. `block_on` waits for a future on the
/// current thread: that of `tower_fixed_window::testing`, or a runtime's.
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
    if new(ManualClock::default()).charges_together() {
        vectors.push(TOGETHER_VECTORS);
        races::all_limits_or_none(&new, &block_on, true);
    }
    for vectors in vectors {
        let (failed, report) = failures(vectors, &new, &block_on);
        assert!(failed.is_empty(), "{report}");
    }
    let in_order = |clock| in_order::InOrder(new(clock));
    let (failed, report) = failures(TOGETHER_VECTORS, &in_order, &block_on);
    assert_eq!(failed, in_order::EXCEPTED, "one limit after the other:\n{report}");
    races::all_limits_or_none(&in_order, &block_on, false);
    block_on(Box::pin(contract::check(&new)));
    races::exact(&new, &block_on);
    races::all_or_nothing(&new, &block_on);
    races::refunds_once(&new, &block_on);
}

/// The traces that got a wrong answer, and a report of them.
fn failures<S: Store>(
    vectors: &str,
    new: &(impl Fn(ManualClock) -> S + Send + Sync),
    block_on: &(impl Fn(Job<'_>) + Send + Sync),
) -> (Vec<String>, String) {
    let failures = Mutex::new(None);
    block_on(Box::pin(async {
        let report = replay(vectors, new).await.expect("the shared traces are well-formed");
        let mut failed: Vec<_> = report.failures.iter().map(|f| f.trace.clone()).collect();
        failed.dedup();
        *failures.lock().expect("no panic") = Some((failed, report.to_string()));
    }));
    failures.into_inner().expect("no panic").expect("block_on waits")
}
