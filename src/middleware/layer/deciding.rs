//! What follows from a decision: a queue, shadow mode, and hooks that see it.

use std::sync::Arc;
#[cfg(feature = "tokio")]
use std::time::Duration;

use http::request::Parts;

use super::FixedWindowLayer;
use crate::decision::Decision;

impl<J> FixedWindowLayer<J> {
    /// Requests that are over the limit wait for the next windows instead of being refused: for
    /// each key up to `tokens` of them (at a cost of 1, so many requests), each no longer than
    /// `max_wait`, in order of arrival. A request that doesn't fit is refused.
    ///
    /// A request that waits holds no place in the service inside; dropping it frees its place in
    /// the queue. If others of its key wait behind it, a newcomer may then share the window of the last
    /// of them, which passes one request more. If the service is not ready before the request's window has ended, the request takes
    /// tokens anew, within what is left of its `max_wait`, or is refused: late requests never pass in a
    /// burst. Those of one key do so in order of arrival in this process. [`Control::close_queue`] ends
    /// all waiting with 503, for a graceful shutdown.
    ///
    /// ```
    /// use std::time::Duration;
    /// use http::Request;
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// // A window of a whole day, for which nobody can wait long enough.
    /// let layer = FixedWindowLayer::new(Quota::per_day(1))
    ///     .key(global())
    ///     .queue(30, Duration::from_millis(1));
    ///
    /// assert_eq!(ask(&layer, Request::get("/")).status(), 200);
    /// assert_eq!(ask(&layer, Request::get("/")).status(), 429);
    /// ```
    #[cfg(feature = "tokio")]
    pub fn queue(mut self, tokens: u64, max_wait: Duration) -> Self {
        self.options.queue = Some(tokens);
        self.options.max_wait = max_wait;
        self
    }

    /// Decides and counts, but refuses nothing and sends no headers: to try a limit out. Switched on
    /// and off at run time by [`Control::set_shadow`].
    ///
    /// ```
    /// use http::Request;
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(0)).key(global()).shadow();
    /// let control = layer.control();
    ///
    /// assert_eq!(ask(&layer, Request::get("/")).status(), 200);
    /// control.set_shadow(false);
    /// assert_eq!(ask(&layer, Request::get("/")).status(), 429);
    /// ```
    pub fn shadow(mut self) -> Self {
        self.options.shadow = true;
        self
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
    /// let layer = FixedWindowLayer::new(Quota::per_minute(5)).key(global()).expose_decision();
    ///
    /// let response = ask_around(&layer, any(handler), Request::get("/"));
    /// assert_eq!(response.status(), 200);
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
    /// knows of the caller is in the extensions. Called again, it adds a closure.
    ///
    /// ```
    /// use std::sync::mpsc;
    /// use http::Request;
    /// use tower_fixed_window::key::extension;
    /// use tower_fixed_window::testing::ask;
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
    /// let (sender, refused_tenants) = mpsc::channel();
    /// let layer = FixedWindowLayer::new(Quota::per_day(1))
    ///     .key(extension::<Tenant>())
    ///     .on_decision(move |parts, decision| {
    ///         if let Some(tenant) = parts.extensions.get::<Tenant>() && !decision.allowed() {
    ///             let _ = sender.send((tenant.id, decision.limit()));
    ///         }
    ///     });
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
