//! Requests that wait for their windows, in order of arrival.
//!
//! A late request, whose window was over before the service was ready, has to take tokens anew, and
//! those of one key do so one after the other: else the one that happens to be woken first would go
//! first.

use std::collections::{BTreeMap, HashMap};
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::key::Key;
use crate::timer::{Instant, Sleep};

/// For how long a request waits for its turn: those before it may be polled no more.
const PATIENCE: Duration = Duration::from_millis(100);

/// The requests of a layer that wait.
#[derive(Default)]
pub(crate) struct Queue(Mutex<Entries>);

#[derive(Default)]
struct Entries {
    arrivals: u64,
    by_key: HashMap<Key, BTreeMap<u64, Entry>>,
}

struct Entry {
    /// From here on it is late.
    until: Instant,
    /// It had tokens, of a window that is over when it is late.
    reserved: bool,
    /// Of one that waits for its turn.
    waker: Option<Waker>,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request that may have to wait. It leaves the queue when it is dropped.
pub(crate) struct Waiter {
    queue: Arc<Queue>,
    key: Key,
    number: u64,
    arrived: Instant,
    charged: Instant,
    /// Until when it is in time, if it is in the queue.
    until: Option<Instant>,
    reserved: bool,
    patience: Option<Sleep>,
}

impl Waiter {
    /// Waits behind late requests, but not behind requests that only wait for these: under load the
    /// queue would never end.
    pub(crate) fn new(queue: &Arc<Queue>, key: &Key) -> Self {
        let now = Instant::now();
        let mut entries = queue.lock();
        entries.arrivals += 1;
        let number = entries.arrivals;
        let is_late = |entry: &Entry| entry.reserved && entry.until <= now;
        let behind = entries.by_key.get(key).is_some_and(|all| all.values().any(is_late));
        drop(entries);
        let mut waiter = Self {
            queue: Arc::clone(queue),
            key: key.clone(),
            number,
            arrived: now,
            charged: now,
            until: None,
            reserved: false,
            patience: None,
        };
        if behind {
            // As late as they are: it has no tokens yet.
            waiter.enter(now);
        }
        waiter
    }

    /// For how long it has been in the queue, if it had to wait there.
    pub(crate) fn has_waited(&self) -> Option<Duration> {
        self.until.map(|_| self.arrived.elapsed())
    }

    /// Its charge is sent now.
    pub(crate) fn charges(&mut self) {
        self.charged = Instant::now();
    }

    /// It has tokens that are good for so long after it was charged.
    pub(crate) fn reserve(&mut self, good_for: Duration) {
        self.reserved = true;
        self.enter(self.charged + good_for);
    }

    /// Whether it had tokens already.
    pub(crate) fn has_reserved(&self) -> bool {
        self.reserved
    }

    fn enter(&mut self, until: Instant) {
        let entry = Entry { until, reserved: self.reserved, waker: None };
        let mut entries = self.queue.lock();
        let all = entries.by_key.entry(self.key.clone()).or_default();
        let before = all.insert(self.number, entry);
        let next = next(all);
        drop(entries);
        drop(before);
        (self.until, self.patience) = (Some(until), None);
        next.into_iter().for_each(Waker::wake);
    }

    /// Whether its tokens are those of a window that is over.
    pub(crate) fn is_late(&self) -> bool {
        self.until.is_some_and(|until| until <= Instant::now())
    }

    /// Its turn has come when none that was there before it is late.
    pub(crate) fn turn(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let now = Instant::now();
        let mut entries = self.queue.lock();
        if let Some(all) = entries.by_key.get_mut(&self.key)
            && all.range(..self.number).any(|(_, entry)| entry.until <= now)
        {
            let waker = Some(cx.waker().clone());
            let before =
                all.get_mut(&self.number).map(|entry| mem::replace(&mut entry.waker, waker));
            drop(entries);
            drop(before);
            return self.patience.get_or_insert_with(|| Sleep::new(PATIENCE)).poll(cx);
        }
        Poll::Ready(())
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        if self.until.is_none() {
            return;
        }
        let mut entries = self.queue.lock();
        let Some(all) = entries.by_key.get_mut(&self.key) else { return };
        let entry = all.remove(&self.number);
        let next = next(all);
        if all.is_empty() {
            entries.by_key.remove(&self.key);
        }
        drop(entries);
        drop(entry);
        next.into_iter().for_each(Waker::wake);
    }
}

/// The first that waits for its turn, to be woken without the lock: that may run others of the
/// queue, or drop them.
fn next(all: &mut BTreeMap<u64, Entry>) -> Option<Waker> {
    all.values_mut().find_map(|entry| entry.waker.take())
}
