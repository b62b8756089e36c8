//! The service that [`FixedWindowLayer`](crate::FixedWindowLayer) makes.

use std::fmt;
use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use tower_service::Service;

use crate::decision::Decision;
use crate::future::{Refusal, ResponseFuture};
use crate::headers::Fixed;
use crate::key::{Key, KeyExtractor};
use crate::layer::Skip;
use crate::limiter::Limiter;
use crate::observe;
use crate::rejection::{ProblemJson, Reject};
use crate::store::{Charge, StoreError};

/// A service whose requests are limited: see [`FixedWindowLayer`](crate::FixedWindowLayer).
///
/// It is as ready as the inner service, and calls the very instance that was made ready. Where the
/// store answers later than at once, that instance is kept for the request, and a clone takes its
/// place.
pub struct FixedWindow<S, J = ProblemJson> {
    inner: S,
    shared: Arc<Shared<J>>,
}

/// What all clones of a service have in common.
pub(crate) struct Shared<J> {
    pub(crate) limiter: Limiter,
    pub(crate) key: Arc<dyn KeyExtractor>,
    pub(crate) skip: Option<Skip>,
    pub(crate) allow_on_failure: bool,
    pub(crate) reject: J,
    pub(crate) fixed: Fixed,
    pub(crate) body: Bytes,
}

impl<J> Shared<J> {
    /// What becomes of a request: it passes, with or without a standing to report, or is refused.
    pub(crate) fn verdict(
        &self,
        answer: Result<Decision, StoreError>,
    ) -> Result<Option<Decision>, Refusal> {
        match answer {
            Ok(decision) if decision.allowed() => Ok(Some(decision)),
            Ok(decision) => Err(Refusal::RateLimited(decision)),
            Err(_) if self.allow_on_failure => Ok(None),
            Err(_) => Err(Refusal::StoreFailed),
        }
    }
}

impl<S, J> FixedWindow<S, J> {
    pub(crate) fn new(inner: S, shared: Arc<Shared<J>>) -> Self {
        Self { inner, shared }
    }

    /// The service inside.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The service inside.
    pub fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// The service inside.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, J, B, R> Service<Request<B>> for FixedWindow<S, J>
where
    S: Service<Request<B>, Response = Response<R>> + Clone,
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
        let shared = Arc::clone(&self.shared);
        let (parts, body) = request.into_parts();
        if shared.skip.as_ref().is_some_and(|skip| skip(&parts)) {
            let future = self.inner.call(Request::from_parts(parts, body));
            return ResponseFuture::calling(shared, future, None);
        }
        let mut key = Key::default();
        if let Err(missing) = shared.key.extract(&parts, &mut key) {
            if !missing.is_client() {
                observe::mistake(missing.message());
            }
            return ResponseFuture::refused(shared, Refusal::MissingKey(missing));
        }
        let quotas = shared.limiter.quotas();
        let reply = shared.limiter.ask(&key, quotas, |account| Charge::new(account, 1));
        match reply.into_now() {
            Ok(answer) => match shared.verdict(answer) {
                Ok(decision) => {
                    let future = self.inner.call(Request::from_parts(parts, body));
                    ResponseFuture::calling(shared, future, decision)
                }
                Err(refusal) => ResponseFuture::refused(shared, refusal),
            },
            Err(later) => {
                let clone = self.inner.clone();
                let ready = mem::replace(&mut self.inner, clone);
                ResponseFuture::deciding(shared, later, ready, Request::from_parts(parts, body))
            }
        }
    }
}

impl<S: Clone, J> Clone for FixedWindow<S, J> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: Arc::clone(&self.shared) }
    }
}

impl<S: fmt::Debug, J> fmt::Debug for FixedWindow<S, J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FixedWindow")
            .field("inner", &self.inner)
            .field("limiter", &self.shared.limiter)
            .finish_non_exhaustive()
    }
}
