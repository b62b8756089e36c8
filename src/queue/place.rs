//! The place of a request in its line. A timer wakes the request when its turn may have come.

use std::sync::Arc;
use std::task::{Context, Poll};

use super::line::{LineState, Turn, Visit};
use super::{Claim, Queue, Terms, WaitingLine};
use crate::decision::Decision;
use crate::store::StoreError;
use crate::sync::{self, Sleep};

/// Dropping it removes the request.
pub(crate) struct Place {
    queue: Arc<Queue>,
    line: Arc<WaitingLine>,
    number: u64,
    alarm: Option<Sleep>,
}

impl Place {
    /// Also returns whether the request has to wait.
    pub(crate) fn join(queue: &Arc<Queue>, claim: Claim) -> Result<(Self, bool), Box<Decision>> {
        let line = queue.lines.line_for(&claim);
        let (number, has_to_wait) = line.visit(queue, |state, visit| state.join(&claim, visit))?;
        Ok((Self { queue: Arc::clone(queue), line, number, alarm: None }, has_to_wait))
    }

    pub(crate) fn poll(
        &mut self,
        mut changed: Option<Terms>,
        mut cx: Option<&mut Context<'_>>,
    ) -> Poll<Turn> {
        loop {
            let waker = cx.as_ref().map(|cx| cx.waker());
            let (turn, alarm) = self.line.visit(&self.queue, |state, visit| {
                state.turn(self.number, changed.take(), waker, visit)
            });
            let turn = turn.map_or(Poll::Pending, Poll::Ready);
            // A request that asks may have to wait for its service, until then.
            let waits = matches!(turn, Poll::Pending | Poll::Ready(Turn::Ask | Turn::GiveBack));
            let Some(cx) = cx.as_mut().filter(|_| waits) else { return turn };
            let sleep = self.alarm.get_or_insert_with(|| Sleep::until(alarm));
            sleep.set(alarm);
            if sleep.poll(cx).is_pending() {
                return turn;
            }
        }
    }

    pub(crate) fn ask(&self) -> bool {
        self.line.visit(&self.queue, |state, visit| state.ask(self.number, visit))
    }

    pub(crate) fn note(&self, answer: &Result<Decision, StoreError>) {
        self.line.visit(&self.queue, |state, visit| state.note(self.number, answer, visit));
    }

    pub(crate) fn note_returned(&self) {
        self.line.visit(&self.queue, |state, visit| state.note_returned(self.number, visit));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.line.visit(&self.queue, |state, visit| state.leave(self.number, visit));
    }
}

impl WaitingLine {
    fn visit<T>(
        &self,
        queue: &Queue,
        change: impl FnOnce(&mut LineState, &mut Visit<'_>) -> T,
    ) -> T {
        let mut visit = Visit::new(queue);
        let mut state = sync::lock(&self.state);
        let before = state.waiting;
        let changed = change(&mut state, &mut visit);
        let more_waiting = state.waiting as i64 - before as i64;
        drop(state);
        if more_waiting != 0 || visit.waited.is_some() {
            for counter in &*self.counters {
                let observed = queue.limits.limiters()[counter.limit].scope().observe();
                observed.waits(more_waiting);
                visit.waited.into_iter().for_each(|time| observed.waited(time));
            }
        }
        visit.wake();
        changed
    }
}
