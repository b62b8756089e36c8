//! The pages of README and the guide, whose examples are tested here: some need more than the
//! examples in the sources do.

#[doc = include_str!("../README.md")]
pub mod readme {}

#[path = "../src/guide.rs"]
pub mod guide;
