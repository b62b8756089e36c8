//! The protocol between nodes and a shared store, small enough to look at every state.

pub mod charges;
pub mod groups;
mod look;
pub mod tables;

pub use look::{Breakable, Looked, look};
