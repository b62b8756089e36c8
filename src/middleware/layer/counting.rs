//! Setters that choose which requests count.

use std::sync::Arc;

use http::request::Parts;
use http::response;

use super::FixedWindowLayer;

impl<J> FixedWindowLayer<J> {
    /// Exempts requests for which the closure returns `true`: they pass uncounted and without
    /// headers. Each call exempts more requests. For a customer without a limit, the closure of
    /// [`Limit::by_plan`](crate::Limit::by_plan) returns `None`.
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
    /// let layer = FixedWindowLayer::new(Quota::per_minute(0).key(global())).skip_preflight();
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
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::ask_around;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(5).key(global()))
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
    /// awaits and refunds the charge (feature `tokio`). If the runtime shuts down first, the charge
    /// stays counted until its window ends. Use this only if such requests are cheap: a client can
    /// start work and disconnect, again and again.
    ///
    /// ```
    /// use http::Request;
    /// use tower::{Layer, Service, service_fn};
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::block_on;
    /// use tower_fixed_window::{FixedWindowLayer, Key, Limiter, Quota};
    ///
    /// let limiter = Limiter::new(Quota::per_minute(5).key(global()));
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
}
