//! Requests that wait for one call, which asks for all of them.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::super::error::StoreError;
use crate::decision::Decision;

/// A key, and the runtime whose requests wait: a task of another runtime may end or stand still.
pub(super) type Id = (u64, tokio::runtime::Id);
pub(super) type Dealt = Result<Decision, StoreError>;
pub(super) type Passenger = oneshot::Sender<Dealt>;

/// The keys with a call in flight.
#[derive(Default)]
pub(super) struct Flights {
    keys: Mutex<HashMap<Id, Boarding>>,
    /// How many tasks were begun.
    tasks: AtomicU64,
}

/// Requests that wait for the next call. All are of one limit.
struct Boarding {
    limit: u64,
    waiters: Vec<Passenger>,
    /// The task that asks.
    task: u64,
    /// When that is given up: its runtime may stand still.
    until: Instant,
}

impl Flights {
    /// Waits for the call for a key. If there is none, a task of this number is to begin, which is
    /// given up at `until`. `None`: the call there is asks under another limit.
    pub(super) fn join(
        &self,
        id: Id,
        limit: u64,
        until: Instant,
    ) -> Option<(oneshot::Receiver<Dealt>, Option<u64>)> {
        let (sender, receiver) = oneshot::channel();
        let begin = || self.tasks.fetch_add(1, Ordering::Relaxed);
        let task = match self.lock().entry(id) {
            Entry::Occupied(flight) if flight.get().limit != limit => return None,
            Entry::Occupied(mut flight) => {
                let flight = flight.get_mut();
                flight.waiters.push(sender);
                (flight.until <= Instant::now()).then(|| {
                    (flight.task, flight.until) = (begin(), until);
                    flight.task
                })
            }
            Entry::Vacant(place) => {
                let task = begin();
                place.insert(Boarding { limit, waiters: vec![sender], task, until });
                Some(task)
            }
        };
        Some((receiver, task))
    }

    /// Hands over the requests that wait for a key to its task, which has until then. It ends if no
    /// request waits.
    pub(super) fn board(
        &self,
        id: Id,
        task: u64,
        until: Instant,
        waiters: &mut VecDeque<Passenger>,
    ) {
        let mut flights = self.lock();
        let Some(flight) = flights.get_mut(&id).filter(|flight| flight.task == task) else {
            return;
        };
        waiters.extend(flight.waiters.drain(..));
        flight.until = until;
        if waiters.is_empty() {
            flights.remove(&id);
        }
    }

    /// Ends a task. Requests that wait for it see their channel closed.
    pub(super) fn end(&self, id: Id, task: u64) {
        let mut flights = self.lock();
        if flights.get(&id).is_some_and(|flight| flight.task == task) {
            flights.remove(&id);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Id, Boarding>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
