//! Puts rate limiters to the test, with real stores, processes and signals, and has the checker look at what
//! passed. See PROOF.md.

pub use tower_fixed_window_checker::{check, history, line, several};

pub mod limiter;
pub mod limiters;
pub mod node;
mod ours;
#[cfg(feature = "peers")]
mod peers;
pub mod run;
pub mod scenarios;
pub mod zone;
