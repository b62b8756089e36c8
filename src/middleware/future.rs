//! The future of a limited request: it waits for the store if it must, for its window if it may,
//! then for the service.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::request::Parts;
use http::{Request, Response};
use pin_project_lite::pin_project;
use tower_service::Service;

use super::rejection::Reject;
use super::request::{Refusal, Ticket, Undecided, Verdict};
use super::upload::{Drain, Rest};
use crate::timer::{Closed, Wait};

pin_project! {
    /// The response of [`FixedWindow`](crate::FixedWindow).
    #[must_use = "futures do nothing unless they are awaited"]
    pub struct ResponseFuture<S, B, J>
    where
        S: Service<Request<B>>,
    {
        #[pin]
        state: State<S, B, S::Future>,
        // Dropped after the state: a charge is given back when the service has been dropped.
        ticket: Ticket<J>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, B, F> {
        /// The store has not answered yet. The service that was made ready waits with the request.
        Deciding { reply: Undecided, held: Option<Held<S, B>> },
        /// The request has a reservation, and holds nothing that others need.
        Waiting { wait: Wait, held: Option<Held<S, B>> },
        /// It is due, and waits for the service.
        Readying { held: Option<Held<S, B>> },
        /// The service was ready too late, and others who are late were there before it. It holds
        /// nothing that they need.
        Behind { held: Option<Held<S, B>> },
        Calling { #[pin] future: F },
        /// What the client is still sending is read first.
        Refused { refusal: Refusal, rest: Option<Rest<B>> },
    }
}

struct Held<S, B> {
    service: S,
    request: Request<B>,
}

const DONE: &str = "polled after it was done";

impl<S, B, J> ResponseFuture<S, B, J>
where
    S: Service<Request<B>>,
{
    pub(crate) fn deciding(
        ticket: Ticket<J>,
        reply: Undecided,
        service: S,
        request: Request<B>,
    ) -> Self {
        Self { state: State::Deciding { reply, held: Some(Held { service, request }) }, ticket }
    }

    pub(crate) fn waiting(
        ticket: Ticket<J>,
        wait: Duration,
        service: S,
        request: Request<B>,
    ) -> Self {
        let wait = Wait::new(wait, &ticket.shared().live.closing);
        Self { state: State::Waiting { wait, held: Some(Held { service, request }) }, ticket }
    }

    pub(crate) fn in_turn(ticket: Ticket<J>, service: S, request: Request<B>) -> Self {
        Self { state: State::Readying { held: Some(Held { service, request }) }, ticket }
    }

    #[inline]
    pub(crate) fn calling(ticket: Ticket<J>, future: S::Future) -> Self {
        Self { state: State::Calling { future }, ticket }
    }

    pub(crate) fn refused(mut ticket: Ticket<J>, refusal: Refusal, parts: &Parts, body: B) -> Self
    where
        B: 'static,
    {
        Self { state: refuse(&mut ticket, refusal, parts, body), ticket }
    }
}

#[inline(always)]
fn refuse<S, B: 'static, F, J>(
    ticket: &mut Ticket<J>,
    refusal: Refusal,
    parts: &Parts,
    body: B,
) -> State<S, B, F> {
    ticket.refused(parts, &refusal);
    let drains = &ticket.shared().options.drains;
    State::Refused { refusal, rest: Drain::rest(drains, parts, body) }
}

#[inline]
fn call<S, B, J>(
    ticket: &mut Ticket<J>,
    service: &mut S,
    mut request: Request<B>,
) -> State<S, B, S::Future>
where
    S: Service<Request<B>>,
{
    ticket.calling(request.extensions_mut());
    State::Calling { future: service.call(request) }
}

/// What follows from a verdict, with a service that is ready.
fn decided<S, B, J>(
    ticket: &mut Ticket<J>,
    verdict: Verdict,
    mut service: S,
    parts: Parts,
    body: B,
) -> State<S, B, S::Future>
where
    S: Service<Request<B>> + Clone,
    B: 'static,
{
    match verdict {
        Verdict::Pass => call(ticket, &mut service, Request::from_parts(parts, body)),
        Verdict::PassIn(wait) => State::Waiting {
            wait: Wait::new(wait, &ticket.shared().live.closing),
            held: Some(Held {
                service: service.clone(),
                request: Request::from_parts(parts, body),
            }),
        },
        Verdict::Refuse(refusal) => refuse(ticket, refusal, &parts, body),
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
                StateProj::Calling { future } => {
                    // Told where it is: a response is large enough for each move of it to be felt.
                    let mut answer = future.poll(cx);
                    if let Poll::Ready(Ok(response)) = &mut answer {
                        if this.ticket.is_corrected_by(response) {
                            return answer.map_ok(|response| this.ticket.correct(response));
                        }
                        this.ticket.tell(response);
                    }
                    return answer;
                }
                StateProj::Refused { refusal, rest } => {
                    if let Some(rest) = rest {
                        ready!(rest.poll(cx));
                    }
                    return Poll::Ready(Ok(this.ticket.refuse(refusal)));
                }
                _ => ready!(advance(this.state.as_mut(), this.ticket, cx))?,
            }
        }
    }
}

/// Goes on to the next state, towards the call of the service or a refusal: apart, since requests
/// that are decided at once have nothing of it to carry.
#[inline(never)]
fn advance<S, B, J>(
    mut state: Pin<&mut State<S, B, S::Future>>,
    ticket: &mut Ticket<J>,
    cx: &mut Context<'_>,
) -> Poll<Result<(), S::Error>>
where
    S: Service<Request<B>> + Clone,
    B: 'static,
{
    let next = match state.as_mut().project() {
        StateProj::Deciding { reply, held } => {
            let answer = ready!(reply.poll(cx));
            let Held { service, request } = held.take().expect(DONE);
            let (parts, body) = request.into_parts();
            let verdict = ticket.verdict(&parts, answer);
            decided(ticket, verdict, service, parts, body)
        }
        StateProj::Waiting { wait, held } => match ready!(wait.poll(cx)) {
            Ok(()) => State::Readying { held: held.take() },
            Err(Closed) => {
                ticket.give_back();
                let (parts, body) = held.take().expect(DONE).request.into_parts();
                refuse(ticket, Refusal::Closed, &parts, body)
            }
        },
        StateProj::Readying { held } => {
            ready!(held.as_mut().expect(DONE).service.poll_ready(cx))?;
            let Held { mut service, request } = held.take().expect(DONE);
            if !ticket.is_late() {
                call(ticket, &mut service, request)
            } else if ticket.turn(cx).is_pending() {
                State::Behind { held: Some(Held { service: service.clone(), request }) }
            } else {
                let (parts, body) = request.into_parts();
                match ticket.ask_again(&parts) {
                    Ok(verdict) => decided(ticket, verdict, service, parts, body),
                    Err(reply) => {
                        let request = Request::from_parts(parts, body);
                        State::Deciding { reply, held: Some(Held { service, request }) }
                    }
                }
            }
        }
        StateProj::Behind { held } => {
            ready!(ticket.turn(cx));
            State::Readying { held: held.take() }
        }
        StateProj::Calling { .. } | StateProj::Refused { .. } => return Poll::Ready(Ok(())),
    };
    state.set(next);
    Poll::Ready(Ok(()))
}

impl<S, B, J> fmt::Debug for ResponseFuture<S, B, J>
where
    S: Service<Request<B>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.state {
            State::Deciding { .. } => "ResponseFuture(deciding)",
            State::Waiting { .. } => "ResponseFuture(waiting)",
            State::Readying { .. } => "ResponseFuture(readying)",
            State::Behind { .. } => "ResponseFuture(behind)",
            State::Calling { .. } => "ResponseFuture(calling)",
            State::Refused { .. } => "ResponseFuture(refused)",
        })
    }
}
