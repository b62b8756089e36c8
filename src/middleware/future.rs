//! The future of a limited request: [`ResponseFuture`]. It waits for the store's answer or in the
//! queue, and then for the service.

use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
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
        state: FutureState<S, B, J>,
        // Dropped after the state: the refund comes after the service has been dropped.
        limited: LimitedRequest,
    }
}

pin_project! {
    #[project = FutureStateProj]
    enum FutureState<S, B, J>
    where
        S: Service<Request<B>>,
    {
        /// The future holds the service that was made ready.
        Deciding { decision: PendingDecision, held: Option<Box<Held<S, B, J>>> },
        /// Until it is the request's turn, it holds a clone of the service that is not ready, so
        /// that it keeps no capacity from others.
        Waiting { held: Option<Box<Held<S, B, J>>> },
        Calling { #[pin] future: S::Future },
        /// The rest of the body is read before the response is made, which counts from then.
        Reading { held: Option<Box<(Parts, Rest<B>, Arc<J>)>> },
        Refused { response: Option<S::Response> },
    }
}

struct Held<S, B, J> {
    service: S,
    /// It may hold capacity, or a place among those that wait for it.
    is_claimed: bool,
    reject: Arc<J>,
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
        mut limited: LimitedRequest,
        service: &mut S,
        reject: &Arc<J>,
        request: Request<B>,
    ) -> Self {
        let (parts, body) = request.into_parts();
        let next = limited.start(&parts);
        let state = if matches!(next, Next::Call) {
            // `Next::Call` holds nothing to drop; dropping it would check that at run time.
            mem::forget(next);
            Self::call(&mut limited, service, parts, body)
        } else {
            Self::follow(&mut limited, next, service, reject, parts, body)
        };
        Self { state, limited }
    }

    /// Inlined, since moving a request is measurable.
    #[inline(always)]
    fn call(
        limited: &mut LimitedRequest,
        service: &mut S,
        mut parts: Parts,
        body: B,
    ) -> FutureState<S, B, J> {
        limited.prepare_call(&mut parts.extensions);
        FutureState::Calling { future: service.call(Request::from_parts(parts, body)) }
    }

    /// Not inlined, so that the path of a request that is called at once stays short.
    #[inline(never)]
    fn follow(
        limited: &mut LimitedRequest,
        next: Next,
        service: &mut S,
        reject: &Arc<J>,
        parts: Parts,
        body: B,
    ) -> FutureState<S, B, J> {
        let hold = |service, is_claimed, parts, body| {
            let reject = Arc::clone(reject);
            Some(Box::new(Held { service, is_claimed, reject, parts, body }))
        };
        match next {
            Next::Call => Self::call(limited, service, parts, body),
            Next::Refuse => {
                limited.note_refused(&parts);
                match Drain::rest(&limited.shared().options.drains, &parts, body) {
                    Ok(rest) => {
                        let held = Some(Box::new((parts, rest, Arc::clone(reject))));
                        FutureState::Reading { held }
                    }
                    Err(is_unread) => {
                        let response = limited.refuse(&**reject, &parts, Duration::ZERO, is_unread);
                        FutureState::Refused { response: Some(response) }
                    }
                }
            }
            Next::Decide(decision) => {
                let held = hold(take_ready(service), true, parts, body);
                FutureState::Deciding { decision, held }
            }
            Next::Ask | Next::Wait => {
                let is_asking = limited.is_asking();
                let service = if is_asking { take_ready(service) } else { release(service) };
                FutureState::Waiting { held: hold(service, is_asking, parts, body) }
            }
        }
    }

    /// Not inlined, since requests that are decided at once never wait.
    #[inline(never)]
    fn advance(
        mut state: Pin<&mut FutureState<S, B, J>>,
        limited: &mut LimitedRequest,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), S::Error>> {
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
                    let next = limited.poll_queue(&held.parts, is_ready, Some(cx));
                    // Until its charge is in flight, a request that waits claims nothing.
                    if matches!(next, Poll::Ready(Next::Wait) | Poll::Pending)
                        && !limited.is_asking()
                        && mem::take(&mut held.is_claimed)
                    {
                        held.service = held.service.clone();
                        is_ready = false;
                    }
                    match next {
                        Poll::Ready(Next::Ask) => {
                            held.is_claimed = true;
                            if let Poll::Ready(ready) = held.service.poll_ready(cx) {
                                ready?;
                                is_ready = true;
                                continue;
                            }
                        }
                        Poll::Ready(Next::Wait) => continue,
                        Poll::Ready(next) => break (next, held),
                        Poll::Pending => {}
                    }
                    *place = Some(held);
                    return Poll::Pending;
                }
            }
            FutureStateProj::Reading { held } => {
                let (_, rest, _) = &mut **held.as_mut().expect(DONE);
                let (late, is_unread) = ready!(rest.poll(cx));
                let (parts, _, reject) = *held.take().expect(DONE);
                let response = Some(limited.refuse(&*reject, &parts, late, is_unread));
                state.set(FutureState::Refused { response });
                return Poll::Ready(Ok(()));
            }
            FutureStateProj::Calling { .. } | FutureStateProj::Refused { .. } => {
                return Poll::Ready(Ok(()));
            }
        };
        let Held { mut service, reject, parts, body, .. } = *held;
        let next = Self::follow(limited, next, &mut service, &reject, parts, body);
        state.set(next);
        Poll::Ready(Ok(()))
    }
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
                _ => ready!(Self::advance(this.state.as_mut(), this.limited, cx))?,
            }
        }
    }
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
