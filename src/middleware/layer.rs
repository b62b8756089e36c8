//! [`FixedWindowLayer`]: its setters by theme, and the service that it makes.

use std::fmt;
use std::panic::Location;
use std::sync::{Arc, Weak};

use http::request::Parts;
use tower_layer::Layer;

use super::live::{Control, Live};
use super::options::Options;
use super::rejection::ProblemJson;
use super::service::FixedWindow;
use super::shared::Shared;
use super::stacked;
use super::twice::Watch;
use crate::key::{Key, KeyExtractor, key_fn};
use crate::limiter::{Limiter, UNNAMED, freed};
use crate::line::{Lines, Queue};
use crate::quota::Quotas;

mod counting;
mod deciding;
mod refusing;
mod storing;

/// Limits the requests to the service it wraps.
///
/// ```
/// use axum::{Router, routing::{get, post}};
/// use tower_fixed_window::{FixedWindowLayer, Quota};
///
/// let login = FixedWindowLayer::new(Quota::per_minute(5)).name("login");
/// let search = FixedWindowLayer::new(Quota::per_minute(33).and(Quota::per_hour(2_000))).name("search");
///
/// let app: Router = Router::new()
///     .route("/login", post(async || "welcome").layer(login))
///     .route("/search", get(async || "found").layer(search));
/// ```
///
/// A request that passes reaches the service, and its response gets the headers
/// `x-ratelimit-limit`, `-remaining`, `-used`, `-reset` (UTC epoch seconds), and `-resource` if the
/// layer has a name. A refused request gets a response with status 429, the same headers,
/// `retry-after` (seconds) and `cache-control: no-store`, and the service is not called. A refusal
/// is a response, not an error, so the error type of the service stays the same.
///
/// # Shared counts
///
/// Clones of a layer share their counters, so the same layer on two routes is one limit for both.
/// Layers that are created separately share counters only if they have the same store *and* the
/// same name. If a request passes the same layer twice, as on a nested router and on the app around
/// it, it is charged twice, and the log names the layer once.
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
/// The type parameter selects how the layer refuses. In a struct, `FixedWindowLayer` suffices:
///
/// ```
/// # use tower_fixed_window::FixedWindowLayer;
/// struct App { limit: FixedWindowLayer }
/// ```
#[doc(alias = "throttle")]
#[must_use = "a layer does nothing until it is applied to a service"]
pub struct FixedWindowLayer<J = ProblemJson> {
    limiter: Limiter,
    live: Arc<Live>,
    options: Options,
    reject: Arc<J>,
    /// For a panic on what is found when it is applied, perhaps by another crate.
    made_at: &'static Location<'static>,
}

impl FixedWindowLayer {
    /// Limits requests by the address of their peer, in memory.
    ///
    /// Under axum, this needs the feature `axum` and
    /// `into_make_service_with_connect_info::<SocketAddr>()`; under other servers, a
    /// [`PeerAddr`](crate::key::PeerAddr) in the extensions of each request.
    ///
    /// ```
    /// use http::Request;
    /// use tower_fixed_window::key::PeerAddr;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(60));
    ///
    /// let request = || Request::get("/").extension(PeerAddr(([192, 0, 2, 1], 4711).into()));
    /// assert_eq!(ask(&layer, request()).headers()["x-ratelimit-remaining"], "59");
    /// assert_eq!(ask(&layer, request()).headers()["x-ratelimit-remaining"], "58");
    /// ```
    #[track_caller]
    pub fn new(quotas: impl Into<Quotas>) -> Self {
        let quotas = quotas.into();
        Self {
            limiter: Limiter::new(quotas),
            live: Arc::new(Live::new(quotas)),
            options: Options::default(),
            reject: Arc::new(ProblemJson),
            made_at: Location::caller(),
        }
    }
}

impl<J> FixedWindowLayer<J> {
    /// Names the limit. The name is the scope of its counters, and the value of
    /// `x-ratelimit-resource`.
    ///
    /// ```
    /// use http::Request;
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(5)).name("login").key(global());
    ///
    /// assert_eq!(ask(&layer, Request::get("/")).headers()["x-ratelimit-resource"], "login");
    /// ```
    ///
    /// # Panics
    /// If the name is not 1 to 64 characters of `[a-z0-9_.-]`, or after [`control`](Self::control).
    #[track_caller]
    pub fn name(mut self, name: &str) -> Self {
        self.assert_uncontrolled();
        self.limiter = self.limiter.name(name);
        self.fork();
        self
    }

    /// Sets the key that requests are counted by: an extractor of [`key`](crate::key), or your own.
    ///
    /// ```
    /// use http::Request;
    /// use tower_fixed_window::key::header;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(60)).key(header("x-api-key"));
    ///
    /// let response = ask(&layer, Request::get("/").header("x-api-key", "alpha"));
    /// assert_eq!(response.headers()["x-ratelimit-used"], "1");
    /// assert_eq!(ask(&layer, Request::get("/")).status(), 400);
    /// ```
    pub fn key(mut self, key: impl KeyExtractor) -> Self {
        self.options.key = Arc::new(key);
        self
    }

    /// Sets the key that requests are counted by, as a closure. A request for which it returns
    /// `None` is refused with 400.
    ///
    /// ```
    /// use http::Request;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Key, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(60))
    ///     .key_fn(|parts| parts.uri.path().split('/').nth(1).map(Key::from));
    ///
    /// assert_eq!(ask(&layer, Request::get("/acme/users")).headers()["x-ratelimit-used"], "1");
    /// assert_eq!(ask(&layer, Request::get("/acme/items")).headers()["x-ratelimit-used"], "2");
    /// assert_eq!(ask(&layer, Request::get("/other")).headers()["x-ratelimit-used"], "1");
    /// ```
    pub fn key_fn<F>(self, key: F) -> Self
    where
        F: Fn(&Parts) -> Option<Key> + Send + Sync + 'static,
    {
        self.key(key_fn(key))
    }

    /// Returns a control that changes this layer and all its clones at run time. Call it after
    /// [`name`](Self::name) and [`store`](Self::store): a layer with another name or store is
    /// another limit.
    ///
    /// ```
    /// use http::Request;
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(1)).key(global());
    /// let control = layer.control();
    ///
    /// assert_eq!(ask(&layer, Request::get("/")).status(), 200);
    /// assert_eq!(ask(&layer, Request::get("/")).status(), 429);
    /// control.set_quotas(Quota::per_minute(2));
    /// assert_eq!(ask(&layer, Request::get("/")).status(), 200);
    /// ```
    pub fn control(&self) -> Control {
        self.live.follow(&self.options);
        self.live.note_control();
        Control::new(Arc::clone(&self.live), self.limiter())
    }

    /// For a service that reports the standing of clients under this layer.
    pub(crate) fn to_resource(&self) -> (Limiter, Options, Arc<Live>) {
        (self.limiter(), self.options.clone(), Arc::clone(&self.live))
    }

    /// Panics with what to write if a control was taken: it would be that of another limit.
    #[track_caller]
    fn assert_uncontrolled(&self) {
        assert!(
            !self.live.is_controlled(),
            "a control of this layer was taken before, and would not control what it is now: write \
             .name(..) and .store(..) before .control()"
        );
    }

    /// With another name or store it is another limit, with settings of its own.
    fn fork(&mut self) {
        self.live = Arc::new(Live::new(self.live.quotas()));
    }

    fn limiter(&self) -> Limiter {
        let limiter = self.limiter.clone();
        let Options { count_if, refund_dropped, settle, queue, .. } = &self.options;
        let refunds = count_if.is_some() || *refund_dropped || *settle || queue.is_some();
        let limiter = if refunds { limiter.refundable() } else { limiter };
        if queue.is_some() { limiter.unleased() } else { limiter }
    }
}

impl<S, J> Layer<S> for FixedWindowLayer<J> {
    type Service = FixedWindow<S, J>;

    /// # Panics
    /// If the layer counts in a shared store and has no name.
    #[track_caller]
    fn layer(&self, inner: S) -> Self::Service {
        let made_at = self.made_at;
        assert!(self.limiter.can_be_found(), "{UNNAMED} on the layer of {made_at}");
        self.live.follow(&self.options);
        stacked::note_applied(&self.live, &self.options);
        let (limiter, live) = (self.limiter(), Arc::clone(&self.live));
        let (options, reject) = (self.options.clone(), Arc::clone(&self.reject));
        let queue = options.queue.map(|(most, max_wait)| {
            let (lines, limiter) = (Arc::clone(&live.lines), limiter.clone());
            let waiting: Weak<Lines> = Arc::downgrade(&lines);
            freed::add_waiting(limiter.scope(), waiting);
            Arc::new(Queue { lines, limiter, most, max_wait })
        });
        let watch = Watch::default();
        FixedWindow::new(inner, Shared { limiter, options, live, queue, reject, watch })
    }
}

impl<J> Clone for FixedWindowLayer<J> {
    fn clone(&self) -> Self {
        Self {
            limiter: self.limiter.clone(),
            live: Arc::clone(&self.live),
            options: self.options.clone(),
            reject: Arc::clone(&self.reject),
            made_at: self.made_at,
        }
    }
}

impl<J> fmt::Debug for FixedWindowLayer<J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FixedWindowLayer").field("limiter", &self.limiter).finish_non_exhaustive()
    }
}
