//! The place of a request in its line.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use super::state::{Asker, End, Out};
use super::turn::Step;
use super::{Line, Queue};
use crate::decision::Decision;
use crate::key::Key;
use crate::limiter::freed;
use crate::quota::Quotas;
use crate::store::{Account, Charge, Reply, StoreError};
use crate::timer::{Instant, Sleep};

/// The place of a request in its line. It leaves the line when it is dropped.
pub(crate) struct Place {
    queue: Arc<Queue>,
    line: Arc<Line>,
    number: u64,
    alarm: Option<Sleep>,
}

impl Place {
    /// Joins the line of a key, as the last one, or is refused.
    pub(crate) fn join(
        queue: &Arc<Queue>,
        key: &Key,
        quotas: &Quotas,
        own: bool,
        cost: u64,
    ) -> Result<Self, Decision> {
        let line = queue.lines.of(key);
        let asker = asker(queue, quotas);
        let mut out = Out::default();
        let number = line.lock().join(cost, own, &asker, &mut out)?;
        let place = Self { queue: Arc::clone(queue), line, number, alarm: None };
        place.follow(out);
        Ok(place)
    }

    /// Ready when its turn has come, and it is to be charged once its service is ready.
    pub(crate) fn poll_turn(
        &mut self,
        quotas: &Quotas,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), End>> {
        self.poll(false, quotas, Some(cx)).map_ok(|_| ())
    }

    /// Charges it. Without a context, only what is answered at once.
    pub(crate) fn poll_charge(
        &mut self,
        quotas: &Quotas,
        cx: Option<&mut Context<'_>>,
    ) -> Poll<Result<Decision, End>> {
        self.poll(true, quotas, cx).map(|end| end.and_then(|granted| granted.ok_or(End::LetGo)))
    }

    fn poll(
        &mut self,
        ready: bool,
        quotas: &Quotas,
        mut cx: Option<&mut Context<'_>>,
    ) -> Poll<Result<Option<Decision>, End>> {
        loop {
            let (asker, mut out) = (asker(&self.queue, quotas), Out::default());
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
                    self.ask(cost, up_to, &asker);
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

    fn ask(&self, cost: u64, up_to: bool, asker: &Asker<'_>) {
        let limiter = &self.queue.limiter;
        let account = Account::new(limiter.scope(), asker.quotas, &self.line.key);
        let charge = Charge::new(account, cost);
        let charge = if up_to { charge.up_to() } else { charge };
        match limiter.send(charge).into_now() {
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
        let observed = self.queue.limiter.scope().observe();
        if out.waits != 0 {
            observed.waits(out.waits);
        }
        out.waited.drain(..).for_each(|time| observed.waited(time));
        for (decision, quotas) in out.back.drain(..) {
            self.line.give_back(&self.queue.limiter, &quotas, &decision).detach();
        }
        if let Some((reply, quotas)) = out.orphan.take() {
            let (queue, line) = (Arc::clone(&self.queue), Arc::clone(&self.line));
            let returned = Reply::later(async move {
                let decision = reply.await?;
                line.give_back(&queue.limiter, &quotas, &decision).await
            });
            let scope = self.queue.limiter.scope();
            freed::note_after(scope, &self.line.key, returned).detach();
        }
        out.wake();
    }
}

fn asker<'a>(queue: &'a Queue, quotas: &'a Quotas) -> Asker<'a> {
    let Queue { lines, limiter, most, max_wait } = queue;
    let (now, closed) = (Instant::now(), lines.closed.load(Ordering::Acquire));
    let (remote, shared) = (limiter.is_remote(), limiter.is_shared());
    Asker { quotas, now, most: *most, max_wait: *max_wait, remote, shared, closed }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut out = Out::default();
        self.line.lock().leave(self.number, &mut out);
        self.follow(out);
    }
}
