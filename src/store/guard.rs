//! A limiter's guard against a store that can fail: a deadline, a breaker, and a fallback (S32,
//! S33).

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::Store;
use super::account::Account;
use super::adjust::Adjust;
use super::breaker::Attempt;
use super::charge::Charge;
use super::error::StoreError;
use super::known::Refundable;
use super::memory::MemoryStore;
use super::outage::Outage;
use super::remote::Remote;
use super::reply::{Reply, Unboxed};
use super::scope::Scope;
use crate::decision::Decision;
use crate::key::Key;
use crate::observe::{Timing, UnderWay};

/// A store whose answers come in time or not at all, and that is not called while the breaker is
/// open.
#[derive(Clone)]
pub(crate) struct Guard {
    store: Arc<dyn Store>,
    pub(super) remote: Remote,
    outage: Arc<Outage>,
    /// The fallback.
    local: Option<MemoryStore>,
}

impl Guard {
    pub(crate) fn new(store: impl Store, remote: Remote) -> Self {
        Self { store: Arc::new(store), remote, outage: Arc::default(), local: None }
    }

    /// The same, with this process's memory as the fallback.
    pub(crate) fn or_memory(&self) -> Self {
        Self { local: Some(self.remote.fallback().clone()), ..self.clone() }
    }

    /// Whether tokens of a scope may come back, for all of its limiters.
    pub(crate) fn refundable(&self, scope: &Scope) -> Arc<Refundable> {
        self.remote.refundable(scope)
    }

    /// Whether the breaker is open, except for a call now and then that tests the store.
    #[cfg(feature = "tokio")]
    pub(super) fn leaves_alone(&self, account: &Account<'_>) -> bool {
        let domain = || self.store.fault_domain(account.scope(), account.key());
        self.remote.breaker().is_open(domain)
    }

    /// A call to the store, if one may be made.
    fn begin(&self, scope: &Scope, key: &Key) -> Result<Call, StoreError> {
        let domain = self.store.fault_domain(scope, key);
        let attempt = self.remote.breaker().begin(domain, self.remote.longest());
        let attempt = attempt.ok_or_else(|| {
            StoreError::new("the store keeps failing: the circuit breaker is open")
        })?;
        Ok(Call { attempt, timing: scope.observe().store_is_called() })
    }

    /// Ends a call: sets the deadline of its reply, and reports its result to the breaker.
    fn end<T: Send + 'static>(
        &self,
        Call { attempt, timing }: Call,
        scope: &Scope,
        reply: Reply<T>,
    ) -> Unboxed<T, impl Future<Output = Result<T, StoreError>> + Send + use<T>> {
        let (deadline, reports) = (self.remote.limiters_deadline(), self.remote.reports());
        match reply.into_now() {
            Ok(answer) => {
                if !reports {
                    attempt.report(&answer);
                }
                self.outage.note(scope, &answer);
                Unboxed::Now(answer)
            }
            Err(later) => {
                let (outage, scope) = (Arc::clone(&self.outage), scope.clone());
                let under_way = UnderWay::new();
                Unboxed::Later(async move {
                    let answer = within(deadline, later).await;
                    drop(under_way);
                    scope.observe().store_was_called(timing);
                    if !reports {
                        attempt.report(&answer);
                    }
                    drop(attempt);
                    outage.note(&scope, &answer);
                    answer
                })
            }
        }
    }

    fn call<T: Send + 'static>(
        &self,
        scope: &Scope,
        key: &Key,
        ask: impl FnOnce(&dyn Store) -> Reply<T>,
    ) -> Reply<T> {
        match self.begin(scope, key) {
            Ok(call) => self.end(call, scope, ask(&*self.store)).boxed(),
            Err(error) => Reply::failed(error),
        }
    }

    /// Calls the store itself for a charge, without the fallback.
    pub(super) fn ask(
        &self,
        charge: Charge<'_>,
    ) -> Unboxed<Decision, impl Future<Output = Result<Decision, StoreError>> + Send + use<>> {
        let Account { scope, key, .. } = charge.account();
        match self.begin(scope, key) {
            Ok(call) => self.end(call, scope, self.store.charge(charge)),
            Err(error) => Unboxed::Now(Err(error)),
        }
    }

    /// The answer to a charge, or the fallback's if the store fails.
    pub(super) fn or_stand_in<F>(
        &self,
        charge: Charge<'_>,
        asked: Unboxed<Decision, F>,
    ) -> Reply<Decision>
    where
        F: Future<Output = Result<Decision, StoreError>> + Send + 'static,
    {
        match asked {
            Unboxed::Now(Ok(decision)) => Reply::now(decision),
            Unboxed::Now(Err(error)) => self.stand_in(charge, error),
            Unboxed::Later(later) => {
                let (guard, charge) = (self.clone(), charge.to_owned());
                Reply::later(async move {
                    match later.await {
                        Ok(decision) => Ok(decision),
                        Err(error) => guard.stand_in(charge.as_charge(), error).await,
                    }
                })
            }
        }
    }

    /// The answer of the fallback.
    pub(crate) fn stand_in(&self, charge: Charge<'_>, error: StoreError) -> Reply<Decision> {
        if !charge.is_peek() {
            charge.account().scope().observe().without_store();
            self.outage.answer_without();
        }
        match &self.local {
            Some(local) => local.charge(charge).map(Decision::into_local),
            None => Reply::failed(error),
        }
    }
}

/// A call to the store in flight.
struct Call {
    attempt: Attempt,
    timing: Timing,
}

/// The reply, or an error when it is late.
pub(super) async fn within<T>(
    deadline: Option<Duration>,
    reply: Reply<T>,
) -> Result<T, StoreError> {
    #[cfg(feature = "tokio")]
    if let Some(deadline) = deadline
        // Other runtimes' stores have to keep their own.
        && tokio::runtime::Handle::try_current().is_ok()
    {
        let late = StoreError::new("the store did not answer in time");
        return tokio::time::timeout(deadline, reply).await.unwrap_or(Err(late));
    }
    let _ = deadline;
    reply.await
}

impl Store for Guard {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        self.or_stand_in(charge, self.ask(charge))
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        match &self.local {
            // A correction that fails is dropped: what was taken stays counted (S14).
            _ if !adjust.is_local() => {
                let Account { scope, key, .. } = adjust.account();
                self.call(scope, key, |store| store.adjust(adjust))
            }
            // Returned to where it was taken from, never to where it was not.
            Some(local) => local.adjust(adjust),
            None => Reply::now(()),
        }
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        // Also without a fallback here: other limiters of the same scope may have one.
        let local = self.remote.fallback().reset(scope, key).into_now();
        let store = self.call(scope, key, |store| store.reset(scope, key));
        match local {
            // It is forgotten if it is in both places.
            Ok(Err(error)) => Reply::later(async { store.await.and(Err(error)) }),
            _ => store,
        }
    }

    fn is_shared(&self) -> bool {
        self.store.is_shared()
    }

    fn remote(&self) -> Option<&Remote> {
        Some(&self.remote)
    }
}
