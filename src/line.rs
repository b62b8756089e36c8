//! Requests that wait for their turn, in order of arrival (S13): a [`Line`] for each key, and the
//! [`Place`] of a request in it. Nothing here knows what waits.
//!
//! Nothing is taken for a request that waits. The head of the line is charged when it is due, and
//! leaves when it is served; then it is the next one's turn.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::decision::Decision;
use crate::key::Key;
use crate::limiter::Limiter;
use crate::limiter::freed::Waiting;
use crate::quota::Quotas;
use crate::store::{Account, Reply};

mod charge;
mod place;
mod state;
mod tokens;
mod turn;

pub(crate) use place::Place;
pub(crate) use state::End;
use state::{Out, State};

/// How requests wait in the lines of a layer.
pub(crate) struct Queue {
    pub(crate) lines: Arc<Lines>,
    pub(crate) limiter: Limiter,
    /// How many may wait for each key.
    pub(crate) most: u64,
    pub(crate) max_wait: Duration,
}

/// The lines of a layer, each as long as a request is in it.
#[derive(Default)]
pub(crate) struct Lines {
    by_key: Mutex<HashMap<Key, Weak<Line>>>,
    closed: AtomicBool,
}

struct Line {
    lines: Arc<Lines>,
    key: Key,
    state: Mutex<State>,
}

impl Lines {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Weak<Line>>> {
        self.by_key.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The line of a key, for one more.
    fn of(self: &Arc<Self>, key: &Key) -> Arc<Line> {
        let mut lines = self.lock();
        if let Some(line) = lines.get(key).and_then(Weak::upgrade) {
            return line;
        }
        let line = Line { lines: Arc::clone(self), key: key.clone(), state: Mutex::default() };
        let line = Arc::new(line);
        lines.insert(key.clone(), Arc::downgrade(&line));
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
    /// The head of the key's line asks anew.
    fn note_freed(&self, key: &Key) {
        let line = self.lock().get(key).and_then(Weak::upgrade);
        if let Some(line) = line {
            line.change(State::ask_again);
        }
    }

    /// All heads ask anew.
    fn note_changed(&self) {
        self.all().iter().for_each(|line| line.change(State::ask_again));
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

    /// Returns what a decision has taken.
    fn give_back(&self, limiter: &Limiter, quotas: &Quotas, decision: &Decision) -> Reply<()> {
        let account = Account::new(limiter.scope(), quotas, &self.key);
        limiter.settle_account(account, decision, 0)
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let mut lines = self.lines.lock();
        // Another line may have taken its place.
        if lines.get(&self.key).is_some_and(|line| line.strong_count() == 0) {
            lines.remove(&self.key);
        }
    }
}
