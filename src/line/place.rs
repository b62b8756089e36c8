//! The place of a request in its line. A timer wakes the request when its turn may have come.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use super::claim::{Claim, Terms, Tokens};
use super::state::{Effects, End, Poller};
use super::turn::NextStep;
use super::{Queue, WaitingLine};
use crate::decision::Decision;
use crate::store::{Reply, StoreError};
use crate::timer::{Instant, Sleep};

/// The place of a request in its line. Dropping it removes the request.
pub(crate) struct Place {
    queue: Arc<Queue>,
    line: Arc<WaitingLine>,
    terms: Terms,
    number: u64,
    alarm: Option<Sleep>,
}

impl Place {
    /// Joins the line of the claim's counters as the last request, or returns a refusal.
    pub(crate) fn join(queue: &Arc<Queue>, claim: Claim) -> Result<Self, Decision> {
        let line = queue.lines.line_for(&claim);
        let poller = poller(queue, &claim.terms);
        let mut effects = Effects::default();
        let number = line.lock().join_line(&claim, &poller, &mut effects)?;
        let (queue, terms) = (Arc::clone(queue), claim.terms);
        let place = Self { queue, line, terms, number, alarm: None };
        place.apply(effects);
        Ok(place)
    }

    /// Waits for the request's turn. The request is then charged once its service is ready.
    pub(crate) fn poll_turn(
        &mut self,
        changed: Option<Terms>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), End>> {
        self.poll(false, changed, Some(cx)).map_ok(|_| ())
    }

    /// Charges the request, whose service is ready. Without a context, an answer counts only if it
    /// is there at once.
    pub(crate) fn poll_charge(
        &mut self,
        changed: Option<Terms>,
        cx: Option<&mut Context<'_>>,
    ) -> Poll<Result<Decision, End>> {
        self.poll(true, changed, cx).map(|end| end.and_then(|granted| granted.ok_or(End::LetGo)))
    }

    /// Does the request's next steps until it has to wait. Returns `None` on the request's turn,
    /// and its decision once it is charged.
    fn poll(
        &mut self,
        ready: bool,
        changed: Option<Terms>,
        mut cx: Option<&mut Context<'_>>,
    ) -> Poll<Result<Option<Decision>, End>> {
        if let Some(changed) = changed {
            self.terms = changed;
        }
        loop {
            let (poller, mut effects) = (poller(&self.queue, &self.terms), Effects::default());
            let mut state = self.line.lock();
            if let Some(cx) = &cx {
                state.set_waker(self.number, cx.waker(), &mut effects);
            }
            let step = state.next_step(self.number, ready, &poller, &mut effects);
            drop(state);
            self.apply(effects);
            let (alarm, turn) = match step {
                NextStep::Wait(alarm) => (alarm, Poll::Pending),
                NextStep::Turn(alarm) => (alarm, Poll::Ready(Ok(None))),
                NextStep::Granted(decision) => return Poll::Ready(Ok(Some(decision))),
                NextStep::End(end) => return Poll::Ready(Err(end)),
                NextStep::Charge { cost, up_to } => {
                    self.send_charge(&cost, up_to, &poller);
                    continue;
                }
                NextStep::PollCharge(reply) => {
                    match self.poll_reply(reply, &poller, cx.as_deref_mut()) {
                        Poll::Ready(()) => continue,
                        Poll::Pending => {
                            match self.line.lock().wait_for_answer(self.number, &poller) {
                                Ok(alarm) => (alarm, Poll::Pending),
                                Err(end) => return Poll::Ready(Err(end)),
                            }
                        }
                    }
                }
            };
            let Some(cx) = &mut cx else { return turn };
            if self.wake_at(alarm, cx).is_pending() {
                return turn;
            }
        }
    }

    /// Wakes the task at `alarm`.
    fn wake_at(&mut self, alarm: Instant, cx: &mut Context<'_>) -> Poll<()> {
        let sleep = self.alarm.get_or_insert_with(|| Sleep::until(alarm));
        sleep.set(alarm);
        sleep.poll(cx)
    }

    fn send_charge(&self, cost: &Tokens, up_to: bool, poller: &Poller<'_>) {
        match self.line.charge(&self.queue, poller.terms, cost, up_to).into_now() {
            Ok(answer) => self.note_answer(answer, poller),
            Err(reply) => self.line.lock().park_reply(reply, None),
        }
    }

    fn poll_reply(
        &self,
        mut reply: Reply<Decision>,
        poller: &Poller<'_>,
        cx: Option<&mut Context<'_>>,
    ) -> Poll<()> {
        let polled_by = cx.is_some().then_some(self.number);
        match cx.map_or(Poll::Pending, |cx| Pin::new(&mut reply).poll(cx)) {
            Poll::Ready(answer) => {
                self.note_answer(answer, poller);
                Poll::Ready(())
            }
            Poll::Pending => {
                self.line.lock().park_reply(reply, polled_by);
                Poll::Pending
            }
        }
    }

    fn note_answer(&self, answer: Result<Decision, StoreError>, poller: &Poller<'_>) {
        let mut effects = Effects::default();
        self.line.lock().note_answer(self.number, answer, poller, &mut effects);
        self.apply(effects);
    }

    /// Applies the effects of a change. The line must not be locked.
    fn apply(&self, mut effects: Effects) {
        if effects.more_waiting != 0 || !effects.wait_times.is_empty() {
            for counter in &*self.line.counters {
                let observed = self.queue.limiter_of(counter).scope().observe();
                observed.waits(effects.more_waiting);
                effects.wait_times.iter().for_each(|time| observed.waited(*time));
            }
        }
        for (decision, terms) in effects.returns.drain(..) {
            self.line.give_back(&self.queue, &terms, &decision).detach();
        }
        if let Some((reply, terms)) = effects.abandoned.take() {
            let (queue, line) = (Arc::clone(&self.queue), Arc::clone(&self.line));
            let returned = Reply::later(async move {
                let decision = reply.await?;
                line.give_back(&queue, &terms, &decision).await
            });
            self.line.notify_after(&self.queue, returned).detach();
        }
        effects.wake();
    }
}

fn poller<'a>(queue: &'a Queue, terms: &'a Terms) -> Poller<'a> {
    let Queue { lines, limits, most, max_wait } = queue;
    let (now, closed) = (Instant::now(), lines.closed.load(Ordering::Acquire));
    // All limits count in one store.
    let limiter = &limits.limiters()[0];
    let (covers_neighbors, shared) = (limiter.is_remote(), limiter.is_shared());
    let (max_waiting, max_wait, of_several) = (*most, *max_wait, queue.is_of_several());
    Poller { terms, now, max_waiting, max_wait, covers_neighbors, of_several, shared, closed }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut effects = Effects::default();
        self.line.lock().leave_line(self.number, &mut effects);
        self.apply(effects);
    }
}
