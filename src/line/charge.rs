//! The charges of a line, and how granted tokens are shared among its requests.

use std::mem;
use std::sync::Arc;
use std::time::Duration;

use super::claim::{LimitSet, Tokens};
use super::state::{Effects, LineState, Poller, TICK};
use super::tokens::{ChargeInFlight, Grant, LastAnswer, granted_tokens, part_decision};
use crate::decision::Decision;
use crate::store::{Reply, StoreError};
use crate::timer::Instant;

/// The most requests behind the head that one charge covers.
const MOST_NEIGHBORS: usize = 1_024;

impl LineState {
    /// Starts a charge for the head and, before a store that takes a while, for the requests behind
    /// it with equal quotas. Returns the tokens to charge, and whether the store may grant fewer.
    pub(super) fn start_charge(&mut self, me: u64, poller: &Poller<'_>) -> (Tokens, bool) {
        let head = &self.waiters[&me];
        let (mut cost, mut last) = (head.cost.clone(), me);
        if poller.covers_neighbors && poller.can_be_granted(&cost) {
            let behind = self.waiters.range(me + 1..).take(MOST_NEIGHBORS);
            for (number, waiter) in
                behind.take_while(|(_, waiter)| waiter.own_terms == head.own_terms)
            {
                let mut sum = cost.clone();
                sum += &waiter.cost;
                // Several limits grant all tokens or none.
                if poller.of_several && !self.is_likely(&sum, poller) {
                    break;
                }
                (cost, last) = (sum, *number);
            }
        }
        let (terms, sent) = (Arc::clone(poller.terms), poller.now);
        let (reply, polled_by, freed) = (None, Some(me), LimitSet::NONE);
        let (sender, last_covered, charged) = (me, last, cost.clone());
        self.in_flight = Some(ChargeInFlight {
            sender,
            last_covered,
            cost,
            terms,
            sent,
            reply,
            polled_by,
            freed,
        });
        (charged, last != me)
    }

    /// Returns whether these tokens are likely to be granted now, by the last answer.
    fn is_likely(&self, tokens: &Tokens, poller: &Poller<'_>) -> bool {
        let answer = self.answer.as_ref();
        let answer = answer.filter(|answer| !answer.stale && answer.terms == *poller.terms);
        let is_due = |answer: &LastAnswer| answer.due(tokens).is_some_and(|due| due <= poller.now);
        poller.can_be_granted(tokens) && answer.is_none_or(is_due)
    }

    /// Keeps the reply of the charge in flight until it is polled again.
    pub(super) fn park_reply(&mut self, reply: Reply<Decision>, polled_by: Option<u64>) {
        if let Some(charge) = &mut self.in_flight {
            (charge.reply, charge.polled_by) = (Some(reply), polled_by);
        }
    }

    /// Notes the answer of the charge in flight.
    pub(super) fn note_answer(
        &mut self,
        me: u64,
        answer: Result<Decision, StoreError>,
        poller: &Poller<'_>,
        effects: &mut Effects,
    ) {
        let Some(charge) = self.in_flight.take() else { return };
        let ChargeInFlight { sender, last_covered, cost, terms, sent, freed, .. } = charge;
        if self.head() != Some(me) {
            self.wake_head(poller.now, effects);
        }
        let decision = match answer {
            Ok(decision) => decision,
            Err(error) => {
                self.failure = Some((last_covered, error));
                return;
            }
        };
        let granted = granted_tokens(&decision, &terms, &cost);
        let whole = self.whole_requests(&granted, last_covered);
        let (none, is_less) = (whole.zeroed(), whole != granted);
        if is_less {
            let excess = part_decision(&decision, &terms, &whole, &(&granted - &whole));
            effects.returns.push((excess, Arc::clone(&terms)));
        }
        let is_served = whole != none;
        if is_served {
            self.last_grant = Some(sent);
            let valid_until = valid_until(&decision, sent, poller.now);
            let (decision, terms, left) = (decision.clone(), Arc::clone(&terms), whole.clone());
            self.grant = Some(Grant { decision, terms, given: none.clone(), left, valid_until });
        }
        let is_of_one = sender == last_covered;
        if decision.exceeds_capacity() && is_of_one && self.waiters.contains_key(&sender) {
            self.refuse_waiter(sender, decision.clone(), poller.now, effects);
        }
        // If several limits refuse the tokens of many requests, the head alone might still pass.
        let is_open = poller.of_several && !is_of_one && !is_served;
        let decision = match (is_less, is_open) {
            (false, false) => decision,
            (false, true) => decision.without_verdict(),
            (true, _) => part_decision(&decision, &terms, &none, &whole),
        };
        let is_all = granted == cost;
        let cost = is_of_one.then_some(cost);
        let mut answer = LastAnswer { decision, terms, cost, sent, stale: false, judged: false };
        let first = self.first_without_tokens();
        answer.stale = !is_all && first.is_some_and(|first| answer.waits_for(freed, first));
        self.answer = Some(answer);
        if !is_served {
            self.judge_newcomers(poller, effects);
        }
    }

    /// Returns how many of the granted tokens go to whole requests, from the head on.
    fn whole_requests(&self, granted: &Tokens, last: u64) -> Tokens {
        let mut whole = granted.zeroed();
        for waiter in self.waiters.range(..=last).map(|(_, waiter)| waiter) {
            let mut sum = whole.clone();
            sum += &waiter.cost;
            if !sum.fits_in(granted) {
                break;
            }
            whole = sum;
        }
        whole
    }

    /// Takes the head's tokens from the grant.
    pub(super) fn grant_head(&mut self, me: u64) -> Decision {
        let waiter = self.waiters.get_mut(&me).expect("it is the head");
        let none = waiter.cost.zeroed();
        let cost = mem::replace(&mut waiter.cost, none);
        self.requested -= &cost;
        let grant = self.grant.as_mut().expect("it covers the head");
        let part = grant.take_part(&cost).expect("it covers the head");
        if grant.left.is_zero() {
            self.grant = None;
        }
        part
    }

    /// Judges the unjudged requests by the last answer: each may be due, has to wait, or is refused
    /// since the line is full or the wait would be too long.
    pub(super) fn judge_newcomers(&mut self, poller: &Poller<'_>, effects: &mut Effects) {
        let Poller { now, max_waiting, .. } = *poller;
        let Some(answer) = self.answer.as_mut().filter(|answer| !answer.judged && !answer.stale)
        else {
            return;
        };
        answer.judged = true;
        let from = self.first_unjudged;
        let numbers: Vec<_> = self.waiters.range(from..).map(|(number, _)| *number).collect();
        let mut before = self.requested.clone();
        numbers.iter().for_each(|number| before -= &self.waiters[number].cost);
        let mut first_unjudged = self.arrivals;
        for number in numbers {
            let answer = self.answer.as_ref().expect("looked at just now");
            let mut tokens = before.clone();
            tokens += &self.waiters[&number].cost;
            let short = self.beyond_grant(&tokens);
            let waiter = self.waiters.get_mut(&number).expect("it is there");
            let due = answer.due(&short);
            let known = answer.terms == *waiter.own_terms.as_ref().unwrap_or(poller.terms);
            if waiter.has_to_wait || waiter.cost.is_zero() {
                before = tokens;
            } else if short.is_zero() || !known || due.is_some_and(|due| due <= now) {
                before = tokens;
                first_unjudged = first_unjudged.min(number);
            } else if self.waiting < max_waiting
                && due.is_some_and(|due| due <= waiter.deadline + TICK)
            {
                waiter.start_waiting(&mut self.waiting, effects);
                before = tokens;
            } else {
                let refusal = answer.refusal(&short, now);
                self.refuse_waiter(number, refusal, now, effects);
            }
        }
        self.first_unjudged = first_unjudged;
    }
}

/// Returns until when a decision's tokens can be used: until the first of their windows ends,
/// counted from when the charge was sent.
fn valid_until(decision: &Decision, sent: Instant, now: Instant) -> Instant {
    // Less one: the store decided up to a millisecond later than its rounded time.
    let (end, shortest) = decision.first_window_end();
    let left = end.saturating_sub(decision.now_ms()).saturating_sub(1);
    let valid_until = sent + Duration::from_millis(left.max(0) as u64).max(TICK);
    // If windows are about as short as the store's delay, every answer would come too late.
    if now.saturating_duration_since(sent) * 2 >= shortest {
        valid_until.max(now + shortest)
    } else {
        valid_until
    }
}
