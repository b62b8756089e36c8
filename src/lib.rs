// If a link is defined twice, the first definition wins: in rustdoc the pages of the guide are
// modules, in the repository files.
#![cfg_attr(not(doctest), doc = include_str!("guide/links.md"))]
#![cfg_attr(not(doctest), doc = include_str!("../docs/pictures/rustdoc.md"))]
#![cfg_attr(not(doctest), doc = include_str!("../README.md"))]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(clippy::print_stdout)]

// First, since rustdoc shows methods in the order of modules: the first one must not be
// `Quota::key`.
mod queue;
mod quota;

mod clock;
mod decision;
// The examples of the guide are tested in tests/guide.rs: some need more crates than the library.
#[cfg(all(doc, not(doctest)))]
pub mod guide;
pub mod key;
mod limits;
mod middleware;
mod observe;
pub mod store;
mod sync;
#[cfg(feature = "testing")]
pub mod testing;
mod window;

pub use clock::{Clock, ManualClock, SystemClock};
pub use decision::{Decision, RateLimited, Usage};
pub use key::{Key, KeyExtractor, MissingKey};
#[cfg(feature = "serde")]
pub use limits::KeptReceipt;
pub use limits::{
    Limit, Limiter, Limits, Line, NearLimit, Receipt, Refused, RefusedKey, RefusedRoute,
};
pub use middleware::{
    CostMeter, EmptyBody, FixedWindow, FixedWindowLayer, GitHubBody, Grpc, Headers, ProblemJson,
    RateLimitEndpoint, Reason, Reject, Rejection, ResponseFuture, TrueCost,
};
pub use quota::{ParseQuotaError, Plan, Quota, Quotas, Weekday};
pub use store::{MemoryStore, OnStoreFailure, Store, StoreError};
