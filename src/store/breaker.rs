//! Stops calls to a store that keeps failing, except for a call now and then that tests it (S32).

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::error::StoreError;
use crate::timer::Instant;

/// Consecutive failures before the breaker opens ...
const FAILURES: u32 = 5;
/// ... for this time. Then a single call may test the store.
const PAUSE: Duration = Duration::from_millis(250);

/// Counts consecutive failures of each part of a store that fails independently. Clones are the
/// same breaker: it belongs to the store, and the store's limiters share it.
#[derive(Clone, Default)]
pub(super) struct Breaker(Arc<Parts>);

#[derive(Default)]
struct Parts {
    /// How many fail: mostly none, and then nothing is locked.
    failing: AtomicUsize,
    domains: Mutex<HashMap<u64, Failures>>,
    /// How many calls have tested the store, over all outages.
    probes: AtomicU64,
    /// How long a task waits for the store to answer again, if there is one.
    #[cfg(feature = "redis")]
    listens: Mutex<Option<Instant>>,
}

struct Failures {
    in_a_row: u32,
    /// When the next call may pass, once the breaker is open.
    next: Instant,
    /// The call that tests the store, and when it is given up.
    probe: Option<(u64, Instant)>,
}

impl Failures {
    fn are_too_many(&self) -> bool {
        self.in_a_row >= FAILURES
    }
}

impl Breaker {
    /// Whether the breaker is open for this part.
    #[cfg(feature = "tokio")]
    pub(super) fn is_open(&self, domain: impl FnOnce() -> u64) -> bool {
        self.0.failing.load(Ordering::Relaxed) > 0
            && self.domains().get(&domain()).is_some_and(Failures::are_too_many)
    }

    /// A call, if one may be made. While it is open that is one in each pause, and one at a time,
    /// however long that takes: `longest` at most, if that is known.
    pub(super) fn begin(&self, domain: u64, longest: Option<Duration>) -> Option<Attempt> {
        let mut probe = None;
        if self.0.failing.load(Ordering::Relaxed) > 0
            && let Some(failures) = self.domains().get_mut(&domain)
            && failures.are_too_many()
        {
            let now = Instant::now();
            let is_tried = failures.probe.is_some_and(|(_, until)| now < until);
            if is_tried || now < failures.next {
                return None;
            }
            let number = self.0.probes.fetch_add(1, Ordering::Relaxed);
            failures.next = now + PAUSE;
            // What is too far away to be an instant is given up anew at each look.
            let until = now.checked_add(longest.unwrap_or(PAUSE));
            failures.probe = until.map(|until| (number, until));
            probe = Some(number);
        }
        Some(Attempt { breaker: self.clone(), domain, probe })
    }

    /// What an answer says of a part; of one that was not sent, nothing.
    pub(super) fn report<T>(&self, domain: u64, answer: &Result<T, StoreError>) {
        match answer {
            Err(error) if error.is_unsent() => {}
            Err(error) => self.note(domain, error.is_of_key()),
            Ok(_) => self.note(domain, true),
        }
    }

    fn note(&self, domain: u64, well: bool) {
        if well && self.0.failing.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut domains = self.domains();
        if well {
            domains.remove(&domain);
        } else {
            let now = Instant::now();
            let failures =
                domains.entry(domain).or_insert(Failures { in_a_row: 0, next: now, probe: None });
            failures.in_a_row = failures.in_a_row.saturating_add(1);
            failures.next = now + PAUSE;
        }
        self.0.failing.store(domains.len(), Ordering::Relaxed);
    }

    /// Finds out for this time when a store that fails as a whole answers again; one at a time.
    #[cfg(feature = "redis")]
    pub(super) fn listener(&self, time: Duration) -> Option<Listener> {
        let (mut listens, now) = (self.listens(), Instant::now());
        // The runtime of the one before may stand still.
        let is_first = listens.is_none_or(|until| until <= now);
        is_first.then(|| {
            *listens = Some(now + time);
            Listener(self.clone())
        })
    }

    #[cfg(feature = "redis")]
    fn listens(&self) -> MutexGuard<'_, Option<Instant>> {
        self.0.listens.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn domains(&self) -> MutexGuard<'_, HashMap<u64, Failures>> {
        self.0.domains.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call that may be made. If it tests a store that failed, the next one may do so when this is
/// dropped.
pub(super) struct Attempt {
    breaker: Breaker,
    domain: u64,
    probe: Option<u64>,
}

impl Attempt {
    pub(super) fn report<T>(&self, answer: &Result<T, StoreError>) {
        self.breaker.report(self.domain, answer);
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if let Some(probe) = self.probe
            && let Some(failures) = self.breaker.domains().get_mut(&self.domain)
            && failures.probe.is_some_and(|(of, _)| of == probe)
        {
            failures.probe = None;
        }
    }
}

#[cfg(feature = "redis")]
pub(super) struct Listener(Breaker);

#[cfg(feature = "redis")]
impl Listener {
    /// The store has answered: that closes the breaker at once.
    pub(super) fn heard(&self) {
        self.0.note(0, true);
    }
}

#[cfg(feature = "redis")]
impl Drop for Listener {
    fn drop(&mut self) {
        *self.0.listens() = None;
    }
}
