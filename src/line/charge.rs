//! The charges of a line, and who they are for.

use std::mem;
use std::sync::Arc;
use std::time::Duration;

use super::claim::{Those, Tokens};
use super::state::{Asker, Out, State, TICK};
use super::tokens::{Asked, Hand, Told, granted, part};
use crate::decision::Decision;
use crate::store::{Reply, StoreError};
use crate::timer::Instant;

/// As many requests are covered by one charge.
const NEIGHBOURS: usize = 1_024;

impl State {
    /// Charges the head, and those behind it with equal quotas where a charge takes a while.
    /// Returns the tokens to ask for, and whether fewer are worth having.
    pub(super) fn ask(&mut self, me: u64, asker: &Asker<'_>) -> (Tokens, bool) {
        let head = &self.there[&me];
        let (mut cost, mut last) = (head.cost.clone(), me);
        if asker.covers_others && asker.can_be_granted(&cost) {
            let behind = self.there.range(me + 1..).take(NEIGHBOURS);
            for (number, entry) in behind.take_while(|(_, entry)| entry.own == head.own) {
                let mut sum = cost.clone();
                sum += &entry.cost;
                // Several limits grant all tokens or none.
                if asker.of_several && !self.is_likely(&sum, asker) {
                    break;
                }
                (cost, last) = (sum, *number);
            }
        }
        let (terms, sent) = (Arc::clone(asker.terms), asker.now);
        let (reply, polled_by, freed) = (None, Some(me), Those::NONE);
        let asked = (cost.clone(), last != me);
        self.asked = Some(Asked { by: me, last, cost, terms, sent, reply, polled_by, freed });
        asked
    }

    /// Whether as many tokens could be granted now, as far as the line knows.
    fn is_likely(&self, tokens: &Tokens, asker: &Asker<'_>) -> bool {
        let told = self.told.as_ref().filter(|told| !told.stale && told.terms == *asker.terms);
        let is_due = |told: &Told| told.due(tokens).is_some_and(|due| due <= asker.now);
        asker.can_be_granted(tokens) && told.is_none_or(is_due)
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
        let Asked { by, last, cost, terms, sent, freed, .. } = asked;
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
        let granted = granted(&decision, &terms);
        let whole = self.whole(&granted, last);
        let (none, is_less) = (whole.none(), whole != granted);
        if is_less {
            let back = part(&decision, &terms, &whole, &(&granted - &whole));
            out.back.push((back, Arc::clone(&terms)));
        }
        let is_served = whole != none;
        if is_served {
            self.served = Some(sent);
            let good_until = good_until(&decision, sent, asker.now);
            let (decision, terms, left) = (decision.clone(), Arc::clone(&terms), whole.clone());
            self.hand = Some(Hand { decision, terms, before: none.clone(), left, good_until });
        }
        if decision.exceeds_capacity() && by == last && self.there.contains_key(&by) {
            self.refuse(by, decision.clone(), asker.now, out);
        }
        // Of several limits, the refusal of many says nothing of the first of them alone.
        let is_open = asker.of_several && by != last && !is_served;
        let decision = match (is_less, is_open) {
            (false, false) => decision,
            (false, true) => decision.standing(),
            (true, _) => part(&decision, &terms, &none, &whole),
        };
        let is_all = granted == cost;
        let cost = (by == last).then_some(cost);
        let mut told = Told { decision, terms, cost, sent, stale: false, judged: false };
        let first = self.first_short();
        told.stale = !is_all && first.is_some_and(|first| told.waits_for(freed, first));
        self.told = Some(told);
        if !is_served {
            self.judge(asker, out);
        }
    }

    /// How many of the tokens that were granted go to whole requests, from the head on.
    fn whole(&self, granted: &Tokens, last: u64) -> Tokens {
        let mut whole = granted.none();
        for entry in self.there.range(..=last).map(|(_, entry)| entry) {
            let mut sum = whole.clone();
            sum += &entry.cost;
            if !sum.fits(granted) {
                break;
            }
            whole = sum;
        }
        whole
    }

    /// The head gets its tokens of those that the line holds.
    pub(super) fn grant(&mut self, me: u64) -> Decision {
        let entry = self.there.get_mut(&me).expect("it is the head");
        let none = entry.cost.none();
        let cost = mem::replace(&mut entry.cost, none);
        self.tokens -= &cost;
        let hand = self.hand.as_mut().expect("it covers the head");
        let granted = hand.take(&cost).expect("it covers the head");
        if hand.left.is_none() {
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
        let mut before = self.tokens.clone();
        numbers.iter().for_each(|number| before -= &self.there[number].cost);
        let mut unjudged = self.arrivals;
        for number in numbers {
            let told = self.told.as_ref().expect("looked at just now");
            let mut tokens = before.clone();
            tokens += &self.there[&number].cost;
            let short = self.not_in_hand(&tokens);
            let entry = self.there.get_mut(&number).expect("it is there");
            let due = told.due(&short);
            let known = told.terms == *entry.own.as_ref().unwrap_or(asker.terms);
            if entry.has_to_wait || entry.cost.is_none() {
                before = tokens;
            } else if short.is_none() || !known || due.is_some_and(|due| due <= now) {
                before = tokens;
                unjudged = unjudged.min(number);
            } else if self.waiting < most && due.is_some_and(|due| due <= entry.deadline + TICK) {
                entry.has_to_wait(&mut self.waiting, out);
                before = tokens;
            } else {
                let refusal = told.refusal(&short, now);
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
    let (end, shortest) = decision.first_to_end();
    let left = end.saturating_sub(decision.now_ms()).saturating_sub(1);
    let good_until = sent + Duration::from_millis(left.max(0) as u64).max(TICK);
    // No answer comes in time where windows are shorter than its way.
    if now.saturating_duration_since(sent) * 2 >= shortest {
        good_until.max(now + shortest)
    } else {
        good_until
    }
}
