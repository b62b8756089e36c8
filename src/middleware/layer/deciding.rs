//! Setters for after the decision: a queue, and hooks that receive the decision.

use std::sync::Arc;
#[cfg(feature = "tokio")]
use std::time::Duration;

use http::request::Parts;

use super::FixedWindowLayer;
use crate::decision::Decision;

impl<J> FixedWindowLayer<J> {
    /// Lets requests over the limit wait in a line instead of refusing them: for each key up to
    /// `requests` in this process, each for at most `max_wait`, in order of arrival. A request that
    /// finds the line full, or would have to wait for longer, is refused. Its `retry-after` is the
    /// time until it could pass behind the others. Several limits have a line for each combination
    /// of their keys.
    ///
    /// Nothing is taken for a request that waits, or is dropped while it waits. The first in the
    /// line is charged, for all limits or none, when its window begins and the service is ready, or
    /// as soon as tokens are returned: never more than the limit passes. A lower cost does not
    /// overtake a higher one; a cost of 0 passes at once, and a cost above the capacity is refused
    /// at once. A waiting request holds no place in the inner service. If it is not polled, it
    /// delays the others by a tenth of a second. The order holds within a process.
    ///
    /// [`close_queue`](Self::close_queue) ends all waiting with 503, for a graceful shutdown.
    ///
    /// ```
    /// use std::time::Duration;
    /// use http::Request;
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// // A window of a day: the second request would have to wait too long.
    /// let layer = FixedWindowLayer::new(Quota::per_day(1).key(global()))
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
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::ask_around;
    /// use tower_fixed_window::{Decision, FixedWindowLayer, Quota};
    ///
    /// async fn handler(Extension(decision): Extension<Decision>) -> String {
    ///     format!("{} left", decision.remaining())
    /// }
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(5).key(global())).expose_decision();
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
}
