//! Several limits in a store that can't charge them in one step (S37): one after the other, within
//! one deadline. What was taken is returned when one refuses, and when the request is dropped.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::decision::{Decision, Merging};
use crate::limiter::{Limiter, freed};
use crate::store::{OwnedAccount, OwnedCharge, Reply, StoreError};
use crate::timer::{Instant, Sleep};

/// Charges these limits. `deadline` is that of the store, and here of all its calls together.
pub(super) fn charge(
    lines: Vec<(Limiter, OwnedCharge)>,
    deadline: Option<Duration>,
) -> Reply<Decision> {
    Reply::later(async move {
        let ends = deadline.and_then(|deadline| Instant::now().checked_add(deadline));
        let this = InOrder { lines, ends, passed: Vec::new(), asked: None, returning: Vec::new() };
        this.run().await
    })
}

struct InOrder {
    lines: Vec<(Limiter, OwnedCharge)>,
    ends: Option<Instant>,
    /// Decisions of the first lines, until all lines have passed.
    passed: Vec<Decision>,
    /// The call for the next line, once it was sent.
    asked: Option<Reply<Decision>>,
    /// Calls that return tokens.
    returning: Vec<Reply<()>>,
}

impl InOrder {
    async fn run(mut self) -> Result<Decision, StoreError> {
        while self.passed.len() < self.lines.len() {
            let decision = self.ask().await?;
            if !decision.allowed() {
                return Ok(self.refuse(Some(decision)).await);
            }
            self.passed.push(decision);
        }
        let mut undone = self.passed.clone();
        if Decision::refuse_late(&mut undone) {
            return Ok(self.refuse(None).await);
        }
        let passed = std::mem::take(&mut self.passed);
        Ok(self.merge(passed.into_iter().map(Some)))
    }

    /// Charges the next line.
    async fn ask(&mut self) -> Result<Decision, StoreError> {
        let (limiter, charge) = &self.lines[self.passed.len()];
        let late = || StoreError::new("the store did not answer in time");
        // The first call keeps the deadline by itself.
        let sleep = if self.passed.is_empty() { None } else { self.ends.map(left) };
        if sleep == Some(Duration::ZERO) {
            return limiter.stand_in(charge.as_charge(), late()).await;
        }
        let mut sleep = sleep.and_then(Sleep::try_new);
        let mut reply = limiter.send(charge.as_charge());
        // Sent with its first poll, and then to be returned if this is dropped.
        let asked = &mut self.asked;
        let answer = poll_fn(|cx| {
            let reply = asked.get_or_insert_with(|| {
                std::mem::replace(&mut reply, Reply::failed(StoreError::new("sent")))
            });
            match Pin::new(reply).poll(cx) {
                Poll::Ready(answer) => Poll::Ready(Some(answer)),
                Poll::Pending => ended(&mut sleep, cx).map(|()| None),
            }
        });
        match answer.await {
            Some(answer) => {
                self.asked = None;
                answer
            }
            None => {
                self.return_asked();
                let (limiter, charge) = &self.lines[self.passed.len()];
                limiter.stand_in(charge.as_charge(), late()).await
            }
        }
    }

    /// Returns what was taken, and looks at the lines that were not asked. `refusal` is the next
    /// line's; without one, those that have passed are too late together.
    async fn refuse(mut self, refusal: Option<Decision>) -> Decision {
        let mut decided = self.passed.clone();
        if refusal.is_none() {
            Decision::refuse_late(&mut decided);
        }
        self.return_passed();
        let mut decided: Vec<_> =
            decided.into_iter().map(Decision::undone).chain(refusal).map(Some).collect();
        let rest = &self.lines[decided.len()..];
        let mut peeks: Vec<_> = rest
            .iter()
            .map(|(limiter, charge)| limiter.send(charge.as_charge().peeking()))
            .collect();
        let mut looks: Vec<_> = peeks.iter().map(|_| None).collect();
        let mut sleep = self.ends.map(left).and_then(Sleep::try_new);
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
            if is_done { Poll::Ready(()) } else { ended(&mut sleep, cx) }
        })
        .await;
        // A line of which nothing is known is not in the decision.
        decided.extend(looks.into_iter().map(Option::flatten));
        self.merge(decided)
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

    /// Has the tokens returned of a call that is in flight, when it has its answer.
    fn return_asked(&mut self) {
        let Some(reply) = self.asked.take() else { return };
        let (limiter, charge) = self.lines[self.passed.len()].clone();
        let returned = Reply::later(async move {
            let decision = reply.await?;
            give_back(&limiter, charge.account(), &decision).await
        });
        returned.detach();
    }

    fn return_passed(&mut self) {
        let lines = self.lines.iter().zip(std::mem::take(&mut self.passed));
        self.returning = lines
            .map(|((limiter, charge), decision)| give_back(limiter, charge.account(), &decision))
            .collect();
    }
}

impl Drop for InOrder {
    fn drop(&mut self) {
        self.return_asked();
        if !self.passed.is_empty() {
            self.return_passed();
        }
        self.returning.drain(..).for_each(Reply::detach);
    }
}

/// Returns all that a decision has taken.
fn give_back(limiter: &Limiter, account: &OwnedAccount, decision: &Decision) -> Reply<()> {
    let account = account.as_account();
    let settled = limiter.give_back(account, decision);
    freed::note_after(limiter.scope(), account.key(), settled)
}

/// How much of a deadline is left.
fn left(ends: Instant) -> Duration {
    ends.saturating_duration_since(Instant::now())
}

fn ended(sleep: &mut Option<Sleep>, cx: &mut Context<'_>) -> Poll<()> {
    sleep.as_mut().map_or(Poll::Pending, |sleep| sleep.poll(cx))
}
