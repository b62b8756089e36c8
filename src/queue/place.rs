//! The place of a request among those that wait. A timer wakes it when its turn may have come.

use std::sync::Arc;
use std::task::{Context, Poll};

use super::waiting::{Look, Turn, Visit, Waiting};
use super::{Claim, KeyQueue, Queue, Terms};
use crate::decision::Decision;
use crate::observe::{self, Timed};
use crate::store::StoreError;
use crate::sync::{self, Instant, Sleep};

/// Dropping it removes the request.
pub(crate) struct Place {
    of_key: Arc<KeyQueue>,
    pub(crate) claim: Claim,
    /// `None` before the first look.
    number: Option<u64>,
    /// When its charge was.
    sent: Instant,
    /// The quotas are others than at the last look.
    pub(crate) has_changed: bool,
    alarm: Option<Sleep>,
}

impl Place {
    pub(crate) fn new(queue: &Arc<Queue>, claim: Claim) -> Self {
        let (of_key, sent) = (queue.find_or_add(&claim), claim.arrived);
        Self { of_key, claim, number: None, sent, has_changed: false, alarm: None }
    }

    /// `changed` are the request's quotas, if they are others now. Once it asks, its charge has to
    /// be sent.
    pub(crate) fn look(
        &mut self,
        changed: Option<Terms>,
        is_ready: bool,
        cx: Option<&mut Context<'_>>,
    ) -> Turn {
        let (waker, has_changed) = (cx.as_ref().map(|cx| cx.waker()), changed.is_some());
        if let Some(terms) = changed {
            self.claim.terms = terms;
        }
        let can_wait = waker.is_none() || self.alarm().is_some();
        let look = Look { waker, is_ready, can_wait, has_changed };
        let Self { claim, number, sent, .. } = self;
        let (turn, until) = self.of_key.visit(|waiting, visit| {
            *sent = visit.now;
            waiting.look(number, claim, &look, visit)
        });
        if let (Turn::Wait | Turn::Ask, Some(cx)) = (&turn, cx) {
            self.wake_at(until, cx);
        }
        turn
    }

    /// While its charge is in flight.
    pub(crate) fn stay(&mut self, cx: &mut Context<'_>) {
        let Some(number) = self.number else { return };
        let next_poll = self.of_key.visit(|waiting, visit| waiting.note_polled(number, visit));
        self.wake_at(next_poll, cx);
    }

    /// Returns `false` if the request no longer waits.
    pub(crate) fn note(&self, answer: &Result<Decision, StoreError>) -> bool {
        let Some(number) = self.number else { return false };
        self.of_key
            .visit(|waiting, visit| waiting.note(number, &self.claim, self.sent, answer, visit))
    }

    fn alarm(&mut self) -> Option<&mut Sleep> {
        if self.alarm.is_none() {
            self.alarm = Sleep::until(self.sent);
        }
        self.alarm.as_mut()
    }

    fn wake_at(&mut self, until: Instant, cx: &mut Context<'_>) {
        let Some(alarm) = self.alarm() else { return };
        alarm.set(until);
        if alarm.poll(cx) == Poll::Ready(()) {
            cx.waker().wake_by_ref();
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.of_key.visit(|waiting, visit| waiting.remove(number, visit));
        }
    }
}

impl KeyQueue {
    fn visit<T>(&self, change: impl FnOnce(&mut Waiting, &mut Visit<'_>) -> T) -> T {
        let mut visit = Visit::new(&self.queue);
        let mut waiting = sync::lock(&self.waiting);
        let before = waiting.have_to_wait;
        let changed = change(&mut waiting, &mut visit);
        let more = waiting.have_to_wait as i64 - before as i64;
        drop(waiting);
        if more != 0 || visit.waited.is_some() {
            for (limit, _) in &*self.counters {
                let observed = self.queue.limits.limiters[*limit].scope.observe();
                observed.waits(more);
                visit.waited.into_iter().for_each(|time| observed.took(Timed::Wait, time));
            }
        }
        if visit.cannot_wait {
            observe::mistake(
                &"requests can't wait in a queue here, where there are no timers, and are refused. \
                  Enable the feature `tokio`, and call `enable_time` or `enable_all` on the \
                  builder of the runtime",
            );
        }
        visit.wake();
        changed
    }
}
