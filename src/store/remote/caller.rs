//! Calls a store, notes its answers, and answers in its place while it fails.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::super::Store;
use super::super::adjust::Adjust;
use super::super::charge::Charge;
use super::super::error::{OnStoreFailure, StoreError};
use super::super::memory::MemoryStore;
use super::super::reply::Reply;
use super::super::scope::Scope;
use super::breaker::Breaker;
use super::known::{Known, Sent};
use super::outage::Outage;
use crate::decision::{Decision, Merging};
use crate::key::Key;
use crate::observe::UnderWay;
use crate::sync::AtEnd;

/// The state that all handles of a store share in this process.
pub(super) struct Node {
    pub(super) known: Known,
    pub(super) breaker: Arc<Breaker>,
    /// The memory that counts while the store fails.
    pub(super) fallback: MemoryStore,
}

impl Node {
    pub(super) fn new(breaker: Arc<Breaker>) -> Self {
        Self { known: Known::default(), fallback: MemoryStore::new(), breaker }
    }
}

/// The settings by which a handle calls its store.
#[derive(Clone, Copy)]
pub(super) struct Policy {
    /// How long a call may take, if that is known.
    pub(super) deadline: Option<Duration>,
    /// The store ends its calls by the deadline itself, and reports them to the breaker.
    pub(super) ends_itself: bool,
    /// How long refusals are remembered, in milliseconds.
    pub(super) remember: i64,
    pub(super) on_failure: OnStoreFailure,
}

/// Makes the calls of a handle.
pub(super) struct Caller {
    pub(super) store: Arc<dyn Store>,
    pub(super) node: Arc<Node>,
    pub(super) policy: Policy,
    outage: Outage,
}

impl Caller {
    pub(super) fn new(store: Arc<dyn Store>, node: Arc<Node>, policy: Policy) -> Self {
        let outage = Outage::new(policy.on_failure);
        Self { store, node, policy, outage }
    }

    /// Returns the refusal of a charge by those of its lines that known facts refuse, else what to
    /// [`ask_store`](Self::ask_store) with, for each line.
    pub(super) fn look_up(&self, charge: &Charge<'_>) -> Result<Decision, Vec<Sent>> {
        if charge.is_peek() || self.policy.remember == 0 {
            return Err(Vec::new());
        }
        let (mut refusals, mut all_sent) = (None, Vec::with_capacity(charge.len()));
        for (place, line) in charge.each().enumerate() {
            match self.node.known.look(&line, self.policy.remember) {
                Ok(refusal) => {
                    let new = || Merging::new(charge.lines().len());
                    refusals.get_or_insert_with(new).push_at(place, refusal);
                }
                Err(sent) => all_sent.push(sent),
            }
        }
        refusals.map(Merging::done).ok_or(all_sent)
    }

    /// Asks the store for a decision, and notes a refusal.
    pub(super) async fn ask_store(
        &self,
        charge: Charge<'_>,
        sent: Vec<Sent>,
    ) -> Result<Decision, StoreError> {
        let account = charge.account();
        let asked = self.call_store(account.scope, account.key, |store| store.charge(charge));
        let mut decision = asked.await?;
        for (place, (line, sent)) in charge.each().zip(sent).enumerate() {
            self.node.known.note(place, &line, &mut decision, sent, self.policy.remember);
        }
        Ok(decision)
    }

    /// Answers in place of the store, which gave this error.
    pub(super) fn stand_in(&self, charge: Charge<'_>, error: StoreError) -> Reply<Decision> {
        for (account, _) in charge.lines().filter(|_| !charge.is_peek()) {
            account.scope().observe().without_store(self.outage.meanwhile);
            self.outage.count_answer_without();
        }
        match self.policy.on_failure {
            OnStoreFailure::Local => self.node.fallback.charge(charge).map(Decision::into_local),
            policy @ (OnStoreFailure::Allow | OnStoreFailure::Deny) => {
                Reply::failed(error.under(policy))
            }
        }
    }

    /// Corrects counts of the store.
    pub(super) fn correct_counts(self: &Arc<Self>, adjust: Adjust<'_>) -> Reply<()> {
        let (this, adjust) = (Arc::clone(self), adjust.to_owned());
        let (node, account) = (Arc::clone(&self.node), adjust.as_adjust().account().to_owned());
        let forget = forget_twice(move || node.known.correct(&account.as_account()));
        Reply::later(async move {
            let adjust = adjust.as_adjust();
            let account = adjust.account();
            let answer =
                this.call_store(account.scope, account.key, |store| store.adjust(adjust)).await;
            drop(forget);
            answer
        })
    }

    /// Clears the counts of a key.
    pub(super) fn reset_key(self: &Arc<Self>, scope: &Scope, key: &Key) -> Reply<()> {
        let (this, node) = (Arc::clone(self), Arc::clone(&self.node));
        let (of, id) = ((scope.clone(), key.clone()), (scope.clone(), key.clone()));
        let forget = forget_twice(move || node.known.reset(&of.0, &of.1));
        Reply::later(async move {
            let (scope, key) = &id;
            let answer = this.call_store(scope, key, |store| store.reset(scope, key)).await;
            drop(forget);
            answer
        })
    }

    /// Calls the store, if the breaker allows it. The call ends by the deadline.
    async fn call_store<T>(
        &self,
        scope: &Scope,
        key: &Key,
        ask: impl FnOnce(&dyn Store) -> Reply<T>,
    ) -> Result<T, StoreError> {
        let Policy { deadline, ends_itself, .. } = self.policy;
        let domain = self.store.fault_domain(scope, key);
        let in_flight = self.node.breaker.begin_call(domain, deadline)?;
        let timing = scope.observe().store_is_called();
        let answer = {
            let _under_way = UnderWay::new();
            with_deadline(deadline.filter(|_| !ends_itself), ask(&*self.store)).await
        };
        if !answer.as_ref().is_err_and(StoreError::is_unsent) {
            scope.observe().store_was_called(timing);
        }
        if answer.as_ref().is_err_and(StoreError::is_failed_call) {
            scope.observe().store_failed();
        }
        if !ends_itself {
            self.node.breaker.report_answer(domain, None, &answer);
        }
        drop(in_flight);
        self.outage.note_answer(scope, domain, &answer, || self.store.server(scope, key));
        answer
    }
}

/// Awaits a reply. Returns an error if it is late.
async fn with_deadline<T>(
    deadline: Option<Duration>,
    reply: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    #[cfg(feature = "tokio")]
    if let Some(deadline) = deadline
        // In other runtimes, the store has to keep a deadline of its own.
        && tokio::runtime::Handle::try_current().is_ok()
    {
        let late = StoreError::new("the store did not answer in time");
        return tokio::time::timeout(deadline, reply).await.unwrap_or(Err(late));
    }
    let _ = deadline;
    reply.await
}

/// Forgets now, and again when the guard is dropped with the reply: answers in between may be
/// outdated.
fn forget_twice<F: Fn()>(forget: F) -> AtEnd<F> {
    forget();
    AtEnd(forget)
}
