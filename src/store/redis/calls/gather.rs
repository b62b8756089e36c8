//! Decisions that share a call.
//!
//! A single decision leaves at once. While calls are in flight, a task lets others run for a
//! moment, then sends all decisions that wait by then: there is no timer. The distance to the
//! server says how many calls may be in flight; beyond that, decisions wait until one of them is
//! back.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redis::Cmd;
use tokio::runtime::Handle;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout_at};

use super::super::link::Link;
use super::call::Call;
use super::failure::{ended, late, unsent};
use super::queue::{Leave, Queue};
use super::waiting::{Outcome, Waiting};
use crate::store::error::StoreError;

/// How often the task that leaves lets others run before. tokio comes back after some sixty tasks,
/// and callers that were answered are to have the chance to ask again.
const YIELDS: usize = 3;

/// Where the decisions of a runtime for one server gather; clones share it.
#[derive(Clone)]
pub(crate) struct Gather(Arc<Server>);

struct Server {
    link: Link,
    runtime: Handle,
    queue: Mutex<Queue>,
    /// It has turned out that no script may use two keys: the server is part of a cluster.
    apart: AtomicBool,
}

impl Gather {
    pub(crate) fn new(link: Link, runtime: Handle) -> Self {
        let apart = AtomicBool::new(false);
        Self(Arc::new(Server { link, runtime, queue: Mutex::default(), apart }))
    }

    /// Whether calls can't be shared here.
    pub(crate) fn is_apart(&self) -> bool {
        self.0.apart.load(Ordering::Relaxed)
    }

    /// Sends it in a shared call. `Outcome::Returned`: calls can't be shared here.
    pub(crate) async fn join(&self, cmd: Cmd, until: Instant) -> Outcome {
        let (waiting, outcome) = Waiting::new(cmd, until);
        let place = self.come(waiting);
        match timeout_at(until, outcome).await {
            Ok(outcome) => outcome.unwrap_or_else(|_| Outcome::Answered(Err(ended()))),
            Err(_) => Outcome::Answered(Err(self.late(place))),
        }
    }

    /// Its place in the order of arrival.
    fn come(&self, waiting: Waiting) -> u64 {
        let (place, leave) = self.queue().come(waiting);
        match leave {
            Leave::Alone(waiting) => {
                let until = waiting.until;
                self.0.runtime.spawn(Trip::new(self, vec![waiting], until).run());
            }
            Leave::WithTask => self.leave(),
            Leave::Later => {}
        }
        place
    }

    fn leave(&self) {
        self.0.runtime.spawn(self.clone().send());
    }

    /// Sends the decisions that wait.
    async fn send(self) {
        for _ in 0..YIELDS {
            yield_now().await;
        }
        let trip = {
            let mut queue = self.queue();
            let Some((batch, until)) = queue.leave() else { return };
            // The others need not wait until it is back.
            let more = queue.claim();
            drop(queue);
            if more {
                self.leave();
            }
            Trip::new(&self, batch, until)
        };
        trip.run().await;
    }

    fn late(&self, place: u64) -> StoreError {
        if self.queue().has_left(place) { late() } else { unsent() }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.0.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call, and its place among those in flight.
struct Trip {
    call: Call,
    place: Place,
}

impl Trip {
    fn new(gather: &Gather, batch: Vec<Waiting>, until: Instant) -> Self {
        let call = Call::new(gather.0.link.clone(), batch, until);
        Self { call, place: Place { gather: gather.clone() } }
    }

    async fn run(self) {
        let Self { call, place } = self;
        let ended = call.send().await;
        if let Some(took) = ended.took() {
            place.gather.queue().note(Instant::now(), took);
        }
        if ended.crosses_slots() {
            place.gather.0.apart.store(true, Ordering::Relaxed);
            return ended.give_back();
        }
        ended.answer();
        // The next one has waited for this.
        drop(place);
    }
}

struct Place {
    gather: Gather,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut queue = self.gather.queue();
        queue.end();
        let more = queue.claim();
        drop(queue);
        if more {
            self.gather.leave();
        }
    }
}
