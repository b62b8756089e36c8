//! Everything below HTTP, a module for each promise. Time is always a manual clock's.

mod arithmetic;
mod overflow;
mod reference;
mod trace;

use tower_fixed_window::testing::block_on;

/// The answer of a store in memory, which never fails.
pub(crate) fn answer<T>(reply: tower_fixed_window::store::Reply<T>) -> T {
    block_on(reply).expect("memory does not fail")
}
