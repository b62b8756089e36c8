//! Requests that wait for their turn, in order of arrival (S13).
//!
//! Nothing is taken for a request that waits. When it is its turn, it is charged as it would be
//! without a queue, except that it goes on waiting after a refusal:
//!
//! ```text
//!          due, and the service is ready          answer: it passes
//! join ──> waits ───────────────────────> asks ───────────────────> answered ──> goes
//!            ^ │ full, too long,           │                           │
//!            │ └> max_wait: refused        │ answer: refused           │ one before it
//!            └─────────────────────────────┴───────────────────────────┘ was refused
//! ```
//!
//! - A `WaitingLine` has the requests of a key; in a layer of several limits, of a combination of
//!   keys. It exists while a request is in it. No task drives it: each request has a `Place`, with
//!   a waker and a timer, and acts when it is polled, so that a runtime that ends or stalls delays
//!   no other.
//! - *Asking.* The first request that waits asks, if by the [`LastAnswer`](line::LastAnswer) its
//!   tokens can pass beside those in flight. So a line asks once at a window's start, and then as
//!   many at a time as there is room for, without waiting for each other's answers.
//! - *Going.* The first request that is answered goes. If one before it was refused, perhaps
//!   because of its tokens, it returns these, and waits again. They are in flight until the store
//!   has them: no refusal judges others until then, and the first one then asks again at once.
//! - *Refusals.* A request is refused if it joins when the line is full, or would be due after
//!   `max_wait` (if nothing is known then, the next answer judges it), and when it has waited for
//!   `max_wait`. If one that was being charged has to wait, a full line loses its last one.
//! - *Time.* A request is due at the time that the last answer gives, or a second after it, then
//!   after twice as long each time: tokens may have come back, here or on another node. On a shared
//!   store, the node whose first request is oldest asks first.
//! - *Unpolled requests.* Others pass a request that is not polled within 100 ms when it is its
//!   turn. It keeps its place.
//!
//! How a request is charged is up to `middleware/request`.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::Waker;
use std::time::Duration;

use crate::decision::MAX_LIMITS;
use crate::key::Key;
use crate::limits::Limits;
use crate::quota::{Quota, Quotas};
use crate::sync::{self, Instant, Mutex};

mod line;
mod place;

use line::LineState;
pub(crate) use line::Turn;
pub(crate) use place::Place;

pub(crate) struct Queue {
    pub(crate) lines: Arc<Lines>,
    pub(crate) limits: Limits,
    pub(crate) most: u64,
    pub(crate) max_wait: Duration,
}

impl Queue {
    /// Whether other nodes charge the same keys. All limits count in one store.
    fn is_shared(&self) -> bool {
        self.limits.limiters()[0].is_shared()
    }

    fn is_closed(&self) -> bool {
        self.lines.closed.load(Ordering::Acquire)
    }
}

#[derive(Default)]
pub(crate) struct Lines {
    all: Mutex<HashMap<Arc<[Counter]>, Weak<WaitingLine>>>,
    closed: AtomicBool,
}

struct WaitingLine {
    lines: Arc<Lines>,
    counters: Arc<[Counter]>,
    state: Mutex<LineState>,
}

impl Lines {
    fn line_for(self: &Arc<Self>, claim: &Claim) -> Arc<WaitingLine> {
        let mut lines = sync::lock(&self.all);
        if let Some(line) = lines.get(&claim.counters).and_then(Weak::upgrade) {
            return line;
        }
        let (counters, state) = (Arc::clone(&claim.counters), LineState::new(&claim.cost));
        let line = WaitingLine { lines: Arc::clone(self), counters, state: Mutex::new(state) };
        let line = Arc::new(line);
        lines.insert(Arc::clone(&line.counters), Arc::downgrade(&line));
        line
    }

    /// All requests stop waiting. Without a runtime nothing waits.
    #[cfg_attr(not(feature = "tokio"), allow(dead_code))]
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        let lines: Vec<_> = sync::lock(&self.all).values().filter_map(Weak::upgrade).collect();
        for line in lines {
            let wakers = sync::lock(&line.state).take_wakers();
            wakers.into_iter().for_each(Waker::wake);
        }
    }
}

impl Drop for WaitingLine {
    fn drop(&mut self) {
        let mut lines = sync::lock(&self.lines.all);
        // A new line may be in the map already.
        if lines.get(&self.counters).is_some_and(|line| line.strong_count() == 0) {
            lines.remove(&self.counters);
        }
    }
}

#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Counter {
    pub(crate) limit: usize,
    pub(crate) key: Key,
}

/// The quotas that decide a request's charge, in the order of its line's counters.
pub(crate) type Terms = Arc<[Quotas]>;

pub(crate) struct Claim {
    pub(crate) counters: Arc<[Counter]>,
    pub(crate) terms: Terms,
    pub(crate) cost: Tokens,
    /// It may have waited in another line since.
    pub(crate) arrived: Instant,
}

#[derive(Clone, PartialEq)]
pub(crate) struct Tokens {
    costs: [u128; MAX_LIMITS],
    limits: usize,
}

impl Tokens {
    pub(crate) fn of(costs: impl Iterator<Item = u64>) -> Self {
        let mut of = Self { costs: [0; MAX_LIMITS], limits: 0 };
        for cost in costs {
            of.costs[of.limits] = cost.into();
            of.limits += 1;
        }
        of
    }

    fn zeroed(&self) -> Self {
        Self { costs: [0; MAX_LIMITS], ..*self }
    }

    /// At most what a charge can have.
    fn costs(&self) -> impl Iterator<Item = u64> + Clone {
        let costs = self.costs[..self.limits].iter();
        costs.map(|tokens| (*tokens).min(Quota::MAX_TOKENS.into()) as u64)
    }

    fn can_be_granted(&self, terms: &Terms) -> bool {
        terms.iter().zip(self.costs()).all(|(quotas, tokens)| quotas.can_grant(tokens))
    }

    fn add(&mut self, more: &Self) {
        let costs = self.costs.iter_mut().zip(&more.costs).take(self.limits);
        costs.for_each(|(tokens, more)| *tokens += more);
    }

    fn subtract(&mut self, less: &Self) {
        let costs = self.costs.iter_mut().zip(&less.costs).take(self.limits);
        costs.for_each(|(tokens, less)| *tokens -= less);
    }
}
