//! Tokens that a node has taken at once, and spends by itself (S34).
//!
//! A lease is taken from the shared count before a token of it is spent, and dies with its window,
//! counted from when it was asked for: so what passes was granted by the store, in that window.
//! What it costs is that tokens leased to one node are not there for another. So leases are small:
//! a part of what is left, and no more than the key's demand, which doubles while leases are spent
//! at once and halves when they are not; and unused tokens are returned soon.
//!
//! Requests for a key without a lease wait for one call: a task asks for all of them, and ends when
//! none waits. Another one returns unused tokens, and ends when nothing is leased.

use std::sync::Arc;

use tokio::runtime::Handle;

use super::Store;
use super::adjust::Adjust;
use super::charge::Charge;
use super::error::StoreError;
use super::front::Front;
use super::guard::within;
use super::known::{Answer, Owner, Sent, leasable};
use super::remote::Remote;
use super::reply::Reply;
use super::scope::Scope;
use crate::decision::Decision;
use crate::key::Key;

mod flight;
mod lender;

use flight::Flight;
use lender::Lender;

/// A store behind a front, whose tokens are leased.
#[derive(Clone)]
pub(crate) struct Leases {
    lender: Lender,
    /// As long as there is one, what is leased may be spent.
    owner: Arc<Owner>,
}

impl Leases {
    /// `max` is the largest lease; 0: none.
    pub(crate) fn new(front: Front, max: u64) -> Self {
        let (lender, owner) = Lender::owned(front, max);
        Self { lender, owner }
    }

    /// Waits for the call that asks for this charge's key, from when it is polled: one that never
    /// is has not charged.
    fn wait(&self, charge: &Charge<'_>, sent: Sent) -> Reply<Decision> {
        let (this, charge) = (self.clone(), charge.to_owned());
        Reply::later(async move {
            let charge = charge.as_charge();
            let front = &this.lender.front;
            let Some(answer) = this.join(&charge) else {
                return front.answer(charge, sent).await;
            };
            let answer = Reply::later(async {
                let given_up = |_| Err(StoreError::new("the task that asks the store has ended"));
                answer.await.unwrap_or_else(given_up)
            });
            // That task may stand still with its runtime. If not, it is to note its failure first.
            match within(this.lender.longest(), answer).await {
                Ok(decision) => Ok(decision),
                Err(error) => front.guard.stand_in(charge, error).await,
            }
        })
    }

    /// `None`: it is one to ask for by itself.
    fn join(&self, charge: &Charge<'_>) -> Option<Answer> {
        let quota = leasable(charge)?;
        let runtime = Handle::try_current().ok()?;
        let id = (self.lender.facts(&charge.account()).id(quota), runtime.id());
        let (answer, task) = self.lender.flights().join(id, quota.limit, self.lender.until())?;
        if let Some(task) = task {
            // A task of its own, as the request may be dropped, or not be polled. It has the flight
            // from its first moment: it may never be polled either.
            let (lender, owner) = (self.lender.clone(), Arc::clone(&self.owner));
            runtime.spawn(Flight::new(lender, owner, (id, task), charge.to_owned()).run());
        }
        Some(answer)
    }
}

impl Store for Leases {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        let Lender { front, max, .. } = &self.lender;
        if *max <= 1 || charge.is_peek() {
            return front.charge(charge);
        }
        let sent = match front.look(&charge, true) {
            Ok(decision) => return Reply::now(decision),
            Err(sent) => sent,
        };
        // A call that tries a store which failed is waited for by its own request only.
        let shares = charge.cost() == 1 && leasable(&charge).is_some();
        if shares && !front.guard.leaves_alone(&charge.account()) {
            return self.wait(&charge, sent);
        }
        front.answer(charge, sent)
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        self.lender.front.adjust(adjust)
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        self.lender.front.reset(scope, key)
    }

    fn is_shared(&self) -> bool {
        self.lender.front.is_shared()
    }

    fn remote(&self) -> Option<&Remote> {
        self.lender.front.remote()
    }
}
