//! The pages of README and the guide, whose examples are tested here: some need more than the
//! examples in the sources do.

#[doc = include_str!("../README.md")]
pub mod readme {}

#[doc = include_str!("../docs/choosing.md")]
pub mod choosing {}

#[doc = include_str!("../docs/windows.md")]
pub mod windows {}

#[doc = include_str!("../docs/keys.md")]
pub mod keys {}

#[doc = include_str!("../docs/behind-a-proxy.md")]
pub mod behind_a_proxy {}

#[doc = include_str!("../docs/responses.md")]
pub mod responses {}

#[doc = include_str!("../docs/features.md")]
pub mod features {}

/// One count for several nodes, in Redis or Valkey.
#[doc = include_str!("../docs/many-nodes.md")]
pub mod many_nodes {}

#[doc = include_str!("../docs/recipes.md")]
pub mod recipes {}

#[doc = include_str!("../docs/operating.md")]
pub mod operating {}

#[doc = include_str!("../docs/observing.md")]
pub mod observing {}

/// On which side of other layers this one goes.
#[doc = include_str!("../docs/ordering.md")]
pub mod ordering {}

#[doc = include_str!("../docs/testing.md")]
pub mod testing {}

#[doc = include_str!("../docs/moving.md")]
pub mod moving {}

#[doc = include_str!("../docs/faq.md")]
pub mod faq {}

/// The exact rules, by the numbers that the code and the tests cite.
#[doc = include_str!("../docs/semantics.md")]
pub mod semantics {}
