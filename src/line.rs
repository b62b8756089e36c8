//! Requests that wait for their turn, in order of arrival (S13). Each key has a [`WaitingLine`]; if
//! a layer has several limits, each combination of keys has one. A [`Place`] is that of a request.
//! This module does not depend on what a request is.
//!
//! No tokens are taken for a request that waits. The head of the line is charged when it is due,
//! and leaves when it is served; then the next request is the head.

use std::collections::HashMap;
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::decision::{Decision, MAX_LIMITS};
use crate::key::Key;
use crate::limiter::Limiter;
use crate::limits::Limits;
use crate::store::freed::{self, Waiting};
use crate::store::{Account, Charge, Reply};

mod charge;
mod claim;
mod place;
mod state;
mod tokens;
mod turn;

use claim::LimitSet;
pub(crate) use claim::{Claim, Counter, Term, Terms, Tokens};
pub(crate) use place::Place;
pub(crate) use state::End;
use state::{Effects, LineState};

/// The lines of a layer, and the settings by which requests wait in them.
pub(crate) struct Queue {
    pub(crate) lines: Arc<Lines>,
    pub(crate) limits: Limits,
    /// How many requests may wait in each line.
    pub(crate) most: u64,
    pub(crate) max_wait: Duration,
}

/// The lines of a layer. A line exists while a request is in it.
pub(crate) struct Lines {
    /// `true` if the layer has several limits.
    are_of_several: bool,
    all: Mutex<HashMap<Arc<[Counter]>, Weak<WaitingLine>>>,
    closed: AtomicBool,
}

struct WaitingLine {
    lines: Arc<Lines>,
    counters: Arc<[Counter]>,
    state: Mutex<LineState>,
}

impl Lines {
    pub(crate) fn new(are_of_several: bool) -> Self {
        Self { are_of_several, all: Mutex::default(), closed: AtomicBool::new(false) }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Arc<[Counter]>, Weak<WaitingLine>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the line of the claim's counters; creates it if there is none.
    fn line_for(self: &Arc<Self>, claim: &Claim) -> Arc<WaitingLine> {
        let mut lines = self.lock();
        if let Some(line) = lines.get(&claim.counters).and_then(Weak::upgrade) {
            return line;
        }
        let (counters, state) = (Arc::clone(&claim.counters), LineState::new(&claim.cost));
        let line = WaitingLine { lines: Arc::clone(self), counters, state: Mutex::new(state) };
        let line = Arc::new(line);
        lines.insert(Arc::clone(&line.counters), Arc::downgrade(&line));
        line
    }

    fn all(&self) -> Vec<Arc<WaitingLine>> {
        self.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// Closes the queue: all requests stop waiting. Without a runtime nothing waits.
    #[cfg_attr(not(feature = "tokio"), allow(dead_code))]
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.all().iter().for_each(|line| line.update(LineState::wake_all));
    }
}

impl Waiting for Lines {
    /// Lets the heads of the key's lines charge again.
    fn note_freed(&self, scope: u64, key: &Key) {
        let lines = self.lock();
        let found: Vec<_> = if self.are_of_several {
            let matches = |counter: &Counter| counter.scope == scope && counter.key == *key;
            let matching = lines.iter().filter(|(counters, _)| counters.iter().any(matches));
            matching.filter_map(|(_, line)| line.upgrade()).collect()
        } else {
            let counter = Counter { limit: 0, scope, key: key.clone() };
            lines.get(slice::from_ref(&counter)).and_then(Weak::upgrade).into_iter().collect()
        };
        drop(lines);
        for line in found {
            let matches = |counter: &Counter| counter.scope == scope && counter.key == *key;
            let limits = LimitSet::from_flags(line.counters.iter().map(matches));
            line.update(|state, effects| state.retry_head(limits, effects));
        }
    }

    /// Lets all heads charge again.
    fn note_changed(&self) {
        let retry_head =
            |state: &mut LineState, effects: &mut Effects| state.retry_head(LimitSet::ALL, effects);
        self.all().iter().for_each(|line| line.update(retry_head));
    }
}

impl WaitingLine {
    fn lock(&self) -> MutexGuard<'_, LineState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn update(&self, change: impl FnOnce(&mut LineState, &mut Effects)) {
        let mut effects = Effects::default();
        change(&mut self.lock(), &mut effects);
        effects.wake();
    }

    /// Charges all limits of the line under these terms.
    fn charge(&self, queue: &Queue, terms: &Terms, cost: &Tokens, up_to: bool) -> Reply<Decision> {
        let charge = |i: usize, cost| {
            let charge = Charge::new(self.account(queue, terms, i), cost);
            if up_to && !queue.is_of_several() { charge.up_to() } else { charge }
        };
        if !queue.is_of_several() {
            let cost = cost.costs().next().unwrap_or(0);
            return queue.limiter_of(&self.counters[0]).send(charge(0, cost));
        }
        let mut limiters = [&queue.limits.limiters()[0]; MAX_LIMITS];
        for (limiter, counter) in limiters.iter_mut().zip(&*self.counters) {
            *limiter = queue.limiter_of(counter);
        }
        let charges: Vec<_> = cost.costs().enumerate().map(|(i, cost)| charge(i, cost)).collect();
        queue.limits.send(limiters, &charges)
    }

    /// Returns the tokens that a decision has taken.
    fn give_back(&self, queue: &Queue, terms: &Terms, decision: &Decision) -> Reply<()> {
        let return_one = |i: usize| {
            let decision = decision.for_limit(&terms[i].name)?;
            let limiter = queue.limiter_of(&self.counters[i]);
            Some(limiter.give_back(self.account(queue, terms, i), &decision))
        };
        let returned = Reply::all((0..terms.len()).filter_map(return_one).collect());
        // Other lines may share some of the counters of several limits, which grant all tokens or
        // none. The excess of one limit would send two heads that it can't serve back and forth.
        if queue.is_of_several() { self.notify_after(queue, returned) } else { returned }
    }

    /// Wakes the lines that wait for these counters when the reply is done.
    fn notify_after(&self, queue: &Queue, returned: Reply<()>) -> Reply<()> {
        self.counters.iter().fold(returned, |returned, counter| {
            freed::note_after(queue.limiter_of(counter).scope(), &counter.key, returned)
        })
    }

    fn account<'a>(&'a self, queue: &'a Queue, terms: &'a Terms, i: usize) -> Account<'a> {
        let counter = &self.counters[i];
        Account::new(queue.limiter_of(counter).scope(), &terms[i].quotas, &counter.key)
    }
}

impl Queue {
    fn limiter_of(&self, counter: &Counter) -> &Limiter {
        &self.limits.limiters()[counter.limit]
    }

    fn is_of_several(&self) -> bool {
        self.lines.are_of_several
    }
}

impl Drop for WaitingLine {
    fn drop(&mut self) {
        let mut lines = self.lines.lock();
        // A new line may be in the map already.
        if lines.get(&self.counters).is_some_and(|line| line.strong_count() == 0) {
            lines.remove(&self.counters);
        }
    }
}
