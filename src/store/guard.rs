//! What stands between a limiter and a store that may fail: a deadline, a breaker, and what answers
//! in its place (S32, S33).

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Adjust, Charge, Inner, MemoryStore, Remote, Reply, Scope, Store, StoreError};
use crate::decision::Decision;
use crate::key::Key;
use crate::timer::Instant;

/// So many failures in a row, and the store is left alone ...
const FAILURES: u32 = 5;
/// ... for so long, after which a single call may try it.
const PAUSE: Duration = Duration::from_millis(250);
/// It is back when it has answered for so long, without a failure in between.
const SETTLED: Duration = Duration::from_secs(1);

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
    remote: Remote,
    breaker: Arc<Breaker>,
    outage: Arc<Outage>,
    /// What answers in its place.
    local: Option<MemoryStore>,
}

impl Guard {
    pub(crate) fn new(store: impl Store, remote: Remote) -> Self {
        Self {
            store: Arc::new(store),
            remote,
            breaker: Arc::default(),
            outage: Arc::default(),
            local: None,
        }
    }

    /// The same, answering from this process's memory where the store fails.
    pub(crate) fn or_memory(&self) -> Self {
        Self { local: Some(self.remote.fallback.clone()), ..self.clone() }
    }

    /// Whether the store is left alone, but for a call that tries it now and then.
    #[cfg(feature = "tokio")]
    pub(super) fn leaves_alone(&self) -> bool {
        self.breaker.is_open()
    }

    /// Asks the store itself: nothing answers in its place.
    pub(super) fn ask<T: Send + 'static>(
        &self,
        scope: &Scope,
        ask: impl FnOnce(&dyn Store) -> Reply<T>,
    ) -> Reply<T> {
        if !self.breaker.lets_pass() {
            return Reply::failed(StoreError::new("the store keeps failing and is left alone"));
        }
        let timing = scope.observe().store_is_called();
        match ask(&*self.store).into_now() {
            // No time was lost: nothing to save by not asking.
            Ok(answer) => {
                self.outage.note(scope, &answer);
                Reply(Inner::Now(Some(answer)))
            }
            Err(later) => {
                let (breaker, deadline) = (Arc::clone(&self.breaker), self.remote.deadline);
                let (outage, scope) = (Arc::clone(&self.outage), scope.clone());
                Reply::later(async move {
                    let answer = within(deadline, later).await;
                    scope.observe().store_was_called(timing);
                    breaker.note(answer.is_ok());
                    outage.note(&scope, &answer);
                    answer
                })
            }
        }
    }

    /// What is answered in its place, where it has failed.
    pub(super) fn stand_in(&self, charge: Charge<'_>, error: StoreError) -> Reply<Decision> {
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
        match self.ask(charge.account().scope(), |store| store.charge(charge)).into_now() {
            Ok(Ok(decision)) => Reply::now(decision),
            Ok(Err(error)) => self.stand_in(charge, error),
            Err(later) => {
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

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        match &self.local {
            // A correction that fails is dropped: what was taken stays counted (S14).
            _ if !adjust.is_local() => {
                self.ask(adjust.account().scope(), |store| store.adjust(adjust))
            }
            // Returned to where it was taken from, never to where it was not.
            Some(local) => local.adjust(adjust),
            None => Reply::now(()),
        }
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        // Also where nothing answers in its place here: limiters of the same scope may differ in that.
        let local = self.remote.fallback.reset(scope, key).into_now();
        let store = self.ask(scope, |store| store.reset(scope, key));
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
    fn is_open(&self) -> bool {
        self.failures.load(Ordering::Relaxed) >= FAILURES
    }

    /// While it is open, one call in each pause. A probe that is dropped needs no notice: the
    /// next pause has its own.
    fn lets_pass(&self) -> bool {
        if !self.is_open() {
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

/// A time in which the store fails: told when it begins and when it has ended, not for each request.
#[derive(Default)]
struct Outage {
    is_on: AtomicBool,
    state: Mutex<Option<Failing>>,
}

struct Failing {
    since: Instant,
    /// Since when it has answered without a failure.
    well_since: Option<Instant>,
    /// Requests that were answered without it.
    without: u64,
}

impl Outage {
    #[inline]
    fn note<T>(&self, scope: &Scope, answer: &Result<T, StoreError>) {
        match answer {
            Err(error) => self.failed(scope, error),
            Ok(_) if self.is_on.load(Ordering::Relaxed) => self.answered(scope),
            Ok(_) => {}
        }
    }

    #[cold]
    fn failed(&self, scope: &Scope, error: &StoreError) {
        scope.observe().store_failed();
        let mut state = self.lock();
        if let Some(failing) = &mut *state {
            failing.well_since = None;
            return;
        }
        *state = Some(Failing { since: Instant::now(), well_since: None, without: 0 });
        self.is_on.store(true, Ordering::Relaxed);
        drop(state);
        scope.observe().store_fails(error);
    }

    #[cold]
    fn answered(&self, scope: &Scope) {
        let mut state = self.lock();
        let Some(failing) = &mut *state else { return };
        let now = Instant::now();
        let well_since = *failing.well_since.get_or_insert(now);
        if now - well_since < SETTLED {
            return;
        }
        let (lasted, without) = (well_since - failing.since, failing.without);
        *state = None;
        self.is_on.store(false, Ordering::Relaxed);
        drop(state);
        scope.observe().store_is_back(without, lasted);
    }

    fn answer_without(&self) {
        if let Some(failing) = &mut *self.lock() {
            failing.without += 1;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Failing>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
