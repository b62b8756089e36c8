//! Which requests count, under which quotas, and at which cost.

use std::sync::Arc;

use http::request::Parts;
use http::response;

use super::FixedWindowLayer;
use crate::key::Key;
use crate::quota::Plan;

impl<J> FixedWindowLayer<J> {
    /// Exempts requests for which the closure returns `true`: they pass uncounted and without
    /// headers. Each call exempts more requests. For a customer
    /// without a limit, [`quota_fn`](Self::quota_fn) returns `None`.
    ///
    /// Exempt requests by properties that a client can't choose: not by a header, and by a path
    /// only if its handler is cheap, as for most health probes. Better, add the route of a probe
    /// outside of the layer, or exempt the prober by its address: `client_ip().is_in(..)` (feature
    /// `client-ip`) is a closure for this.
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
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(0)).key(global()).skip_preflight();
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

    /// Chooses the quotas of each request, for example for free and paid plans under one name. The
    /// closure also gets the key. All plans share one counter for each window length, so a customer
    /// who upgrades keeps what is used. With `None` a request has no limit: it passes uncounted and
    /// without headers. With a limit of 0 each request is refused: a ban.
    ///
    /// [`Control::set_quotas`](crate::Control::set_quotas) changes the layer's quotas, not what the
    /// closure returns.
    ///
    /// ```
    /// use http::Request;
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// const FREE: Quota = Quota::per_hour(60);
    /// const PRO: Quota = Quota::per_hour(5_000);
    ///
    /// // Really: a plan that the authentication layer has left in the extensions.
    /// let layer = FixedWindowLayer::new(FREE).key(global()).quota_fn(|parts, _key| {
    ///     match parts.uri.path() {
    ///         "/internal" => None,
    ///         "/pro" => Some(PRO),
    ///         _ => Some(FREE),
    ///     }
    /// });
    ///
    /// assert_eq!(ask(&layer, Request::get("/")).headers()["x-ratelimit-remaining"], "59");
    /// assert_eq!(ask(&layer, Request::get("/pro")).headers()["x-ratelimit-remaining"], "4998");
    /// assert_eq!(ask(&layer, Request::get("/internal")).headers().get("x-ratelimit-limit"), None);
    /// ```
    #[doc(alias = "ban")]
    #[doc(alias = "unlimited")]
    pub fn quota_fn<F, Q>(mut self, quotas: F) -> Self
    where
        F: Fn(&Parts, &Key) -> Q + Send + Sync + 'static,
        Q: Into<Plan>,
    {
        self.options.quota_fn = Some(Arc::new(move |parts, key| quotas(parts, key).into()));
        self
    }

    /// Sets how many tokens a request costs. The default is 1. A request of cost 0 passes and takes
    /// nothing.
    ///
    /// ```
    /// use http::{Method, Request};
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_hour(5_000))
    ///     .key(global())
    ///     .cost_fn(|parts| if parts.method == Method::GET { 1 } else { 5 });
    ///
    /// assert_eq!(ask(&layer, Request::get("/")).headers()["x-ratelimit-used"], "1");
    /// assert_eq!(ask(&layer, Request::post("/")).headers()["x-ratelimit-used"], "6");
    /// ```
    pub fn cost_fn<F>(mut self, cost: F) -> Self
    where
        F: Fn(&Parts) -> u64 + Send + Sync + 'static,
    {
        self.options.cost_fn = Some(Arc::new(cost));
        self
    }

    /// Counts only requests whose response meets the condition, such as failed logins.
    ///
    /// The layer takes the tokens before it calls the service, and refunds them if the response
    /// does not count. So a request counts until its response is known: with a limit of 5, at most
    /// 5 undecided requests are in flight, and never more than 5 failures pass.
    ///
    /// ```
    /// use axum::routing::any;
    /// use http::{Request, StatusCode, Uri};
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::ask_around;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(5))
    ///     .key(global())
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

    /// Corrects the charge to the [`TrueCost`](crate::TrueCost) that the response reports: a lower
    /// cost is refunded, a higher one is taken even beyond the limit. Without this, a layer ignores
    /// the report, so in a stack of layers only those that count in its unit apply it.
    ///
    /// ```
    /// use axum::{Extension, routing::any};
    /// use http::Request;
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::ask_around;
    /// use tower_fixed_window::{FixedWindowLayer, Quota, TrueCost};
    ///
    /// const ESTIMATE: u64 = 500;
    /// let layer = FixedWindowLayer::new(Quota::per_day(100_000))
    ///     .name("model-tokens")
    ///     .key(global())
    ///     .cost_fn(|_| ESTIMATE)
    ///     .settle_true_cost();
    ///
    /// async fn handler() -> Extension<TrueCost> {
    ///     Extension(TrueCost::of(120))
    /// }
    ///
    /// let response = ask_around(&layer, any(handler), Request::get("/"));
    /// assert_eq!(response.headers()["x-ratelimit-used"], "120");
    /// ```
    pub fn settle_true_cost(mut self) -> Self {
        self.options.settle = true;
        self
    }

    /// Refunds the charge if a request is dropped before its response: the client disconnected, or
    /// the handler or a closure of this layer panicked. If a remote store is still deciding, a task
    /// awaits and refunds the charge (feature `tokio`). Use this only if such requests are cheap: a
    /// client can start work and disconnect, again and again.
    ///
    /// ```
    /// use http::Request;
    /// use tower::{Layer, Service, service_fn};
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::block_on;
    /// use tower_fixed_window::{FixedWindowLayer, Key, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(5)).key(global()).refund_dropped();
    /// let control = layer.control();
    /// let mut slow = layer.layer(service_fn(async |_: Request<String>| {
    ///     std::future::pending::<()>().await;
    ///     Ok::<_, std::io::Error>(http::Response::new(axum::body::Body::empty()))
    /// }));
    ///
    /// let response = slow.call(Request::new(String::new()));
    /// assert_eq!(block_on(control.peek(Key::global()))?.used(), 1);
    /// drop(response);
    /// assert_eq!(block_on(control.peek(Key::global()))?.used(), 0);
    /// # Ok::<_, tower_fixed_window::StoreError>(())
    /// ```
    pub fn refund_dropped(mut self) -> Self {
        self.options.refund_dropped = true;
        self
    }
}
