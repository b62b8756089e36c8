//! The charges of a line, and who they are for.

use std::mem;
use std::time::Duration;

use super::state::{Asker, Out, State, TICK};
use super::tokens::{Asked, Hand, Told};
use crate::decision::Decision;
use crate::quota::MAX_TOKENS;
use crate::store::{Reply, StoreError};
use crate::timer::Instant;

/// As many requests are covered by one charge.
const NEIGHBOURS: usize = 1_024;

impl State {
    /// Charges the head, and those behind it with equal quotas where a charge takes a while.
    /// Returns the tokens to ask for, and whether fewer are worth having.
    pub(super) fn ask(&mut self, me: u64, asker: &Asker<'_>) -> (u64, bool) {
        let head = &self.there[&me];
        let (mut cost, mut last) = (head.cost, me);
        if asker.remote && asker.quotas.can_grant(head.cost) {
            let behind = self.there.range(me + 1..).take(NEIGHBOURS);
            for (number, entry) in behind.take_while(|(_, entry)| entry.own == head.own) {
                cost = cost.saturating_add(entry.cost).min(MAX_TOKENS);
                last = *number;
            }
        }
        let (quotas, sent) = (*asker.quotas, asker.now);
        let (reply, polled_by, again) = (None, Some(me), false);
        self.asked = Some(Asked { by: me, last, cost, quotas, sent, reply, polled_by, again });
        (cost, last != me)
    }

    /// The charge in flight has no answer yet.
    pub(super) fn park(&mut self, reply: Reply<Decision>, polled_by: Option<u64>) {
        if let Some(asked) = &mut self.asked {
            (asked.reply, asked.polled_by) = (Some(reply), polled_by);
        }
    }

    /// The charge in flight was answered.
    pub(super) fn answer(
        &mut self,
        me: u64,
        answer: Result<Decision, StoreError>,
        asker: &Asker<'_>,
        out: &mut Out,
    ) {
        let Some(asked) = self.asked.take() else { return };
        let Asked { by, last, cost, quotas, sent, again, .. } = asked;
        if self.head() != Some(me) {
            self.wake_head(asker.now, out);
        }
        let decision = match answer {
            Ok(decision) => decision,
            Err(error) => {
                self.failed = Some((last, error));
                return;
            }
        };
        let granted = decision.granted();
        let whole = self.whole(granted, last);
        if whole < granted {
            out.back.push((decision.part(whole, granted - whole), quotas));
        }
        if whole > 0 {
            self.served = Some(sent);
            let good_until = good_until(&decision, sent, asker.now);
            let (decision, before, left) = (decision.clone(), 0, whole);
            self.hand = Some(Hand { decision, quotas, before, left, good_until });
        }
        if decision.exceeds_capacity() && by == last && self.there.contains_key(&by) {
            self.refuse(by, decision.clone(), asker.now, out);
        }
        let stale = again && granted < cost;
        let decision = if whole < granted { decision.with_cost(whole) } else { decision };
        let cost = (by == last).then_some(cost);
        self.told = Some(Told { decision, quotas, cost, sent, stale, judged: false });
        if whole == 0 {
            self.judge(asker, out);
        }
    }

    /// How many of the tokens that were granted go to whole requests, from the head on.
    fn whole(&self, granted: u64, last: u64) -> u64 {
        let mut whole = 0_u64;
        for entry in self.there.range(..=last).map(|(_, entry)| entry) {
            match whole.checked_add(entry.cost) {
                Some(sum) if sum <= granted => whole = sum,
                _ => break,
            }
        }
        whole
    }

    /// The head gets its tokens of those that the line holds.
    pub(super) fn grant(&mut self, me: u64) -> Decision {
        let entry = self.there.get_mut(&me).expect("it is the head");
        let cost = mem::take(&mut entry.cost);
        self.tokens -= u128::from(cost);
        let hand = self.hand.as_mut().expect("it covers the head");
        let granted = hand.take(cost).expect("it covers the head");
        if hand.left == 0 {
            self.hand = None;
        }
        granted
    }

    /// Those who have joined without knowing it learn whether they have to wait, or can't.
    pub(super) fn judge(&mut self, asker: &Asker<'_>, out: &mut Out) {
        let Asker { now, most, .. } = *asker;
        let Some(told) = self.told.as_mut().filter(|told| !told.judged && !told.stale) else {
            return;
        };
        told.judged = true;
        let from = self.unjudged;
        let numbers: Vec<_> = self.there.range(from..).map(|(number, _)| *number).collect();
        let behind: u128 = numbers.iter().map(|number| u128::from(self.there[number].cost)).sum();
        let (mut before, in_hand) = (self.tokens - behind, self.in_hand());
        let mut unjudged = self.arrivals;
        for number in numbers {
            let told = self.told.as_ref().expect("looked at just now");
            let entry = self.there.get_mut(&number).expect("it is there");
            let tokens = before + u128::from(entry.cost);
            let due = told.due(tokens.saturating_sub(in_hand));
            let known = told.quotas == *entry.own.as_deref().unwrap_or(asker.quotas);
            if entry.has_to_wait || entry.cost == 0 {
                before = tokens;
            } else if tokens <= in_hand || !known || due.is_some_and(|due| due <= now) {
                before = tokens;
                unjudged = unjudged.min(number);
            } else if self.waiting < most && due.is_some_and(|due| due <= entry.deadline + TICK) {
                entry.has_to_wait(&mut self.waiting, out);
                before = tokens;
            } else {
                let refusal = told.refusal(tokens.saturating_sub(in_hand), now);
                self.refuse(number, refusal, now, out);
            }
        }
        self.unjudged = unjudged;
    }
}

/// Until when the tokens of a decision are those of a window that is not over, judged from when it
/// was asked for.
fn good_until(decision: &Decision, sent: Instant, now: Instant) -> Instant {
    // One less: it was a fraction of a millisecond later than the store says.
    let left = decision.good_until_ms().saturating_sub(decision.now_ms()).saturating_sub(1);
    let good_until = sent + Duration::from_millis(left.max(0) as u64).max(TICK);
    // No answer comes in time where windows are shorter than its way.
    match decision.usage().iter().map(|usage| usage.window()).min() {
        Some(shortest) if now.saturating_duration_since(sent) * 2 >= shortest => {
            good_until.max(now + shortest)
        }
        _ => good_until,
    }
}
