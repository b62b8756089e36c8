//! Whose turn it is in a line, and until when the others look away.

use std::time::Duration;

use super::claim::Tokens;
use super::state::{Asker, End, Out, State, TICK};
use crate::decision::Decision;
use crate::store::Reply;
use crate::timer::Instant;

/// For how long those behind it wait for one that is not polled.
const PATIENCE: Duration = Duration::from_millis(100);
/// How often one that may be waited for shows that it is polled.
const SIGN_OF_LIFE: Duration = Duration::from_millis(50);
/// Those further behind look no later whether those before them are polled.
const RANKS: u64 = 64;
/// The first ones count exactly how many are before them.
const NEAR: usize = 8;

/// What a request does next.
pub(super) enum Step {
    /// It looks again by then.
    Wait(Instant),
    /// It is its turn: it readies its service, and looks again by then.
    Turn(Instant),
    /// It charges these tokens, or as many of them as there are.
    Ask {
        cost: Tokens,
        up_to: bool,
    },
    /// It polls the charge in flight.
    Poll(Reply<Decision>),
    Granted(Decision),
    End(End),
}

impl From<Result<Instant, End>> for Step {
    fn from(wait: Result<Instant, End>) -> Self {
        wait.map_or_else(Self::End, Self::Wait)
    }
}

impl State {
    pub(super) fn step(&mut self, me: u64, ready: bool, asker: &Asker<'_>, out: &mut Out) -> Step {
        let now = asker.now;
        if let Some(refusal) = self.refused.remove(&me) {
            return Step::End(End::Refused(refusal));
        }
        if let Some(entry) = self.away.remove(&me) {
            self.there.insert(me, entry);
        }
        self.pass_over(me, now, out);
        if self.hand.as_ref().is_some_and(|hand| hand.good_until <= now) {
            self.empty_hand(out);
        }
        if self.head() != Some(me) {
            return if ready { Step::End(End::LetGo) } else { self.wait_behind(me, asker).into() };
        }
        if let Some((last, error)) = &self.failed
            && me <= *last
        {
            let failed = End::Failed(error.clone());
            return if ready { Step::End(failed) } else { self.turn(me, asker) };
        }
        let deadline = self.there[&me].deadline;
        if let Some(hand) = &self.hand {
            if hand.terms == *asker.terms && self.there[&me].cost.fits(&hand.left) {
                return if ready { Step::Granted(self.grant(me)) } else { self.turn(me, asker) };
            }
            self.empty_hand(out);
        }
        if let Some(asked) = &mut self.asked {
            if ready && asked.by != me {
                return Step::End(End::LetGo);
            }
            return match asked.reply.take() {
                Some(reply) => {
                    asked.polled_by = Some(me);
                    Step::Poll(reply)
                }
                None => self.wait_for_answer(me, asker).into(),
            };
        }
        match self.due(me, asker) {
            Some(due) if due <= now => {}
            due => {
                self.judge(asker, out);
                if let Some(refusal) = self.refused.remove(&me) {
                    return Step::End(End::Refused(refusal));
                }
                let due = due.unwrap_or(deadline);
                return if ready {
                    Step::End(End::LetGo)
                } else {
                    self.wait(me, due, asker).into()
                };
            }
        }
        if now >= deadline + PATIENCE {
            Step::End(self.too_late(me, asker))
        } else if ready {
            let (cost, up_to) = self.ask(me, asker);
            Step::Ask { cost, up_to }
        } else {
            self.turn(me, asker)
        }
    }

    /// Those before it that were not polled for a while let it go first, and keep their places. If
    /// it was polled late itself, the runtime is slow, and they may have a little more time.
    fn pass_over(&mut self, me: u64, now: Instant, out: &mut Out) {
        let mut passed = false;
        let looks = self.there.get(&me).map(|entry| entry.looks);
        if looks.is_none_or(|looks| now < looks || looks + SIGN_OF_LIFE < now) {
            return;
        }
        while let Some(head) = self.there.first_entry()
            && *head.key() < me
            && head.get().looks + PATIENCE <= now
        {
            let (number, entry) = head.remove_entry();
            self.away.insert(number, entry);
            passed = true;
        }
        if passed && self.head() != Some(me) {
            self.wake_head(now, out);
        }
    }

    /// When the head is due, by the last answer. `None`: never.
    fn due(&self, head: u64, asker: &Asker<'_>) -> Option<Instant> {
        let told = self.told.as_ref().filter(|told| !told.stale && told.terms == *asker.terms);
        let Some(told) = told else { return Some(asker.now) };
        let head = &self.there[&head];
        let due = told.due(&head.cost)?;
        if !asker.shared || due <= told.sent {
            return Some(due);
        }
        // Where all have waited for as long as they may, the nodes take turns.
        let from = self.served.map_or(head.arrived, |served| served.max(head.arrived));
        Some(due + told.courtesy(due.saturating_duration_since(from), asker.max_wait))
    }

    fn wait_behind(&mut self, me: u64, asker: &Asker<'_>) -> Result<Instant, End> {
        let (first, head) = self.there.first_key_value().expect("one is before it");
        let rank = match self.there.range(..me).take(NEAR).count() {
            // Gaps matter less there, and counting them takes time.
            NEAR => (me - first).min(RANKS) as u32,
            near => near as u32,
        };
        let until = head.looks + PATIENCE * rank;
        self.wait(me, if until <= asker.now { asker.now + PATIENCE } else { until }, asker)
    }

    pub(super) fn wait_for_answer(&mut self, me: u64, asker: &Asker<'_>) -> Result<Instant, End> {
        self.wait(me, asker.now + SIGN_OF_LIFE, asker)
    }

    /// Until when it looks away.
    fn wait(&mut self, me: u64, until: Instant, asker: &Asker<'_>) -> Result<Instant, End> {
        let now = asker.now;
        let Some(deadline) = self.there.get(&me).map(|entry| entry.deadline) else {
            return Ok(until);
        };
        if self.asked.as_ref().is_none_or(|asked| asked.last < me) {
            if asker.closed {
                return Err(End::Closed);
            }
            if deadline <= now && !self.is_about_to_go(deadline, now) {
                return Err(self.too_late(me, asker));
            }
        }
        let entry = self.there.get_mut(&me).expect("looked at just now");
        entry.readying = false;
        entry.looks = until.min(if now < deadline { deadline } else { now + SIGN_OF_LIFE });
        Ok(entry.looks)
    }

    /// Whether those who were due by this deadline are on their way.
    fn is_about_to_go(&self, deadline: Instant, now: Instant) -> bool {
        let head = self.there.first_key_value();
        let due = || match (&self.told, head) {
            (Some(told), Some((_, head))) => told.due(&head.cost),
            _ => None,
        };
        now < deadline + PATIENCE
            && head.is_some_and(|(_, head)| !head.readying)
            && (self.hand.is_some() || due().is_some_and(|due| due <= deadline + TICK))
    }

    fn turn(&mut self, me: u64, asker: &Asker<'_>) -> Step {
        let now = asker.now;
        if asker.closed {
            return Step::End(End::Closed);
        }
        let good_until = self.hand.as_ref().map(|hand| hand.good_until);
        let entry = self.there.get_mut(&me).expect("it is the head");
        if entry.readying && entry.deadline <= now {
            return Step::End(self.too_late(me, asker));
        }
        entry.readying = true;
        entry.looks = now + SIGN_OF_LIFE;
        let ends = good_until.into_iter().chain((now < entry.deadline).then_some(entry.deadline));
        Step::Turn(ends.fold(entry.looks, Instant::min))
    }

    /// It has waited for as long as it may.
    fn too_late(&self, me: u64, asker: &Asker<'_>) -> End {
        let Some(told) = &self.told else { return End::Unanswered };
        let mut tokens = self.tokens.none();
        self.there.range(..=me).for_each(|(_, entry)| tokens += &entry.cost);
        End::Refused(told.refusal(&tokens, asker.now))
    }
}
