//! A task that asks for all requests that wait for a key, until none waits: [`Flight`].

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::runtime::Handle;

use super::super::charge::{Charge, OwnedCharge};
use super::super::error::StoreError;
use super::caller::{Caller, with_deadline};
use super::fact::{SHARE, leasable};
use super::flights::{Id, WaitingRequest};
use super::idle::Owner;
use super::known::Sent;
use crate::decision::Decision;

pub(super) struct Flight {
    caller: Arc<Caller>,
    /// Leased tokens may be spent as long as the task runs.
    owner: Arc<Owner>,
    /// The id of the requests that wait, and the number of the task.
    id: (Id, u64),
    /// The charge of one token.
    charge: OwnedCharge,
    waiters: VecDeque<WaitingRequest>,
    /// `true` if fewer tokens were left than it had seemed.
    ran_short: bool,
}

impl Flight {
    /// Waits for the shared call for this charge's key. `None` if the charge needs its own call.
    pub(super) async fn join(
        caller: &Arc<Caller>,
        owner: &Arc<Owner>,
        charge: &Charge<'_>,
    ) -> Option<Result<Decision, StoreError>> {
        let quota = leasable(charge).filter(|_| caller.policy.leases() && charge.cost() == 1)?;
        // Only one request waits for a call that tests a failing store.
        if caller.is_breaker_open(charge) {
            return None;
        }
        let runtime = Handle::try_current().ok()?;
        // Handles with other deadlines have calls of their own.
        let key = caller.facts(&charge.account()).id(quota);
        let id = (key, runtime.id(), caller.policy.deadline);
        let (answer, task) =
            caller.node.flights.add_request(id, quota.limit, caller.give_up_at())?;
        if let Some(task) = task {
            let flight = Self {
                caller: Arc::clone(caller),
                owner: Arc::clone(owner),
                id: (id, task),
                charge: charge.to_owned(),
                waiters: VecDeque::new(),
                ran_short: false,
            };
            // The request may be dropped or not polled, so a task makes the call. It owns the
            // flight from the start, which so ends even if the task is never polled.
            runtime.spawn(flight.run());
        }
        let answer = async {
            let given_up = |_| Err(StoreError::new("the task that asks the store has ended"));
            answer.await.unwrap_or_else(given_up)
        };
        // The task may stand still with its runtime. Otherwise it ends first, and notes its
        // failure.
        Some(with_deadline(caller.max_wait(), answer).await)
    }

    async fn run(mut self) {
        while self.take_requests() {
            if let Some(sent) = self.answer_from_known()
                && let Some((order, heat)) = self.next_order()
            {
                let answer = self.caller.ask_store(order.as_charge(), Some(sent)).await;
                self.handle_answer(&order.as_charge(), heat, sent, answer);
            }
        }
    }

    /// Returns whether a request waits; else the flight has ended.
    fn take_requests(&mut self) -> bool {
        let (flights, (id, task)) = (&self.caller.node.flights, self.id);
        loop {
            flights.take_requests(id, task, self.caller.give_up_at(), &mut self.waiters);
            if self.waiters.is_empty() {
                return false;
            }
            self.waiters.retain(|waiter| !waiter.is_closed());
            if !self.waiters.is_empty() {
                return true;
            }
        }
    }

    /// Answers requests by tokens that were leased since they began to wait, or by a refusal.
    /// Returns `None` if no request waits any more.
    fn answer_from_known(&mut self) -> Option<Sent> {
        let charge = self.charge.as_charge();
        while !self.waiters.is_empty() {
            let decision = match self.caller.look_up(&charge) {
                Ok(decision) => decision,
                Err(sent) => return sent,
            };
            let waiter = self.waiters.pop_front().expect("not empty");
            // A token for a request that was dropped just now is lost.
            let _ = waiter.send(Ok(decision));
        }
        None
    }

    /// Returns the charge to send, of a token for each request that waits or of a lease, and the
    /// key's heat.
    fn next_order(&self) -> Option<(OwnedCharge, u64)> {
        let charge = self.charge.as_charge();
        let (quota, max) = (leasable(&charge)?, self.caller.policy.max_lease);
        let facts = self.caller.facts(&charge.account());
        let (now, fact) = (facts.now(), facts.get(quota));
        drop(facts);
        let heat = fact.lease.next_heat(now, quota, max);
        let used = if fact.lease.can_be_spent_at(now) { fact.state.used.max(0) as u64 } else { 0 };
        let remaining = quota.limit.saturating_sub(used);
        let lease = heat.min(remaining / SHARE).min(max);
        let tokens = lease.max(self.waiters.len() as u64);
        // Usually all of them are left, and an exact charge is simpler.
        let up_to = tokens > 1 && (self.ran_short || tokens > remaining / 2);
        let order = Charge::new(charge.account(), tokens);
        Some((if up_to { order.up_to() } else { order }.to_owned(), heat))
    }

    fn handle_answer(
        &mut self,
        order: &Charge<'_>,
        heat: u64,
        sent: Sent,
        answer: Result<Decision, StoreError>,
    ) {
        match answer {
            Ok(decision) if decision.allowed() => {
                self.ran_short = false;
                self.hand_out_tokens(heat, sent, &decision);
            }
            // Fewer may be left.
            Ok(_) if order.cost() > 1 && !order.is_up_to() => self.ran_short = true,
            answer => {
                if answer.is_err() {
                    // Requests that came meanwhile have waited long enough.
                    let ((id, task), until) = (self.id, self.caller.give_up_at());
                    self.caller.node.flights.take_requests(id, task, until, &mut self.waiters);
                }
                for waiter in self.waiters.drain(..) {
                    let _ = waiter.send(answer.clone());
                }
            }
        }
    }

    /// Gives a token to each request that waits, and keeps the rest.
    fn hand_out_tokens(&mut self, heat: u64, sent: Sent, decision: &Decision) {
        let charge = self.charge.as_charge();
        let Some(quota) = leasable(&charge) else { return };
        let mut fact = self.caller.fact_with_lease(decision, quota, heat, sent);
        let one = fact.decide(fact.lease.taken_at, &charge);
        let left = &mut fact.lease.left;
        charge.account().scope().observe().lease_taken(*left);
        while *left > 0
            && let Some(waiter) = self.waiters.pop_front()
        {
            *left -= u64::from(waiter.send(Ok(one.clone())).is_ok());
        }
        let (owner, granted) = (Arc::downgrade(&self.owner), decision.granted());
        let excess = self.caller.keep_lease(&owner, &self.charge, quota, granted, fact, sent);
        self.caller.return_tokens(&charge, &one, excess);
    }
}

impl Drop for Flight {
    /// Ends the task, also when its runtime ends: requests that still wait get an error, and the
    /// next one asks anew.
    fn drop(&mut self) {
        let (id, task) = self.id;
        self.caller.node.flights.end_task(id, task);
    }
}
