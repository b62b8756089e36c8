//! One task that asks for all requests that wait for a key, until none does.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::runtime::Handle;

use super::super::charge::{Charge, OwnedCharge};
use super::super::error::StoreError;
use super::caller::{Caller, within};
use super::fact::{SHARE, leasable};
use super::flights::{Id, Passenger};
use super::idle::Owner;
use super::known::Sent;
use crate::decision::Decision;

pub(super) struct Flight {
    caller: Arc<Caller>,
    /// What it asks for may be spent.
    owner: Arc<Owner>,
    /// Of the requests that wait, and of the task.
    id: (Id, u64),
    /// Of one token.
    charge: OwnedCharge,
    waiters: VecDeque<Passenger>,
    /// Not as much was there as it had seemed.
    short: bool,
}

impl Flight {
    /// Waits for the call that asks for this charge's key. `None`: it is one to ask for by itself.
    pub(super) async fn join(
        caller: &Arc<Caller>,
        owner: &Arc<Owner>,
        charge: &Charge<'_>,
    ) -> Option<Result<Decision, StoreError>> {
        let quota = leasable(charge).filter(|_| caller.policy.leases() && charge.cost() == 1)?;
        // A call that tries a store which failed is waited for by its own request only.
        if caller.is_left_alone(charge) {
            return None;
        }
        let runtime = Handle::try_current().ok()?;
        let id = (caller.facts(&charge.account()).id(quota), runtime.id());
        let (answer, task) = caller.node.flights.join(id, quota.limit, caller.until())?;
        if let Some(task) = task {
            let flight = Self {
                caller: Arc::clone(caller),
                owner: Arc::clone(owner),
                id: (id, task),
                charge: charge.to_owned(),
                waiters: VecDeque::new(),
                short: false,
            };
            // A task of its own, as the request may be dropped, or not be polled. It has the flight
            // from its first moment: it may never be polled either.
            runtime.spawn(flight.run());
        }
        let answer = async {
            let given_up = |_| Err(StoreError::new("the task that asks the store has ended"));
            answer.await.unwrap_or_else(given_up)
        };
        // That task may stand still with its runtime. If not, it is to note its failure first.
        Some(within(caller.longest(), answer).await)
    }

    async fn run(mut self) {
        while self.board() {
            if let Some(sent) = self.answer_what_is_known()
                && let Some((order, demand)) = self.order()
            {
                let answer = self.caller.ask(order.as_charge(), Some(sent)).await;
                self.deal(&order.as_charge(), demand, sent, answer);
            }
        }
    }

    /// Whether a request waits; else the flight has ended.
    fn board(&mut self) -> bool {
        let (flights, (id, task)) = (&self.caller.node.flights, self.id);
        loop {
            flights.board(id, task, self.caller.until(), &mut self.waiters);
            if self.waiters.is_empty() {
                return false;
            }
            self.waiters.retain(|waiter| !waiter.is_closed());
            if !self.waiters.is_empty() {
                return true;
            }
        }
    }

    /// Tokens may have been leased since they began to wait, or the key refused. `None`: no request
    /// waits any more.
    fn answer_what_is_known(&mut self) -> Option<Sent> {
        let charge = self.charge.as_charge();
        while !self.waiters.is_empty() {
            let decision = match self.caller.look(&charge) {
                Ok(decision) => decision,
                Err(sent) => return sent,
            };
            let waiter = self.waiters.pop_front().expect("not empty");
            // A token for a request that was dropped just now is lost.
            let _ = waiter.send(Ok(decision));
        }
        None
    }

    /// What to ask for: a token for each request that waits, or a lease; and the key's demand.
    fn order(&self) -> Option<(OwnedCharge, u64)> {
        let charge = self.charge.as_charge();
        let (quota, max) = (leasable(&charge)?, self.caller.policy.max_lease);
        let facts = self.caller.facts(&charge.account());
        let (now, fact) = (facts.now(), facts.get(quota));
        drop(facts);
        let demand = fact.lease.next(now, quota, max);
        let used = if fact.lease.is_alive(now) { fact.state.used.max(0) as u64 } else { 0 };
        let remaining = quota.limit.saturating_sub(used);
        let lease = demand.min(remaining / SHARE).min(max);
        let tokens = lease.max(self.waiters.len() as u64);
        // Mostly all of them are there, and that is the simpler question.
        let up_to = tokens > 1 && (self.short || tokens > remaining / 2);
        let order = Charge::new(charge.account(), tokens);
        Some((if up_to { order.up_to() } else { order }.to_owned(), demand))
    }

    fn deal(
        &mut self,
        order: &Charge<'_>,
        demand: u64,
        sent: Sent,
        answer: Result<Decision, StoreError>,
    ) {
        match answer {
            Ok(decision) if decision.allowed() => {
                self.short = false;
                self.deal_out(demand, sent, &decision);
            }
            // Fewer may be there.
            Ok(_) if order.cost() > 1 && !order.is_up_to() => self.short = true,
            answer => {
                if answer.is_err() {
                    // Requests that came meanwhile have waited long enough.
                    let ((id, task), until) = (self.id, self.caller.until());
                    self.caller.node.flights.board(id, task, until, &mut self.waiters);
                }
                for waiter in self.waiters.drain(..) {
                    let _ = waiter.send(answer.clone());
                }
            }
        }
    }

    /// Answers the requests that wait, and keeps the rest.
    fn deal_out(&mut self, demand: u64, sent: Sent, decision: &Decision) {
        let charge = self.charge.as_charge();
        let Some(quota) = leasable(&charge) else { return };
        let mut fact = self.caller.leased(decision, quota, demand, sent);
        let one = fact.decide(fact.lease.taken, &charge);
        let left = &mut fact.lease.left;
        charge.account().scope().observe().lease_taken(*left);
        while *left > 0
            && let Some(waiter) = self.waiters.pop_front()
        {
            *left -= u64::from(waiter.send(Ok(one.clone())).is_ok());
        }
        let (owner, granted) = (Arc::downgrade(&self.owner), decision.granted());
        let excess = self.caller.keep(&owner, &self.charge, quota, granted, fact, sent);
        self.caller.give_back(&charge, &one, excess);
    }
}

impl Drop for Flight {
    /// Also with the runtime that it ran in: requests elsewhere get an error, and the next one asks
    /// anew.
    fn drop(&mut self) {
        let (id, task) = self.id;
        self.caller.node.flights.end(id, task);
    }
}
