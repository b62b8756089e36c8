//! The middleware. A request passes through its files in one direction: `layer` creates the
//! `service`, whose `future` charges the `request`. A refused request gets a `rejection`, and every
//! response gets its `headers`.

mod correction;
mod cost;
mod endpoint;
mod future;
mod headers;
mod layer;
#[cfg(feature = "openapi")]
mod openapi;
mod rejection;
mod request;
mod service;
mod stacked;
mod upload;

pub use cost::{CostMeter, TrueCost};
pub use endpoint::RateLimitEndpoint;
pub use future::ResponseFuture;
pub use headers::Headers;
pub use layer::FixedWindowLayer;
pub use rejection::{EmptyBody, GitHubBody, Grpc, ProblemJson, Reason, Reject, Rejection};
pub use service::FixedWindow;
