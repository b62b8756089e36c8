//! The place of a request in its line.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use super::claim::{Claim, Terms, Tokens};
use super::state::{Asker, End, Out};
use super::turn::Step;
use super::{Line, Queue};
use crate::decision::Decision;
use crate::store::{Reply, StoreError};
use crate::timer::{Instant, Sleep};

/// The place of a request in its line. It leaves the line when it is dropped.
pub(crate) struct Place {
    queue: Arc<Queue>,
    line: Arc<Line>,
    terms: Terms,
    number: u64,
    alarm: Option<Sleep>,
}

impl Place {
    /// Joins the line of its counters, as the last one, or is refused.
    pub(crate) fn join(queue: &Arc<Queue>, claim: Claim) -> Result<Self, Decision> {
        let line = queue.lines.of(&claim);
        let asker = asker(queue, &claim.terms);
        let mut out = Out::default();
        let number = line.lock().join(&claim, &asker, &mut out)?;
        let (queue, terms) = (Arc::clone(queue), claim.terms);
        let place = Self { queue, line, terms, number, alarm: None };
        place.follow(out);
        Ok(place)
    }

    /// Ready when its turn has come, and it is to be charged once its service is ready.
    pub(crate) fn poll_turn(
        &mut self,
        changed: Option<Terms>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), End>> {
        self.poll(false, changed, Some(cx)).map_ok(|_| ())
    }

    /// Charges it. Without a context, only what is answered at once.
    pub(crate) fn poll_charge(
        &mut self,
        changed: Option<Terms>,
        cx: Option<&mut Context<'_>>,
    ) -> Poll<Result<Decision, End>> {
        self.poll(true, changed, cx).map(|end| end.and_then(|granted| granted.ok_or(End::LetGo)))
    }

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
            let (asker, mut out) = (asker(&self.queue, &self.terms), Out::default());
            let mut state = self.line.lock();
            if let Some(cx) = &cx {
                state.set_waker(self.number, cx.waker(), &mut out);
            }
            let step = state.step(self.number, ready, &asker, &mut out);
            drop(state);
            self.follow(out);
            let (alarm, turn) = match step {
                Step::Wait(alarm) => (alarm, Poll::Pending),
                Step::Turn(alarm) => (alarm, Poll::Ready(Ok(None))),
                Step::Granted(decision) => return Poll::Ready(Ok(Some(decision))),
                Step::End(end) => return Poll::Ready(Err(end)),
                Step::Ask { cost, up_to } => {
                    self.ask(&cost, up_to, &asker);
                    continue;
                }
                Step::Poll(reply) => match self.poll_reply(reply, &asker, cx.as_deref_mut()) {
                    Poll::Ready(()) => continue,
                    Poll::Pending => match self.line.lock().wait_for_answer(self.number, &asker) {
                        Ok(alarm) => (alarm, Poll::Pending),
                        Err(end) => return Poll::Ready(Err(end)),
                    },
                },
            };
            let Some(cx) = &mut cx else { return turn };
            if self.sleep(alarm, cx).is_pending() {
                return turn;
            }
        }
    }

    fn sleep(&mut self, alarm: Instant, cx: &mut Context<'_>) -> Poll<()> {
        let sleep = self.alarm.get_or_insert_with(|| Sleep::until(alarm));
        sleep.set(alarm);
        sleep.poll(cx)
    }

    fn ask(&self, cost: &Tokens, up_to: bool, asker: &Asker<'_>) {
        match self.line.charge(&self.queue, asker.terms, cost, up_to).into_now() {
            Ok(answer) => self.answer(answer, asker),
            Err(reply) => self.line.lock().park(reply, None),
        }
    }

    fn poll_reply(
        &self,
        mut reply: Reply<Decision>,
        asker: &Asker<'_>,
        cx: Option<&mut Context<'_>>,
    ) -> Poll<()> {
        let polled_by = cx.is_some().then_some(self.number);
        match cx.map_or(Poll::Pending, |cx| Pin::new(&mut reply).poll(cx)) {
            Poll::Ready(answer) => {
                self.answer(answer, asker);
                Poll::Ready(())
            }
            Poll::Pending => {
                self.line.lock().park(reply, polled_by);
                Poll::Pending
            }
        }
    }

    fn answer(&self, answer: Result<Decision, StoreError>, asker: &Asker<'_>) {
        let mut out = Out::default();
        self.line.lock().answer(self.number, answer, asker, &mut out);
        self.follow(out);
    }

    /// What follows for others, without the lock.
    fn follow(&self, mut out: Out) {
        if out.waits != 0 || !out.waited.is_empty() {
            for counter in &*self.line.counters {
                let observed = self.queue.limiter_of(counter).scope().observe();
                observed.waits(out.waits);
                out.waited.iter().for_each(|time| observed.waited(*time));
            }
        }
        for (decision, terms) in out.back.drain(..) {
            self.line.give_back(&self.queue, &terms, &decision).detach();
        }
        if let Some((reply, terms)) = out.orphan.take() {
            let (queue, line) = (Arc::clone(&self.queue), Arc::clone(&self.line));
            let returned = Reply::later(async move {
                let decision = reply.await?;
                line.give_back(&queue, &terms, &decision).await
            });
            self.line.note_after(&self.queue, returned).detach();
        }
        out.wake();
    }
}

fn asker<'a>(queue: &'a Queue, terms: &'a Terms) -> Asker<'a> {
    let Queue { lines, limits, most, max_wait } = queue;
    let (now, closed) = (Instant::now(), lines.closed.load(Ordering::Acquire));
    // All limits count in one store.
    let limiter = &limits.limiters()[0];
    let (covers_others, shared) = (limiter.is_remote(), limiter.is_shared());
    let (most, max_wait, of_several) = (*most, *max_wait, queue.is_of_several());
    Asker { terms, now, most, max_wait, covers_others, of_several, shared, closed }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut out = Out::default();
        self.line.lock().leave(self.number, &mut out);
        self.follow(out);
    }
}
