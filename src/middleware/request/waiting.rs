//! A request in the queue: it is charged when it is its turn.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::request::Parts;

use super::{LimitedRequest, Next, PendingDecision, Rare, RequestLine};
use crate::decision::Decision;
use crate::middleware::rejection::Reason;
use crate::middleware::service::Current;
use crate::queue::{Claim, Counter, Place, Terms, Tokens, Turn};
use crate::store::{Reply, StoreError};
use crate::sync::Instant;

pub(super) struct Waiting {
    place: Place,
    arrived: Instant,
    asked: Option<PendingDecision>,
    /// Until those before the request have gone. Tokens are returned if it is dropped.
    answer: Option<Result<Decision, StoreError>>,
    returning: Option<Reply<()>>,
}

impl<J> LimitedRequest<J> {
    pub(super) fn may_wait(&self) -> bool {
        self.lines().any(|line| line.cost > 0)
            && self.lines().all(|line| self.quotas_of(line).can_grant(line.cost))
    }

    #[inline(never)]
    pub(super) fn join_queue(&mut self, parts: &Parts, arrived: Option<Instant>) -> Next {
        let Some(queue) = &self.current.shared.queue else { return Next::Call };
        let arrived = arrived.unwrap_or_else(Instant::now);
        let (place, has_to_wait) = match Place::join(queue, self.claim(arrived)) {
            Ok(joined) => joined,
            Err(refusal) => return self.refused(Reason::RateLimited(*refusal)),
        };
        self.rare().waiting =
            Some(Waiting { place, arrived, asked: None, answer: None, returning: None });
        if has_to_wait {
            return Next::Wait;
        }
        let mut next = self.poll_queue(parts, None);
        if let Poll::Ready(Next::Ask) = next {
            next = match self.ask(parts) {
                Some(next) => Poll::Ready(next),
                None => self.poll_queue(parts, None),
            };
        }
        match next {
            Poll::Ready(next) => next,
            Poll::Pending => Next::Wait,
        }
    }

    pub(crate) fn is_asking(&self) -> bool {
        self.waiting().is_some_and(|of| of.asked.is_some())
    }

    fn waiting(&self) -> Option<&Waiting> {
        self.rare.as_ref()?.waiting.as_ref()
    }

    fn is_charged(&self) -> bool {
        self.waiting().is_some_and(|of| of.asked.is_some() || of.answer.is_some())
    }

    fn waits_for_shadow(&self) -> bool {
        self.lines().any(|line| {
            let limiter = &self.settings_of(line).limiter;
            // Or a shadow mode that has ended meanwhile would cost the request its place.
            limiter.end_changes();
            limiter.live().is_shadow()
        })
    }

    /// `None`: the request waits for the answer in the queue.
    pub(crate) fn ask(&mut self, parts: &Parts) -> Option<Next> {
        let mut waiting = self.rare.as_mut().and_then(|rare| rare.waiting.take())?;
        if self.waits_for_shadow() {
            let arrived = waiting.arrived;
            drop(waiting);
            self.renew();
            return Some(self.begin_again(parts, arrived));
        }
        if waiting.place.ask() {
            match self.send().into_now() {
                Ok(answer) => waiting.note(answer),
                // A request that leaves the queue keeps nothing.
                Err(later) => {
                    waiting.asked = Some(PendingDecision::new(later, Some(self.correction())));
                }
            }
        }
        self.rare().waiting = Some(waiting);
        None
    }

    /// [`Next::Wait`]: it was refused, and goes on waiting without its service.
    pub(crate) fn poll_queue(
        &mut self,
        parts: &Parts,
        mut cx: Option<&mut Context<'_>>,
    ) -> Poll<Next> {
        // The answer to a charge is of the quotas under which it was sent.
        let is_charged = self.is_charged();
        if !is_charged && self.waits_for_shadow() {
            return Poll::Ready(Next::Ask);
        }
        let changed = (!is_charged && self.renew()).then(|| self.terms());
        let Some(waiting) = self.rare.as_mut().and_then(|rare| rare.waiting.as_mut()) else {
            return Poll::Ready(Next::Call);
        };
        let mut is_back = false;
        if let (Some(asked), Some(cx)) = (&mut waiting.asked, &mut cx)
            && let Poll::Ready(answer) = asked.poll(cx)
        {
            waiting.asked = None;
            waiting.note(answer);
            is_back = waiting.answer.is_none();
        }
        if let (Some(returning), Some(cx)) = (&mut waiting.returning, &mut cx)
            && Pin::new(returning).poll(cx).is_ready()
        {
            waiting.returning = None;
            waiting.place.note_returned();
        }
        let turn = waiting.place.poll(changed, cx);
        Poll::Ready(match turn {
            Poll::Pending if is_back => Next::Wait,
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Turn::Ask) => Next::Ask,
            Poll::Ready(Turn::Go) => match waiting.answer.take() {
                Some(answer) => self.decide(parts, answer),
                None => Next::Wait,
            },
            Poll::Ready(Turn::GiveBack) if waiting.returning.is_some() => return Poll::Pending,
            Poll::Ready(Turn::GiveBack) => {
                let returning = self.give_back_granted().or(Some(Reply::now(())));
                if let Some(waiting) = &mut self.rare().waiting {
                    waiting.returning = returning;
                }
                Next::Wait
            }
            Poll::Ready(Turn::Refused(refusal)) => self.refused(Reason::RateLimited(*refusal)),
            Poll::Ready(Turn::Unanswered) => self.refused(Reason::StoreFailed),
            Poll::Ready(Turn::Closed) => self.refused(Reason::QueueClosed),
        })
    }

    pub(super) fn give_back_granted(&mut self) -> Option<Reply<()>> {
        let waiting = self.rare.as_mut()?.waiting.as_mut()?;
        let decision = waiting.answer.take()?.ok()?;
        Some(self.correction().give_back(&decision))
    }

    fn claim(&self, arrived: Instant) -> Claim {
        let lines = (0..self.count()).map(|place| self.line(place));
        let counter = |line: &RequestLine| Counter { limit: line.limit, key: line.key.clone() };
        Claim {
            counters: lines.clone().map(counter).collect(),
            terms: self.terms(),
            cost: Tokens::of(lines.map(|line| line.cost)),
            arrived,
        }
    }

    fn terms(&self) -> Terms {
        (0..self.count()).map(|place| *self.quotas_of(self.line(place))).collect()
    }

    fn renew(&mut self) -> bool {
        let shared = &self.current.shared;
        let changed = !self.current.is_current_now();
        if changed {
            self.current = Current::new(shared);
        }
        changed
    }

    #[inline]
    pub(crate) fn leave_queue(&mut self) {
        #[inline(never)]
        fn leave(rare: &mut Rare) {
            rare.waiting = None;
        }
        if let Some(rare) = &mut self.rare {
            leave(rare);
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(returning) = self.returning.take() {
            returning.detach();
        }
    }
}

impl Waiting {
    fn note(&mut self, answer: Result<Decision, StoreError>) {
        self.place.note(&answer);
        // A refusal has taken nothing, and the place knows of it.
        self.answer = Some(answer)
            .filter(|answer| answer.as_ref().is_ok_and(Decision::allowed) || answer.is_err());
    }
}
