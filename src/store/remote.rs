//! What limiters need for a store that is asked over a network: [`Remote`].

use std::fmt;
use std::time::Duration;

#[cfg(feature = "tokio")]
use super::book::Book;
use super::breaker::Breaker;
use super::memory::MemoryStore;
use super::recall::Recall;
use super::stopwatch::Stopwatch;

/// What is remote about a [`Store`](super::Store): its deadline, its breaker (S32), the memory that counts
/// while it fails (S33), and what this process remembers of its answers (S34).
///
/// A store makes one when it is made itself and keeps it in a field. Clones are the same one, so that
/// layers which share counters in the store share them here, too, and a reset through any of them is
/// seen by all.
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
    /// Whether the store itself reports to the breaker what became of its calls.
    reports: bool,
    /// `None`: the store is asked each time.
    recall: Option<Recall>,
    #[cfg(feature = "tokio")]
    book: Book,
}

/// Who ends a reply in time.
#[derive(Clone, Copy)]
enum Deadline {
    Limiter(Duration),
    /// The store, by then if that is known.
    Store(Option<Duration>),
}

impl Remote {
    /// A deadline of 250 ms, a fallback of a million entries, and nothing remembered yet.
    pub fn new() -> Self {
        let time = Stopwatch::start();
        Self {
            deadline: Deadline::Limiter(Duration::from_millis(250)),
            fallback: MemoryStore::new(),
            breaker: Breaker::default(),
            reports: false,
            recall: Some(Recall::new(time)),
            #[cfg(feature = "tokio")]
            book: Book::new(time),
        }
    }

    /// How long a limiter waits for an answer that is not there at once, before it acts as if the
    /// store had failed (feature `tokio`, in a runtime of tokio's).
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Deadline::Limiter(deadline);
        self
    }

    /// The store ends its replies in time by itself.
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

    /// The store reports to this breaker what became of its calls, also where the callers are gone.
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
        if self.recall.is_some() { fresh } else { fresh.without_front() }
    }

    /// Asks the store each time: no refusal is remembered, and no tokens are
    /// [leased](crate::FixedWindowLayer::leases). For a store whose clock doesn't run as this process's
    /// does: a [`ManualClock`](crate::ManualClock) in tests.
    #[must_use]
    pub fn without_front(mut self) -> Self {
        self.recall = None;
        self
    }

    /// Counts in this memory while the store fails.
    #[must_use]
    pub fn fallback_to(mut self, memory: MemoryStore) -> Self {
        self.fallback = memory;
        self
    }

    /// The memory that counts while the store fails.
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
    pub(super) fn longest(&self) -> Option<Duration> {
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

    pub(super) fn recall(&self) -> Option<&Recall> {
        self.recall.as_ref()
    }

    #[cfg(feature = "tokio")]
    pub(super) fn book(&self) -> &Book {
        &self.book
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
