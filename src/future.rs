//! The future of a limited request: it waits for the store if it must, then for the service.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::{Request, Response};
use pin_project_lite::pin_project;
use tower_service::Service;

use crate::decision::Decision;
use crate::headers;
use crate::key::MissingKey;
use crate::rejection::{Reason, Reject, Rejection};
use crate::service::Shared;
use crate::store::Reply;

pin_project! {
    /// The response of [`FixedWindow`](crate::FixedWindow).
    #[must_use = "futures do nothing unless they are awaited"]
    pub struct ResponseFuture<S, B, J>
    where
        S: Service<Request<B>>,
    {
        #[pin]
        state: State<S, B, S::Future>,
        shared: Arc<Shared<J>>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, B, F> {
        /// The store has not answered yet. The service that was made ready waits with the request.
        Deciding { reply: Reply<Decision>, call: Option<(S, Request<B>)> },
        /// The request has passed.
        Calling { #[pin] future: F, decision: Option<Decision> },
        Refused { refusal: Refusal },
    }
}

/// Why a request does not pass.
pub(crate) enum Refusal {
    RateLimited(Decision),
    MissingKey(MissingKey),
    StoreFailed,
}

impl<S, B, J> ResponseFuture<S, B, J>
where
    S: Service<Request<B>>,
{
    pub(crate) fn deciding(
        shared: Arc<Shared<J>>,
        reply: Reply<Decision>,
        service: S,
        request: Request<B>,
    ) -> Self {
        Self { state: State::Deciding { reply, call: Some((service, request)) }, shared }
    }

    pub(crate) fn calling(
        shared: Arc<Shared<J>>,
        future: S::Future,
        decision: Option<Decision>,
    ) -> Self {
        Self { state: State::Calling { future, decision }, shared }
    }

    pub(crate) fn refused(shared: Arc<Shared<J>>, refusal: Refusal) -> Self {
        Self { state: State::Refused { refusal }, shared }
    }
}

impl<S, B, J, R> Future for ResponseFuture<S, B, J>
where
    S: Service<Request<B>, Response = Response<R>>,
    J: Reject<R>,
{
    type Output = Result<Response<R>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            let next = match this.state.as_mut().project() {
                StateProj::Deciding { reply, call } => {
                    let answer = ready!(Pin::new(reply).poll(cx));
                    let (mut service, request) = call.take().expect("polled after it was done");
                    match this.shared.verdict(answer) {
                        Ok(decision) => State::Calling { future: service.call(request), decision },
                        Err(refusal) => State::Refused { refusal },
                    }
                }
                StateProj::Calling { future, decision } => {
                    let mut response = ready!(future.poll(cx))?;
                    if let Some(decision) = decision {
                        headers::stamp_passed(response.headers_mut(), decision, &this.shared.fixed);
                    }
                    return Poll::Ready(Ok(response));
                }
                StateProj::Refused { refusal } => {
                    return Poll::Ready(Ok(this.shared.refuse(refusal)));
                }
            };
            this.state.set(next);
        }
    }
}

impl<J> Shared<J> {
    fn refuse<R>(&self, refusal: &Refusal) -> Response<R>
    where
        J: Reject<R>,
    {
        let reason = match refusal {
            Refusal::RateLimited(decision) => Reason::RateLimited(decision),
            Refusal::MissingKey(missing) => Reason::MissingKey(missing),
            Refusal::StoreFailed => Reason::StoreFailed,
        };
        let limiter = &self.limiter;
        let why = Rejection::new(reason, limiter.scope().name(), limiter.quotas(), &self.body);
        let mut response = self.reject.reject(&why);
        headers::stamp_refusal(response.headers_mut(), &why, &self.fixed);
        response
    }
}

impl<S, B, J> fmt::Debug for ResponseFuture<S, B, J>
where
    S: Service<Request<B>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.state {
            State::Deciding { .. } => "ResponseFuture(deciding)",
            State::Calling { .. } => "ResponseFuture(calling)",
            State::Refused { .. } => "ResponseFuture(refused)",
        })
    }
}
