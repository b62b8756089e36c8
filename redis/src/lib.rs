// If a link is defined twice, the first definition wins: these are for rustdoc, those of the page for
// the repository.
#![doc = "[guide]: https://docs.rs/tower-fixed-window/latest/tower_fixed_window/guide/"]
#![doc = "[many_nodes]: https://docs.rs/tower-fixed-window/latest/tower_fixed_window/guide/many_nodes/"]
#![doc = ""]
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(clippy::print_stdout)]

mod calls;
mod connect;
mod link;
mod observe;
mod script;
mod store;
mod sync;

pub use store::RedisStore;
