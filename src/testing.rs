//! Tests of limits: [`ask`] sends one request through a layer.
//!
//! A store of your own is tested by the crate `tower-fixed-window-conformance`.

mod ask;
mod block_on;

// A type that signatures name and callers don't.
#[doc(hidden)]
pub use ask::Hello;
pub use ask::{ask, ask_around};
pub use block_on::block_on;
