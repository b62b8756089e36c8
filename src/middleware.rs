//! The middleware: what stands between a request and the service.

mod cost;
mod endpoint;
mod future;
mod headers;
mod layer;
mod live;
mod options;
mod queue;
mod rejection;
mod request;
mod service;
mod upload;

pub use cost::{CostMeter, TrueCost};
pub use endpoint::RateLimitEndpoint;
pub use future::ResponseFuture;
pub use headers::Headers;
pub use layer::FixedWindowLayer;
pub use live::Handle;
pub use rejection::{
    EmptyBody, GitHubBody, Grpc, OnReject, ProblemJson, Reason, Reject, Rejection,
};
pub use service::FixedWindow;
