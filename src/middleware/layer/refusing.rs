//! How a layer refuses.

use std::sync::Arc;

use http::{Response, StatusCode};
use http_body::Body;

use super::FixedWindowLayer;
use crate::middleware::headers::Headers;
use crate::middleware::rejection::{EmptyBody, GitHubBody, Grpc, OnReject, Rejection};
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
    ///     FixedWindowLayer::new(Quota::per_minute(0)).key(global()).status(StatusCode::FORBIDDEN);
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
    /// let layer = FixedWindowLayer::new(Quota::per_minute(60))
    ///     .name("api")
    ///     .key(global())
    ///     .headers(Headers::IetfDraft10);
    ///
    /// let response = ask(&layer, Request::get("/"));
    /// assert_eq!(response.headers()["ratelimit-policy"], r#""api:60/minute";q=60;w=60"#);
    /// ```
    pub fn headers(mut self, headers: Headers) -> Self {
        self.options.headers = headers;
        self
    }

    /// Creates the response to a refused request. The layer adds the rate-limit headers to it.
    ///
    /// ```
    /// use axum::routing::any;
    /// use axum::{Json, response::IntoResponse};
    /// use http::{Request, StatusCode};
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::ask_around;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(0))
    ///     .key(global())
    ///     .on_reject(|why| (StatusCode::IM_A_TEAPOT, Json(why.message())).into_response());
    ///
    /// let response = ask_around(&layer, any(async || "hello"), Request::get("/"));
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
    /// use http::Request;
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(0)).key(global()).empty_body();
    ///
    /// let response = ask(&layer, Request::get("/"));
    /// assert_eq!(response.status(), 429);
    /// assert_eq!(response.headers().get("content-type"), None);
    /// ```
    pub fn empty_body(self) -> FixedWindowLayer<EmptyBody> {
        self.reject(EmptyBody)
    }

    /// Refuses with the JSON body of GitHub's API, `{"message": "API rate limit exceeded ..."}`,
    /// for clients of that API. With [`status`](Self::status) 403, the response is GitHub's.
    ///
    /// ```
    /// use http::{Request, StatusCode};
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_hour(0))
    ///     .key(global())
    ///     .github_body()
    ///     .status(StatusCode::FORBIDDEN);
    ///
    /// let response = ask(&layer, Request::get("/"));
    /// assert_eq!(response.status(), 403);
    /// assert_eq!(response.headers()["content-type"], "application/json; charset=utf-8");
    /// ```
    pub fn github_body(self) -> FixedWindowLayer<GitHubBody> {
        self.reject(GitHubBody)
    }

    /// Refuses in gRPC: 200 with `grpc-status: 8` (RESOURCE_EXHAUSTED), a message, and the same
    /// headers as metadata. gRPC clients would read a plain 429 as UNAVAILABLE and retry at once.
    ///
    /// ```
    /// use http::Request;
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_second(0)).key(global()).grpc();
    ///
    /// let response = ask(&layer, Request::post("/"));
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

    /// Reads the rest of refused requests with bodies of type `B`: see
    /// [above](Self#refused-uploads). axum's bodies don't need this. Each call adds a type.
    ///
    /// In a `ServiceBuilder`, a layer outside of the limit may change the type of the bodies:
    ///
    /// ```
    /// use std::time::Duration;
    /// use axum::body::Body;
    /// use tower::ServiceBuilder;
    /// use tower_http::body::Limited;
    /// use tower_http::limit::RequestBodyLimitLayer;
    /// use tower_http::timeout::{RequestBodyTimeoutLayer, TimeoutBody};
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
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
    /// use http::Request;
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(0))
    ///     .key(global())
    ///     .drain_refused::<hyper::body::Incoming>();
    ///
    /// assert_eq!(ask(&layer, Request::post("/")).status(), 429);
    /// ```
    pub fn drain_refused<B: Body + 'static>(mut self) -> Self {
        self.options.drains.push(Drain::of::<B>());
        self
    }
}
