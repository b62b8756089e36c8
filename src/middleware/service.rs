//! The service that [`FixedWindowLayer`](crate::FixedWindowLayer) makes, and the state that its
//! clones share.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};

use http::{Extensions, Request, Response};
use tower_service::Service;

use super::future::ResponseFuture;
use super::headers::PreparedHeaders;
use super::layer::Options;
use super::rejection::{ProblemJson, Reject};
use super::request::LimitedRequest;
use crate::key::Key;
use crate::limits::{Limiter, Limits, PlanFn};
use crate::observe;
use crate::quota::Quotas;
use crate::sync::{self, Mutex};

/// A service whose requests are limited: see [`FixedWindowLayer`](crate::FixedWindowLayer).
///
/// `S` is the inner service. `J` makes the responses to refused requests, as
/// [`FixedWindowLayer::reject`](crate::FixedWindowLayer::reject) has set it.
///
/// The service is ready when the inner service is, and calls the instance that was made ready. If
/// the store does not answer at once, the request keeps that instance, and a clone takes its place.
/// For a request that waits for a window, a clone is made ready when that begins.
///
/// # If it is not a service
///
/// The compiler may only say that a method such as `ready` has unsatisfied bounds. The inner
/// service must be `Clone` and answer `http::Request` with `http::Response`, and the layer must be
/// able to make a refusal's body: from bytes, or with [`.reject(EmptyBody)`](crate::EmptyBody) from
/// `Default`. The body of hyper-util's client is neither. Under the layer, turn it into axum's by
/// `client.map_response(|response: Response<Incoming>| response.map(Body::new))` of tower's
/// `ServiceExt`.
// If a method of `Service` is missing, the compiler shows the next line and nothing else of this
// crate.
#[rustfmt::skip]
pub struct FixedWindow<S, J = ProblemJson> { // no Service? Write `.reject(EmptyBody)`, or see its docs
    inner: S,
    in_force: Arc<InForce<J>>,
}

impl<S, J> FixedWindow<S, J> {
    pub(crate) fn new(inner: S, current: Current, reject: Arc<J>) -> Self {
        let initial = Arc::new(current);
        let changed = Mutex::new(Arc::clone(&initial));
        Self { inner, in_force: Arc::new(InForce { initial, changed, reject }) }
    }
}

impl<S, J, B, R> Service<Request<B>> for FixedWindow<S, J>
where
    S: Service<Request<B>, Response = Response<R>> + Clone,
    B: 'static,
    J: Reject<R>,
{
    type Response = Response<R>;
    type Error = S::Error;
    type Future = ResponseFuture<S, B, J>;

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let limited = LimitedRequest::new(self.in_force.current());
        ResponseFuture::new(limited, &mut self.inner, &self.in_force.reject, request)
    }
}

impl<S: Clone, J> Clone for FixedWindow<S, J> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), in_force: Arc::clone(&self.in_force) }
    }
}

impl<S: fmt::Debug, J> fmt::Debug for FixedWindow<S, J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FixedWindow")
            .field("inner", &self.inner)
            .field("limits", &self.in_force.initial.limits)
            .finish_non_exhaustive()
    }
}

/// The state of all clones of a service, behind one pointer: axum clones it for each request.
struct InForce<J> {
    /// Read without a lock. Most layers never change their quotas.
    initial: Arc<Current>,
    changed: Mutex<Arc<Current>>,
    reject: Arc<J>,
}

impl<J> InForce<J> {
    #[inline]
    fn current(&self) -> Arc<Current> {
        match self.initial.is_current() {
            true => Arc::clone(&self.initial),
            false => self.renew(),
        }
    }

    #[cold]
    fn renew(&self) -> Arc<Current> {
        let mut current = sync::lock(&self.changed);
        if !current.is_current_now() {
            *current = Arc::new(current.renewed());
        }
        Arc::clone(&current)
    }
}

/// The layer's state and the quotas in force. A request holds one `Arc` of it.
pub(crate) struct Current {
    pub(crate) limits: Limits,
    pub(crate) options: Options,
    /// In the order of the limits.
    pub(crate) settings: Box<[Settings]>,
    /// Counts the requests that were marked: see [`mark`](Self::mark).
    marked: AtomicU32,
}

impl Current {
    pub(crate) fn new(limits: Limits, options: Options) -> Self {
        let settings = limits.limiters.iter().map(|limiter| Settings::new(limiter, &options));
        let settings = settings.collect();
        Self { limits, options, settings, marked: AtomicU32::new(0) }
    }

    #[cold]
    pub(crate) fn renewed(&self) -> Self {
        Self::new(self.limits.clone(), self.options.clone())
    }

    /// No limit's quotas have changed since this was made, and no change ends by itself.
    #[inline]
    fn is_current(&self) -> bool {
        self.settings.iter().all(|of| of.limiter.live.is_of(of.generation))
    }

    pub(crate) fn is_current_now(&self) -> bool {
        self.settings.iter().all(|of| {
            of.limiter.end_changes();
            of.limiter.live.generation() == of.generation
        })
    }
}

pub(crate) struct Settings {
    pub(crate) limiter: Limiter,
    generation: u64,
    pub(crate) quotas: Quotas,
    pub(crate) plan: Option<PlanFn>,
    pub(crate) headers: PreparedHeaders,
}

impl Settings {
    pub(crate) fn new(limiter: &Limiter, options: &Options) -> Self {
        limiter.end_changes();
        let (generation, quotas, plan) = limiter.live.in_force();
        let headers = PreparedHeaders::new(options.headers, limiter.name(), quotas.first().limit());
        Self { limiter: limiter.clone(), generation, quotas, plan, headers }
    }
}

/// By then, most services have had a request on each route, and later requests cost nothing.
const MARKED: u32 = 256;

/// The charges of a request so far. The addresses of a layer's limit and of its `count_if` identify
/// the layer: a clone with another `count_if` differs.
#[derive(Default)]
struct Charges(Vec<([usize; 2], Key)>);

/// Cloned extensions belong to another request, such as a part of a batch.
impl Clone for Charges {
    fn clone(&self) -> Self {
        Self(Vec::new())
    }
}

impl Current {
    #[inline]
    pub(crate) fn marks(&self) -> bool {
        self.marked.load(Ordering::Relaxed) < MARKED
    }

    /// Detects a layer that a request passes twice, and that so charges it twice.
    pub(crate) fn mark(&self, limiter: &Limiter, key: &Key, extensions: &mut Extensions) {
        self.marked.fetch_add(1, Ordering::Relaxed);
        let count_if =
            self.options.count_if.as_ref().map_or(0, |of| Arc::as_ptr(of).cast::<()>().addr());
        let charge = ([Arc::as_ptr(&limiter.live).addr(), count_if], key.clone());
        let Charges(charges) = extensions.get_or_insert_default();
        if charges.contains(&charge) {
            let name = limiter.name();
            let name = if name.is_empty() { String::new() } else { format!(" `{name}`") };
            observe::mistake(&format_args!(
                "the same rate limit{name} is applied twice on the way of a request and charges it \
                 twice: remove one of the two `.layer(..)` calls, on the app or on a route or router \
                 in it, or make it another limit with another name"
            ));
        }
        charges.push(charge);
    }
}
