//! Whose turn it is in a line, and when the others are polled next. `place` sets their timers.

use std::time::Duration;

use super::claim::Tokens;
use super::state::{Effects, End, LineState, Poller, TICK};
use crate::decision::Decision;
use crate::store::Reply;
use crate::timer::Instant;

/// How long the requests behind a request wait for it to be polled, before they go first.
const PATIENCE: Duration = Duration::from_millis(100);
/// How often a request is polled that others wait for.
const SIGN_OF_LIFE: Duration = Duration::from_millis(50);
/// The highest rank: requests further behind check no later that the head is polled.
const RANKS: u64 = 64;
/// Within this rank, the requests before a request are counted exactly.
const NEAR: usize = 8;

/// The next step of a request that is polled.
pub(super) enum NextStep {
    /// Wait until then.
    Wait(Instant),
    /// Take the turn: make the service ready, and poll again by then.
    Turn(Instant),
    /// Charge these tokens, or as many of them as there are.
    Charge {
        cost: Tokens,
        up_to: bool,
    },
    /// Poll the charge in flight.
    PollCharge(Reply<Decision>),
    Granted(Decision),
    End(End),
}

impl From<Result<Instant, End>> for NextStep {
    fn from(wait: Result<Instant, End>) -> Self {
        wait.map_or_else(Self::End, Self::Wait)
    }
}

impl LineState {
    /// Decides what the request `me` does next; `ready` if its service is.
    pub(super) fn next_step(
        &mut self,
        me: u64,
        ready: bool,
        poller: &Poller<'_>,
        effects: &mut Effects,
    ) -> NextStep {
        let now = poller.now;
        if let Some(refusal) = self.refusals.remove(&me) {
            return NextStep::End(End::Refused(refusal));
        }
        if let Some(waiter) = self.passed_over.remove(&me) {
            self.waiters.insert(me, waiter);
        }
        self.pass_over_unpolled(me, now, effects);
        if self.grant.as_ref().is_some_and(|grant| grant.valid_until <= now) {
            self.return_unused(effects);
        }
        if self.head() != Some(me) {
            return if ready {
                NextStep::End(End::LetGo)
            } else {
                self.wait_behind(me, poller).into()
            };
        }
        if let Some((last, error)) = &self.failure
            && me <= *last
        {
            let failed = End::Failed(error.clone());
            return if ready { NextStep::End(failed) } else { self.take_turn(me, poller) };
        }
        let deadline = self.waiters[&me].deadline;
        if let Some(grant) = &self.grant {
            if grant.terms == *poller.terms && self.waiters[&me].cost.fits_in(&grant.left) {
                return if ready {
                    NextStep::Granted(self.grant_head(me))
                } else {
                    self.take_turn(me, poller)
                };
            }
            self.return_unused(effects);
        }
        if let Some(charge) = &mut self.in_flight {
            if ready && charge.sender != me {
                return NextStep::End(End::LetGo);
            }
            return match charge.reply.take() {
                Some(reply) => {
                    charge.polled_by = Some(me);
                    NextStep::PollCharge(reply)
                }
                None => self.wait_for_answer(me, poller).into(),
            };
        }
        match self.head_due(me, poller) {
            Some(due) if due <= now => {}
            due => {
                self.judge_newcomers(poller, effects);
                if let Some(refusal) = self.refusals.remove(&me) {
                    return NextStep::End(End::Refused(refusal));
                }
                let due = due.unwrap_or(deadline);
                return if ready {
                    NextStep::End(End::LetGo)
                } else {
                    self.wait_until(me, due, poller).into()
                };
            }
        }
        if now >= deadline + PATIENCE {
            NextStep::End(self.timeout_end(me, poller))
        } else if ready {
            let (cost, up_to) = self.start_charge(me, poller);
            NextStep::Charge { cost, up_to }
        } else {
            self.take_turn(me, poller)
        }
    }

    /// Lets the request go before those that were not polled for a while; they keep their places.
    /// If the request itself was polled late, the runtime is slow, and the others get more time.
    fn pass_over_unpolled(&mut self, me: u64, now: Instant, effects: &mut Effects) {
        let mut passed = false;
        let next_poll = self.waiters.get(&me).map(|waiter| waiter.next_poll);
        if next_poll.is_none_or(|next_poll| now < next_poll || next_poll + SIGN_OF_LIFE < now) {
            return;
        }
        while let Some(head) = self.waiters.first_entry()
            && *head.key() < me
            && head.get().next_poll + PATIENCE <= now
        {
            let (number, waiter) = head.remove_entry();
            self.passed_over.insert(number, waiter);
            passed = true;
        }
        if passed && self.head() != Some(me) {
            self.wake_head(now, effects);
        }
    }

    /// Returns when the head is due by the last answer; `None`: never.
    fn head_due(&self, head: u64, poller: &Poller<'_>) -> Option<Instant> {
        let answer =
            self.answer.as_ref().filter(|answer| !answer.stale && answer.terms == *poller.terms);
        let Some(answer) = answer else { return Some(poller.now) };
        let head = &self.waiters[&head];
        let due = answer.due(&head.cost)?;
        if !poller.shared || due <= answer.sent {
            return Some(due);
        }
        // Counted from the line's last grant, so that nodes take turns if all heads are old.
        let from = self.last_grant.map_or(head.arrived, |granted| granted.max(head.arrived));
        Some(due + answer.courtesy_delay(due.saturating_duration_since(from), poller.max_wait))
    }

    /// Waits behind the head: the further back, the later the request checks that it is polled.
    fn wait_behind(&mut self, me: u64, poller: &Poller<'_>) -> Result<Instant, End> {
        let (first, head) = self.waiters.first_key_value().expect("one is before it");
        let rank = match self.waiters.range(..me).take(NEAR).count() {
            // An estimate: numbers have gaps, but counting takes time.
            NEAR => (me - first).min(RANKS) as u32,
            near => near as u32,
        };
        let until = head.next_poll + PATIENCE * rank;
        self.wait_until(me, if until <= poller.now { poller.now + PATIENCE } else { until }, poller)
    }

    pub(super) fn wait_for_answer(&mut self, me: u64, poller: &Poller<'_>) -> Result<Instant, End> {
        self.wait_until(me, poller.now + SIGN_OF_LIFE, poller)
    }

    /// Sets when the request is polled next, at most until its deadline, or ends its wait.
    fn wait_until(&mut self, me: u64, until: Instant, poller: &Poller<'_>) -> Result<Instant, End> {
        let now = poller.now;
        let Some(deadline) = self.waiters.get(&me).map(|waiter| waiter.deadline) else {
            return Ok(until);
        };
        if self.in_flight.as_ref().is_none_or(|charge| charge.last_covered < me) {
            if poller.closed {
                return Err(End::Closed);
            }
            if deadline <= now && !self.is_head_about_to_go(deadline, now) {
                return Err(self.timeout_end(me, poller));
            }
        }
        let waiter = self.waiters.get_mut(&me).expect("looked at just now");
        waiter.readying = false;
        waiter.next_poll = until.min(if now < deadline { deadline } else { now + SIGN_OF_LIFE });
        Ok(waiter.next_poll)
    }

    /// Returns whether the head is likely to be served shortly, and was due by this deadline.
    fn is_head_about_to_go(&self, deadline: Instant, now: Instant) -> bool {
        let head = self.waiters.first_key_value();
        let due = || match (&self.answer, head) {
            (Some(answer), Some((_, head))) => answer.due(&head.cost),
            _ => None,
        };
        now < deadline + PATIENCE
            && head.is_some_and(|(_, head)| !head.readying)
            && (self.grant.is_some() || due().is_some_and(|due| due <= deadline + TICK))
    }

    /// Lets the head make its service ready.
    fn take_turn(&mut self, me: u64, poller: &Poller<'_>) -> NextStep {
        let now = poller.now;
        if poller.closed {
            return NextStep::End(End::Closed);
        }
        let valid_until = self.grant.as_ref().map(|grant| grant.valid_until);
        let waiter = self.waiters.get_mut(&me).expect("it is the head");
        if waiter.readying && waiter.deadline <= now {
            return NextStep::End(self.timeout_end(me, poller));
        }
        waiter.readying = true;
        waiter.next_poll = now + SIGN_OF_LIFE;
        let ends =
            valid_until.into_iter().chain((now < waiter.deadline).then_some(waiter.deadline));
        NextStep::Turn(ends.fold(waiter.next_poll, Instant::min))
    }

    /// Returns how the wait of a request ends that has reached its deadline.
    fn timeout_end(&self, me: u64, poller: &Poller<'_>) -> End {
        let Some(answer) = &self.answer else { return End::Unanswered };
        let mut tokens = self.requested.zeroed();
        self.waiters.range(..=me).for_each(|(_, waiter)| tokens += &waiter.cost);
        End::Refused(answer.refusal(&tokens, poller.now))
    }
}
