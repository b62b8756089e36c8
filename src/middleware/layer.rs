//! [`FixedWindowLayer`]: what is limited, by whom, and what a refusal looks like.

use std::fmt;
use std::sync::Arc;
#[cfg(feature = "tokio")]
use std::time::Duration;

use http::request::Parts;
use http::{Response, StatusCode, response};
use http_body::Body;
use tower_layer::Layer;

use super::headers::Headers;
use super::live::{Handle, Live};
use super::options::Options;
use super::rejection::{EmptyBody, GitHubBody, Grpc, OnReject, ProblemJson, Rejection};
use super::service::FixedWindow;
use super::shared::Shared;
use super::upload::Drain;
use crate::decision::Decision;
use crate::key::{Key, KeyExtractor, key_fn};
use crate::limiter::Limiter;
use crate::quota::Quotas;
use crate::store::{OnStoreFailure, Store};

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
/// A request that passes reaches the service, and its response gets the fields
/// `x-ratelimit-limit`, `-remaining`, `-used`, `-reset` (UTC epoch seconds), and `-resource` if the
/// layer is named. One that doesn't is answered with 429, the same fields, `retry-after` (seconds)
/// and `cache-control: no-store`; the service is not called. That is a response, not an error: the
/// service's error type is kept.
///
/// # Who shares a count
///
/// Clones of a layer share their counters, so the same layer on two routes is one limit for both.
/// Layers that are made separately never do, unless they have one store *and* one name.
///
/// # Refused uploads
///
/// An HTTP/1 server closes a connection whose request was not read to its end, and a client that is
/// still sending sees a broken pipe instead of its 429. An HTTP/2 server resets the stream, and ends
/// the whole connection when that has happened often (in hyper 1,024 times, if what the client still
/// sends comes too late). So the rest of a refused request's body is read, and thrown away, before the
/// request is answered: at most 16 MiB of it, for at most 30 s, and no longer than until nothing has
/// come for a second. Outside of a runtime of tokio's, or without the feature `tokio`, only what is
/// there at once is read. A request that says it is longer, or asks first (`expect: 100-continue`), is answered at once. A client that floods an
/// HTTP/2 connection with uploads beyond these bounds still loses it; hyper's
/// `max_local_error_reset_streams` sets how soon.
///
/// This works for axum's bodies. Those of other servers, and those that another layer has changed, are
/// read where [`drain_refused`](Self::drain_refused) names their type. Under axum it suffices to apply
/// the limit with a `Router::layer` of its own: each of these calls makes them axum's again.
///
/// # Around a client
///
/// The same layer keeps an HTTP client inside of somebody else's limit, with
/// [`queue`](Self::queue) waiting for the next window instead of failing: `examples/outbound.rs` has
/// reqwest's. The responses of hyper-util's client can't be made from bytes, as a refusal is: map
/// them under the layer, `.map_response(|response| response.map(Body::new))`.
///
/// # Its type
///
/// The type parameter is the way of refusing; as `FixedWindowLayer` it can be written in a field:
///
/// ```
/// # use tower_fixed_window::FixedWindowLayer;
/// struct App { limit: FixedWindowLayer }
/// ```
#[derive(Clone)]
#[must_use = "a layer does nothing until it is applied to a service"]
pub struct FixedWindowLayer<J = ProblemJson> {
    limiter: Limiter,
    live: Arc<Live>,
    options: Options,
    reject: J,
}

impl FixedWindowLayer {
    /// Limits requests by their peer's address, in memory.
    ///
    /// Under axum that needs the `axum` feature and
    /// `into_make_service_with_connect_info::<SocketAddr>()`; under other servers a
    /// [`PeerAddr`](crate::key::PeerAddr) in each request.
    ///
    /// ```
    /// use tower_fixed_window::key::PeerAddr;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(60));
    /// # use axum::{Router, body::Body, http::Request, routing::any};
    /// # use tower::ServiceExt;
    /// # let app = Router::<()>::new().fallback(any(async || "hello")).layer(layer);
    /// # let ask = |request: http::request::Builder| {
    /// #     let request = request.body(Body::empty()).unwrap();
    /// #     tower_fixed_window::testing::block_on(app.clone().oneshot(request)).unwrap()
    /// # };
    /// let request = || Request::get("/").extension(PeerAddr(([192, 0, 2, 1], 4711).into()));
    /// assert_eq!(ask(request()).headers()["x-ratelimit-remaining"], "59");
    /// assert_eq!(ask(request()).headers()["x-ratelimit-remaining"], "58");
    /// ```
    pub fn new(quotas: impl Into<Quotas>) -> Self {
        let quotas = quotas.into();
        Self {
            limiter: Limiter::new(quotas),
            live: Arc::new(Live::new(quotas)),
            options: Options::default(),
            reject: ProblemJson,
        }
    }
}

impl<J> FixedWindowLayer<J> {
    /// Names the limit: the scope of its counters, and the value of `x-ratelimit-resource`.
    ///
    /// ```
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(5)).name("login").key(global());
    /// # use axum::{Router, body::Body, http::Request, routing::any};
    /// # use tower::ServiceExt;
    /// # let app = Router::<()>::new().fallback(any(async || "hello")).layer(layer);
    /// # let ask = |request: http::request::Builder| {
    /// #     let request = request.body(Body::empty()).unwrap();
    /// #     tower_fixed_window::testing::block_on(app.clone().oneshot(request)).unwrap()
    /// # };
    /// assert_eq!(ask(Request::get("/")).headers()["x-ratelimit-resource"], "login");
    /// ```
    ///
    /// # Panics
    /// If the name is not 1 to 64 of `[a-z0-9_.-]`.
    pub fn name(mut self, name: &str) -> Self {
        self.limiter = self.limiter.name(name);
        self.fork();
        self
    }

    /// Who pays: an extractor of [`key`](crate::key), or one of your own.
    ///
    /// ```
    /// use tower_fixed_window::key::header;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(60)).key(header("x-api-key"));
    /// # use axum::{Router, body::Body, http::Request, routing::any};
    /// # use tower::ServiceExt;
    /// # let app = Router::<()>::new().fallback(any(async || "hello")).layer(layer);
    /// # let ask = |request: http::request::Builder| {
    /// #     let request = request.body(Body::empty()).unwrap();
    /// #     tower_fixed_window::testing::block_on(app.clone().oneshot(request)).unwrap()
    /// # };
    /// let response = ask(Request::get("/").header("x-api-key", "alpha"));
    /// assert_eq!(response.headers()["x-ratelimit-used"], "1");
    /// assert_eq!(ask(Request::get("/")).status(), 400);
    /// ```
    pub fn key(mut self, key: impl KeyExtractor) -> Self {
        self.options.key = Arc::new(key);
        self
    }

    /// Who pays, as a closure; a request for which it returns `None` is refused with 400.
    ///
    /// ```
    /// use tower_fixed_window::{FixedWindowLayer, Key, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(60))
    ///     .key_fn(|parts| parts.uri.path().split('/').nth(1).map(Key::from));
    /// # use axum::{Router, body::Body, http::Request, routing::any};
    /// # use tower::ServiceExt;
    /// # let app = Router::<()>::new().fallback(any(async || "hello")).layer(layer);
    /// # let ask = |request: http::request::Builder| {
    /// #     let request = request.body(Body::empty()).unwrap();
    /// #     tower_fixed_window::testing::block_on(app.clone().oneshot(request)).unwrap()
    /// # };
    /// assert_eq!(ask(Request::get("/acme/users")).headers()["x-ratelimit-used"], "1");
    /// assert_eq!(ask(Request::get("/acme/items")).headers()["x-ratelimit-used"], "2");
    /// assert_eq!(ask(Request::get("/other")).headers()["x-ratelimit-used"], "1");
    /// ```
    pub fn key_fn<F>(self, key: F) -> Self
    where
        F: Fn(&Parts) -> Option<Key> + Send + Sync + 'static,
    {
        self.key(key_fn(key))
    }

    /// Where the counters live; in memory by default, in a store of the layer's own.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::{FixedWindowLayer, ManualClock, MemoryStore, Quota};
    ///
    /// let clock = ManualClock::at_ms(1_700_000_040_000);
    /// let layer = FixedWindowLayer::new(Quota::per_minute(1))
    ///     .key(global())
    ///     .store(MemoryStore::with_clock(clock.clone()));
    /// # use axum::{Router, body::Body, http::Request, routing::any};
    /// # use tower::ServiceExt;
    /// # let app = Router::<()>::new().fallback(any(async || "hello")).layer(layer);
    /// # let ask = |request: http::request::Builder| {
    /// #     let request = request.body(Body::empty()).unwrap();
    /// #     tower_fixed_window::testing::block_on(app.clone().oneshot(request)).unwrap()
    /// # };
    /// assert_eq!(ask(Request::get("/")).status(), 200);
    /// assert_eq!(ask(Request::get("/")).status(), 429);
    /// clock.advance(Duration::from_secs(60));
    /// assert_eq!(ask(Request::get("/")).status(), 200);
    /// ```
    pub fn store(mut self, store: impl Store) -> Self {
        self.limiter = self.limiter.store_named_later(store);
        self.fork();
        self
    }

    /// Makes a [reset](Handle::reset) by another process be seen within a second.
    ///
    /// A refusal by a remote store is remembered until it ends, so that who is refused causes no
    /// traffic to the store. What this process resets or refunds is seen at once, and so is a raised
    /// limit; what another one does, when the refusal ends. With this the store is asked again after
    /// a second, as it is anyhow where requests may give back what they took
    /// ([`count_if`](Self::count_if), [`refund_dropped`](Self::refund_dropped),
    /// [`settle_true_cost`](Self::settle_true_cost), [`queue`](Self::queue)).
    ///
    /// ```no_run
    /// # #[cfg(feature = "redis")]
    /// use tower_fixed_window::{FixedWindowLayer, Quota, RedisStore};
    ///
    /// # #[cfg(not(feature = "redis"))] fn main() {}
    /// # #[cfg(feature = "redis")]
    /// # fn main() -> Result<(), tower_fixed_window::StoreError> {
    /// let store = RedisStore::new("redis://127.0.0.1/")?;
    /// let login =
    ///     FixedWindowLayer::new(Quota::per_hour(5)).name("login").store(store).resettable();
    /// # let _ = login; Ok(()) }
    /// ```
    pub fn resettable(mut self) -> Self {
        self.limiter = self.limiter.resettable();
        self
    }

    /// Lets this process take up to `max` tokens of a busy key at once from a remote store, and
    /// spend them by itself: a hot key then costs a call for many requests instead of one for each.
    /// Off unless set; 0 and 1 are off.
    ///
    /// Never more than the limit passes, whatever happens to nodes or store: tokens are taken from
    /// the shared count before they are spent, and what is left of them ends with the window. What it
    /// costs is that the last tokens may lie on a node that does not need them, so that others refuse
    /// a little early. A lease is at most a 16th of what is left, and at most the key's heat, which
    /// starts at 1, doubles while leases are spent within a hundredth of the window, and halves when
    /// they are not; what is not spent within a 16th of the window is given back. So `n` nodes refuse
    /// at most `(n - 1) * (min(max, limit / 16) - 1)` requests too many in a window. `used`, as
    /// responses say it, has leased tokens in it.
    ///
    /// Leases are for layers of a single quota of at least 32 tokens, without rollover and without a
    /// [`queue`](Self::queue); elsewhere this changes nothing. Requests of cost 1 take them, and
    /// larger ones are paid from them where they suffice. A reset by another process does not reach
    /// what is in hand here.
    ///
    /// ```no_run
    /// # #[cfg(feature = "redis")]
    /// use tower_fixed_window::{FixedWindowLayer, Quota, RedisStore};
    ///
    /// # #[cfg(not(feature = "redis"))] fn main() {}
    /// # #[cfg(feature = "redis")]
    /// # fn main() -> Result<(), tower_fixed_window::StoreError> {
    /// let store = RedisStore::new("redis://127.0.0.1/")?;
    /// let api = FixedWindowLayer::new(Quota::per_minute(60_000)).name("api").store(store).leases(100);
    /// # let _ = api; Ok(()) }
    /// ```
    #[cfg(feature = "tokio")]
    pub fn leases(mut self, max: u64) -> Self {
        self.limiter = self.limiter.leases(max);
        self
    }

    /// What happens to requests while the store fails: by default the same quotas are enforced in
    /// this process's memory.
    ///
    /// ```
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::store::{Adjust, Charge, Remote, Reply, Scope, Store};
    /// use tower_fixed_window::{Decision, FixedWindowLayer, Key, OnStoreFailure, Quota, StoreError};
    ///
    /// struct Down(Remote);
    ///
    /// impl Store for Down {
    ///     fn charge(&self, _: Charge<'_>) -> Reply<Decision> { Reply::failed(StoreError::new("down")) }
    ///     fn adjust(&self, _: Adjust<'_>) -> Reply<()> { Reply::failed(StoreError::new("down")) }
    ///     fn reset(&self, _: &Scope, _: &Key) -> Reply<()> { Reply::failed(StoreError::new("down")) }
    ///     fn remote(&self) -> Option<&Remote> { Some(&self.0) }
    /// }
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(60))
    ///     .name("api")
    ///     .key(global())
    ///     .store(Down(Remote::new()))
    ///     .on_store_failure(OnStoreFailure::Deny);
    /// # use axum::{Router, body::Body, http::Request, routing::any};
    /// # use tower::ServiceExt;
    /// # let app = Router::<()>::new().fallback(any(async || "hello")).layer(layer);
    /// # let ask = |request: http::request::Builder| {
    /// #     let request = request.body(Body::empty()).unwrap();
    /// #     tower_fixed_window::testing::block_on(app.clone().oneshot(request)).unwrap()
    /// # };
    /// assert_eq!(ask(Request::get("/")).status(), 503);
    /// ```
    pub fn on_store_failure(mut self, policy: OnStoreFailure) -> Self {
        self.options.on_store_failure = policy;
        self
    }

    /// Requests for which the closure says `true` pass without being counted, and without fields.
    /// This is how to say "unlimited". Called again, it exempts more.
    ///
    /// What is skipped has no limit, so ask for what a client can't choose: not for a header, and
    /// for a path only if its handler is cheap. For health probes that is mostly so; better still,
    /// put their route outside of the layer, or exempt the prober by its address:
    /// `client_ip().is_in(..)` of the feature `client-ip`, which is a closure for this.
    ///
    /// ```
    /// use tower_fixed_window::key::client_ip;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(60))
    ///     .skip(|parts| parts.uri.path() == "/health")
    ///     .skip(client_ip().is_in(["192.0.2.0/24"]));
    /// # use axum::{Router, body::Body, http::Request, routing::any};
    /// # use tower::ServiceExt;
    /// # let app = Router::<()>::new().fallback(any(async || "hello")).layer(layer);
    /// # let ask = |request: http::request::Builder| {
    /// #     let request = request.body(Body::empty()).unwrap();
    /// #     tower_fixed_window::testing::block_on(app.clone().oneshot(request)).unwrap()
    /// # };
    /// let response = ask(Request::get("/health"));
    /// assert_eq!(response.status(), 200);
    /// assert!(!response.headers().contains_key("x-ratelimit-limit"));
    /// ```
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

    /// CORS preflights (`OPTIONS` with `origin` and `access-control-request-method`) pass without
    /// being counted. A preflight carries no credentials, and a browser that is refused one reports a
    /// failure of CORS, not a limit. Where a CORS layer answers them outside of this one, they never
    /// come here.
    ///
    /// Any client can send both headers: what it marks as a preflight in this way has no limit. So use
    /// this only if whatever answers `OPTIONS` inside of the limit is cheap.
    ///
    /// ```
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(0)).key(global()).skip_preflight();
    /// # use axum::{Router, body::Body, http::Request, routing::any};
    /// # use tower::ServiceExt;
    /// # let app = Router::<()>::new().fallback(any(async || "hello")).layer(layer);
    /// # let ask = |request: http::request::Builder| {
    /// #     let request = request.body(Body::empty()).unwrap();
    /// #     tower_fixed_window::testing::block_on(app.clone().oneshot(request)).unwrap()
    /// # };
    /// let preflight = Request::options("/")
    ///     .header("origin", "https://app.example")
    ///     .header("access-control-request-method", "PUT");
    /// assert_eq!(ask(preflight).status(), 200);
    /// assert_eq!(ask(Request::put("/")).status(), 429);
    /// ```
    pub fn skip_preflight(mut self) -> Self {
        self.options.skip_preflight = true;
        self
    }

    /// What may be spent, for each request: free and paid plans under one name. The closure gets
    /// the key, too. All plans share one counter for each window length, so that a customer who
    /// upgrades goes on from what is used.
    ///
    /// [`Handle::set_quotas`] changes the layer's quotas, not what the closure returns.
    ///
    /// ```
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// const FREE: Quota = Quota::per_hour(60);
    /// const PRO: Quota = Quota::per_hour(5_000);
    ///
    /// let layer = FixedWindowLayer::new(FREE).key(global()).quota_fn(|parts, _key| {
    ///     // Really: a plan that the authentication layer has left in the extensions.
    ///     if parts.uri.path().starts_with("/pro") { PRO } else { FREE }
    /// });
    /// # use axum::{Router, body::Body, http::Request, routing::any};
    /// # use tower::ServiceExt;
    /// # let app = Router::<()>::new().fallback(any(async || "hello")).layer(layer);
    /// # let ask = |request: http::request::Builder| {
    /// #     let request = request.body(Body::empty()).unwrap();
    /// #     tower_fixed_window::testing::block_on(app.clone().oneshot(request)).unwrap()
    /// # };
    /// assert_eq!(ask(Request::get("/")).headers()["x-ratelimit-remaining"], "59");
    /// assert_eq!(ask(Request::get("/pro")).headers()["x-ratelimit-remaining"], "4998");
    /// ```
    pub fn quota_fn<F, Q>(mut self, quotas: F) -> Self
    where
        F: Fn(&Parts, &Key) -> Q + Send + Sync + 'static,
        Q: Into<Quotas>,
    {
        self.options.quota_fn = Some(Arc::new(move |parts, key| quotas(parts, key).into()));
        self
    }

    /// How many tokens a request costs; 1 unless set. A request of cost 0 passes and takes nothing.
    ///
    /// ```
    /// use http::Method;
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_hour(5_000))
    ///     .key(global())
    ///     .cost_fn(|parts| if parts.method == Method::GET { 1 } else { 5 });
    /// # use axum::{Router, body::Body, http::Request, routing::any};
    /// # use tower::ServiceExt;
    /// # let app = Router::<()>::new().fallback(any(async || "hello")).layer(layer);
    /// # let ask = |request: http::request::Builder| {
    /// #     let request = request.body(Body::empty()).unwrap();
    /// #     tower_fixed_window::testing::block_on(app.clone().oneshot(request)).unwrap()
    /// # };
    /// assert_eq!(ask(Request::get("/")).headers()["x-ratelimit-used"], "1");
    /// assert_eq!(ask(Request::post("/")).headers()["x-ratelimit-used"], "6");
    /// ```
    pub fn cost_fn<F>(mut self, cost: F) -> Self
    where
        F: Fn(&Parts) -> u64 + Send + Sync + 'static,
    {
        self.options.cost_fn = Some(Arc::new(cost));
        self
    }

    /// Counts only requests whose response meets the condition: failed logins.
    ///
    /// The tokens are taken before the service is called, and given back when the response shows
    /// that it doesn't count. So what is undecided counts: with a limit of 5, at most 5 requests
    /// whose outcome is unknown are under way at once, and never more than 5 failures pass.
    ///
    /// ```
    /// use http::StatusCode;
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(5))
    ///     .key(global())
    ///     .count_if(|response| response.status == StatusCode::UNAUTHORIZED);
    /// # use axum::{Router, body::Body, http::Request, routing::any};
    /// # use tower::ServiceExt;
    /// # let app = Router::<()>::new().fallback(any(async |uri: http::Uri| if uri.path() == "/wrong" { StatusCode::UNAUTHORIZED } else { StatusCode::OK })).layer(layer);
    /// # let ask = |request: http::request::Builder| {
    /// #     let request = request.body(Body::empty()).unwrap();
    /// #     tower_fixed_window::testing::block_on(app.clone().oneshot(request)).unwrap()
    /// # };
    /// assert_eq!(ask(Request::post("/right")).headers()["x-ratelimit-used"], "0");
    /// assert_eq!(ask(Request::post("/wrong")).headers()["x-ratelimit-used"], "1");
    /// ```
    pub fn count_if<F>(mut self, counts: F) -> Self
    where
        F: Fn(&response::Parts) -> bool + Send + Sync + 'static,
    {
        self.options.count_if = Some(Arc::new(counts));
        self
    }

    /// Corrects the charge by the [`TrueCost`](crate::TrueCost) that the response reports: less is
    /// returned, more is taken even past the limit. Without this a layer ignores what is reported,
    /// so that in a stack of layers only those follow it that count in its unit.
    ///
    /// ```
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::{FixedWindowLayer, Quota, TrueCost};
    ///
    /// const ESTIMATE: u64 = 500;
    /// let layer = FixedWindowLayer::new(Quota::per_day(100_000))
    ///     .name("model-tokens")
    ///     .key(global())
    ///     .cost_fn(|_| ESTIMATE)
    ///     .settle_true_cost();
    ///
    /// async fn handler() -> axum::Extension<TrueCost> {
    ///     axum::Extension(TrueCost::of(120))
    /// }
    /// # use axum::{Router, body::Body, http::Request, routing::any};
    /// # use tower::ServiceExt;
    /// # let app = Router::<()>::new().fallback(any(handler)).layer(layer);
    /// # let ask = |request: http::request::Builder| {
    /// #     let request = request.body(Body::empty()).unwrap();
    /// #     tower_fixed_window::testing::block_on(app.clone().oneshot(request)).unwrap()
    /// # };
    /// assert_eq!(ask(Request::get("/")).headers()["x-ratelimit-used"], "120");
    /// ```
    pub fn settle_true_cost(mut self) -> Self {
        self.options.settle = true;
        self
    }

    /// Gives the charge back when a request is dropped before its response: the client hung up, or
    /// the handler or a closure of this layer panicked. A charge that a remote store is still deciding
    /// is awaited and given back in the background (feature `tokio`). Only where such requests cost nothing worth limiting: a client can
    /// start work and hang up, again and again.
    ///
    /// ```
    /// use http::Request;
    /// use tower::{Layer, Service, service_fn};
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::block_on;
    /// use tower_fixed_window::{FixedWindowLayer, Key, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(5)).key(global()).refund_dropped();
    /// let handle = layer.handle();
    /// let mut slow = layer.layer(service_fn(async |_: Request<String>| {
    ///     std::future::pending::<()>().await;
    ///     Ok::<_, std::io::Error>(http::Response::new(axum::body::Body::empty()))
    /// }));
    ///
    /// let response = slow.call(Request::new(String::new()));
    /// assert_eq!(block_on(handle.peek(Key::global()))?.used(), 1);
    /// drop(response);
    /// assert_eq!(block_on(handle.peek(Key::global()))?.used(), 0);
    /// # Ok::<_, tower_fixed_window::StoreError>(())
    /// ```
    pub fn refund_dropped(mut self) -> Self {
        self.options.refund_dropped = true;
        self
    }

    /// Requests that are over the limit wait for the next windows instead of being refused: for
    /// each key up to `tokens` of them (at a cost of 1, so many requests), each no longer than
    /// `max_wait`, in order of arrival. Who doesn't fit is refused as ever.
    ///
    /// A request that waits holds no place in the service inside; dropping it frees its place in
    /// the queue. If others of its key wait behind it, a newcomer may then share the window of the last
    /// of them, which passes one request more. If the service is not ready before the request's window has ended, the request takes
    /// tokens anew, within what is left of its `max_wait`, or is refused: late requests never pass in a
    /// burst. Those of one key do so in order of arrival in this process. [`Handle::close_queue`] ends
    /// all waiting with 503, for a graceful shutdown.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// // A window of a whole day, for which nobody can wait long enough.
    /// let layer = FixedWindowLayer::new(Quota::per_day(1))
    ///     .key(global())
    ///     .queue(30, Duration::from_millis(1));
    /// # use axum::{Router, body::Body, http::Request, routing::any};
    /// # use tower::ServiceExt;
    /// # let app = Router::<()>::new().fallback(any(async || "hello")).layer(layer);
    /// # let ask = |request: http::request::Builder| {
    /// #     let request = request.body(Body::empty()).unwrap();
    /// #     tower_fixed_window::testing::block_on(app.clone().oneshot(request)).unwrap()
    /// # };
    /// assert_eq!(ask(Request::get("/")).status(), 200);
    /// assert_eq!(ask(Request::get("/")).status(), 429);
    /// ```
    #[cfg(feature = "tokio")]
    pub fn queue(mut self, tokens: u64, max_wait: Duration) -> Self {
        self.options.queue = Some(tokens);
        self.options.max_wait = max_wait;
        self
    }

    /// Decides and counts, but refuses nobody and sends no fields: to try a limit out. Switched on
    /// and off at run time by [`Handle::set_shadow`].
    ///
    /// ```
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(0)).key(global()).shadow();
    /// let handle = layer.handle();
    /// # use axum::{Router, body::Body, http::Request, routing::any};
    /// # use tower::ServiceExt;
    /// # let app = Router::<()>::new().fallback(any(async || "hello")).layer(layer);
    /// # let ask = |request: http::request::Builder| {
    /// #     let request = request.body(Body::empty()).unwrap();
    /// #     tower_fixed_window::testing::block_on(app.clone().oneshot(request)).unwrap()
    /// # };
    /// assert_eq!(ask(Request::get("/")).status(), 200);
    /// handle.set_shadow(false);
    /// assert_eq!(ask(Request::get("/")).status(), 429);
    /// ```
    pub fn shadow(mut self) -> Self {
        self.options.shadow = true;
        self
    }

    /// Puts the [`Decision`](crate::Decision) into the extensions of requests that pass, for
    /// handlers to read.
    ///
    /// ```
    /// use axum::Extension;
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::{Decision, FixedWindowLayer, Quota};
    ///
    /// async fn handler(Extension(decision): Extension<Decision>) -> String {
    ///     format!("{} left", decision.remaining())
    /// }
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(5)).key(global()).expose_decision();
    /// # use axum::{Router, body::Body, http::Request, routing::any};
    /// # use tower::ServiceExt;
    /// # let app = Router::<()>::new().fallback(any(handler)).layer(layer);
    /// # let ask = |request: http::request::Builder| {
    /// #     let request = request.body(Body::empty()).unwrap();
    /// #     tower_fixed_window::testing::block_on(app.clone().oneshot(request)).unwrap()
    /// # };
    /// assert_eq!(ask(Request::get("/")).status(), 200);
    /// ```
    pub fn expose_decision(mut self) -> Self {
        self.options.expose_decision = true;
        self
    }

    /// Shows each decision of the store to a closure, with the request it is about: for a log or a
    /// metric with ids of your own, or to tell an account that it is near its limit. Metrics and
    /// logs by the layer's name are there without it: the features `metrics` and `tracing`.
    ///
    /// It is called once for a request, before the service is called or the refusal is made:
    /// whether the request passes, is refused, or waits for a window
    /// ([`ready_after`](Decision::ready_after)); a second time if one that has waited is refused
    /// because the service was not ready in time. In [shadow mode](Self::shadow), too, where a
    /// request passes that the decision refuses. It is not called where there is no decision: for
    /// requests that are skipped or have no key, or while the store fails and nothing decides in its
    /// place ([`is_local`](Decision::is_local) if something does).
    ///
    /// The request waits meanwhile, so it must not block: send to a channel what takes time. It
    /// doesn't get the key, which may be a credential that a log must not have; what the app itself
    /// knows of the caller is in the extensions. Called again, it replaces the closure.
    ///
    /// ```
    /// use std::sync::mpsc;
    /// use tower_fixed_window::key::extension;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// /// Left by your authentication.
    /// #[derive(Clone)]
    /// struct Tenant { id: u64, token: &'static str }
    ///
    /// impl From<&Tenant> for tower_fixed_window::Key {
    ///     fn from(tenant: &Tenant) -> Self { Self::secret(tenant.token) }
    /// }
    ///
    /// let (told, refused_tenants) = mpsc::channel();
    /// let layer = FixedWindowLayer::new(Quota::per_day(1))
    ///     .key(extension::<Tenant>())
    ///     .on_decision(move |parts, decision| {
    ///         if let Some(tenant) = parts.extensions.get::<Tenant>() && !decision.allowed() {
    ///             let _ = told.send((tenant.id, decision.limit()));
    ///         }
    ///     });
    /// # use axum::{Router, body::Body, http::Request, routing::any};
    /// # use tower::ServiceExt;
    /// # let app = Router::<()>::new().fallback(any(async || "hello")).layer(layer);
    /// # let ask = |request: http::request::Builder| {
    /// #     let request = request.body(Body::empty()).unwrap();
    /// #     tower_fixed_window::testing::block_on(app.clone().oneshot(request)).unwrap()
    /// # };
    /// let tenant = Tenant { id: 7, token: "t0k3n" };
    /// assert_eq!(ask(Request::get("/").extension(tenant.clone())).status(), 200);
    /// assert_eq!(ask(Request::get("/").extension(tenant)).status(), 429);
    /// assert_eq!(refused_tenants.try_iter().collect::<Vec<_>>(), [(7, 1)]);
    /// ```
    pub fn on_decision<F>(mut self, on_decision: F) -> Self
    where
        F: Fn(&Parts, &Decision) + Send + Sync + 'static,
    {
        self.options.on_decision = Some(Arc::new(on_decision));
        self
    }

    /// The status of a refusal; 429 unless set. GitHub's API says 403.
    ///
    /// ```
    /// use http::StatusCode;
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer =
    ///     FixedWindowLayer::new(Quota::per_minute(0)).key(global()).status(StatusCode::FORBIDDEN);
    /// # use axum::{Router, body::Body, http::Request, routing::any};
    /// # use tower::ServiceExt;
    /// # let app = Router::<()>::new().fallback(any(async || "hello")).layer(layer);
    /// # let ask = |request: http::request::Builder| {
    /// #     let request = request.body(Body::empty()).unwrap();
    /// #     tower_fixed_window::testing::block_on(app.clone().oneshot(request)).unwrap()
    /// # };
    /// assert_eq!(ask(Request::get("/")).status(), 403);
    /// ```
    pub fn status(mut self, status: StatusCode) -> Self {
        self.options.status = status;
        self
    }

    /// Reads what is left of a refused request whose body is of type `B`: see
    /// [above](Self#refused-uploads). axum's are read without this. Called again, it adds a type.
    ///
    /// In a `ServiceBuilder`, a layer outside of the limit may have changed the type of the bodies:
    ///
    /// ```
    /// use std::time::Duration;
    /// use axum::body::Body;
    /// use tower::ServiceBuilder;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    /// use tower_http::body::Limited;
    /// use tower_http::limit::RequestBodyLimitLayer;
    /// use tower_http::timeout::{RequestBodyTimeoutLayer, TimeoutBody};
    ///
    /// let layers = ServiceBuilder::new()
    ///     .layer(RequestBodyTimeoutLayer::new(Duration::from_secs(10)))
    ///     .layer(RequestBodyLimitLayer::new(1 << 20))
    ///     .layer(
    ///         FixedWindowLayer::new(Quota::per_minute(60))
    ///             .drain_refused::<Limited<TimeoutBody<Body>>>(),
    ///     );
    /// # let _: axum::Router = axum::Router::new()
    /// #     .route("/", axum::routing::post(async |body: String| body)).layer(layers);
    /// ```
    ///
    /// Under hyper alone:
    ///
    /// ```
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(0))
    ///     .key(global())
    ///     .drain_refused::<hyper::body::Incoming>();
    /// # use axum::{Router, body::Body, http::Request, routing::any};
    /// # use tower::ServiceExt;
    /// # let app = Router::<()>::new().fallback(any(async || "hello")).layer(layer);
    /// # let ask = |request: http::request::Builder| {
    /// #     let request = request.body(Body::empty()).unwrap();
    /// #     tower_fixed_window::testing::block_on(app.clone().oneshot(request)).unwrap()
    /// # };
    /// assert_eq!(ask(Request::post("/")).status(), 429);
    /// ```
    pub fn drain_refused<B: Body + 'static>(mut self) -> Self {
        self.options.drains.push(Drain::of::<B>());
        self
    }

    /// Which rate-limit fields responses have: GitHub's unless set.
    ///
    /// ```
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::{FixedWindowLayer, Headers, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(60))
    ///     .name("api")
    ///     .key(global())
    ///     .headers(Headers::IetfDraft10);
    /// # use axum::{Router, body::Body, http::Request, routing::any};
    /// # use tower::ServiceExt;
    /// # let app = Router::<()>::new().fallback(any(async || "hello")).layer(layer);
    /// # let ask = |request: http::request::Builder| {
    /// #     let request = request.body(Body::empty()).unwrap();
    /// #     tower_fixed_window::testing::block_on(app.clone().oneshot(request)).unwrap()
    /// # };
    /// let response = ask(Request::get("/"));
    /// assert_eq!(response.headers()["ratelimit-policy"], r#""api:60/minute";q=60;w=60"#);
    /// ```
    pub fn headers(mut self, headers: Headers) -> Self {
        self.options.headers = headers;
        self
    }

    /// Makes the response to a refused request. The layer adds the rate-limit fields to it.
    ///
    /// ```
    /// use axum::{Json, http::StatusCode, response::IntoResponse};
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(0))
    ///     .key(global())
    ///     .on_reject(|why| (StatusCode::IM_A_TEAPOT, Json(why.message())).into_response());
    /// # use axum::{Router, body::Body, http::Request, routing::any};
    /// # use tower::ServiceExt;
    /// # let app = Router::<()>::new().fallback(any(async || "hello")).layer(layer);
    /// # let ask = |request: http::request::Builder| {
    /// #     let request = request.body(Body::empty()).unwrap();
    /// #     tower_fixed_window::testing::block_on(app.clone().oneshot(request)).unwrap()
    /// # };
    /// let response = ask(Request::get("/"));
    /// assert_eq!(response.status(), 418);
    /// assert_eq!(response.headers()["x-ratelimit-remaining"], "0");
    /// ```
    pub fn on_reject<F, B>(self, reject: F) -> FixedWindowLayer<OnReject<F>>
    where
        F: Fn(&Rejection<'_>) -> Response<B> + Send + Sync + 'static,
    {
        self.reject(OnReject(Arc::new(reject)))
    }

    /// Refuses without a body, for response bodies that can't be made from bytes: tonic's, a
    /// `BoxBody`.
    ///
    /// ```
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(0)).key(global()).empty_body();
    /// # use axum::{Router, body::Body, http::Request, routing::any};
    /// # use tower::ServiceExt;
    /// # let app = Router::<()>::new().fallback(any(async || "hello")).layer(layer);
    /// # let ask = |request: http::request::Builder| {
    /// #     let request = request.body(Body::empty()).unwrap();
    /// #     tower_fixed_window::testing::block_on(app.clone().oneshot(request)).unwrap()
    /// # };
    /// let response = ask(Request::get("/"));
    /// assert_eq!(response.status(), 429);
    /// assert_eq!(response.headers().get("content-type"), None);
    /// ```
    pub fn empty_body(self) -> FixedWindowLayer<EmptyBody> {
        self.reject(EmptyBody)
    }

    /// Turns the knobs of this layer, and of all its clones, while it is at work. Take it when the
    /// layer has its name and store: with others it is another limit.
    ///
    /// ```
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(1)).key(global());
    /// let handle = layer.handle();
    /// # use axum::{Router, body::Body, http::Request, routing::any};
    /// # use tower::ServiceExt;
    /// # let app = Router::<()>::new().fallback(any(async || "hello")).layer(layer);
    /// # let ask = |request: http::request::Builder| {
    /// #     let request = request.body(Body::empty()).unwrap();
    /// #     tower_fixed_window::testing::block_on(app.clone().oneshot(request)).unwrap()
    /// # };
    /// assert_eq!(ask(Request::get("/")).status(), 200);
    /// assert_eq!(ask(Request::get("/")).status(), 429);
    /// handle.set_quotas(Quota::per_minute(2));
    /// assert_eq!(ask(Request::get("/")).status(), 200);
    /// ```
    pub fn handle(&self) -> Handle {
        self.live.follow(&self.options);
        Handle::new(Arc::clone(&self.live), self.limiter())
    }

    /// What a service needs that shows how callers stand under this layer.
    pub(crate) fn to_resource(&self) -> (Limiter, Options, Arc<Live>) {
        (self.limiter(), self.options.clone(), Arc::clone(&self.live))
    }

    /// With a name or store of its own it is another limit: with knobs of its own.
    fn fork(&mut self) {
        self.live = Arc::new(Live::new(self.live.quotas()));
    }

    /// The limiter, with a fallback or without.
    fn limiter(&self) -> Limiter {
        let mut limiter = self.limiter.clone();
        let Options { count_if, refund_dropped, settle, queue, .. } = &self.options;
        if count_if.is_some() || *refund_dropped || *settle || queue.is_some() {
            limiter = limiter.resettable();
        }
        match self.options.on_store_failure {
            OnStoreFailure::Local => limiter,
            OnStoreFailure::Allow | OnStoreFailure::Deny => limiter.without_fallback(),
        }
    }

    /// Refuses with the JSON body of GitHub's API, `{"message": "API rate limit exceeded ..."}`,
    /// for clients that were written for that one. With [`status`](Self::status) 403 it is what
    /// GitHub answers.
    ///
    /// ```
    /// use http::StatusCode;
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_hour(0))
    ///     .key(global())
    ///     .github_body()
    ///     .status(StatusCode::FORBIDDEN);
    /// # use axum::{Router, body::Body, http::Request, routing::any};
    /// # use tower::ServiceExt;
    /// # let app = Router::<()>::new().fallback(any(async || "hello")).layer(layer);
    /// # let ask = |request: http::request::Builder| {
    /// #     let request = request.body(Body::empty()).unwrap();
    /// #     tower_fixed_window::testing::block_on(app.clone().oneshot(request)).unwrap()
    /// # };
    /// let response = ask(Request::get("/"));
    /// assert_eq!(response.status(), 403);
    /// assert_eq!(response.headers()["content-type"], "application/json; charset=utf-8");
    /// ```
    pub fn github_body(self) -> FixedWindowLayer<GitHubBody> {
        self.reject(GitHubBody)
    }

    /// Refuses in gRPC: 200 with `grpc-status: 8` (RESOURCE_EXHAUSTED), a message, and the same
    /// fields as metadata. A plain 429 would reach gRPC clients as UNAVAILABLE, which they retry at
    /// once.
    ///
    /// ```
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_second(0)).key(global()).grpc();
    /// # use axum::{Router, body::Body, http::Request, routing::any};
    /// # use tower::ServiceExt;
    /// # let app = Router::<()>::new().fallback(any(async || "hello")).layer(layer);
    /// # let ask = |request: http::request::Builder| {
    /// #     let request = request.body(Body::empty()).unwrap();
    /// #     tower_fixed_window::testing::block_on(app.clone().oneshot(request)).unwrap()
    /// # };
    /// let response = ask(Request::post("/"));
    /// assert_eq!(response.status(), 200);
    /// assert_eq!(response.headers()["grpc-status"], "8");
    /// ```
    pub fn grpc(self) -> FixedWindowLayer<Grpc> {
        self.reject(Grpc)
    }

    fn reject<K>(self, reject: K) -> FixedWindowLayer<K> {
        let Self { limiter, live, options, reject: _ } = self;
        FixedWindowLayer { limiter, live, options, reject }
    }
}

impl<S, J: Clone> Layer<S> for FixedWindowLayer<J> {
    type Service = FixedWindow<S, J>;

    /// # Panics
    /// If the layer counts in a shared store and has no name.
    fn layer(&self, inner: S) -> Self::Service {
        self.limiter.check_name();
        self.live.follow(&self.options);
        let (limiter, live) = (self.limiter(), Arc::clone(&self.live));
        let shared = Shared::new(limiter, self.options.clone(), live, self.reject.clone());
        FixedWindow::new(inner, Arc::new(shared))
    }
}

impl<J: fmt::Debug> fmt::Debug for FixedWindowLayer<J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FixedWindowLayer")
            .field("limiter", &self.limiter)
            .field("reject", &self.reject)
            .finish_non_exhaustive()
    }
}
