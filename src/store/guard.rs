//! What stands between a limiter and a store that may fail: a deadline, a breaker, and what answers
//! in its place (S32, S33).

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

#[cfg(not(feature = "tokio"))]
use std::time::Instant;
#[cfg(feature = "tokio")]
use tokio::time::Instant;

use super::{Account, Adjust, Charge, Inner, MemoryStore, Reply, Store, StoreError};
use crate::decision::Decision;

/// So many failures in a row, and the store is left alone ...
const FAILURES: u32 = 5;
/// ... for so long, after which a single call may try it.
const PAUSE: Duration = Duration::from_millis(250);

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

/// A store whose answers come in time or not at all, and that is not asked while it fails.
#[derive(Clone)]
pub(crate) struct Guard {
    store: Arc<dyn Store>,
    breaker: Arc<Breaker>,
    /// What answers in its place.
    local: Option<MemoryStore>,
}

impl Guard {
    pub(crate) fn new(store: impl Store) -> Self {
        Self { store: Arc::new(store), breaker: Arc::default(), local: None }
    }

    /// The same, answering from this process's memory where the store fails.
    pub(crate) fn or_memory(&self) -> Self {
        Self { local: Some(self.store.fallback()), ..self.clone() }
    }

    fn ask<T: Send + 'static>(&self, ask: impl FnOnce(&dyn Store) -> Reply<T>) -> Reply<T> {
        if !self.breaker.lets_pass() {
            return Reply::failed(StoreError::new("the store keeps failing and is left alone"));
        }
        match ask(&*self.store).into_now() {
            // No time was lost: nothing to save by not asking.
            Ok(answer) => Reply(Inner::Now(Some(answer))),
            Err(later) => {
                let (breaker, deadline) = (Arc::clone(&self.breaker), self.store.deadline());
                Reply::later(async move {
                    let answer = within(deadline, later).await;
                    breaker.note(answer.is_ok());
                    answer
                })
            }
        }
    }
}

async fn within<T>(deadline: Option<Duration>, reply: Reply<T>) -> Result<T, StoreError> {
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
        let reply = self.ask(|store| store.charge(charge));
        let Some(local) = &self.local else { return reply };
        match reply.into_now() {
            Ok(Ok(decision)) => Reply::now(decision),
            Ok(Err(_)) => stand_in(local, charge),
            Err(later) => {
                let (local, charge) = (local.clone(), charge.to_owned());
                Reply::later(async move {
                    match later.await {
                        Ok(decision) => Ok(decision),
                        Err(_) => stand_in(&local, charge.as_charge()).await,
                    }
                })
            }
        }
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        match &self.local {
            // A correction that fails is dropped: what was taken stays counted (S14).
            _ if !adjust.is_local() => self.ask(|store| store.adjust(adjust)),
            // Returned to where it was taken from, never to where it was not.
            Some(local) => local.adjust(adjust),
            None => Reply::now(()),
        }
    }

    fn reset(&self, account: Account<'_>) -> Reply<()> {
        if let Some(local) = &self.local {
            let _done_at_once = local.reset(account);
        }
        self.ask(|store| store.reset(account))
    }

    fn is_shared(&self) -> bool {
        self.store.is_shared()
    }

    fn deadline(&self) -> Option<Duration> {
        None
    }
}

fn stand_in(local: &MemoryStore, charge: Charge<'_>) -> Reply<Decision> {
    local.charge(charge).map(Decision::into_local)
}

/// Counts failures in a row.
struct Breaker {
    failures: AtomicU32,
    /// When the next call may pass, once there are too many.
    next: Mutex<Instant>,
}

impl Default for Breaker {
    fn default() -> Self {
        Self { failures: AtomicU32::new(0), next: Mutex::new(Instant::now()) }
    }
}

impl Breaker {
    /// While it is open, one call in each pause. A probe that is dropped needs no notice: the
    /// next pause has its own.
    fn lets_pass(&self) -> bool {
        if self.failures.load(Ordering::Relaxed) < FAILURES {
            return true;
        }
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let due = now >= *next;
        if due {
            *next = now + PAUSE;
        }
        due
    }

    fn note(&self, well: bool) {
        if !well {
            let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
            *next = Instant::now() + PAUSE;
            self.failures.fetch_add(1, Ordering::Relaxed);
        } else if self.failures.load(Ordering::Relaxed) > 0 {
            self.failures.store(0, Ordering::Relaxed);
        }
    }
}
