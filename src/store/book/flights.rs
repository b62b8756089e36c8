//! Requests that wait for one call, which asks for all of them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use super::super::error::StoreError;
use crate::decision::Decision;

pub(crate) type Waiter = oneshot::Sender<Result<Decision, StoreError>>;
pub(crate) type Answer = oneshot::Receiver<Result<Decision, StoreError>>;

/// The keys with a call in flight.
#[derive(Default)]
pub(crate) struct Flights(Mutex<HashMap<u64, Waiting>>);

/// All are of one limit.
struct Waiting {
    limit: u64,
    waiters: Vec<Waiter>,
}

impl Flights {
    /// Waits for the call for a key, and whether that is still to be begun. `None`: the one there
    /// is asks under another limit.
    pub(crate) fn join(&self, id: u64, limit: u64) -> Option<(Answer, bool)> {
        let (sender, receiver) = oneshot::channel();
        let mut flights = self.lock();
        let is_first = match flights.entry(id) {
            Entry::Occupied(flight) if flight.get().limit != limit => return None,
            Entry::Occupied(mut flight) => {
                flight.get_mut().waiters.push(sender);
                false
            }
            Entry::Vacant(place) => {
                place.insert(Waiting { limit, waiters: vec![sender] });
                true
            }
        };
        Some((receiver, is_first))
    }

    /// Hands over the requests that wait for a key.
    pub(crate) fn board(&self, id: u64, waiters: &mut impl Extend<Waiter>) {
        if let Some(flight) = self.lock().get_mut(&id) {
            waiters.extend(flight.waiters.drain(..));
        }
    }

    /// Ends the call for a key, unless a request waits for it.
    pub(crate) fn end_if_empty(&self, id: u64) -> bool {
        let mut flights = self.lock();
        let ends = flights.get(&id).is_none_or(|flight| flight.waiters.is_empty());
        if ends {
            flights.remove(&id);
        }
        ends
    }

    /// Ends the call for a key. Requests that wait for it see their channel closed.
    pub(crate) fn end(&self, id: u64) {
        self.lock().remove(&id);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Waiting>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
