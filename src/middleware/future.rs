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
use super::request::{LimitedRequest, Next};
use super::upload::{Rest, rest};

pin_project! {
    /// The future of a response of [`FixedWindow`](crate::FixedWindow).
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
        /// For the store's answer, or in the queue.
        Waiting { held: Option<Box<Held<S, B, J>>> },
        Calling { #[pin] future: S::Future },
        /// The rest of the body is read before the response is made, which counts from then.
        Reading { held: Option<Box<(Parts, Rest<B>, Arc<J>)>> },
        Refused { response: Option<S::Response> },
    }
}

struct Held<S, B, J> {
    service: S,
    /// The service was asked whether it is ready: it may hold capacity, or a place among those that
    /// wait for it. It does while a charge is in flight. In the queue, a request that does not ask
    /// has a clone, which keeps nothing from others.
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
        let (mut parts, body) = request.into_parts();
        let state = match limited.start(&parts) {
            Next::Call => {
                limited.prepare_call(&mut parts.extensions);
                // Moved from here into the call, since moving a request twice is measurable.
                FutureState::Calling { future: service.call(Request::from_parts(parts, body)) }
            }
            Next::Refuse => Self::refuse(&mut limited, reject, parts, body),
            Next::Wait | Next::AwaitService => Self::wait(&limited, service, reject, parts, body),
        };
        Self { state, limited }
    }

    /// Not inlined, as the next ones: the path of a request that is called at once stays short.
    #[inline(never)]
    fn refuse(
        limited: &mut LimitedRequest,
        reject: &Arc<J>,
        parts: Parts,
        body: B,
    ) -> FutureState<S, B, J> {
        limited.note_refused(&parts);
        match rest(&limited.current.options.drains, &parts, body) {
            Ok(rest) => {
                FutureState::Reading { held: Some(Box::new((parts, rest, Arc::clone(reject)))) }
            }
            Err(is_unread) => {
                let response = limited.make_refusal(&**reject, &parts, Duration::ZERO, is_unread);
                FutureState::Refused { response: Some(response) }
            }
        }
    }

    #[inline(never)]
    fn wait(
        limited: &LimitedRequest,
        service: &mut S,
        reject: &Arc<J>,
        parts: Parts,
        body: B,
    ) -> FutureState<S, B, J> {
        let (is_claimed, reject) = (limited.is_in_flight(), Arc::clone(reject));
        let unready = service.clone();
        let ready = mem::replace(service, unready.clone());
        let service = if is_claimed { ready } else { unready };
        FutureState::Waiting {
            held: Some(Box::new(Held { service, is_claimed, reject, parts, body })),
        }
    }

    #[inline(never)]
    fn advance(
        mut state: Pin<&mut FutureState<S, B, J>>,
        limited: &mut LimitedRequest,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), S::Error>> {
        let next = match state.as_mut().project() {
            FutureStateProj::Waiting { held: place } => {
                // Taken, so that nothing is polled again after a panic.
                let mut held = place.take().expect(DONE);
                let mut is_ready = false;
                let next = loop {
                    match limited.poll(&held.parts, is_ready, Some(cx)) {
                        Next::AwaitService => {
                            held.is_claimed = true;
                            if let Poll::Ready(ready) = held.service.poll_ready(cx) {
                                ready?;
                                is_ready = true;
                                continue;
                            }
                        }
                        Next::Wait if limited.is_in_flight() => {}
                        Next::Wait => {
                            if mem::take(&mut held.is_claimed) {
                                held.service = held.service.clone();
                            }
                        }
                        next => break next,
                    }
                    *place = Some(held);
                    return Poll::Pending;
                };
                let Held { mut service, reject, mut parts, body, .. } = *held;
                match next {
                    Next::Call => {
                        limited.prepare_call(&mut parts.extensions);
                        let request = Request::from_parts(parts, body);
                        FutureState::Calling { future: service.call(request) }
                    }
                    _ => Self::refuse(limited, &reject, parts, body),
                }
            }
            FutureStateProj::Reading { held } => {
                let (_, rest, _) = &mut **held.as_mut().expect(DONE);
                let (late, is_unread) = ready!(rest.poll(cx));
                let (parts, _, reject) = *held.take().expect(DONE);
                let response = limited.make_refusal(&*reject, &parts, late, is_unread);
                FutureState::Refused { response: Some(response) }
            }
            FutureStateProj::Calling { .. } | FutureStateProj::Refused { .. } => {
                return Poll::Ready(Ok(()));
            }
        };
        state.set(next);
        Poll::Ready(Ok(()))
    }
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
            FutureState::Waiting { .. } => "ResponseFuture(waiting)",
            FutureState::Calling { .. } => "ResponseFuture(calling)",
            FutureState::Reading { .. } | FutureState::Refused { .. } => "ResponseFuture(refused)",
        })
    }
}
