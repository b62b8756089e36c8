//! A request in the queue: it is charged when it is its turn.

use std::mem;
use std::task::{Context, Poll};

use http::request::Parts;

use super::{LimitedRequest, Next, PendingDecision, RequestLine};
use crate::middleware::rejection::Reason;
use crate::middleware::service::Current;
use crate::queue::{Claim, Counter, Place, Terms, Tokens, Turn};
use crate::quota::Plan;
use crate::sync::Instant;

pub(super) struct InQueue {
    pub(super) place: Place,
    pub(super) asked: Option<PendingDecision>,
    /// Since the last look.
    has_changed: bool,
}

impl LimitedRequest {
    pub(super) fn may_wait(&self) -> bool {
        self.lines().any(|line| line.cost > 0)
            && self.lines().all(|line| self.quotas_of(line).can_grant(line.cost))
    }

    /// The service is ready.
    #[inline(never)]
    pub(super) fn join_queue(&mut self, parts: &Parts, arrived: Option<Instant>) -> Next {
        let Some(queue) = &self.current.shared.queue else { return Next::Call };
        let arrived = arrived.unwrap_or_else(Instant::now);
        let place = Place::new(queue, self.claim(arrived));
        self.rare().waiting = Some(Box::new(InQueue { place, asked: None, has_changed: false }));
        match self.poll_queue(parts, true, None) {
            Poll::Ready(next) => next,
            Poll::Pending => Next::Wait,
        }
    }

    pub(crate) fn is_asking(&self) -> bool {
        let waiting = self.rare.as_ref().and_then(|rare| rare.waiting.as_ref());
        waiting.is_some_and(|of| of.asked.is_some())
    }

    /// [`Next::Ask`]: again, once the service is ready. [`Next::Wait`]: again, without it.
    pub(crate) fn poll_queue(
        &mut self,
        parts: &Parts,
        is_ready: bool,
        mut cx: Option<&mut Context<'_>>,
    ) -> Poll<Next> {
        // Taken, so that a request whose hook panics has left the queue.
        let waiting = self.rare.as_mut().and_then(|rare| rare.waiting.take());
        let Some(mut waiting) = waiting else { return Poll::Pending };
        let next = loop {
            let answer = if let Some(asked) = &mut waiting.asked {
                let Some(cx) = cx else { break Poll::Pending };
                let Poll::Ready(answer) = asked.poll(cx) else {
                    waiting.place.stay(cx);
                    break Poll::Pending;
                };
                answer
            } else {
                // First, and once: a change after this is one of the next look.
                waiting.has_changed |= self.renew();
                if self.is_eased(waiting.has_changed) {
                    if !is_ready {
                        break Poll::Ready(Next::Ask);
                    }
                    let arrived = waiting.place.claim.arrived;
                    drop(waiting);
                    return Poll::Ready(self.begin_again(parts, arrived));
                }
                let changed = mem::take(&mut waiting.has_changed).then(|| self.terms());
                match waiting.place.look(changed, is_ready, cx.as_deref_mut()) {
                    Turn::Wait => break Poll::Pending,
                    Turn::Ask if !is_ready => break Poll::Ready(Next::Ask),
                    Turn::Ask => match self.send().into_now() {
                        Ok(answer) => answer,
                        Err(later) => {
                            // A request that leaves the queue keeps nothing.
                            let refund = Some(self.refundable());
                            waiting.asked = Some(PendingDecision::new(later, refund));
                            continue;
                        }
                    },
                    Turn::Refused(refusal) => {
                        return Poll::Ready(self.refused(Reason::RateLimited(*refusal)));
                    }
                    Turn::Unanswered => return Poll::Ready(self.refused(Reason::StoreFailed)),
                    Turn::Closed => return Poll::Ready(self.refused(Reason::QueueClosed)),
                }
            };
            waiting.asked = None;
            if !waiting.place.note(&answer) {
                drop(waiting);
                return Poll::Ready(self.decide(parts, answer));
            }
            break Poll::Ready(Next::Wait);
        };
        self.rare().waiting = Some(waiting);
        next
    }

    /// Some limits were lifted, or are in shadow mode by now.
    fn is_eased(&self, has_changed: bool) -> bool {
        self.lines().any(|line| {
            let is_shadow = self.settings_of(line).limiter.live().is_shadow();
            is_shadow || has_changed && self.is_lifted(line)
        })
    }

    /// A plan's quotas, and a key's own, stay as they were when the request came (S40).
    pub(super) fn is_lifted(&self, line: &RequestLine) -> bool {
        let live = self.settings_of(line).limiter.live();
        line.quotas.is_none() && live.quotas() == Some(Plan::UNLIMITED)
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
}
