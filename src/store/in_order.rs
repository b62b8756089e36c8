//! Several lines in a store that can't charge them in one step (S37): one after the other, within
//! one deadline. Tokens are returned when a line refuses, and when the request is dropped.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use super::Store;
use super::charge::{Charge, OwnedCharge};
use super::remote::{LATE, with_deadline};
use super::reply::{Fault, Reply, StoreError};
use crate::decision::Decision;
use crate::sync::Instant;

#[inline(never)]
pub(super) fn charge_in_order(store: &Arc<dyn Store>, charge: Charge<'_>) -> Reply<Decision> {
    let in_order = |store, charge| async move { SequentialCharge::new(store, charge).run().await };
    if !store.charges_together() {
        let known = store.remote().and_then(|remote| remote.caller.look_up(&charge).ok());
        if let Some(refusal) = known {
            return Reply::now(refusal);
        }
        return Reply::later(in_order(Arc::clone(store), charge.to_owned()));
    }
    let reply = store.charge(charge);
    let is_apart = |answer: &Result<_, StoreError>| {
        answer.as_ref().is_err_and(|error| error.fault == Fault::Apart)
    };
    if reply.as_now().is_some_and(|answer| !is_apart(answer)) {
        return reply;
    }
    let (store, charge) = (Arc::clone(store), charge.to_owned());
    Reply::later(async move {
        let answer = reply.await;
        if is_apart(&answer) { in_order(store, charge).await } else { answer }
    })
}

/// Dropping it returns the tokens taken so far.
struct SequentialCharge {
    store: Arc<dyn Store>,
    charge: OwnedCharge,
    /// The store's deadline, here for all calls together.
    ends: Option<Instant>,
    /// In order. `None`: the line's store failed, and its policy lets requests pass.
    passed: Vec<Option<Decision>>,
    in_flight: Option<Reply<Decision>>,
    returning: Vec<Reply<()>>,
}

impl SequentialCharge {
    fn new(store: Arc<dyn Store>, charge: OwnedCharge) -> Self {
        let deadline = store.remote().and_then(|remote| remote.caller.deadline);
        let ends = deadline.and_then(|deadline| Instant::now().checked_add(deadline));
        let (passed, in_flight, returning) = Default::default();
        Self { store, charge, ends, passed, in_flight, returning }
    }

    async fn run(mut self) -> Result<Decision, StoreError> {
        let (mut failure, lines) = (None, self.charge.as_charge().len());
        while self.passed.len() < lines {
            let answer = self.charge_next().await;
            // The log counts requests, and another line of this one was answered without the store.
            if answer.as_ref().map_or_else(StoreError::allows, Decision::is_local)
                && self.passed.iter().any(|passed| passed.as_ref().is_none_or(Decision::is_local))
                && let Some(remote) = self.store.remote()
            {
                remote.caller.uncount_answer();
            }
            match answer {
                Ok(decision) if decision.is_allowed() => self.passed.push(Some(decision)),
                Ok(refusal) => return Ok(self.refuse(refusal).await),
                Err(error) if error.allows() => {
                    self.passed.push(None);
                    failure = Some(error);
                }
                Err(error) => {
                    // Before the answer, or the client's next request is refused by these tokens.
                    self.return_passed(Vec::new()).await;
                    return Err(error);
                }
            }
        }
        if let Some(error) = failure
            && self.passed.iter().all(Option::is_none)
        {
            return Err(error);
        }
        let passed = merge(&self.passed);
        if let Some(refusal) = passed.late_refusal() {
            self.return_passed(Vec::new()).await;
            return Ok(refusal);
        }
        self.passed.clear();
        Ok(passed)
    }

    async fn charge_next(&mut self) -> Result<Decision, StoreError> {
        let charge = self.charge.as_charge();
        let next = charge.line(self.passed.len());
        // The store ends the first call at the deadline itself.
        let ends = self.ends.filter(|_| !self.passed.is_empty());
        let mut is_late = ends.is_some_and(|ends| ends <= Instant::now());
        if !is_late {
            // A reply is sent with its first poll. From then on, a drop has to return its tokens.
            let reply = self.in_flight.insert(self.store.charge(next));
            let late = || {
                is_late = true;
                StoreError::new(LATE)
            };
            let answer = with_deadline(ends, reply, late).await;
            if !is_late {
                self.in_flight = None;
                return answer;
            }
            self.return_in_flight();
        }
        let (charge, late) = (self.charge.as_charge(), StoreError::new(LATE));
        let Some(remote) = self.store.remote() else { return Err(late) };
        remote.caller.stand_in(charge.line(self.passed.len()), late)
    }

    /// Peeks at the lines that were not charged. `refusal` is that of the next line.
    async fn refuse(mut self, refusal: Decision) -> Decision {
        let returned = |decision: &Option<Decision>| decision.clone().map(Decision::returned);
        let mut decided: Vec<_> = self.passed.iter().map(returned).chain([Some(refusal)]).collect();
        let charge = self.charge.as_charge();
        let rest = charge.each().skip(decided.len());
        let peeks = rest.map(|line| self.store.charge(line.peeking())).collect();
        // A line without an answer is not in the decision.
        decided.extend(self.return_passed(peeks).await);
        merge(&decided)
    }

    async fn return_passed(&mut self, mut peeks: Vec<Reply<Decision>>) -> Vec<Option<Decision>> {
        self.begin_returning();
        let mut looks: Vec<_> = peeks.iter().map(|_| None).collect();
        let returning = &mut self.returning;
        let all = poll_fn(|cx| {
            returning.retain_mut(|reply| Pin::new(reply).poll(cx).is_pending());
            for (look, peek) in looks.iter_mut().zip(&mut peeks) {
                if look.is_none()
                    && let Poll::Ready(answer) = Pin::new(peek).poll(cx)
                {
                    *look = Some(answer.ok());
                }
            }
            match returning.is_empty() && looks.iter().all(Option::is_some) {
                true => Poll::Ready(Ok(())),
                false => Poll::Pending,
            }
        });
        let _ = with_deadline(self.ends, all, || StoreError::new(LATE)).await;
        looks.into_iter().map(Option::flatten).collect()
    }

    fn begin_returning(&mut self) {
        for ((account, _), passed) in self.charge.as_charge().lines().zip(self.passed.drain(..)) {
            let returned = passed.map(|decision| self.store.give_back(account, &decision));
            self.returning.extend(returned);
        }
    }

    fn return_in_flight(&mut self) {
        let Some(reply) = self.in_flight.take() else { return };
        let charge = self.charge.as_charge().line(self.passed.len()).to_owned();
        let store = Arc::clone(&self.store);
        let returned = Reply::later(async move {
            let decision = reply.await?;
            store.give_back(charge.as_charge().account(), &decision).await
        });
        returned.detach();
    }
}

impl Drop for SequentialCharge {
    fn drop(&mut self) {
        self.return_in_flight();
        self.begin_returning();
        self.returning.drain(..).for_each(Reply::detach);
    }
}

fn merge(decided: &[Option<Decision>]) -> Decision {
    let line = |place: usize| decided[place].clone();
    Decision::of_lines(decided.len(), line).expect("a line is decided")
}
