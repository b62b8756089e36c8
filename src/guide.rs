//! The guide: what does not fit on the front page.

/// The exact rules, by the numbers that the code and the tests cite.
#[doc = include_str!("../docs/semantics.md")]
pub mod semantics {}

/// On which side of other layers this one goes.
#[doc = include_str!("../docs/ordering.md")]
pub mod ordering {}

/// One count for several nodes, in Redis or Valkey.
#[cfg(feature = "redis")]
#[doc = include_str!("../docs/many-nodes.md")]
pub mod many_nodes {}
