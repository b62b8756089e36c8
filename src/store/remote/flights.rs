//! Requests that wait for one call, which asks for all of them: [`Flights`].

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::super::error::StoreError;
use crate::decision::Decision;

/// A key, the runtime whose requests wait (a task of another one may end or stand still), and the
/// deadline of their calls.
pub(super) type Id = (u64, tokio::runtime::Id, Option<Duration>);
pub(super) type SharedAnswer = Result<Decision, StoreError>;
pub(super) type WaitingRequest = oneshot::Sender<SharedAnswer>;

/// The keys with a call in flight.
#[derive(Default)]
pub(super) struct Flights {
    keys: Mutex<HashMap<Id, KeyFlight>>,
    /// How many tasks were begun: the number of the next one.
    tasks: AtomicU64,
}

/// Requests that wait for the next call, all under one limit.
struct KeyFlight {
    limit: u64,
    waiters: Vec<WaitingRequest>,
    /// The number of the task that makes the call.
    task: u64,
    /// When the task is given up: its runtime may stand still.
    until: Instant,
}

impl Flights {
    /// Adds a request that waits for the call for a key. Also returns the number of the task to
    /// spawn, if none runs; it is given up at `until`. Returns `None` if the others wait under
    /// another limit.
    pub(super) fn add_request(
        &self,
        id: Id,
        limit: u64,
        until: Instant,
    ) -> Option<(oneshot::Receiver<SharedAnswer>, Option<u64>)> {
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
                place.insert(KeyFlight { limit, waiters: vec![sender], task, until });
                Some(task)
            }
        };
        Some((receiver, task))
    }

    /// Hands the requests that wait for a key to its task, which is given up at `until`. Ends the
    /// task if no request waits.
    pub(super) fn take_requests(
        &self,
        id: Id,
        task: u64,
        until: Instant,
        waiters: &mut VecDeque<WaitingRequest>,
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
    pub(super) fn end_task(&self, id: Id, task: u64) {
        let mut flights = self.lock();
        if flights.get(&id).is_some_and(|flight| flight.task == task) {
            flights.remove(&id);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Id, KeyFlight>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
