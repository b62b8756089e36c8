//! [`FixedWindowLayer`]: its setters by theme, and the service that it makes.

use std::fmt;
use std::sync::{Arc, Weak};

use tower_layer::Layer;

use super::options::Options;
use super::rejection::ProblemJson;
use super::service::FixedWindow;
use super::shared::Shared;
use super::stacked;
use super::twice::Watch;
use crate::limiter::{Limiter, freed};
use crate::limits::Limits;
use crate::line::{Lines, Queue};

// First, since rustdoc shows methods in the order of modules.
mod creating;

mod counting;
mod deciding;
mod refusing;

/// Limits the requests to the service it wraps.
///
/// ```
/// use axum::{Router, routing::{get, post}};
/// use tower_fixed_window::{FixedWindowLayer, Quota};
///
/// let login = FixedWindowLayer::new(Quota::per_minute(5).name("login"));
/// let search = Quota::per_minute(33).and(Quota::per_hour(2_000)).name("search");
/// let search = FixedWindowLayer::new(search);
///
/// let app: Router = Router::new()
///     .route("/login", post(async || "welcome").layer(login))
///     .route("/search", get(async || "found").layer(search));
/// ```
///
/// A request that passes reaches the service, and its response gets the headers
/// `x-ratelimit-limit`, `-remaining`, `-used`, `-reset` (UTC epoch seconds), and `-resource` if the
/// limit has a name. A refused request gets a response with status 429, the same headers,
/// `retry-after` (seconds) and `cache-control: no-store`, and the service is not called. A refusal
/// is a response, not an error, so the error type of the service stays the same.
///
/// # Shared counts
///
/// Clones of a layer share their counters, so the same layer on two routes is one limit for both.
/// So do layers of the same [`Limiter`] or [`Limits`]. Limits that are created separately share
/// counters only if they have the same store *and* the same name. If a request passes the same
/// layer twice, as on a nested router and on the app around it, it is charged twice, and the log
/// names the layer once.
///
/// # Refused uploads
///
/// An HTTP/1 server closes a connection if the request was not read to its end, and a client that
/// is still sending sees a broken pipe instead of its 429. An HTTP/2 server resets the stream, and
/// closes the connection after many resets (in hyper 1,024, if the client sends more data after
/// them). So the layer reads and discards the rest of a refused request's body before it responds:
/// at most 16 MiB, for at most 30 s, and until no data has arrived for one second. Outside of a
/// tokio runtime with timers (`enable_time`), or without the feature `tokio`, it reads only what is
/// available immediately. A request with a larger `content-length`, or with `expect: 100-continue`,
/// gets its response immediately. A client that floods an HTTP/2 connection with uploads beyond
/// these bounds still loses it; hyper's `max_local_error_reset_streams` sets how soon.
///
/// This works for axum's bodies. For the bodies of other servers, and for bodies that another layer
/// has wrapped, name the type with [`drain_refused`](Self::drain_refused). Under axum it suffices
/// to apply the limit with a separate `Router::layer` call: each of these calls turns bodies into
/// axum's again.
///
/// # Around a client
///
/// Around an HTTP client, the same layer respects the limit of an API: with `queue` (feature
/// `tokio`), requests wait for the next window instead of failing. `examples/stacks/outbound.rs`
/// does this for reqwest. The response bodies of hyper-util's client can't be made from bytes,
/// which a refusal requires; map them under the layer:
/// `.map_response(|response| response.map(Body::new))`.
///
/// # The type of a layer
///
/// `J` makes the responses to refused requests: [`reject`](Self::reject) sets it, to a type that
/// implements [`Reject`](crate::Reject). In a struct, `FixedWindowLayer` suffices:
///
/// ```
/// # use tower_fixed_window::FixedWindowLayer;
/// struct App { limit: FixedWindowLayer }
/// ```
#[doc(alias = "throttle")]
#[must_use = "a layer does nothing until it is applied to a service"]
pub struct FixedWindowLayer<J = ProblemJson> {
    limits: Limits,
    options: Options,
    /// The lines in which requests wait.
    lines: Arc<Lines>,
    reject: Arc<J>,
}

impl<J> FixedWindowLayer<J> {
    /// Returns the limits of the layer, by which they are found and changed at run time.
    ///
    /// ```
    /// use http::Request;
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::{ask, block_on};
    /// use tower_fixed_window::{FixedWindowLayer, Key, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_day(1).name("api").key(global()));
    /// assert_eq!(ask(&layer, Request::get("/")).status(), 200);
    /// assert_eq!(ask(&layer, Request::get("/")).status(), 429);
    ///
    /// let api = layer.limits().of("api");
    /// block_on(api.reset(Key::global()))?;
    /// assert_eq!(ask(&layer, Request::get("/")).status(), 200);
    /// # Ok::<_, tower_fixed_window::StoreError>(())
    /// ```
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    #[cfg(feature = "openapi")]
    pub(super) fn options(&self) -> &Options {
        &self.options
    }

    #[cfg(feature = "openapi")]
    pub(super) fn rejects(&self) -> &J {
        &self.reject
    }

    /// Returns whether any limit of the layer may get tokens back.
    fn refunds(&self) -> bool {
        let Options { count_if, refund_dropped, queue, .. } = &self.options;
        count_if.is_some() || *refund_dropped || queue.is_some()
    }

    /// Returns the only limit, or the first one, as this layer charges it.
    fn limiter(&self) -> Limiter {
        let limiter = self.limits.limiters()[0].clone();
        let refunds = self.refunds() || limiter.live().limit().settled;
        let limiter = if refunds { limiter.refundable() } else { limiter };
        if self.options.queue.is_some() { limiter.unleased() } else { limiter }
    }
}

impl<S, J> Layer<S> for FixedWindowLayer<J> {
    type Service = FixedWindow<S, J>;

    fn layer(&self, inner: S) -> Self::Service {
        let (options, reject) = (self.options.clone(), Arc::clone(&self.reject));
        let (limiter, refunds) = (self.limiter(), self.refunds());
        let limit = limiter.live().limit().clone();
        let several = (self.limits.limiters().len() > 1).then(|| self.limits.clone());
        stacked::note_applied(&limiter, &options);
        let queue = options.queue.map(|(most, max_wait)| {
            let lines = Arc::clone(&self.lines);
            let limits = several.clone().unwrap_or_else(|| Limits::from(&limiter));
            for limiter in limits.iter() {
                let waiting: Weak<Lines> = Arc::downgrade(&lines);
                freed::add_waiting(limiter.scope(), waiting);
            }
            Arc::new(Queue { lines, limits, most, max_wait })
        });
        let watch = Watch::default();
        let shared = Shared { limiter, limit, several, refunds, options, queue, reject, watch };
        FixedWindow::new(inner, shared)
    }
}

impl<J> From<&FixedWindowLayer<J>> for Limits {
    fn from(layer: &FixedWindowLayer<J>) -> Self {
        layer.limits.clone()
    }
}

impl<J> Clone for FixedWindowLayer<J> {
    fn clone(&self) -> Self {
        Self {
            limits: self.limits.clone(),
            options: self.options.clone(),
            lines: Arc::clone(&self.lines),
            reject: Arc::clone(&self.reject),
        }
    }
}

impl<J> fmt::Debug for FixedWindowLayer<J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FixedWindowLayer").field("limits", &self.limits).finish_non_exhaustive()
    }
}
