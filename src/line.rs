//! Requests that wait for their turn, in order of arrival (S13): a [`Line`] for each key, or for
//! each combination of keys where a layer has several limits, and the [`Place`] of a request in it.
//! Nothing here knows what waits.
//!
//! Nothing is taken for a request that waits. The head of the line is charged when it is due, and
//! leaves when it is served; then it is the next one's turn.

use std::collections::HashMap;
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::decision::{Decision, MAX_LIMITS};
use crate::key::Key;
use crate::limiter::Limiter;
use crate::limiter::freed::{self, Waiting};
use crate::limits::Limits;
use crate::store::{Account, Charge, Reply};

mod charge;
mod claim;
mod place;
mod state;
mod tokens;
mod turn;

use claim::Those;
pub(crate) use claim::{Claim, Counter, Term, Terms, Tokens};
pub(crate) use place::Place;
pub(crate) use state::End;
use state::{Out, State};

/// How requests wait in the lines of a layer.
pub(crate) struct Queue {
    pub(crate) lines: Arc<Lines>,
    pub(crate) limits: Limits,
    /// How many may wait in each line.
    pub(crate) most: u64,
    pub(crate) max_wait: Duration,
}

/// The lines of a layer, each as long as a request is in it.
pub(crate) struct Lines {
    /// Whether the layer has several limits.
    are_of_several: bool,
    all: Mutex<HashMap<Arc<[Counter]>, Weak<Line>>>,
    closed: AtomicBool,
}

struct Line {
    lines: Arc<Lines>,
    counters: Arc<[Counter]>,
    state: Mutex<State>,
}

impl Lines {
    pub(crate) fn new(are_of_several: bool) -> Self {
        Self { are_of_several, all: Mutex::default(), closed: AtomicBool::new(false) }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Arc<[Counter]>, Weak<Line>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The line of some counters, for one more.
    fn of(self: &Arc<Self>, claim: &Claim) -> Arc<Line> {
        let mut lines = self.lock();
        if let Some(line) = lines.get(&claim.counters).and_then(Weak::upgrade) {
            return line;
        }
        let (counters, state) = (Arc::clone(&claim.counters), State::new(&claim.cost));
        let line = Line { lines: Arc::clone(self), counters, state: Mutex::new(state) };
        let line = Arc::new(line);
        lines.insert(Arc::clone(&line.counters), Arc::downgrade(&line));
        line
    }

    fn all(&self) -> Vec<Arc<Line>> {
        self.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// Ends all waiting. Without a runtime nothing waits.
    #[cfg_attr(not(feature = "tokio"), allow(dead_code))]
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.all().iter().for_each(|line| line.change(State::wake_all));
    }
}

impl Waiting for Lines {
    /// The heads of the key's lines ask anew.
    fn note_freed(&self, scope: u64, key: &Key) {
        let lines = self.lock();
        let found: Vec<_> = if self.are_of_several {
            let is_it = |counter: &Counter| counter.scope == scope && counter.key == *key;
            let with = lines.iter().filter(|(counters, _)| counters.iter().any(is_it));
            with.filter_map(|(_, line)| line.upgrade()).collect()
        } else {
            let counter = Counter { limit: 0, scope, key: key.clone() };
            lines.get(slice::from_ref(&counter)).and_then(Weak::upgrade).into_iter().collect()
        };
        drop(lines);
        for line in found {
            let is_it = |counter: &Counter| counter.scope == scope && counter.key == *key;
            let limits = Those::of(line.counters.iter().map(is_it));
            line.change(|state, out| state.ask_again(limits, out));
        }
    }

    /// All heads ask anew.
    fn note_changed(&self) {
        let ask_again = |state: &mut State, out: &mut Out| state.ask_again(Those::ALL, out);
        self.all().iter().for_each(|line| line.change(ask_again));
    }
}

impl Line {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State, &mut Out)) {
        let mut out = Out::default();
        change(&mut self.lock(), &mut out);
        out.wake();
    }

    /// Charges all its limits by these terms.
    fn charge(&self, queue: &Queue, terms: &Terms, cost: &Tokens, up_to: bool) -> Reply<Decision> {
        let charge = |i: usize, cost| {
            let charge = Charge::new(self.account(queue, terms, i), cost).refundable_if(true);
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

    /// Returns what a decision has taken.
    fn give_back(&self, queue: &Queue, terms: &Terms, decision: &Decision) -> Reply<()> {
        let of = |i: usize| {
            let decision = decision.for_limit(&terms[i].name)?;
            let limiter = queue.limiter_of(&self.counters[i]);
            Some(limiter.give_back(self.account(queue, terms, i), &decision))
        };
        let returned = Reply::all((0..terms.len()).filter_map(of).collect());
        // Other lines have some of the counters.
        if queue.is_of_several() { self.note_after(queue, returned) } else { returned }
    }

    /// Lets those who wait for its counters know when a reply is done.
    fn note_after(&self, queue: &Queue, returned: Reply<()>) -> Reply<()> {
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

impl Drop for Line {
    fn drop(&mut self) {
        let mut lines = self.lines.lock();
        // Another line may have taken its place.
        if lines.get(&self.counters).is_some_and(|line| line.strong_count() == 0) {
            lines.remove(&self.counters);
        }
    }
}
