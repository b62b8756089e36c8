//! How a layer refuses.

use std::sync::Arc;

use http::request::Parts;
use http::{Response, StatusCode};
use http_body::Body;

use super::FixedWindowLayer;
use crate::middleware::headers::Headers;
use crate::middleware::rejection::Rejection;
use crate::middleware::upload::Drain;

impl<J> FixedWindowLayer<J> {
    /// Sets the status of a refusal. The default is 429; GitHub's API uses 403.
    ///
    /// ```
    /// use http::{Request, StatusCode};
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer =
    ///     FixedWindowLayer::new(Quota::per_minute(0).key(global())).status(StatusCode::FORBIDDEN);
    ///
    /// assert_eq!(ask(&layer, Request::get("/")).status(), 403);
    /// ```
    pub fn status(mut self, status: StatusCode) -> Self {
        self.options.status = status;
        self
    }

    /// Sets which rate-limit headers responses have. The default is GitHub's.
    ///
    /// ```
    /// use http::Request;
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Headers, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(60).name("api").key(global()))
    ///     .headers(Headers::IetfDraft10);
    ///
    /// let response = ask(&layer, Request::get("/"));
    /// assert_eq!(response.headers()["ratelimit-policy"], r#""api:60/minute";q=60;w=60"#);
    /// ```
    pub fn headers(mut self, headers: Headers) -> Self {
        self.options.headers = headers;
        self
    }

    /// Sets the response to refused requests: [`GitHubBody`](crate::GitHubBody),
    /// [`Grpc`](crate::Grpc), [`EmptyBody`](crate::EmptyBody), or a [`Reject`](crate::Reject) of
    /// your own; [`ProblemJson`](crate::ProblemJson) unless set.
    ///
    /// ```
    /// use http::Request;
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Grpc, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_second(0).key(global())).reject(Grpc);
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
    /// it was refused. The layer adds `retry-after`, `cache-control` and the rate-limit headers
    /// that [`headers`](Self::headers) selects. Other rate-limit headers of the closure stay.
    ///
    /// ```
    /// use axum::routing::any;
    /// use axum::{Json, response::IntoResponse};
    /// use http::{Request, header::ACCEPT};
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::ask_around;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(0).key(global()));
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
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(0).key(global()))
    ///     .drain_refused::<hyper::body::Incoming>();
    ///
    /// assert_eq!(ask(&layer, Request::post("/")).status(), 429);
    /// ```
    pub fn drain_refused<B: Body + 'static>(mut self) -> Self {
        self.options.drains.push(Drain::of::<B>());
        self
    }
}
