//! Requests that wait for their turn, in order of arrival (S13).
//!
//! Nothing is taken for a request that waits. When it is its turn, it is charged as it would be
//! without a queue, except that it goes on waiting after a refusal:
//!
//! ```text
//!          due, and the service is ready          answer: granted
//! look ──> waits ───────────────────────> asks ───────────────────> goes
//!            ^ │ full, too long,           │
//!            │ └> max_wait: refused        │ answer: refused
//!            └─────────────────────────────┘
//! ```
//!
//! - A `KeyQueue` has the requests of a key; in a layer of several limits, of a combination of keys.
//!   It exists while a request is in it. No task drives it: each request has a `Place`, with a
//!   waker and a timer, and looks whether it is its turn when it is polled, so that a runtime that
//!   ends or stalls delays no other.
//! - *Asking.* The first request that waits asks, if by the last answer its tokens can pass beside
//!   those in flight. So a key's requests ask once at a window's start, and then as many at a time
//!   as there is room for, without waiting for each other's answers.
//! - *Going.* A request that is granted goes. One before it that was refused is the first again,
//!   and those behind don't ask before it has. Taking back what was granted behind it would keep
//!   the order without exception, at the price of returned tokens and of refusals in doubt.
//! - *Refusals.* A request is refused if it comes when the queue is full, or would be due after
//!   `max_wait` (if nothing is known then, the next answer judges it), and when it has waited for
//!   `max_wait`. If one that was being charged has to wait, a full queue loses its last one.
//! - *Time.* A request is due at the time that the last answer gives, or a second after it, then
//!   after twice as long each time: tokens may have come back, here or on another node. On a shared
//!   store, the node whose first request is oldest asks first.
//! - *Unpolled requests.* One that is not polled within 100 ms when it is its turn is out, and its
//!   tokens are not counted. When it is polled it enters again, by its number.
//!
//! How a request is charged is up to `middleware/request`.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::Waker;
use std::time::Duration;

use foldhash::quality::RandomState;

use crate::decision::MAX_LIMITS;
use crate::key::Key;
use crate::limits::Limits;
use crate::quota::{Quota, Quotas};
use crate::store::AnyStore;
use crate::sync::{self, Instant, Mutex};

mod place;
mod waiting;

pub(crate) use place::Place;
pub(crate) use waiting::Turn;
use waiting::Waiting;

pub(crate) struct Queue {
    limits: Limits,
    most: u64,
    max_wait: Duration,
    by_key: Mutex<HashMap<Arc<[Counter]>, Weak<KeyQueue>, RandomState>>,
    closed: AtomicBool,
}

struct KeyQueue {
    queue: Arc<Queue>,
    counters: Arc<[Counter]>,
    waiting: Mutex<Waiting>,
}

impl Queue {
    #[cfg_attr(not(feature = "tokio"), allow(dead_code))]
    pub(crate) fn new(limits: Limits, most: u64, max_wait: Duration) -> Self {
        let (by_key, closed) = Default::default();
        Self { limits, most, max_wait, by_key, closed }
    }

    /// Returns whether other nodes charge the same keys. All limits count in one store. A memory
    /// with a file is shared with later processes only.
    fn is_shared(&self) -> bool {
        let store = self.limits.common_store();
        store.is_shared() && !matches!(store, AnyStore::Memory(_))
    }

    fn find_or_add(self: &Arc<Self>, claim: &Claim) -> Arc<KeyQueue> {
        let mut all = sync::lock(&self.by_key);
        if let Some(of_key) = all.get(&claim.counters).and_then(Weak::upgrade) {
            return of_key;
        }
        let (queue, counters) = (Arc::clone(self), Arc::clone(&claim.counters));
        let of_key = Arc::new(KeyQueue { queue, counters, waiting: Mutex::default() });
        all.insert(Arc::clone(&of_key.counters), Arc::downgrade(&of_key));
        of_key
    }

    /// All requests stop waiting. Without a runtime nothing waits.
    #[cfg_attr(not(feature = "tokio"), allow(dead_code))]
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        let all: Vec<_> = sync::lock(&self.by_key).values().filter_map(Weak::upgrade).collect();
        for of_key in all {
            let wakers = sync::lock(&of_key.waiting).take_wakers();
            wakers.into_iter().for_each(Waker::wake);
        }
    }
}

impl Drop for KeyQueue {
    fn drop(&mut self) {
        let mut all = sync::lock(&self.queue.by_key);
        // A new one may be in the map already.
        if all.get(&self.counters).is_some_and(|of_key| of_key.strong_count() == 0) {
            all.remove(&self.counters);
        }
    }
}

/// The position of the limit, and the key.
type Counter = (usize, Key);

/// The quotas that decide a request's charge, in the order of its counters.
pub(crate) type Terms = Arc<[Quotas]>;

#[derive(Clone)]
pub(crate) struct Claim {
    pub(crate) counters: Arc<[Counter]>,
    pub(crate) terms: Terms,
    pub(crate) cost: Tokens,
    /// When the request came: it may have waited by other keys since.
    pub(crate) arrived: Instant,
}

impl Claim {
    fn deadline(&self, queue: &Queue) -> Instant {
        const FOR_EVER: Duration = Duration::from_secs(1 << 32);
        self.arrived.checked_add(queue.max_wait).unwrap_or(self.arrived + FOR_EVER)
    }
}

/// By limit, in the order of a request's counters. Sums of many requests.
#[derive(Clone, Default, PartialEq)]
pub(crate) struct Tokens([u128; MAX_LIMITS]);

impl Tokens {
    pub(crate) fn from_costs(costs: impl Iterator<Item = u64>) -> Self {
        let mut of = Self::default();
        of.0.iter_mut().zip(costs).for_each(|(tokens, cost)| *tokens = cost.into());
        of
    }

    /// At most what a charge can have.
    fn costs(&self) -> impl Iterator<Item = u64> + Clone {
        self.0.iter().map(|tokens| (*tokens).min(Quota::MAX_TOKENS.into()) as u64)
    }

    fn can_be_granted(&self, terms: &Terms) -> bool {
        terms.iter().zip(self.costs()).all(|(quotas, tokens)| quotas.can_grant(tokens))
    }

    fn add(&mut self, more: &Self) {
        self.0.iter_mut().zip(&more.0).for_each(|(tokens, more)| *tokens += more);
    }

    fn subtract(&mut self, less: &Self) {
        self.0.iter_mut().zip(&less.0).for_each(|(tokens, less)| *tokens -= less);
    }
}
