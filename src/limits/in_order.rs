//! Several limits in a store that can't charge them in one step (S37): they are charged one after
//! the other, within one deadline. Tokens taken are returned when a limit refuses, and when the
//! request is dropped.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::decision::{Decision, Merging};
use crate::limiter::Limiter;
use crate::store::{OwnedAccount, OwnedCharge, Reply, StoreError};
use crate::timer::{Instant, Sleep};

/// Charges the limits of these lines. `deadline` is that of the store, here for all calls together.
pub(super) fn charge(
    lines: Vec<(Limiter, OwnedCharge)>,
    deadline: Option<Duration>,
) -> Reply<Decision> {
    Reply::later(async move {
        let ends = deadline.and_then(|deadline| Instant::now().checked_add(deadline));
        let this = SequentialCharge {
            lines,
            ends,
            passed: Vec::new(),
            in_flight: None,
            returning: Vec::new(),
        };
        this.run().await
    })
}

/// A charge of several limits, one after the other. Dropping it returns the tokens taken so far.
struct SequentialCharge {
    lines: Vec<(Limiter, OwnedCharge)>,
    ends: Option<Instant>,
    /// The decisions of the lines that have passed, in order. `None`: the line's store failed, and
    /// its policy lets requests pass.
    passed: Vec<Option<Decision>>,
    /// The call for the next line, once it was sent.
    in_flight: Option<Reply<Decision>>,
    /// Calls that return tokens.
    returning: Vec<Reply<()>>,
}

impl SequentialCharge {
    async fn run(mut self) -> Result<Decision, StoreError> {
        let mut failure = None;
        while self.passed.len() < self.lines.len() {
            match self.charge_next().await {
                Ok(decision) if decision.allowed() => self.passed.push(Some(decision)),
                Ok(refusal) => return Ok(self.refuse_all(Some(refusal)).await),
                Err(error) if error.allows() => {
                    self.passed.push(None);
                    failure = Some(error);
                }
                Err(error) => {
                    // Before the answer, or the client's next request is refused by these tokens.
                    self.give_back().await;
                    return Err(error);
                }
            }
        }
        if let Some(error) = failure
            && self.passed.iter().all(Option::is_none)
        {
            return Err(error);
        }
        if refuse_late(&mut self.passed.clone()) {
            return Ok(self.refuse_all(None).await);
        }
        let passed = std::mem::take(&mut self.passed);
        Ok(self.merge(passed))
    }

    /// Charges the next line.
    async fn charge_next(&mut self) -> Result<Decision, StoreError> {
        let (limiter, charge) = &self.lines[self.passed.len()];
        let late = || StoreError::new("the store did not answer in time");
        // The store ends the first call at the deadline itself.
        let sleep = if self.passed.is_empty() { None } else { self.ends.map(time_left) };
        if sleep == Some(Duration::ZERO) {
            return limiter.stand_in(charge.as_charge(), late()).await;
        }
        let mut sleep = sleep.and_then(Sleep::try_new);
        let mut reply = limiter.send(charge.as_charge());
        // A reply is sent with its first poll. From then on, a drop has to return its tokens.
        let in_flight = &mut self.in_flight;
        let answer = poll_fn(|cx| {
            let reply = in_flight.get_or_insert_with(|| {
                std::mem::replace(&mut reply, Reply::failed(StoreError::new("sent")))
            });
            match Pin::new(reply).poll(cx) {
                Poll::Ready(answer) => Poll::Ready(Some(answer)),
                Poll::Pending => poll_deadline(&mut sleep, cx).map(|()| None),
            }
        });
        match answer.await {
            Some(answer) => {
                self.in_flight = None;
                answer
            }
            None => {
                self.return_in_flight();
                let (limiter, charge) = &self.lines[self.passed.len()];
                limiter.stand_in(charge.as_charge(), late()).await
            }
        }
    }

    /// Returns the tokens taken, and peeks at the lines that were not charged. `refusal` is that of
    /// the next line; `None` if all lines have passed but their reservations don't fit together.
    async fn refuse_all(mut self, refusal: Option<Decision>) -> Decision {
        let mut decided = self.passed.clone();
        if refusal.is_none() {
            refuse_late(&mut decided);
        }
        self.return_passed();
        let undone = decided.into_iter().map(|decision| decision.map(Decision::undone));
        let mut decided: Vec<_> = undone.chain(refusal.map(Some)).collect();
        let rest = &self.lines[decided.len()..];
        let mut peeks: Vec<_> = rest
            .iter()
            .map(|(limiter, charge)| limiter.send(charge.as_charge().peeking()))
            .collect();
        let mut looks: Vec<_> = peeks.iter().map(|_| None).collect();
        let mut sleep = self.ends.map(time_left).and_then(Sleep::try_new);
        let returning = &mut self.returning;
        poll_fn(|cx| {
            returning.retain_mut(|reply| Pin::new(reply).poll(cx).is_pending());
            for (look, peek) in looks.iter_mut().zip(&mut peeks) {
                if look.is_none()
                    && let Poll::Ready(answer) = Pin::new(peek).poll(cx)
                {
                    *look = Some(answer.ok());
                }
            }
            let is_done = returning.is_empty() && looks.iter().all(Option::is_some);
            if is_done { Poll::Ready(()) } else { poll_deadline(&mut sleep, cx) }
        })
        .await;
        // A line without an answer is not in the decision.
        decided.extend(looks.into_iter().map(Option::flatten));
        self.merge(decided)
    }

    /// Returns the tokens of all lines that have passed, until the deadline.
    async fn give_back(&mut self) {
        self.return_passed();
        let mut sleep = self.ends.map(time_left).and_then(Sleep::try_new);
        let returning = &mut self.returning;
        poll_fn(|cx| {
            returning.retain_mut(|reply| Pin::new(reply).poll(cx).is_pending());
            if returning.is_empty() { Poll::Ready(()) } else { poll_deadline(&mut sleep, cx) }
        })
        .await;
    }

    fn merge(&self, decisions: impl IntoIterator<Item = Option<Decision>>) -> Decision {
        let mut merging = Merging::new();
        for ((limiter, _), decision) in self.lines.iter().zip(decisions) {
            if let Some(decision) = decision {
                merging.push(limiter.scope().shared_name(), decision);
            }
        }
        merging.done()
    }

    /// Lets the tokens of a call in flight be returned when it has its answer.
    fn return_in_flight(&mut self) {
        let Some(reply) = self.in_flight.take() else { return };
        let (limiter, charge) = self.lines[self.passed.len()].clone();
        let returned = Reply::later(async move {
            let decision = reply.await?;
            return_tokens(&limiter, charge.account(), &decision).await
        });
        returned.detach();
    }

    /// Starts returning the tokens of all lines that have passed.
    fn return_passed(&mut self) {
        let lines = self.lines.iter().zip(std::mem::take(&mut self.passed));
        self.returning = lines
            .filter_map(|((limiter, charge), decision)| {
                Some(return_tokens(limiter, charge.account(), &decision?))
            })
            .collect();
    }
}

impl Drop for SequentialCharge {
    fn drop(&mut self) {
        self.return_in_flight();
        if !self.passed.is_empty() {
            self.return_passed();
        }
        self.returning.drain(..).for_each(Reply::detach);
    }
}

/// Refuses reservations that are late beside each other ([`Decision::refuse_late`]).
fn refuse_late(decided: &mut [Option<Decision>]) -> bool {
    let mut decisions: Vec<_> = decided.iter().flatten().cloned().collect();
    let is_late = Decision::refuse_late(&mut decisions);
    decided.iter_mut().flatten().zip(decisions).for_each(|(of, refused)| *of = refused);
    is_late
}

/// Returns the tokens that a decision has taken.
fn return_tokens(limiter: &Limiter, account: &OwnedAccount, decision: &Decision) -> Reply<()> {
    limiter.give_back(account.as_account(), decision)
}

/// Returns how much time is left until a deadline.
fn time_left(ends: Instant) -> Duration {
    ends.saturating_duration_since(Instant::now())
}

/// Waits for the deadline, if there is one.
fn poll_deadline(sleep: &mut Option<Sleep>, cx: &mut Context<'_>) -> Poll<()> {
    sleep.as_mut().map_or(Poll::Pending, |sleep| sleep.poll(cx))
}
