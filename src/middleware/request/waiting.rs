//! A request in the queue: it is charged when it is its turn.

use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::request::Parts;

use super::{LimitedRequest, Next, PendingDecision, RequestLine};
use crate::decision::Decision;
use crate::middleware::rejection::Reason;
use crate::queue::{Claim, Place, Terms, Tokens, Turn};
use crate::quota::Plan;
use crate::store::{Charge, Reply};
use crate::sync::Instant;

impl LimitedRequest {
    pub(super) fn may_wait(&self) -> bool {
        self.lines().any(|line| line.cost > 0) && !self.lines().any(|line| self.never_fits(line))
    }

    /// Its cost is above what a quota grants (S8).
    fn never_fits(&self, line: &RequestLine) -> bool {
        !self.quotas_of(line).can_grant(line.cost)
    }

    /// The service is ready.
    #[inline(never)]
    pub(super) fn join_queue(&mut self, parts: &Parts, arrived: Option<Instant>) -> Next {
        let Some(queue) = &self.current.options.queue else { return Next::Call };
        let arrived = arrived.unwrap_or_else(Instant::now);
        let place = Place::new(queue, self.claim(arrived));
        self.rare().queued = Some(Box::new(place));
        self.poll(parts, true, None)
    }

    /// Its charge is in flight.
    pub(crate) fn is_in_flight(&self) -> bool {
        self.rare.as_ref().is_some_and(|rare| rare.in_flight.is_some())
    }

    /// Polls a request that waits for an answer of the store, or in the queue.
    pub(crate) fn poll(
        &mut self,
        parts: &Parts,
        mut is_ready: bool,
        mut cx: Option<&mut Context<'_>>,
    ) -> Next {
        // Taken, so that a request whose hook panics has left the queue.
        let rare = self.rare();
        let (mut in_flight, mut queued) = (rare.in_flight.take(), rare.queued.take());
        let next = loop {
            let answer = match (&mut in_flight, &mut queued) {
                (Some(charge), _) => {
                    let Some(cx) = &mut cx else { break Next::Wait };
                    match charge.poll(cx) {
                        Poll::Ready(answer) => answer,
                        Poll::Pending => {
                            queued.iter_mut().for_each(|place| place.stay(cx));
                            break Next::Wait;
                        }
                    }
                }
                (None, Some(place)) => {
                    // First, and once: a change after this is one of the next look.
                    place.has_changed |= self.renew();
                    let is_eased = |line: &_| self.is_eased(line, place.has_changed);
                    // A limit is below the request's cost by now.
                    let never = self
                        .lines()
                        .position(|of| place.has_changed && self.never_fits(of) && !is_eased(of));
                    let need_not_wait = never.is_some() || self.lines().any(is_eased);
                    if need_not_wait && is_ready {
                        let arrived = place.claim.arrived;
                        drop(queued);
                        return self.restart(parts, arrived, cx);
                    }
                    // One that is still limited waits for its service no longer than before.
                    let changed = place.has_changed.then(|| self.terms());
                    place.has_changed &= need_not_wait;
                    let reply = match place.look(changed, is_ready, cx.as_deref_mut()) {
                        Turn::Wait if need_not_wait => break Next::AwaitService,
                        Turn::Wait => break Next::Wait,
                        Turn::Ask if !is_ready => break Next::AwaitService,
                        Turn::Ask => self.send(),
                        Turn::Refused(refusal) => {
                            queued = None;
                            self.refusal(never, refusal)
                        }
                        Turn::Unanswered => return self.refuse(Reason::StoreFailed),
                        Turn::Closed => return self.refuse(Reason::QueueClosed),
                    };
                    match reply.into_now() {
                        Ok(answer) => answer,
                        Err(later) => {
                            // A request that leaves the queue keeps nothing.
                            let refund = Some(self.refundable());
                            in_flight = Some(PendingDecision::new(later, refund));
                            continue;
                        }
                    }
                }
                (None, None) => return Next::Wait,
            };
            in_flight = None;
            if !queued.as_ref().is_some_and(|place| place.note(&answer)) {
                drop(queued);
                return self.take_answer(parts, answer);
            }
            is_ready = false;
        };
        let rare = self.rare();
        (rare.in_flight, rare.queued) = (in_flight, queued);
        next
    }

    /// The queue's refusal, for good if this line never fits (S8). If the store fails, it stays as it
    /// is: the service is not ready to be called.
    fn refusal(&self, never: Option<usize>, refusal: Box<Decision>) -> Reply<Decision> {
        let Some(never) = never else { return Reply::now(*refusal) };
        let (limiter, account, cost) = self.charged_line(self.line(never));
        let reply = limiter.store.charge(Charge::new(account, cost));
        Reply::later(async move {
            let refused = reply.await.ok().filter(|of| !of.is_allowed());
            let line = |place, of| refused.clone().filter(|_| place == never).unwrap_or(of);
            Ok(refusal.map_lines(line))
        })
    }

    /// The limit was lifted, or is in shadow mode by now.
    fn is_eased(&self, line: &RequestLine, has_changed: bool) -> bool {
        self.settings_of(line).limiter.live.is_shadow() || has_changed && self.is_lifted(line)
    }

    /// A plan's quotas, and a key's own, stay as they were when the request came (S40).
    pub(super) fn is_lifted(&self, line: &RequestLine) -> bool {
        let live = &self.settings_of(line).limiter.live;
        line.quotas.is_none() && live.quotas() == Some(Plan::UNLIMITED)
    }

    fn claim(&self, arrived: Instant) -> Claim {
        let counter = |line: &RequestLine| (line.limit, line.key.clone());
        Claim {
            counters: self.lines().map(counter).collect(),
            terms: self.terms(),
            cost: Tokens::from_costs(self.lines().map(|line| line.cost)),
            arrived,
        }
    }

    fn terms(&self) -> Terms {
        self.lines().map(|line| *self.quotas_of(line)).collect()
    }

    fn renew(&mut self) -> bool {
        let changed = !self.current.is_current_now();
        if changed {
            self.current = Arc::new(self.current.renewed());
            // Nobody waits for a limit in shadow mode, and `is_eased` does not look at it.
            let mut aside = mem::take(&mut self.rare().aside);
            aside.retain(|(line, _)| !self.is_lifted(line));
            self.rare().aside = aside;
        }
        changed
    }
}
