#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(clippy::print_stdout)]

mod calls;
#[cfg(feature = "cluster")]
mod cluster;
mod connect;
mod link;
mod observe;
mod script;
mod store;
mod sync;

pub use store::RedisStore;
