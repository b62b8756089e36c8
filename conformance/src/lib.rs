//! The conformance suite for stores of [`tower_fixed_window`].
//!
//! [`conformance`] checks a [`Store`] of your own against the contract. [`replay`], which is part of
//! that, runs traces in the format of `traces/vectors.json`. The [`rules`] say what is checked,
//! and [`mistakes`] what fails most often.
//!
//! ```
//! use tower_fixed_window::MemoryStore;
//! use tower_fixed_window::testing::block_on;
//! use tower_fixed_window_conformance::conformance;
//!
//! // Two handles of the same counters.
//! let new = |clock| {
//!     let store = MemoryStore::new().clock(clock);
//!     [store.clone(), store]
//! };
//! conformance(new, |job| block_on(job));
//! ```

use std::future::Future;
use std::pin::Pin;
use std::sync::Mutex;

use tower_fixed_window::{ManualClock, Store, testing};

use nodes::Nodes;
use races::Race;

// The first definition of a link wins: in the repository the pages are files.
/// The rules by number, which the contract and all traces follow.
///
/// [many_nodes]: https://docs.rs/tower-fixed-window/latest/tower_fixed_window/guide/many_nodes/
/// [memory]: https://docs.rs/tower-fixed-window/latest/tower_fixed_window/guide/operating/#memory
/// [ordering]: https://docs.rs/tower-fixed-window/latest/tower_fixed_window/guide/ordering/
#[doc = include_str!("../semantics.md")]
pub mod rules {}

/// What goes wrong most often in a store over a database.
///
#[doc = include_str!("../mistakes.md")]
pub mod mistakes {}

mod contract;
mod in_order;
mod nodes;
mod races;
mod replay;

pub use in_order::InOrder;
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
/// `new` creates two handles of the same counters, as two nodes have: of a store in a database two
/// values that share nothing in this process, each with connections of its own. The counters are
/// empty, and nobody else has them: give each call a table or a prefix of its own (there are some
/// 250). Both handles read the given clock. They remember no refusals: give a `Shared` without a
/// `Remote`, or a `Remote` with `remember_refusals(Duration::ZERO)`. `block_on` waits for a future
/// on the current thread: that of `tower_fixed_window::testing`, or a runtime's. It may end a future
/// that takes minutes: a store that never answers is waited for.
///
/// Each trace, reset and refund is made by both handles, in turns without a pattern, and in races
/// both are called at once, while some decisions are held up between what they read and what they
/// write.
///
/// # Panics
/// If the store breaks the contract, with a message that says how.
pub fn conformance<S: Store>(
    new: impl Fn(ManualClock) -> [S; 2] + Send + Sync,
    block_on: impl Fn(Job<'_>) + Send + Sync,
) {
    let nodes = |clock| Nodes::new(&new, clock);
    let in_order = |clock| new(clock).map(InOrder);
    #[cfg_attr(not(feature = "time-zones"), allow(unused_mut))]
    let mut vectors = vec![VECTORS];
    #[cfg(feature = "time-zones")]
    vectors.extend(CALENDAR_VECTORS);
    // Its words say more than a trace that fails.
    block_on(Box::pin(contract::check(&nodes)));
    let in_one_step = nodes(ManualClock::default()).charges_together();
    if in_one_step {
        vectors.push(TOGETHER_VECTORS);
    }
    for vectors in vectors {
        let (failed, report) = failures(vectors, &nodes, &block_on);
        assert!(failed.is_empty(), "{report}");
    }
    let (failed, report) =
        failures(TOGETHER_VECTORS, &|clock| Nodes::new(&in_order, clock), &block_on);
    assert_eq!(failed, in_order::EXCEPTED, "one limit after the other:\n{report}");

    let _held_up = testing::hold_up_decisions();
    let race = || Race::new(&new, &block_on);
    race().exact();
    race().over_boundaries();
    race().first_charges();
    race().own_answers();
    race().all_or_nothing();
    race().corrections_once();
    race().resets();
    if in_one_step {
        race().all_limits_or_none(true);
    }
    Race::new(&in_order, &block_on).all_limits_or_none(false);
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
