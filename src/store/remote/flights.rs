//! Requests that wait for one call, which asks for all of them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::super::error::StoreError;
use crate::decision::Decision;

/// A key, and the runtime whose requests wait: a task of another runtime may end or stand still.
pub(super) type Id = (u64, tokio::runtime::Id);
pub(super) type Waiter = oneshot::Sender<Result<Decision, StoreError>>;
pub(super) type Answer = oneshot::Receiver<Result<Decision, StoreError>>;

/// The keys with a call in flight.
#[derive(Default)]
pub(super) struct Flights(Mutex<Keys>);

#[derive(Default)]
struct Keys {
    waiting: HashMap<Id, Waiting>,
    /// How many tasks were begun.
    tasks: u64,
}

/// All are of one limit.
struct Waiting {
    limit: u64,
    waiters: Vec<Waiter>,
    /// The task that asks.
    task: u64,
    /// When that is given up: its runtime may stand still.
    until: Instant,
}

impl Flights {
    /// Waits for the call for a key. If there is none, a task of this number is to begin, which is
    /// given up at `until`. `None`: the call there is asks under another limit.
    pub(super) fn join(&self, id: Id, limit: u64, until: Instant) -> Option<(Answer, Option<u64>)> {
        let (sender, receiver) = oneshot::channel();
        let Keys { waiting, tasks } = &mut *self.lock();
        let mut begin = || {
            *tasks += 1;
            *tasks
        };
        let task = match waiting.entry(id) {
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
                place.insert(Waiting { limit, waiters: vec![sender], task, until });
                Some(task)
            }
        };
        Some((receiver, task))
    }

    /// Hands over the requests that wait for a key to its task, which has until then.
    pub(super) fn board(
        &self,
        id: Id,
        task: u64,
        until: Instant,
        waiters: &mut impl Extend<Waiter>,
    ) {
        let flights = &mut self.lock().waiting;
        if let Some(flight) = flights.get_mut(&id).filter(|flight| flight.task == task) {
            flight.until = until;
            waiters.extend(flight.waiters.drain(..));
        }
    }

    /// Ends a task, unless a request waits for it.
    pub(super) fn end_if_empty(&self, id: Id, task: u64) -> bool {
        let flights = &mut self.lock().waiting;
        let flight = flights.get(&id).filter(|flight| flight.task == task);
        let ends = flight.is_none_or(|flight| flight.waiters.is_empty());
        if ends && flight.is_some() {
            flights.remove(&id);
        }
        ends
    }

    /// Ends a task. Requests that wait for it see their channel closed.
    pub(super) fn end(&self, id: Id, task: u64) {
        let flights = &mut self.lock().waiting;
        if flights.get(&id).is_some_and(|flight| flight.task == task) {
            flights.remove(&id);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Keys> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
