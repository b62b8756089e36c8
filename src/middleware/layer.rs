//! [`FixedWindowLayer`]: its setters, and the service that it makes.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::header::{ACCESS_CONTROL_REQUEST_METHOD, ORIGIN};
use http::request::Parts;
use http::{HeaderName, Method, Response, StatusCode, response};
use http_body::Body;
use tower_layer::Layer;

use super::headers::Headers;
use super::rejection::{Grpc, ProblemJson, Rejection};
use super::service::{FixedWindow, Shared, Watch};
use super::upload::Drain;
use crate::decision::Decision;
use crate::limits::{IntoLimits, Limits};
use crate::queue::{Lines, Queue};

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
///     .route("/login", post(async || "welcome").route_layer(login))
///     .route("/search", get(async || "found").route_layer(search));
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
/// So do layers of the same [`Limiter`](crate::Limiter) or [`Limits`]. Limits that are created
/// separately share counters only if they have the same store *and* the same name. If a request
/// passes the same layer twice, as on a nested router and on the app around it, it is charged
/// twice, and the log names the layer once.
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
/// these bounds still loses it; hyper's `max_local_error_reset_streams` sets how soon. gRPC calls
/// and WebSockets over HTTP/2 are refused within 0.1 s: their clients read an early answer.
///
/// This works for axum's bodies. For the bodies of other servers, and for bodies that another layer
/// has wrapped, name the type with [`drain_refused`](Self::drain_refused). Under axum it suffices
/// to apply the limit with a separate `Router::layer` call: each of these calls turns bodies into
/// axum's again. [`drain_nothing`](Self::drain_nothing) turns it off.
///
/// # Around a client
///
/// Around an HTTP client, the same layer respects the limit of an API: with `queue` (feature
/// `tokio`), requests wait for the next window instead of failing. `examples/stacks/outbound.rs`
/// does this for reqwest. hyper-util's client needs [a line
/// more](crate::FixedWindow#if-it-is-not-a-service).
///
/// # The type of a layer
///
/// `J` makes the responses to refused requests: [`reject`](Self::reject) sets it, to a type that
/// implements [`Reject`](crate::Reject). In a struct, `FixedWindowLayer` suffices. The type of a
/// closure has no name, so a field for a layer with [`on_reject`](Self::on_reject) has that of a
/// function pointer:
///
/// ```
/// use axum::response::Response;
/// use http::request::Parts;
/// use tower_fixed_window::{FixedWindowLayer, Quota, Rejection};
///
/// type Refuse = fn(&Parts, &Rejection<'_>) -> Response;
///
/// struct App { limit: FixedWindowLayer, login: FixedWindowLayer<Refuse> }
///
/// let app = App {
///     limit: FixedWindowLayer::new(Quota::per_minute(60)),
///     // The last setter: a later one would get the closure's own type.
///     login: FixedWindowLayer::new(Quota::per_minute(5))
///         .on_reject(|_, why| why.response(why.message().into())),
/// };
/// # let _ = (app.limit, app.login);
/// ```
#[doc(alias = "throttle")]
#[must_use = "a layer does nothing until it is applied to a service"]
pub struct FixedWindowLayer<J = ProblemJson> {
    limits: Limits,
    pub(super) options: Options,
    /// The lines in which requests wait.
    lines: Arc<Lines>,
    pub(super) reject: Arc<J>,
}

impl FixedWindowLayer {
    /// Limits requests by the address of their peer, in memory. `limits` is a quota, or anything
    /// else that becomes [`Limits`](crate::Limits).
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
    /// Several limits are decided together: a request passes only if all of them grant it, and a
    /// refusal takes from none.
    ///
    /// ```
    /// use http::Request;
    /// use tower_fixed_window::key::header;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new([
    ///     Quota::per_minute(600).name("organization").key(header("x-org")),
    ///     Quota::per_minute(60).name("user").key(header("x-user")),
    /// ]);
    ///
    /// let request = Request::get("/").header("x-org", "acme").header("x-user", "ann");
    /// let response = ask(&layer, request);
    /// // The limit with the smallest part left.
    /// assert_eq!(response.headers()["x-ratelimit-resource"], "user");
    /// assert_eq!(response.headers()["x-ratelimit-remaining"], "59");
    /// ```
    ///
    /// To peek, reset or change a limit at run time, make a [`Limiter`](crate::Limiter) or
    /// [`Limits`](crate::Limits) first, and the layer of it: `FixedWindowLayer::new(&limits)`.
    ///
    /// # Panics
    /// As [`Limits::new`](crate::Limits::new) does: of several limits, each needs a name of its
    /// own.
    #[track_caller]
    pub fn new(limits: impl IntoLimits) -> Self {
        let limits = limits.into_limits();
        limits.assert_valid();
        let options = Options { drains: default_drains(), ..Options::default() };
        Self { limits, options, lines: Arc::default(), reject: Arc::new(ProblemJson) }
    }
}

impl<J> FixedWindowLayer<J> {
    /// Returns the limits of the layer, by which they are found and changed at run time.
    ///
    /// ```
    /// use http::Request;
    /// use tower_fixed_window::testing::{ask, block_on};
    /// use tower_fixed_window::{FixedWindowLayer, Key, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_day(1).name("api").key(Key::global()));
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

    /// Exempts requests for which the closure returns `true`: they pass uncounted and without
    /// headers. Each call exempts more requests. For a customer without a limit, the closure of
    /// [`Limit::by_plan`](crate::Limit::by_plan) returns `Plan::UNLIMITED`.
    ///
    /// Exempt requests by properties that a client can't choose: not by a header, and by a path
    /// only if its handler is cheap, as for most health probes. A path is compared as text:
    /// `/health/` is another one, and inside of a nested router its beginning is cut off (axum
    /// keeps the whole one in the extension `OriginalUri`). So don't limit `/login` by skipping all
    /// else, which may let `/login/` through: put the layer on its route. Better, add the route of
    /// a probe outside of the layer, or exempt the prober by its address: `client_ip().is_in(..)`
    /// (feature `client-ip`) is a closure for this.
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
    #[doc(alias = "whitelist")]
    #[doc(alias = "allowlist")]
    #[doc(alias = "exempt")]
    #[doc(alias = "bypass")]
    pub fn skip<F>(mut self, skip: F) -> Self
    where
        F: Fn(&Parts) -> bool + Send + Sync + 'static,
    {
        self.options.skip = Some(match self.options.skip.take() {
            Some(earlier) => Arc::new(move |parts| earlier(parts) || skip(parts)),
            None => Arc::new(skip),
        });
        self
    }

    /// Exempts CORS preflights (`OPTIONS` with `origin` and `access-control-request-method`). A
    /// preflight carries no credentials, and if one is refused, the browser reports a failure of
    /// CORS instead of a limit. If a CORS layer outside of this one answers preflights, they never
    /// reach the limit.
    ///
    /// Any client can send both headers, and its requests are then unlimited. Use this only if the
    /// handler for `OPTIONS` inside of the limit is cheap.
    ///
    /// ```
    /// use http::Request;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Key, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(0).key(Key::global())).skip_preflight();
    ///
    /// let preflight = Request::options("/")
    ///     .header("origin", "https://app.example")
    ///     .header("access-control-request-method", "PUT");
    /// assert_eq!(ask(&layer, preflight).status(), 200);
    /// assert_eq!(ask(&layer, Request::put("/")).status(), 429);
    /// ```
    pub fn skip_preflight(mut self) -> Self {
        self.options.skip_preflight = true;
        self
    }

    /// Counts only requests whose response meets the condition, such as failed logins.
    ///
    /// The layer takes the tokens before it calls the service, and refunds them if the response
    /// does not count. So a request counts until its response is known: with a limit of 5, at most
    /// 5 undecided requests are in flight, and never more than 5 failures pass. With a remote
    /// store, a background task sends the refund. If the runtime shuts down first, the request
    /// stays counted until its window ends.
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
    pub fn count_if<F>(mut self, counts: F) -> Self
    where
        F: Fn(&response::Parts) -> bool + Send + Sync + 'static,
    {
        self.options.count_if = Some(Arc::new(counts));
        self
    }

    /// Refunds the charge if a request is dropped before its response: the client disconnected, or
    /// the handler or a closure of this layer panicked. If a remote store is still deciding, a task
    /// awaits and refunds the charge (feature `tokio`), and ends with the runtime, as for
    /// [`count_if`](Self::count_if). Use this only if such requests are cheap: a client can start
    /// work and disconnect, again and again.
    ///
    /// ```
    /// use http::Request;
    /// use tower::{Layer, Service, service_fn};
    /// use tower_fixed_window::testing::block_on;
    /// use tower_fixed_window::{FixedWindowLayer, Key, Limiter, Quota};
    ///
    /// let limiter = Limiter::new(Quota::per_minute(5).key(Key::global()));
    /// let layer = FixedWindowLayer::new(&limiter).refund_dropped();
    /// let mut slow = layer.layer(service_fn(async |_: Request<String>| {
    ///     std::future::pending::<()>().await;
    ///     Ok::<_, std::io::Error>(http::Response::new(axum::body::Body::empty()))
    /// }));
    ///
    /// let response = slow.call(Request::new(String::new()));
    /// assert_eq!(block_on(limiter.peek(Key::global()))?.used(), 1);
    /// drop(response);
    /// assert_eq!(block_on(limiter.peek(Key::global()))?.used(), 0);
    /// # Ok::<_, tower_fixed_window::StoreError>(())
    /// ```
    pub fn refund_dropped(mut self) -> Self {
        self.options.refund_dropped = true;
        self
    }

    /// Lets requests over the limit wait in a line instead of refusing them: for each key up to
    /// `requests` in this process, each for at most `max_wait`, in order of arrival. A request that
    /// finds the line full, or would have to wait for longer, is refused. Its `retry-after` is the
    /// time until it could pass behind the others. Several limits have a line for each combination
    /// of their keys.
    ///
    /// Nothing is taken for a request that waits, or is dropped while it waits. The first in the
    /// line is charged, for all limits or none, when its window begins and the service is ready:
    /// never more than the limit passes. Before that it asks again after a second, then after twice
    /// as long each time, so it also notices tokens that were returned, resets and raised limits. A
    /// lower cost does not overtake a higher one; a cost of 0 passes at once, and a cost above the
    /// capacity is refused at once. A waiting request holds no place in the inner service. If it is
    /// not polled, it delays the others by a tenth of a second. The order holds within a process.
    ///
    /// [`close_queue`](Self::close_queue) ends all waiting with 503, for a graceful shutdown.
    ///
    /// ```
    /// use std::time::Duration;
    /// use http::Request;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Key, Quota};
    ///
    /// // A window of a day: the second request would have to wait too long.
    /// let layer = FixedWindowLayer::new(Quota::per_day(1).key(Key::global()))
    ///     .queue(30, Duration::from_millis(1));
    ///
    /// assert_eq!(ask(&layer, Request::get("/")).status(), 200);
    /// assert_eq!(ask(&layer, Request::get("/")).status(), 429);
    /// ```
    #[cfg(feature = "tokio")]
    pub fn queue(mut self, requests: u64, max_wait: Duration) -> Self {
        self.options.queue = Some((requests, max_wait));
        self
    }

    /// Ends the waiting of all requests in the [`queue`](Self::queue) of this layer and its clones
    /// with 503. Later requests don't wait. Call it for a graceful shutdown.
    #[cfg(feature = "tokio")]
    #[cfg_attr(docsrs, doc(cfg(feature = "tokio")))]
    pub fn close_queue(&self) {
        self.lines.close();
    }

    /// Puts the [`Decision`](crate::Decision) into the extensions of requests that pass, for
    /// handlers to read.
    ///
    /// ```
    /// use axum::{Extension, routing::any};
    /// use http::Request;
    /// use tower_fixed_window::testing::ask_around;
    /// use tower_fixed_window::{Decision, FixedWindowLayer, Key, Quota};
    ///
    /// async fn handler(Extension(decision): Extension<Decision>) -> String {
    ///     format!("{} left", decision.remaining())
    /// }
    ///
    /// let limit = Quota::per_minute(5).key(Key::global());
    /// let layer = FixedWindowLayer::new(limit).expose_decision();
    ///
    /// let response = ask_around(&layer, any(handler), Request::get("/"));
    /// assert_eq!(response.status(), 200);
    /// ```
    pub fn expose_decision(mut self) -> Self {
        self.options.expose_decision = true;
        self
    }

    /// Calls a closure with each decision and its request, for logs or metrics with your own ids,
    /// or to warn an account near its limit. For logs and metrics by the limit's name, use the
    /// features `tracing` and `metrics` instead.
    ///
    /// The layer calls it once for each request, before it calls the service or responds with a
    /// refusal; for a request that waits in a queue, when it has waited. In
    /// [shadow mode](crate::Limit::shadow), it also calls it for requests that pass although the
    /// decision refuses them. It does not call it if there is no decision: for exempt requests, for
    /// requests without a key, and while the store fails and nothing decides in its place (if
    /// memory does, [`is_local`](Decision::is_local) is `true`).
    ///
    /// The closure must not block, since the request waits for it; send slow work to a channel. It
    /// does not get the key, which may be a credential; put what your app knows of the client into
    /// the extensions. Another call adds a closure.
    ///
    /// ```
    /// use std::sync::mpsc;
    /// use http::Request;
    /// use tower_fixed_window::key::extension;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// /// Your authentication layer puts it into the extensions.
    /// #[derive(Clone)]
    /// struct Tenant { id: u64, token: &'static str }
    ///
    /// impl From<&Tenant> for tower_fixed_window::Key {
    ///     fn from(tenant: &Tenant) -> Self { Self::secret(tenant.token) }
    /// }
    ///
    /// let (sender, refused_tenants) = mpsc::channel();
    /// let layer = FixedWindowLayer::new(Quota::per_day(1).key(extension::<Tenant>()));
    /// let layer = layer.on_decision(move |parts, decision| {
    ///     if let Some(tenant) = parts.extensions.get::<Tenant>() && !decision.allowed() {
    ///         let _ = sender.send((tenant.id, decision.limit()));
    ///     }
    /// });
    ///
    /// let tenant = Tenant { id: 7, token: "t0k3n" };
    /// assert_eq!(ask(&layer, Request::get("/").extension(tenant.clone())).status(), 200);
    /// assert_eq!(ask(&layer, Request::get("/").extension(tenant)).status(), 429);
    /// assert_eq!(refused_tenants.try_iter().collect::<Vec<_>>(), [(7, 1)]);
    /// ```
    pub fn on_decision<F>(mut self, on_decision: F) -> Self
    where
        F: Fn(&Parts, &Decision) + Send + Sync + 'static,
    {
        self.options.on_decision = Some(match self.options.on_decision.take() {
            Some(earlier) => Arc::new(move |parts, decision| {
                earlier(parts, decision);
                on_decision(parts, decision);
            }),
            None => Arc::new(on_decision),
        });
        self
    }

    /// Sets the status of a refusal. The default is 429; GitHub's API uses 403.
    ///
    /// ```
    /// use http::{Request, StatusCode};
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Key, Quota};
    ///
    /// let limit = Quota::per_minute(0).key(Key::global());
    /// let layer = FixedWindowLayer::new(limit).status(StatusCode::FORBIDDEN);
    ///
    /// assert_eq!(ask(&layer, Request::get("/")).status(), 403);
    /// ```
    pub fn status(mut self, status: StatusCode) -> Self {
        self.options.status = Some(status);
        self
    }

    /// Sets which rate-limit headers responses have. The default is GitHub's.
    ///
    /// ```
    /// use http::Request;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Headers, Key, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(60).name("api").key(Key::global()))
    ///     .headers(Headers::IetfDraft10);
    ///
    /// let response = ask(&layer, Request::get("/"));
    /// assert_eq!(response.headers()["ratelimit-policy"], r#""api:60/minute";q=60;w=60"#);
    /// ```
    pub fn headers(mut self, headers: Headers) -> Self {
        self.options.headers = headers;
        self
    }

    /// Returns the names of the headers that the layer writes: scripts on a page read only those
    /// that a CORS layer exposes. With tower-http: `cors.expose_headers(layer.header_names())`.
    ///
    /// ```
    /// use tower_fixed_window::{FixedWindowLayer, Headers, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(60)).headers(Headers::IetfDraft10);
    /// assert_eq!(layer.header_names(), ["retry-after", "ratelimit-policy", "ratelimit"]);
    /// ```
    pub fn header_names(&self) -> Vec<HeaderName>
    where
        J: 'static,
    {
        let mut names = self.options.headers.names();
        let reject: &dyn Any = &*self.reject;
        if reject.is::<Grpc>() {
            names.extend(Grpc::HEADERS);
        }
        names
    }

    /// Sets the response to refused requests: [`GitHubBody`](crate::GitHubBody),
    /// [`Grpc`](crate::Grpc), [`EmptyBody`](crate::EmptyBody), or a [`Reject`](crate::Reject) of
    /// your own; [`ProblemJson`](crate::ProblemJson) unless set.
    ///
    /// ```
    /// use http::Request;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Grpc, Key, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_second(0).key(Key::global())).reject(Grpc);
    ///
    /// let response = ask(&layer, Request::post("/"));
    /// assert_eq!(response.status(), 200);
    /// assert_eq!(response.headers()["grpc-status"], "8");
    /// ```
    pub fn reject<K>(self, reject: K) -> FixedWindowLayer<K> {
        let Self { limits, options, lines, reject: _ } = self;
        FixedWindowLayer { limits, options, lines, reject: Arc::new(reject) }
    }

    /// Makes the response to a refused request by a closure, which gets the request's parts and why
    /// it was refused. The layer adds its headers, as for each [`Reject`](crate::Reject). Other
    /// rate-limit headers of the closure stay. For a field of a struct, see [the type of a
    /// layer](Self#the-type-of-a-layer).
    ///
    /// ```
    /// use axum::routing::any;
    /// use axum::{Json, response::IntoResponse};
    /// use http::{Request, header::ACCEPT};
    /// use tower_fixed_window::testing::ask_around;
    /// use tower_fixed_window::{FixedWindowLayer, Key, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(0).key(Key::global()));
    /// let layer = layer.on_reject(|parts, why| {
    ///     let accept = parts.headers.get(ACCEPT);
    ///     match accept.is_some_and(|kind| kind == "application/json") {
    ///         true => (why.status(), Json(why.message())).into_response(),
    ///         false => (why.status(), why.message()).into_response(),
    ///     }
    /// });
    ///
    /// let request = Request::get("/").header(ACCEPT, "application/json");
    /// let response = ask_around(&layer, any(async || "hello"), request);
    /// assert_eq!(response.status(), 429);
    /// assert_eq!(response.headers()["content-type"], "application/json");
    /// assert_eq!(response.headers()["x-ratelimit-remaining"], "0");
    /// ```
    pub fn on_reject<F, B>(self, reject: F) -> FixedWindowLayer<F>
    where
        F: Fn(&Parts, &Rejection<'_>) -> Response<B> + Send + Sync + 'static,
    {
        self.reject(reject)
    }

    /// Reads the rest of refused requests with bodies of type `B` before the response, for at most
    /// 30 s: see [above](Self#refused-uploads). axum's bodies don't need this. Each call adds a
    /// type.
    ///
    /// In a `ServiceBuilder`, a layer outside of the limit may change the type of the bodies, as
    /// tower-http's `RequestBodyLimitLayer` does:
    ///
    /// ```
    /// use axum::body::Body;
    /// use http::Request;
    /// use http_body_util::Limited;
    /// use tower::ServiceBuilder;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let at_most = |request: Request<Body>| request.map(|body| Limited::new(body, 1 << 20));
    /// let layers = ServiceBuilder::new()
    ///     .map_request(at_most)
    ///     .layer(FixedWindowLayer::new(Quota::per_minute(60)).drain_refused::<Limited<Body>>());
    /// # let _: axum::Router = axum::Router::new()
    /// #     .route("/", axum::routing::post(async |body: String| body)).layer(layers);
    /// ```
    ///
    /// Under hyper alone:
    ///
    /// ```
    /// use http::Request;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Key, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(0).key(Key::global()))
    ///     .drain_refused::<hyper::body::Incoming>();
    ///
    /// assert_eq!(ask(&layer, Request::post("/")).status(), 429);
    /// ```
    pub fn drain_refused<B: Body + 'static>(mut self) -> Self {
        self.options.drains.push(Drain::of::<B>());
        self
    }

    /// Refuses requests without reading the rest of their bodies, those of axum included: where
    /// something in front of the server reads them, or where clients read an early answer.
    ///
    /// ```
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(60)).drain_nothing();
    /// # let _ = layer;
    /// ```
    pub fn drain_nothing(mut self) -> Self {
        self.options.drains.clear();
        self
    }
}

impl<S, J> Layer<S> for FixedWindowLayer<J> {
    type Service = FixedWindow<S, J>;

    fn layer(&self, inner: S) -> Self::Service {
        let (limits, options) = (self.limits.clone(), self.options.clone());
        let queue = options.queue.map(|(most, max_wait)| {
            let (lines, limits) = (Arc::clone(&self.lines), limits.clone());
            Arc::new(Queue { lines, limits, most, max_wait })
        });
        let (reject, watch) = (Arc::clone(&self.reject), Watch::default());
        let shared = Shared { limits, options, queue, reject, watch };
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

type Skip = Arc<dyn Fn(&Parts) -> bool + Send + Sync>;
type CountIf = Arc<dyn Fn(&response::Parts) -> bool + Send + Sync>;
type OnDecision = Arc<dyn Fn(&Parts, &Decision) + Send + Sync>;

/// How a layer applies its limits to HTTP, apart from how it refuses.
#[derive(Clone, Default)]
pub(crate) struct Options {
    pub(crate) skip: Option<Skip>,
    pub(crate) skip_preflight: bool,
    pub(crate) count_if: Option<CountIf>,
    pub(crate) on_decision: Option<OnDecision>,
    pub(crate) refund_dropped: bool,
    pub(crate) expose_decision: bool,
    /// The most requests of a key that may wait, and the longest wait.
    pub(crate) queue: Option<(u64, Duration)>,
    /// Readers for the bodies of refused requests.
    pub(crate) drains: Vec<Drain>,
    /// The status of a refusal, if it is another one than 429.
    pub(crate) status: Option<StatusCode>,
    pub(crate) headers: Headers,
}

impl Options {
    /// Returns whether a request passes without being counted.
    #[inline]
    pub(crate) fn skips(&self, parts: &Parts) -> bool {
        let preflight = || {
            parts.method == Method::OPTIONS
                && parts.headers.contains_key(ORIGIN)
                && parts.headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
        };
        self.skip_preflight && preflight() || self.skip.as_ref().is_some_and(|skip| skip(parts))
    }
}

/// Returns a reader for axum's bodies, with the feature `axum`.
fn default_drains() -> Vec<Drain> {
    #[cfg(feature = "axum")]
    return vec![Drain::of::<axum::body::Body>()];
    #[cfg(not(feature = "axum"))]
    Vec::new()
}
