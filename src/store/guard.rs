//! What happens when a store fails (S33).

use super::{Account, Adjust, Charge, MemoryStore, Reply, Store};
use crate::decision::Decision;

/// What a layer does with a request when its store can't say whether it may pass.
///
/// Never a 429: that would blame the client.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum OnStoreFailure {
    /// Enforce the same quotas in this process's memory until the store is back: at most one
    /// further limit passes on each node.
    #[default]
    Local,
    /// Let it pass, without rate-limit fields: the standing is unknown.
    Allow,
    /// Refuse with 503 and `retry-after`.
    Deny,
}

/// A store that answers from this process's memory where the one behind it fails.
pub(crate) struct Guard<S> {
    store: S,
    local: MemoryStore,
}

impl<S: Store> Guard<S> {
    pub(crate) fn new(store: S) -> Self {
        Self { store, local: MemoryStore::new() }
    }
}

impl<S: Store> Store for Guard<S> {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        match self.store.charge(charge).into_now() {
            Ok(Ok(decision)) => Reply::now(decision),
            Ok(Err(_)) => self.local.charge(charge).map(Decision::into_local),
            Err(later) => {
                let (local, charge) = (self.local.clone(), charge.to_owned());
                Reply::later(async move {
                    match later.await {
                        Ok(decision) => Ok(decision),
                        Err(_) => local.charge(charge.as_charge()).await.map(Decision::into_local),
                    }
                })
            }
        }
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        // What was taken locally is returned there. A correction that fails is dropped, and its
        // charge stays counted (S14).
        if adjust.is_local() { self.local.adjust(adjust) } else { self.store.adjust(adjust) }
    }

    fn reset(&self, account: Account<'_>) -> Reply<()> {
        let _done_at_once = self.local.reset(account);
        self.store.reset(account)
    }

    fn is_shared(&self) -> bool {
        self.store.is_shared()
    }
}
