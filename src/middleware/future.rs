//! The future of a limited request: [`ResponseFuture`]. It waits for the store's answer or in the
//! queue, and then for the service.

use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::request::Parts;
use http::{Request, Response};
use pin_project_lite::pin_project;
use tower_service::Service;

use super::rejection::Reject;
use super::request::{LimitedRequest, Next, PendingDecision};
use super::upload::{Drain, Rest};

pin_project! {
    /// The response of [`FixedWindow`](crate::FixedWindow).
    ///
    /// `S` is the inner service, `B` the body of the request, and `J` makes the responses to
    /// refused requests.
    #[must_use = "futures do nothing unless they are awaited"]
    pub struct ResponseFuture<S, B, J>
    where
        S: Service<Request<B>>,
    {
        #[pin]
        state: FutureState<S, B, S::Future, S::Response>,
        // Dropped after the state: the refund comes after the service has been dropped.
        limited: LimitedRequest<J>,
    }
}

pin_project! {
    #[project = FutureStateProj]
    enum FutureState<S, B, F, R> {
        /// The future holds the service that was made ready.
        Deciding { decision: PendingDecision, held: Option<Box<Held<S, B>>> },
        /// Until it is the request's turn, it holds a clone of the service that is not ready, so
        /// that it keeps no capacity from others.
        Waiting { held: Option<Box<Held<S, B>>> },
        Calling { #[pin] future: F },
        /// The rest of the body is read before the response is made, which counts from then.
        Reading { held: Option<Box<(Parts, Rest<B>)>> },
        Refused { response: Option<R> },
    }
}

struct Held<S, B> {
    service: S,
    parts: Parts,
    body: B,
}

const DONE: &str = "polled after it was done";

impl<S, B, J, R> ResponseFuture<S, B, J>
where
    S: Service<Request<B>, Response = Response<R>> + Clone,
    B: 'static,
    J: Reject<R>,
{
    /// A request that has to wait takes `service`, which is ready, and leaves a clone in its place.
    #[inline(always)]
    pub(crate) fn new(
        mut limited: LimitedRequest<J>,
        service: &mut S,
        request: Request<B>,
    ) -> Self {
        let (mut parts, body) = request.into_parts();
        let next = limited.start(&parts);
        if matches!(next, Next::Call) {
            // `Next::Call` holds nothing to drop; dropping it would check that at run time.
            mem::forget(next);
            limited.prepare_call(&mut parts.extensions);
            // Called in this function, since moving a request is measurable.
            let future = service.call(Request::from_parts(parts, body));
            return Self { state: FutureState::Calling { future }, limited };
        }
        match next {
            Next::Refuse => {
                let state = refuse(&mut limited, parts, body);
                Self { state, limited }
            }
            next => {
                let state = follow(&mut limited, next, service, parts, body);
                Self { state, limited }
            }
        }
    }
}

/// Not inlined, so that the path of a request that is called at once stays short.
#[inline(never)]
fn follow<S, B, J, R>(
    limited: &mut LimitedRequest<J>,
    next: Next,
    service: &mut S,
    mut parts: Parts,
    body: B,
) -> FutureState<S, B, S::Future, Response<R>>
where
    S: Service<Request<B>, Response = Response<R>> + Clone,
    B: 'static,
    J: Reject<R>,
{
    match next {
        Next::Call => {
            limited.prepare_call(&mut parts.extensions);
            let future = service.call(Request::from_parts(parts, body));
            FutureState::Calling { future }
        }
        Next::Refuse => refuse(limited, parts, body),
        Next::Decide(decision) => {
            let service = take_ready(service);
            FutureState::Deciding { decision, held: Some(Box::new(Held { service, parts, body })) }
        }
        Next::Ask | Next::Wait => {
            let is_asking = limited.is_asking();
            let service = if is_asking { take_ready(service) } else { release(service) };
            FutureState::Waiting { held: Some(Box::new(Held { service, parts, body })) }
        }
    }
}

#[inline(always)]
fn refuse<B, J, R, S>(
    limited: &mut LimitedRequest<J>,
    parts: Parts,
    body: B,
) -> FutureState<S, B, S::Future, Response<R>>
where
    S: Service<Request<B>, Response = Response<R>>,
    B: 'static,
    J: Reject<R>,
{
    limited.note_refused(&parts);
    match Drain::rest(&limited.shared().options.drains, &parts, body) {
        Ok(rest) => FutureState::Reading { held: Some(hold(parts, rest)) },
        Err(is_unread) => {
            let response = Some(limited.refuse(&parts, Duration::ZERO, is_unread));
            FutureState::Refused { response }
        }
    }
}

/// Not inlined, so that only such a request moves its parts.
#[cold]
#[inline(never)]
fn hold<B>(parts: Parts, rest: Rest<B>) -> Box<(Parts, Rest<B>)> {
    Box::new((parts, rest))
}

fn take_ready<S: Clone>(service: &mut S) -> S {
    let clone = service.clone();
    mem::replace(service, clone)
}

/// Leaves and returns clones that are not ready: a waiting request must not hold capacity that
/// others need.
fn release<S: Clone>(service: &mut S) -> S {
    let unready = service.clone();
    *service = unready.clone();
    unready
}

impl<S, B, J, R> Future for ResponseFuture<S, B, J>
where
    S: Service<Request<B>, Response = Response<R>> + Clone,
    B: 'static,
    J: Reject<R>,
{
    type Output = Result<Response<R>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            match this.state.as_mut().project() {
                FutureStateProj::Calling { future } => {
                    // Stamped in place, since moving a response is measurable.
                    let mut answer = future.poll(cx);
                    if let Poll::Ready(Ok(response)) = &mut answer {
                        if this.limited.is_corrected_by(response) {
                            return answer.map_ok(|response| this.limited.correct(response));
                        }
                        this.limited.stamp(response);
                    }
                    return answer;
                }
                FutureStateProj::Refused { response } => {
                    return Poll::Ready(Ok(response.take().expect(DONE)));
                }
                _ => ready!(advance(this.state.as_mut(), this.limited, cx))?,
            }
        }
    }
}

/// Not inlined, since requests that are decided at once never wait.
#[inline(never)]
fn advance<S, B, J, R>(
    mut state: Pin<&mut FutureState<S, B, S::Future, Response<R>>>,
    limited: &mut LimitedRequest<J>,
    cx: &mut Context<'_>,
) -> Poll<Result<(), S::Error>>
where
    S: Service<Request<B>, Response = Response<R>> + Clone,
    B: 'static,
    J: Reject<R>,
{
    let (next, held) = match state.as_mut().project() {
        FutureStateProj::Deciding { decision, held } => {
            let answer = ready!(decision.poll(cx));
            let held = held.take().expect(DONE);
            (limited.decide(&held.parts, answer), held)
        }
        FutureStateProj::Waiting { held: place } => {
            // Taken, so that nothing is polled again after a panic.
            let mut held = place.take().expect(DONE);
            let mut is_ready = false;
            loop {
                match limited.poll_queue(&held.parts, is_ready, Some(cx)) {
                    Poll::Ready(Next::Ask) => match held.service.poll_ready(cx) {
                        Poll::Ready(ready) => {
                            ready?;
                            is_ready = true;
                        }
                        Poll::Pending => {
                            *place = Some(held);
                            return Poll::Pending;
                        }
                    },
                    Poll::Ready(Next::Wait) => {
                        held.service = held.service.clone();
                        is_ready = false;
                    }
                    Poll::Ready(next) => break (next, held),
                    Poll::Pending => {
                        *place = Some(held);
                        return Poll::Pending;
                    }
                }
            }
        }
        FutureStateProj::Reading { held } => {
            let (_, rest) = &mut **held.as_mut().expect(DONE);
            let (late, is_unread) = ready!(rest.poll(cx));
            let (parts, _) = *held.take().expect(DONE);
            let response = Some(limited.refuse(&parts, late, is_unread));
            state.set(FutureState::Refused { response });
            return Poll::Ready(Ok(()));
        }
        FutureStateProj::Calling { .. } | FutureStateProj::Refused { .. } => {
            return Poll::Ready(Ok(()));
        }
    };
    let Held { mut service, parts, body } = *held;
    let next = follow(limited, next, &mut service, parts, body);
    state.set(next);
    Poll::Ready(Ok(()))
}

impl<S, B, J> fmt::Debug for ResponseFuture<S, B, J>
where
    S: Service<Request<B>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.state {
            FutureState::Deciding { .. } => "ResponseFuture(deciding)",
            FutureState::Waiting { .. } => "ResponseFuture(waiting)",
            FutureState::Calling { .. } => "ResponseFuture(calling)",
            FutureState::Reading { .. } | FutureState::Refused { .. } => "ResponseFuture(refused)",
        })
    }
}
