//! [`FixedWindowLayer`]: its setters, and the service that it makes.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
#[cfg(feature = "tokio")]
use std::time::Duration;

use http::header::{ACCESS_CONTROL_REQUEST_METHOD, ORIGIN};
use http::request::Parts;
use http::{HeaderName, Method, Response, StatusCode, response};
use http_body::Body;
use tower_layer::Layer;

use super::headers::Headers;
use super::rejection::{Grpc, ProblemJson, Rejection};
use super::service::{Current, FixedWindow};
use super::upload::{Drain, drain};
use crate::decision::Decision;
use crate::limits::{IntoLimits, Limiter, Limits};
use crate::queue::Queue;

/// Limits the requests to the service that it wraps.
///
/// The layer has the options of requests and responses, such as [`skip`](Self::skip) and
/// [`on_reject`](Self::on_reject). What requests are counted by, what they cost and where counts
/// are kept are options of the [`Limit`](crate::Limit) that you pass to [`new`](Self::new):
/// `FixedWindowLayer::new(Quota::per_minute(60).name("api").key(extension::<User>()))`.
///
/// | if you look here for | it is an option of |
/// |---|---|
/// | `name`, `key`, `key_fn`, `cost_fn`, `shadow`, `store`, plans | the [`Limit`](crate::Limit) |
/// | `and`, `in_zone`, `from_first_request`, bursts | the [`Quota`](crate::Quota) |
/// | `deadline` (a time-out), `on_failure` (fail open or closed), `clock` | the store |
/// | `peek`, `reset`, `set_quotas`, `set_shadow` | a [`Limiter`](crate::Limiter), from which you make the layer |
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
///     .route("/login", post(async || "welcome").route_layer(login))
///     .route("/search", get(async || "found").route_layer(search));
/// ```
///
/// A request that passes reaches the service. Its response gets the headers `x-ratelimit-limit`,
/// `-remaining`, `-used`, `-reset` (UTC epoch seconds) and, if the limit has a name, `-resource`. A
/// refusal is a response, not an error: 429 with the same headers, `retry-after` (seconds) and
/// `cache-control: no-store`. The service is not called, and its error type stays the same.
///
/// # Shared counts
///
/// Clones of a layer share their counters, and so do layers made from one
/// [`Limiter`](crate::Limiter) or [`Limits`]: the same layer on two routes is one limit for both.
/// Other layers share counters only if they have the same store *and* the same name. A request that
/// passes through the same layer twice, as on a nested router and on the app around it, is charged
/// twice, and the log warns once.
///
/// # Refused uploads
///
/// An HTTP/1 server closes a connection if it has not read the request to its end, and a client
/// that is still sending then sees a broken pipe instead of its 429. An HTTP/2 server resets the
/// stream, and closes the connection after many resets (in hyper, after 1,024, if the client sends
/// more data after them). So the layer reads and discards the rest of a refused request's body
/// before it responds: at most 16 MiB, for at most 30 s, until no data has arrived for one second.
/// Without the feature `tokio`, or in a runtime without timers (`enable_time`), it reads only what
/// is available immediately.
///
/// The layer responds at once to a larger `content-length` and to `expect: 100-continue`, and
/// within 0.1 s to gRPC calls and WebSockets over HTTP/2, whose clients read an early answer. A client
/// that floods an HTTP/2 connection beyond these bounds still loses it; hyper's
/// `max_local_error_reset_streams` sets how soon. If a request over HTTP/1 is left unread, its
/// response has `connection: close`.
///
/// This works for axum's bodies. For bodies of other servers, or bodies that another layer has
/// wrapped, name the type with [`drain_refused`](Self::drain_refused). Under axum, a separate
/// `Router::layer` call for the limit is enough: each such call turns bodies into axum's again.
/// [`drain_nothing`](Self::drain_nothing) turns this off.
///
/// # Around a client
///
/// Around an HTTP client, the layer respects the limit of an API. With `queue` (feature `tokio`),
/// requests wait for the next window, as in `examples/stacks/outbound.rs` for reqwest. hyper-util's
/// client needs [one more line](crate::FixedWindow#if-it-is-not-a-service). If a handler passes the
/// API's responses on, set `.headers(Headers::None)`, so that your own clients don't get the
/// layer's numbers.
///
/// # The type of a layer
///
/// `J` makes the responses to refused requests; [`reject`](Self::reject) sets it. In a struct, the
/// type `FixedWindowLayer` is enough. With [`on_reject`](Self::on_reject), the closure's type has
/// no name, so give the field the type of a function pointer, `FixedWindowLayer<fn(&Parts,
/// &Rejection<'_>) -> Response>`, and call `on_reject` last: before another setter, the compiler
/// infers the closure's own type.
#[doc(alias = "RateLimitLayer")]
#[must_use = "a layer does nothing until it is applied to a service"]
pub struct FixedWindowLayer<J = ProblemJson> {
    pub(super) limits: Limits,
    pub(super) options: Options,
    pub(super) reject: Arc<J>,
}

impl FixedWindowLayer {
    /// Creates a layer that counts in memory, by default by the peer's address. `limits` is a
    /// quota, or anything else that converts into [`Limits`](crate::Limits).
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
    ///
    /// Several limits are decided together, all or none, as in
    /// `FixedWindowLayer::new([per_user, per_address])`. The headers show the limit with the
    /// smallest fraction left.
    ///
    /// To peek at, reset or change a limit at run time, make a [`Limiter`](crate::Limiter) or
    /// [`Limits`](crate::Limits) first: `FixedWindowLayer::new(&limits)`. In a function of yours
    /// that passes its argument on, take an `impl Into<Limits>`.
    ///
    /// # Panics
    /// As [`Limits::new`](crate::Limits::new) does.
    #[track_caller]
    pub fn new(limits: impl IntoLimits) -> Self {
        let limits = limits.into_limits();
        let drains = Vec::from([
            #[cfg(feature = "axum")]
            drain::<axum::body::Body>(),
        ]);
        let options = Options { drains, ..Options::default() };
        Self { limits, options, reject: Arc::new(ProblemJson) }
    }
}

impl<J> FixedWindowLayer<J> {
    /// Exempts requests for which the closure returns `true`, such as health checks: they pass
    /// uncounted and without headers. Each call exempts more requests. For a customer without a
    /// limit, use `Plan::UNLIMITED` in [`Limit::by_plan`](crate::Limit::by_plan).
    ///
    /// Exempt requests by properties that a client can't choose: not by a header, and by a path
    /// only if its handler is cheap, as for most [health
    /// probes](crate::guide::operating#what-to-leave-unlimited). Paths are compared as text:
    /// `/health/` is another path, and a nested router removes the beginning (axum keeps the whole
    /// path in the extension `OriginalUri`). So put a limit for `/login` on its route: if you skip
    /// everything else, `/login/` may get through. `client_ip().is_in(..)` (feature `client-ip`)
    /// exempts addresses.
    ///
    /// ```
    /// use http::Request;
    /// use tower_fixed_window::key::client_ip;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(60))
    ///     .skip(|parts| parts.uri.path() == "/health")
    ///     .skip(client_ip().is_in(["192.0.2.0/24"]));
    ///
    /// let response = ask(&layer, Request::get("/health"));
    /// assert_eq!(response.status(), 200);
    /// assert!(!response.headers().contains_key("x-ratelimit-limit"));
    /// ```
    #[doc(alias("whitelist", "allowlist", "exempt", "bypass", "health"))]
    pub fn skip<F>(mut self, skip: F) -> Self
    where
        F: Fn(&Parts) -> bool + Send + Sync + 'static,
    {
        self.options.skip.push(Arc::new(skip));
        self
    }

    /// Exempts CORS preflights (`OPTIONS` with `origin` and `access-control-request-method`), which
    /// carry no credentials. If a preflight is refused, the browser reports a failure of CORS
    /// instead of a limit. A CORS layer outside of this one answers preflights itself, so they
    /// never reach the limit.
    ///
    /// Any client can send these headers and is then unlimited, as with [`skip`](Self::skip): use
    /// this only if the handler for `OPTIONS` inside of the limit is cheap.
    pub fn skip_preflight(self) -> Self {
        self.skip(|parts| {
            parts.method == Method::OPTIONS
                && parts.headers.contains_key(ORIGIN)
                && parts.headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
        })
    }

    /// Counts only requests whose response meets the condition, such as failed logins.
    ///
    /// The layer takes the tokens before it calls the service, and refunds them if the response
    /// does not count. So with a limit of 5, at most 5 undecided requests are in flight, and never
    /// more than 5 failures pass. With a remote store, a background task sends the refund, which is
    /// lost if the runtime shuts down first. A [true cost](crate::TrueCost) of the response still
    /// applies, for the limits that it names.
    ///
    /// A layer counts each request that it lets pass, whatever the response is. With
    /// `.count_if(|response| response.status != 429)`, it does not count what an inner limit
    /// refuses. But it then doesn't count a handler's own 429 either, even if the handler has done
    /// its work before.
    ///
    /// ```
    /// use axum::routing::any;
    /// use http::{Request, StatusCode, Uri};
    /// use tower_fixed_window::testing::ask_around;
    /// use tower_fixed_window::{FixedWindowLayer, Key, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(5).key(Key::global()))
    ///     .count_if(|response| response.status == StatusCode::UNAUTHORIZED);
    ///
    /// let login = any(async |uri: Uri| match uri.path() {
    ///     "/right" => StatusCode::OK,
    ///     _ => StatusCode::UNAUTHORIZED,
    /// });
    /// let response = ask_around(&layer, login.clone(), Request::post("/right"));
    /// assert_eq!(response.headers()["x-ratelimit-used"], "0");
    /// let response = ask_around(&layer, login, Request::post("/wrong"));
    /// assert_eq!(response.headers()["x-ratelimit-used"], "1");
    /// ```
    #[doc(alias("skip_failed_requests", "failures", "skip_successful_requests"))]
    pub fn count_if<F>(mut self, counts: F) -> Self
    where
        F: Fn(&response::Parts) -> bool + Send + Sync + 'static,
    {
        self.options.count_if = Some(Arc::new(counts));
        self
    }

    /// Refunds the charge if a request ends without a response: the client disconnected, the
    /// service returned an error, or the handler or a closure of this layer panicked. If a remote
    /// store is still deciding, a task refunds the charge (feature `tokio`), as for
    /// [`count_if`](Self::count_if). Use this only if such requests are cheap: a client can start
    /// work and disconnect, again and again.
    pub fn refund_dropped(mut self) -> Self {
        self.options.refund_dropped = true;
        self
    }

    /// Lets requests over the limit wait in a queue instead of refusing them, such as
    /// `.queue(200, Duration::from_secs(5))`. They are served in order of arrival: for each key, or
    /// combination of keys, up to `requests` wait in this process, each for at most `max_wait`. A
    /// request is refused if the queue is full, or if it would have to wait longer. Its
    /// `retry-after` is the time until it could pass, after all that are already waiting.
    ///
    /// A waiting request takes no tokens, and no place in the inner service. The first in the queue
    /// is charged, for all limits or none, when its window begins and the service is ready, so
    /// never more than the limit passes. The queue looks for refunds, resets and raised limits
    /// after a second, then at intervals that double. [S13] has all rules,
    /// such as those for costs.
    ///
    /// For a graceful shutdown, call [`close_queue`](Self::close_queue), which ends all waiting.
    ///
    /// [S13]:
    ///     https://docs.rs/tower-fixed-window-conformance/latest/tower_fixed_window_conformance/rules/#s13
    #[cfg(feature = "tokio")]
    #[doc(alias("wait", "max_wait", "delay"))]
    pub fn queue(mut self, requests: u64, max_wait: Duration) -> Self {
        self.options.queue = Some(Arc::new(Queue::new(self.limits.clone(), requests, max_wait)));
        self
    }

    /// Answers all requests that wait in the [`queue`](Self::queue) of this layer and its clones
    /// with 503. Later requests don't wait.
    #[cfg(feature = "tokio")]
    pub fn close_queue(&self) {
        self.options.queue.iter().for_each(|queue| queue.close());
    }

    /// Puts the [`Decision`](crate::Decision) into the extensions of requests that the limits have
    /// granted. In axum, a handler takes `Option<Extension<Decision>>`: requests that are exempt or
    /// unlimited, or that only shadow mode or `OnStoreFailure::Allow` lets pass, have none. A plain
    /// `Extension<Decision>` would then respond with 500.
    #[doc(alias = "extension")]
    pub fn expose_decision(mut self) -> Self {
        self.options.expose_decision = true;
        self
    }

    /// Calls a closure with each decision and its request, for logs or metrics with [your own
    /// ids](crate::guide::observing#your-own-ids), or to warn an account near its limit.
    ///
    /// The layer calls it once for each request: after any waiting in a queue, and before it calls
    /// the service or responds with a refusal. The decision leaves out limits in [shadow
    /// mode](crate::Limit::shadow). Only if all limits are in shadow mode, the closure gets the
    /// decision of the first one ([`is_shadow`](Decision::is_shadow)), which may be a refusal
    /// although the request passes. It is not called for exempt requests, for requests without a
    /// key, or if the store fails and nothing decides in its place (if memory does,
    /// [`is_local`](Decision::is_local) is `true`).
    ///
    /// The closure must not block, because the request waits for it; send slow work to a channel.
    /// The closure gets no key, which may be a credential: put what your app knows about the client
    /// into the extensions. Call this again to add another closure.
    ///
    /// ```
    /// use std::sync::mpsc;
    /// use http::Request;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Key, Quota};
    ///
    /// let (sender, refused) = mpsc::channel();
    /// let layer = FixedWindowLayer::new(Quota::per_day(1).key(Key::global()));
    /// let layer = layer.on_decision(move |parts, decision| {
    ///     if !decision.is_allowed() && !decision.is_shadow() {
    ///         let _ = sender.send((parts.uri.path().to_owned(), decision.limit()));
    ///     }
    /// });
    ///
    /// for path in ["/a", "/b"] {
    ///     let _ = ask(&layer, Request::get(path));
    /// }
    /// assert_eq!(refused.try_iter().collect::<Vec<_>>(), [("/b".to_owned(), 1)]);
    /// ```
    pub fn on_decision<F>(mut self, on_decision: F) -> Self
    where
        F: Fn(&Parts, &Decision) + Send + Sync + 'static,
    {
        self.options.on_decision.push(Arc::new(on_decision));
        self
    }

    /// Sets the status of a refusal, as in the example of [`GitHubBody`](crate::GitHubBody). The
    /// default is 429; GitHub's API uses 403.
    pub fn status(mut self, status: StatusCode) -> Self {
        self.options.status = Some(status);
        self
    }

    /// Sets which rate-limit headers responses have, such as `.headers(Headers::IetfDraft10)`, or
    /// `Headers::None` for no rate-limit headers. The default is GitHub's.
    ///
    /// # Panics
    /// If [`Headers::OpenAi`] is to name a limit that has no name.
    #[track_caller]
    #[doc(alias("use_headers", "no_headers"))]
    pub fn headers(mut self, headers: Headers) -> Self {
        let is_named = self.limits.limiters.iter().all(|limiter| !limiter.name().is_empty());
        assert!(
            headers != Headers::OpenAi || is_named,
            "the headers of OpenAI's API have the names of the limits: write \
             Quota::per_minute(60).name(\"requests\")"
        );
        self.options.headers = headers;
        self
    }

    /// Returns the names of the headers that the layer writes, for a CORS layer to expose to
    /// scripts on a page. With tower-http: `cors.expose_headers(layer.header_names())`.
    ///
    /// [The guide](crate::guide::ordering#headers-for-scripts-on-a-page) says where to put it.
    pub fn header_names(&self) -> Vec<HeaderName>
    where
        J: 'static,
    {
        let mut names = self.options.headers.names(self.limits.limiters.iter().map(Limiter::name));
        let reject: &dyn Any = &*self.reject;
        if reject.is::<Grpc>() {
            names.extend(Grpc::HEADERS);
        }
        names
    }

    /// Sets the response to refused requests: [`GitHubBody`](crate::GitHubBody),
    /// [`Grpc`](crate::Grpc), [`EmptyBody`](crate::EmptyBody), or your own
    /// [`Reject`](crate::Reject), each with an example. The default is
    /// [`ProblemJson`](crate::ProblemJson).
    pub fn reject<K>(self, reject: K) -> FixedWindowLayer<K> {
        let Self { limits, options, .. } = self;
        FixedWindowLayer { limits, options, reject: Arc::new(reject) }
    }

    /// Sets a closure that makes the response to a refused request, such as a JSON body, from the
    /// request's parts and the reason, as in the example of [`Rejection`]. In axum, JSON is
    /// `.on_reject(|_, why| (why.status(), Json(problem(why))).into_response())`. The layer adds
    /// its headers; other rate-limit headers of the closure stay. For a field of a struct, see [the
    /// type of a layer](Self#the-type-of-a-layer).
    #[doc(alias("error_handler", "on_limit", "rejection_response"))]
    pub fn on_reject<F, B>(self, reject: F) -> FixedWindowLayer<F>
    where
        F: Fn(&Parts, &Rejection<'_>) -> Response<B> + Send + Sync + 'static,
    {
        self.reject(reject)
    }

    /// Reads the rest of refused requests with bodies of type `B` before it responds: see
    /// [above](Self#refused-uploads). axum's bodies don't need this. For hyper's, write
    /// `drain_refused::<hyper::body::Incoming>()`; for those inside of tower-http's
    /// `RequestBodyLimitLayer`, in one `ServiceBuilder`, `drain_refused::<Limited<Body>>()`. Each
    /// call adds a type.
    pub fn drain_refused<B: Body + 'static>(mut self) -> Self {
        self.options.drains.push(drain::<B>());
        self
    }

    /// Refuses requests without reading the [rest of their bodies](Self#refused-uploads), axum's
    /// included. Use this if something in front of the server reads them, or if clients read an
    /// early answer.
    pub fn drain_nothing(mut self) -> Self {
        self.options.drains.clear();
        self
    }
}

impl<S, J> Layer<S> for FixedWindowLayer<J> {
    type Service = FixedWindow<S, J>;

    fn layer(&self, inner: S) -> Self::Service {
        let current = Current::new(self.limits.clone(), self.options.clone());
        FixedWindow::new(inner, current, Arc::clone(&self.reject))
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
            reject: Arc::clone(&self.reject),
        }
    }
}

impl<J> fmt::Debug for FixedWindowLayer<J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FixedWindowLayer").field("limits", &self.limits).finish_non_exhaustive()
    }
}

type Skip = Arc<dyn Fn(&Parts) -> bool + Send + Sync>;
type CountIf = Arc<dyn Fn(&response::Parts) -> bool + Send + Sync>;
type OnDecision = Arc<dyn Fn(&Parts, &Decision) + Send + Sync>;

#[derive(Clone, Default)]
pub(crate) struct Options {
    pub(crate) skip: Vec<Skip>,
    pub(crate) count_if: Option<CountIf>,
    pub(crate) on_decision: Vec<OnDecision>,
    pub(crate) refund_dropped: bool,
    pub(crate) expose_decision: bool,
    pub(crate) queue: Option<Arc<Queue>>,
    pub(crate) drains: Vec<Drain>,
    pub(crate) status: Option<StatusCode>,
    pub(crate) headers: Headers,
}
