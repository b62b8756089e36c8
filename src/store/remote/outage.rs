//! Logs when a store begins to fail and when it is back, not each request.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::super::error::{OnStoreFailure, StoreError};
use super::super::scope::Scope;
use crate::observe::{self, Meanwhile};
use crate::timer::Instant;

/// The store is back when it has answered for this time without a failure.
const SETTLED: Duration = Duration::from_secs(1);
/// Causes of one outage that are logged.
const MAX_CAUSES: usize = 8;
const UNREADABLE: &str = "a key of the rate limiter holds what is none of its counts, and requests \
    for it are answered without the store: something else writes to keys that begin with tfw1:, or \
    with the store's prefix";

/// The current outage of a store, if there is one.
pub(super) struct Outage {
    /// How requests are answered meanwhile.
    pub(super) meanwhile: Meanwhile,
    is_on: AtomicBool,
    state: Mutex<Option<Failing>>,
}

struct Failing {
    since: Instant,
    /// The causes that were logged, each with the part of the store that has failed.
    causes: Vec<(u64, String)>,
    /// Since when the store has answered without a failure.
    well_since: Option<Instant>,
    /// Requests that were answered without the store.
    answered_without: u64,
}

impl Outage {
    pub(super) fn new(on_failure: OnStoreFailure) -> Self {
        let meanwhile = match on_failure {
            OnStoreFailure::Local => Meanwhile::Local,
            OnStoreFailure::Allow => Meanwhile::Allow,
            OnStoreFailure::Deny => Meanwhile::Deny,
        };
        Self { meanwhile, is_on: AtomicBool::new(false), state: Mutex::default() }
    }

    /// Notes an answer of a part of the store. `server` returns its name.
    pub(super) fn note_answer<T>(
        &self,
        scope: &Scope,
        domain: u64,
        answer: &Result<T, StoreError>,
        server: impl FnOnce() -> Option<Arc<str>>,
    ) {
        match answer {
            Err(error) if error.is_of_key() => observe::mistake(&UNREADABLE),
            Err(error) if !error.is_apart() => self.note_failure(scope, domain, error, server),
            _ if self.is_on.load(Ordering::Relaxed) => self.note_success(scope),
            _ => {}
        }
    }

    fn note_failure(
        &self,
        scope: &Scope,
        domain: u64,
        error: &StoreError,
        server: impl FnOnce() -> Option<Arc<str>>,
    ) {
        let cause = (domain, error.to_string());
        let mut state = self.lock();
        match &mut *state {
            Some(failing) => {
                failing.well_since = None;
                // A cause that comes and goes is logged once.
                if failing.causes.len() == MAX_CAUSES || failing.causes.contains(&cause) {
                    return;
                }
                failing.causes.push(cause);
            }
            None => {
                let (since, causes) = (Instant::now(), vec![cause]);
                *state = Some(Failing { since, causes, well_since: None, answered_without: 0 });
                self.is_on.store(true, Ordering::Relaxed);
            }
        }
        drop(state);
        scope.observe().store_fails(self.meanwhile, server().as_deref(), error);
    }

    fn note_success(&self, scope: &Scope) {
        let mut state = self.lock();
        let Some(failing) = &mut *state else { return };
        let now = Instant::now();
        let well_since = *failing.well_since.get_or_insert(now);
        if now - well_since < SETTLED {
            return;
        }
        let (lasted, without) = (well_since - failing.since, failing.answered_without);
        *state = None;
        self.is_on.store(false, Ordering::Relaxed);
        drop(state);
        scope.observe().store_is_back(without, lasted);
    }

    pub(super) fn count_answer_without(&self) {
        if let Some(failing) = &mut *self.lock() {
            failing.answered_without += 1;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Failing>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
