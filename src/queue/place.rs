//! The place of a request in its line. A timer wakes the request when its turn may have come.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use super::claim::{Claim, Terms};
use super::line::{Effects, LineState, Poller, Turn};
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
        let (poller, mut effects) = (queue.poller(), Effects::default());
        let (number, has_to_wait) = sync::lock(&line.state).join(&claim, poller, &mut effects)?;
        let place = Self { queue: Arc::clone(queue), line, number, sent: poller.now, alarm: None };
        place.apply(effects);
        Ok((place, has_to_wait))
    }

    /// Waits until the request can do something. `changed` are its quotas, if they have changed.
    pub(crate) fn poll(
        &mut self,
        mut changed: Option<Terms>,
        mut cx: Option<&mut Context<'_>>,
    ) -> Poll<Turn> {
        loop {
            let (mut poller, mut effects) = (self.queue.poller(), Effects::default());
            poller.joins = cx.is_none();
            let waker = cx.as_ref().map(|cx| cx.waker());
            let (turn, alarm) = sync::lock(&self.line.state).turn(
                self.number,
                changed.take(),
                waker,
                poller,
                &mut effects,
            );
            self.apply(effects);
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

    /// Notes that the request is being charged.
    pub(crate) fn ask(&mut self) {
        self.sent = Instant::now();
        self.update(|state, number, effects| state.ask(number, self.sent, effects));
    }

    /// Notes the answer to the charge.
    pub(crate) fn note(&self, answer: &Result<Decision, StoreError>) {
        let poller = self.queue.poller();
        self.update(|state, number, effects| {
            state.note(number, answer, self.sent, poller, effects);
        });
    }

    fn update(&self, change: impl FnOnce(&mut LineState, u64, &mut Effects)) {
        let mut effects = Effects::default();
        change(&mut sync::lock(&self.line.state), self.number, &mut effects);
        self.apply(effects);
    }

    /// Applies the effects of a change. The line must not be locked.
    fn apply(&self, effects: Effects) {
        if effects.more_waiting != 0 || effects.waited.is_some() {
            for counter in &*self.line.counters {
                let limiter = &self.queue.limits.limiters()[counter.limit];
                let observed = limiter.scope().observe();
                observed.waits(effects.more_waiting);
                effects.waited.into_iter().for_each(|time| observed.waited(time));
            }
        }
        effects.wake();
    }
}

impl Queue {
    fn poller(&self) -> Poller<'_> {
        let closed = self.lines.closed.load(Ordering::Acquire);
        Poller { queue: self, now: Instant::now(), joins: false, closed }
    }

    /// Returns whether other nodes charge the same keys. All limits count in one store.
    pub(super) fn is_shared(&self) -> bool {
        self.limits.limiters()[0].is_shared()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.update(LineState::leave);
    }
}
