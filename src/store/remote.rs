//! What limiters need for a store that is called over a network: [`Remote`].

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::breaker::Breaker;
#[cfg(feature = "tokio")]
use super::known::{Flights, Idle};
use super::known::{Known, Refundable};
use super::memory::MemoryStore;
use super::scope::Scope;
use super::stopwatch::Stopwatch;

/// What is remote about a [`Store`](super::Store): its deadline, its breaker (S32), the memory that
/// counts while it fails (S33), and what this process remembers of its answers (S34).
///
/// A store creates one `Remote` for itself and keeps it in a field. Clones share it. So layers that
/// share counters in the store also share what is remembered of them, and a reset through one layer
/// takes effect in all.
///
/// ```
/// use std::time::Duration;
/// use tower_fixed_window::store::{Adjust, Charge, Remote, Reply, Scope, Store};
/// use tower_fixed_window::{Decision, Key, StoreError};
///
/// #[derive(Clone)]
/// struct Database { remote: Remote }
///
/// impl Database {
///     fn new() -> Self {
///         Self { remote: Remote::new().deadline(Duration::from_millis(50)) }
///     }
/// }
///
/// impl Store for Database {
///     // ... three queries
/// #     fn charge(&self, _: Charge<'_>) -> Reply<Decision> { Reply::failed(StoreError::new("down")) }
/// #     fn adjust(&self, _: Adjust<'_>) -> Reply<()> { Reply::failed(StoreError::new("down")) }
/// #     fn reset(&self, _: &Scope, _: &Key) -> Reply<()> { Reply::failed(StoreError::new("down")) }
///
///     fn remote(&self) -> Option<&Remote> { Some(&self.remote) }
/// }
///
/// assert_eq!(Database::new().remote().unwrap().fallback().len(), 0);
/// ```
#[derive(Clone)]
pub struct Remote {
    deadline: Deadline,
    fallback: MemoryStore,
    breaker: Breaker,
    /// Whether the store itself reports the results of its calls to the breaker.
    reports: bool,
    /// `None`: each request calls the store.
    known: Option<Known>,
    #[cfg(feature = "tokio")]
    pub(super) flights: Arc<Flights>,
    #[cfg(feature = "tokio")]
    pub(super) idle: Idle,
}

/// Which side ends a reply in time.
#[derive(Clone, Copy)]
enum Deadline {
    Limiter(Duration),
    /// The store, by then if that is known.
    Store(Option<Duration>),
}

impl Remote {
    /// Creates a `Remote` with a deadline of 250 ms and a fallback of a million entries.
    pub fn new() -> Self {
        let time = Stopwatch::start();
        Self {
            deadline: Deadline::Limiter(Duration::from_millis(250)),
            fallback: MemoryStore::new(),
            breaker: Breaker::default(),
            reports: false,
            known: Some(Known::new(time)),
            #[cfg(feature = "tokio")]
            flights: Arc::default(),
            #[cfg(feature = "tokio")]
            idle: Idle::new(time),
        }
    }

    /// Sets how long a limiter waits for an answer before it treats the store as failed (feature
    /// `tokio`, in a tokio runtime).
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Deadline::Limiter(deadline);
        self
    }

    /// The store itself ends its replies in time, so limiters set no [`deadline`](Self::deadline).
    #[must_use]
    pub fn without_deadline(mut self) -> Self {
        self.deadline = Deadline::Store(None);
        self
    }

    /// The store ends its replies by this deadline by itself.
    #[cfg(feature = "redis")]
    pub(super) fn keeping_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Deadline::Store(Some(deadline));
        self
    }

    /// The store reports the results of its calls to this breaker, also if the callers are gone.
    #[cfg(feature = "redis")]
    pub(super) fn reporting_to(mut self, breaker: Breaker) -> Self {
        (self.breaker, self.reports) = (breaker, true);
        self
    }

    /// The same for other counters of the store.
    #[cfg(feature = "redis")]
    pub(super) fn afresh(&self) -> Self {
        let Self { deadline, reports, .. } = *self;
        let fresh = Self { deadline, reports, breaker: self.breaker.clone(), ..Self::new() };
        if self.known.is_some() { fresh } else { fresh.without_front() }
    }

    /// Calls the store for each request: no refusal is remembered, and no tokens are leased. For
    /// stores whose clock differs from this process's, such as a
    /// [`ManualClock`](crate::ManualClock) in tests.
    #[must_use]
    pub fn without_front(mut self) -> Self {
        self.known = None;
        self
    }

    /// Returns the memory that counts while the store fails.
    pub fn fallback(&self) -> &MemoryStore {
        &self.fallback
    }

    /// How long a limiter is to wait.
    pub(super) fn limiters_deadline(&self) -> Option<Duration> {
        match self.deadline {
            Deadline::Limiter(deadline) => Some(deadline),
            Deadline::Store(_) => None,
        }
    }

    /// How long a call may take, whether the limiter ends it or the store.
    pub(crate) fn longest(&self) -> Option<Duration> {
        match self.deadline {
            Deadline::Limiter(deadline) => Some(deadline),
            Deadline::Store(deadline) => deadline,
        }
    }

    pub(super) fn breaker(&self) -> &Breaker {
        &self.breaker
    }

    pub(super) fn reports(&self) -> bool {
        self.reports
    }

    pub(super) fn known(&self) -> Option<&Known> {
        self.known.as_ref()
    }

    /// Whether tokens of a scope may come back, for all of its limiters.
    pub(super) fn refundable(&self, scope: &Scope) -> Arc<Refundable> {
        self.known.as_ref().map(|known| known.refundable(scope)).unwrap_or_default()
    }
}

impl Default for Remote {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote").field("fallback", &self.fallback).finish_non_exhaustive()
    }
}
