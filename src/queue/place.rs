//! The place of a request in its line. A timer wakes the request when its turn may have come.

use std::sync::Arc;
use std::task::{Context, Poll};

use super::claim::{Claim, Terms};
use super::line::{LineState, Turn, Visit};
use super::{Queue, WaitingLine};
use crate::decision::Decision;
use crate::store::StoreError;
use crate::sync;
use crate::timer::{Instant, Sleep};

/// The place of a request in its line. Dropping it removes the request.
pub(crate) struct Place {
    queue: Arc<Queue>,
    line: Arc<WaitingLine>,
    number: u64,
    /// When the request's last charge was sent.
    sent: Instant,
    alarm: Option<Sleep>,
}

impl Place {
    /// Joins the line of the claim's counters as the last request, or returns a refusal. Also
    /// returns whether the request has to wait.
    pub(crate) fn join(queue: &Arc<Queue>, claim: Claim) -> Result<(Self, bool), Decision> {
        let line = queue.lines.line_for(&claim);
        let mut visit = Visit::new(queue);
        let (number, has_to_wait) = sync::lock(&line.state).join(&claim, &mut visit)?;
        let sent = Instant::now();
        let place = Self { queue: Arc::clone(queue), line, number, sent, alarm: None };
        place.apply(visit);
        Ok((place, has_to_wait))
    }

    /// Waits until the request can do something. `changed` are its quotas, if they have changed.
    pub(crate) fn poll(
        &mut self,
        mut changed: Option<Terms>,
        mut cx: Option<&mut Context<'_>>,
    ) -> Poll<Turn> {
        loop {
            let (mut visit, waker) = (Visit::new(&self.queue), cx.as_ref().map(|cx| cx.waker()));
            let mut state = sync::lock(&self.line.state);
            let (turn, alarm) = state.turn(self.number, changed.take(), waker, &mut visit);
            drop(state);
            self.apply(visit);
            let turn = turn.map_or(Poll::Pending, Poll::Ready);
            // A request that asks may have to wait for its service, until then.
            let waits = matches!(turn, Poll::Pending | Poll::Ready(Turn::Ask));
            let Some(cx) = cx.as_mut().filter(|_| waits) else { return turn };
            let sleep = self.alarm.get_or_insert_with(|| Sleep::until(alarm));
            sleep.set(alarm);
            if sleep.poll(cx).is_pending() {
                return turn;
            }
        }
    }

    /// Notes that the request is being charged, unless it was refused since its turn came.
    pub(crate) fn ask(&mut self) -> bool {
        self.sent = Instant::now();
        self.update(|state, number, visit| state.ask(number, visit))
    }

    /// Notes the answer to the charge.
    pub(crate) fn note(&self, answer: &Result<Decision, StoreError>) {
        self.update(|state, number, visit| state.note(number, answer, self.sent, visit));
    }

    fn update<T>(&self, change: impl FnOnce(&mut LineState, u64, &mut Visit<'_>) -> T) -> T {
        let mut visit = Visit::new(&self.queue);
        let changed = change(&mut sync::lock(&self.line.state), self.number, &mut visit);
        self.apply(visit);
        changed
    }

    /// Applies what follows from a visit. The line must not be locked.
    fn apply(&self, visit: Visit<'_>) {
        if visit.more_waiting != 0 || visit.waited.is_some() {
            for counter in &*self.line.counters {
                let limiter = &self.queue.limits.limiters()[counter.limit];
                let observed = limiter.scope().observe();
                observed.waits(visit.more_waiting);
                visit.waited.into_iter().for_each(|time| observed.waited(time));
            }
        }
        visit.wake();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.update(|state, number, visit| state.leave(number, visit));
    }
}
