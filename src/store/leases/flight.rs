//! One task that asks for all requests that wait for a key, until none does.

use std::collections::VecDeque;
use std::sync::Arc;

use super::super::charge::{Charge, OwnedCharge};
use super::super::error::StoreError;
use super::super::known::{Id, Owner, SHARE, Sent, Waiter, leasable};
use super::lender::Lender;
use crate::decision::Decision;

pub(super) struct Flight {
    lender: Lender,
    /// What it asks for may be spent.
    _owner: Arc<Owner>,
    /// Of the requests that wait, and of the task.
    id: (Id, u64),
    /// Of one token.
    charge: OwnedCharge,
    waiters: VecDeque<Waiter>,
    /// Not as much was there as it had seemed.
    short: bool,
    ended: bool,
}

/// The next call.
struct Order {
    tokens: u64,
    /// Whether fewer are acceptable.
    up_to: bool,
    demand: u64,
    sent: Sent,
}

impl Flight {
    pub(super) fn new(
        lender: Lender,
        owner: Arc<Owner>,
        id: (Id, u64),
        charge: OwnedCharge,
    ) -> Self {
        let waiters = VecDeque::new();
        Self { lender, _owner: owner, id, charge, waiters, short: false, ended: false }
    }

    pub(super) async fn run(mut self) {
        while self.board() {
            if let Some(sent) = self.answer_what_is_known()
                && let Some(order) = self.order(sent)
            {
                let answer = self.ask(&order).await;
                self.deal(order, answer);
            }
        }
    }

    /// Whether a request waits; else the flight has ended.
    fn board(&mut self) -> bool {
        let (flights, (id, task)) = (self.lender.flights(), self.id);
        loop {
            flights.board(id, task, self.lender.until(), &mut self.waiters);
            self.waiters.retain(|waiter| !waiter.is_closed());
            if !self.waiters.is_empty() {
                return true;
            }
            if flights.end_if_empty(id, task) {
                self.ended = true;
                return false;
            }
        }
    }

    /// Tokens may have been leased since they began to wait, or the key refused. `None`: no request
    /// waits any more.
    fn answer_what_is_known(&mut self) -> Option<Sent> {
        let charge = self.charge.as_charge();
        while !self.waiters.is_empty() {
            let decision = match self.lender.front.look(&charge, true) {
                Ok(decision) => decision,
                Err(sent) => return Some(sent),
            };
            let waiter = self.waiters.pop_front().expect("not empty");
            // A token for a request that was dropped just now is lost.
            let _ = waiter.send(Ok(decision));
        }
        None
    }

    /// How much to ask for: a token for each request that waits, or a lease.
    fn order(&self, sent: Sent) -> Option<Order> {
        let charge = self.charge.as_charge();
        let (quota, max) = (leasable(&charge)?, self.lender.max);
        let facts = self.lender.facts(&charge.account());
        let (now, fact) = (facts.now(), facts.get(quota));
        drop(facts);
        let demand = fact.lease.next(now, quota, max);
        let used = if fact.lease.is_alive(now) { fact.state.used.max(0) as u64 } else { 0 };
        let remaining = quota.limit.saturating_sub(used);
        let lease = demand.min(remaining / SHARE).min(max);
        let tokens = lease.max(self.waiters.len() as u64);
        // Mostly all of them are there, and that is the simpler question.
        let up_to = tokens > 1 && (self.short || tokens > remaining / 2);
        Some(Order { tokens, up_to, demand, sent })
    }

    async fn ask(&self, order: &Order) -> Result<Decision, StoreError> {
        let asked = {
            let charge = Charge::new(self.charge.as_charge().account(), order.tokens);
            let charge = if order.up_to { charge.up_to() } else { charge };
            self.lender.front.ask(charge, order.sent).boxed()
        };
        asked.await
    }

    fn deal(&mut self, order: Order, answer: Result<Decision, StoreError>) {
        match answer {
            Ok(decision) if decision.allowed() => {
                self.short = false;
                self.deal_out(&order, &decision);
            }
            // Fewer may be there.
            Ok(_) if order.tokens > 1 && !order.up_to => self.short = true,
            answer => {
                if answer.is_err() {
                    // Requests that came meanwhile have waited long enough.
                    let ((id, task), until) = (self.id, self.lender.until());
                    self.lender.flights().board(id, task, until, &mut self.waiters);
                }
                for waiter in self.waiters.drain(..) {
                    let _ = waiter.send(answer.clone());
                }
            }
        }
    }

    /// Answers the requests that wait, and keeps the rest.
    fn deal_out(&mut self, order: &Order, decision: &Decision) {
        let charge = self.charge.as_charge();
        let Some(quota) = leasable(&charge) else { return };
        let mut fact = self.lender.leased(decision, quota, order.demand, order.sent);
        let one = fact.decide(fact.lease.taken, &charge);
        let left = &mut fact.lease.left;
        charge.account().scope().observe().lease_taken(*left);
        while *left > 0
            && let Some(waiter) = self.waiters.pop_front()
        {
            *left -= u64::from(waiter.send(Ok(one.clone())).is_ok());
        }
        let excess = self.lender.keep(&self.charge, quota, decision.granted(), fact, order.sent);
        self.lender.give_back(&charge, &one, excess);
    }
}

impl Drop for Flight {
    /// Also with the runtime that it ran in: requests elsewhere get an error, and the next one asks
    /// anew.
    fn drop(&mut self) {
        if !self.ended {
            let (id, task) = self.id;
            self.lender.flights().end(id, task);
        }
    }
}
