//! The service that [`FixedWindowLayer`](crate::FixedWindowLayer) makes: it asks the store, and
//! calls or refuses. What takes longer than a call is the [`ResponseFuture`]'s.

use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use http::{Request, Response};
use tower_service::Service;

use super::future::ResponseFuture;
use super::live::{Live, Policy};
use super::options::Options;
use super::rejection::{ProblemJson, Reject};
use super::request::{Asked, Ticket, Verdict};
use crate::limiter::Limiter;

/// A service whose requests are limited: see [`FixedWindowLayer`](crate::FixedWindowLayer).
///
/// It is as ready as the inner service, and calls the very instance that was made ready. Where the
/// store answers later than at once, that instance is kept for the request, and a clone takes its
/// place; where the request has to wait for a window, a clone is made ready when it is due.
pub struct FixedWindow<S, J = ProblemJson> {
    inner: S,
    shared: Arc<Shared<J>>,
    policy: Arc<Policy>,
}

/// What all clones of a service have in common.
pub(crate) struct Shared<J> {
    pub(crate) limiter: Limiter,
    pub(crate) options: Options,
    pub(crate) live: Arc<Live>,
    pub(crate) reject: J,
    /// The newest policy that was needed. Services have copies of it, and come here when theirs is
    /// old.
    policy: Mutex<Arc<Policy>>,
}

impl<J> Shared<J> {
    pub(crate) fn new(limiter: Limiter, options: Options, live: Arc<Live>, reject: J) -> Self {
        let policy = live.policy(limiter.scope().name(), &options);
        Self { limiter, options, live, reject, policy: Mutex::new(Arc::new(policy)) }
    }

    #[cold]
    pub(crate) fn policy(&self) -> Arc<Policy> {
        let mut policy = self.policy.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.live.is_current(&policy) {
            let name = self.limiter.scope().name();
            *policy = Arc::new(self.live.policy(name, &self.options));
        }
        Arc::clone(&policy)
    }
}

impl<S, J> FixedWindow<S, J> {
    pub(crate) fn new(inner: S, shared: Arc<Shared<J>>) -> Self {
        let policy = shared.policy();
        Self { inner, shared, policy }
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
        if !self.shared.live.is_current(&self.policy) {
            self.policy = self.shared.policy();
        }
        let mut ticket = Ticket::new(&self.shared, &self.policy);
        let (mut parts, body) = request.into_parts();
        match ticket.ask(&parts) {
            Asked::Now(Verdict::Pass) => {
                ticket.calling(&mut parts.extensions);
                let future = self.inner.call(Request::from_parts(parts, body));
                ResponseFuture::calling(ticket, future)
            }
            Asked::Now(Verdict::Refuse(refusal)) => {
                ResponseFuture::refused(ticket, refusal, &parts, body)
            }
            Asked::Now(Verdict::PassIn(wait)) => {
                let unready = self.inner.clone();
                // What waits must not hold what others need to be served: the instance that was
                // made ready is let go.
                self.inner = unready.clone();
                let request = Request::from_parts(parts, body);
                ResponseFuture::waiting(ticket, wait, unready, request)
            }
            Asked::InTurn => {
                let unready = self.inner.clone();
                self.inner = unready.clone();
                ResponseFuture::in_turn(ticket, unready, Request::from_parts(parts, body))
            }
            Asked::Later(reply) => {
                let clone = self.inner.clone();
                let ready = mem::replace(&mut self.inner, clone);
                let request = Request::from_parts(parts, body);
                ResponseFuture::deciding(ticket, reply, ready, request)
            }
        }
    }
}

impl<S: Clone, J> Clone for FixedWindow<S, J> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            shared: Arc::clone(&self.shared),
            policy: Arc::clone(&self.policy),
        }
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
