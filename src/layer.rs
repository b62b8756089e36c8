//! [`FixedWindowLayer`]: what is limited, by whom, and what a refusal looks like.

use std::fmt;
use std::sync::Arc;

use http::Response;
use http::request::Parts;
use tower_layer::Layer;

use crate::headers::Fixed;
use crate::key::{Key, KeyExtractor, key_fn, peer_ip};
use crate::limiter::Limiter;
use crate::quota::Quotas;
use crate::rejection::{EmptyBody, OnReject, ProblemJson, Rejection, prepare};
use crate::service::{FixedWindow, Shared};
use crate::store::{OnStoreFailure, Store};

pub(crate) type Skip = Arc<dyn Fn(&Parts) -> bool + Send + Sync>;

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
    key: Arc<dyn KeyExtractor>,
    skip: Option<Skip>,
    on_store_failure: OnStoreFailure,
    reject: J,
}

impl FixedWindowLayer {
    /// Limits requests by their peer's address, in memory.
    ///
    /// Under axum that needs the `axum` feature and
    /// `into_make_service_with_connect_info::<SocketAddr>()`; under other servers a
    /// [`PeerAddr`](crate::key::PeerAddr) in each request.
    pub fn new(quotas: impl Into<Quotas>) -> Self {
        Self {
            limiter: Limiter::new(quotas),
            key: Arc::new(peer_ip()),
            skip: None,
            on_store_failure: OnStoreFailure::default(),
            reject: ProblemJson,
        }
    }
}

impl<J> FixedWindowLayer<J> {
    /// Names the limit: the scope of its counters, and the value of `x-ratelimit-resource`.
    ///
    /// # Panics
    /// If the name is not 1 to 64 of `[a-z0-9_.-]`.
    pub fn name(mut self, name: &str) -> Self {
        self.limiter = self.limiter.name(name);
        self
    }

    /// Who pays: an extractor of [`key`](crate::key), or one of your own.
    pub fn key(mut self, key: impl KeyExtractor) -> Self {
        self.key = Arc::new(key);
        self
    }

    /// Who pays, as a closure; a request for which it returns `None` is refused with 400.
    ///
    /// ```
    /// use tower_fixed_window::{FixedWindowLayer, Key, Quota};
    ///
    /// #[derive(Clone)]
    /// struct User { id: u64 }
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(60))
    ///     .key_fn(|parts| parts.extensions.get::<User>().map(|user| Key::from(user.id)));
    /// # let _ = layer;
    /// ```
    pub fn key_fn<F>(self, key: F) -> Self
    where
        F: Fn(&Parts) -> Option<Key> + Send + Sync + 'static,
    {
        self.key(key_fn(key))
    }

    /// Where the counters live; in memory by default, in a store of the layer's own.
    pub fn store(mut self, store: impl Store) -> Self {
        self.limiter = self.limiter.store_named_later(store);
        self
    }

    /// What happens to requests while the store fails: by default the same quotas are enforced in
    /// this process's memory.
    pub fn on_store_failure(mut self, policy: OnStoreFailure) -> Self {
        self.on_store_failure = policy;
        self
    }

    /// Requests for which the closure says `true` pass without being counted, and without fields.
    /// This is how to say "unlimited".
    ///
    /// ```
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(60))
    ///     .skip(|parts| parts.uri.path() == "/health");
    /// # let _ = layer;
    /// ```
    pub fn skip<F>(mut self, skip: F) -> Self
    where
        F: Fn(&Parts) -> bool + Send + Sync + 'static,
    {
        self.skip = Some(Arc::new(skip));
        self
    }

    /// Makes the response to a refused request. The layer adds the rate-limit fields to it.
    ///
    /// ```
    /// use axum::{Json, http::StatusCode, response::IntoResponse};
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(60))
    ///     .on_reject(|why| (why.status(), Json(why.message())).into_response());
    /// # let _ = layer;
    /// ```
    pub fn on_reject<F, B>(self, reject: F) -> FixedWindowLayer<OnReject<F>>
    where
        F: Fn(&Rejection<'_>) -> Response<B>,
    {
        self.reject(OnReject(reject))
    }

    /// Refuses without a body, for response bodies that can't be made from bytes: tonic's, a
    /// `BoxBody`.
    pub fn empty_body(self) -> FixedWindowLayer<EmptyBody> {
        self.reject(EmptyBody)
    }

    fn reject<K>(self, reject: K) -> FixedWindowLayer<K> {
        let Self { limiter, key, skip, on_store_failure, reject: _ } = self;
        FixedWindowLayer { limiter, key, skip, on_store_failure, reject }
    }
}

impl<S, J: Clone> Layer<S> for FixedWindowLayer<J> {
    type Service = FixedWindow<S, J>;

    /// # Panics
    /// If the layer counts in a shared store and has no name.
    fn layer(&self, inner: S) -> Self::Service {
        self.limiter.check_name();
        let limiter = match self.on_store_failure {
            OnStoreFailure::Local => self.limiter.clone(),
            OnStoreFailure::Allow | OnStoreFailure::Deny => self.limiter.clone().without_fallback(),
        };
        let (name, quotas) = (limiter.scope().name(), limiter.quotas());
        let shared = Shared {
            fixed: Fixed::new(name, quotas.as_slice()[0].limit()),
            body: prepare(name, quotas),
            allow_on_failure: self.on_store_failure == OnStoreFailure::Allow,
            key: Arc::clone(&self.key),
            skip: self.skip.clone(),
            reject: self.reject.clone(),
            limiter,
        };
        FixedWindow::new(inner, Arc::new(shared))
    }
}

impl<J: fmt::Debug> fmt::Debug for FixedWindowLayer<J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FixedWindowLayer")
            .field("limiter", &self.limiter)
            .field("on_store_failure", &self.on_store_failure)
            .field("reject", &self.reject)
            .finish_non_exhaustive()
    }
}
