// If a link is defined twice, the first definition wins: these are for rustdoc, those of the page for
// the repository.
#![doc = "[guide]: https://docs.rs/tower-fixed-window/latest/tower_fixed_window/guide/"]
#![doc = "[many_nodes]: https://docs.rs/tower-fixed-window/latest/tower_fixed_window/guide/many_nodes/"]
#![doc = ""]
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(clippy::print_stdout)]

/// The page of the guide for those who come from another limiter, of which many count in Redis.
///
/// [actix]: https://docs.rs/tower-fixed-window/latest/tower_fixed_window/guide/other_stacks/#without-tower
/// [behind_a_proxy]: https://docs.rs/tower-fixed-window/latest/tower_fixed_window/guide/behind_a_proxy/
/// [configuration]: https://docs.rs/tower-fixed-window/latest/tower_fixed_window/guide/configuration/#where-an-option-is
/// [keys]: https://docs.rs/tower-fixed-window/latest/tower_fixed_window/guide/keys/#different-spellings-of-one-value
/// [lockouts]: https://docs.rs/tower-fixed-window/latest/tower_fixed_window/guide/recipes/#lock-outs
/// [many_nodes]: https://docs.rs/tower-fixed-window/latest/tower_fixed_window/guide/many_nodes/
/// [responses]: https://docs.rs/tower-fixed-window/latest/tower_fixed_window/guide/responses/
#[cfg(all(doc, not(doctest)))]
#[doc = include_str!("../moving.md")]
pub mod moving {}

/// The page of the guide that runs `redis/examples/admin.rs`.
///
/// [admin_keys]: https://docs.rs/tower-fixed-window/latest/tower_fixed_window/guide/configuration/#keys-in-admin-routes
/// [configuration]: https://docs.rs/tower-fixed-window/latest/tower_fixed_window/guide/configuration/#limits-by-plan
/// [observing]: https://docs.rs/tower-fixed-window/latest/tower_fixed_window/guide/observing/#what-an-outage-looks-like
/// [persistence]: crate#configuring-the-server
/// [responses]: https://docs.rs/tower-fixed-window/latest/tower_fixed_window/guide/responses/
/// [semantics]: https://docs.rs/tower-fixed-window-conformance/latest/tower_fixed_window_conformance/rules/
#[cfg(all(doc, not(doctest)))]
#[doc = include_str!("../support.md")]
pub mod support {}

mod calls;
mod connect;
mod link;
mod observe;
mod script;
mod store;
mod sync;

pub use store::RedisStore;
