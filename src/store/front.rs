//! Remembers what a remote store answers, and refuses without a call what is known to be refused
//! (S34).

use std::future::Future;
use std::sync::Arc;

use super::Store;
use super::adjust::Adjust;
use super::charge::Charge;
use super::error::StoreError;
use super::guard::Guard;
use super::known::{Known, Refundable, Sent};
use super::remote::Remote;
use super::reply::{Reply, Unboxed};
use super::scope::Scope;
use crate::decision::Decision;
use crate::key::Key;

/// A store behind a guard whose refusals are remembered.
#[derive(Clone)]
pub(crate) struct Front {
    known: Known,
    pub(super) guard: Guard,
    refundable: Arc<Refundable>,
}

impl Front {
    /// `None`: each request calls the store.
    pub(crate) fn before(guard: &Guard, refundable: &Arc<Refundable>) -> Option<Self> {
        let known = guard.remote.known()?.clone();
        Some(Self { known, guard: guard.clone(), refundable: Arc::clone(refundable) })
    }

    #[cfg(feature = "tokio")]
    pub(super) fn known(&self) -> &Known {
        &self.known
    }

    /// The decision that follows from what is known, else when the store is called.
    pub(super) fn look(&self, charge: &Charge<'_>, may_spend: bool) -> Result<Decision, Sent> {
        self.known.look(charge, self.refundable.get(), may_spend)
    }

    /// Calls the store for a charge, without a fallback, and remembers the answer.
    pub(super) fn ask(
        &self,
        charge: Charge<'_>,
        sent: Sent,
    ) -> Unboxed<Decision, impl Future<Output = Result<Decision, StoreError>> + Send + use<>> {
        match self.guard.ask(charge) {
            Unboxed::Now(mut answer) => {
                if let Ok(decision) = &mut answer {
                    self.note(&charge, decision, sent);
                }
                Unboxed::Now(answer)
            }
            Unboxed::Later(later) => {
                let (front, charge) = (self.clone(), charge.to_owned());
                Unboxed::Later(async move {
                    let mut decision = later.await?;
                    front.note(&charge.as_charge(), &mut decision, sent);
                    Ok(decision)
                })
            }
        }
    }

    /// The same, with a fallback if the store fails.
    pub(super) fn answer(&self, charge: Charge<'_>, sent: Sent) -> Reply<Decision> {
        self.guard.or_stand_in(charge, self.ask(charge, sent))
    }

    fn note(&self, charge: &Charge<'_>, decision: &mut Decision, sent: Sent) {
        self.known.note(charge, decision, sent, self.refundable.get());
    }

    /// Corrects counts of the store.
    pub(super) fn correct(&self, adjust: Adjust<'_>) -> Reply<()> {
        let (known, account) = (self.known.clone(), adjust.account().to_owned());
        let forget = Twice::now(move || known.correct(&account.as_account()));
        forget.after(self.guard.adjust(adjust))
    }
}

impl Store for Front {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        if charge.is_peek() {
            return self.guard.charge(charge);
        }
        match self.look(&charge, false) {
            Ok(refusal) => Reply::now(refusal),
            Err(sent) => self.answer(charge, sent),
        }
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        if adjust.is_local() {
            return self.guard.adjust(adjust);
        }
        if adjust.is_refund() {
            // If tokens come back here, they may do so on other nodes.
            self.refundable.set();
        }
        self.correct(adjust)
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        let (known, of) = (self.known.clone(), (scope.clone(), key.clone()));
        let forget = Twice::now(move || known.reset(&of.0, &of.1));
        forget.after(self.guard.reset(scope, key))
    }

    fn is_shared(&self) -> bool {
        self.guard.is_shared()
    }

    fn remote(&self) -> Option<&Remote> {
        self.guard.remote()
    }
}

/// Forgets now, and again when the reply is done: answers in between may be outdated.
struct Twice<F: Fn()>(F);

impl<F: Fn() + Send + 'static> Twice<F> {
    fn now(forget: F) -> Self {
        forget();
        Self(forget)
    }

    /// Also where the reply is dropped before its end.
    fn after(self, reply: Reply<()>) -> Reply<()> {
        match reply.into_now() {
            Ok(answer) => Reply::from(answer),
            Err(later) => Reply::later(async move {
                let answer = later.await;
                drop(self);
                answer
            }),
        }
    }
}

impl<F: Fn()> Drop for Twice<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
