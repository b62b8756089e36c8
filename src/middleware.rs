//! Limits over HTTP.
//!
//! ```text
//! FixedWindowLayer ──> FixedWindow ──> ResponseFuture ──> the inner service
//! `layer`              `service`       `future` │                │
//!                                               v                v
//!                                     LimitedRequest ──────> its response, with `headers`
//!                                     `request` │
//!                                               v
//!                                     Rejection ──────────> 429, once the `upload` was read
//!                                     `rejection`
//! ```
//!
//! - The *layer* has the options. Its *service* has what requests need: the quotas in force, and
//!   headers made of these alone.
//! - The *future* owns the service that was made ready, the request's parts and its body. It only
//!   calls, waits and reads; the *limited request* knows what was taken and what is returned.
//! - A *rejection* is why a request is refused. A `Reject` makes the response of it, and the layer
//!   adds the headers.
//! - `cost` carries true costs from the handler to the limited request. `endpoint` and `openapi`
//!   show limits, and charge nothing.
//!
//! The numbers in GitHub's headers are those of the limit that governs: of limits that refuse, the
//! one with the latest retry; if all pass, the one with the smallest part left (`decision/decide`),
//! and among stacked layers the tightest (`headers`).
//!
//! All limits of a request that is dropped get back:
//!
//! - while it waits in the queue: nothing was taken, or what was is returned;
//! - while the store decides: a call that was not sent is withdrawn, and one that was sent counts,
//!   unless the layer is to [`refund_dropped`](FixedWindowLayer::refund_dropped). A store that
//!   charges limits one after the other returns what was taken, since not all have passed;
//! - once charged: nothing, unless the layer is to refund, whatever happens behind it (S9).
//!
//! A request that passes is called within `call`, before the future is polled: most stores answer
//! at once. Its path has few functions, since moving a request, a response or a decision is
//! measurable. Whatever is rare is boxed, or not inlined.

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
mod upload;

pub use cost::{CostMeter, TrueCost};
pub use endpoint::RateLimitEndpoint;
pub use future::ResponseFuture;
pub use headers::Headers;
pub use layer::FixedWindowLayer;
pub use rejection::{EmptyBody, GitHubBody, Grpc, ProblemJson, Reason, Reject, Rejection};
pub use service::FixedWindow;
