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
use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout_at};

use super::super::error::StoreError;
use super::call::Call;
use super::failure::{ended, late, runtime, unsent};
use super::link::Link;
use super::queue::{Leave, Queue, STUCK, UnderWay};
use super::waiting::{Outcome, Waiting};

/// How often the task that leaves lets others run before. tokio comes back after some sixty tasks,
/// and callers that were answered are to have the chance to ask again.
const YIELDS: usize = 3;

/// Where the decisions for one server gather; clones share it.
#[derive(Clone)]
pub(super) struct Gather(Arc<Server>);

struct Server {
    link: Link,
    queue: Mutex<Queue>,
    /// It has turned out that no script may use two keys: the server is part of a cluster.
    apart: AtomicBool,
}

impl Gather {
    pub(super) fn new(link: Link) -> Self {
        let apart = AtomicBool::new(false);
        Self(Arc::new(Server { link, queue: Mutex::default(), apart }))
    }

    /// Whether calls can't be shared here.
    pub(super) fn is_apart(&self) -> bool {
        self.0.apart.load(Ordering::Relaxed)
    }

    /// Sends it in a shared call. `Outcome::Returned`: calls can't be shared here.
    pub(super) async fn join(&self, mut cmd: Cmd, until: Instant) -> Outcome {
        loop {
            let runtime = match runtime() {
                Ok(runtime) => runtime,
                Err(error) => return Outcome::Answered(Err(error)),
            };
            let (waiting, outcome) = Waiting::new(cmd, until, runtime.clone());
            let place = self.come(waiting);
            match self.wait(place, until, &runtime, outcome).await {
                Outcome::Returned(same) if !self.is_apart() => cmd = same,
                outcome => return outcome,
            }
        }
    }

    async fn wait(
        &self,
        place: u64,
        until: Instant,
        runtime: &Handle,
        mut outcome: oneshot::Receiver<Outcome>,
    ) -> Outcome {
        let mut wake = until.min(Instant::now() + STUCK);
        loop {
            match timeout_at(wake, &mut outcome).await {
                Ok(outcome) => return outcome.unwrap_or_else(|_| Outcome::Answered(Err(ended()))),
                Err(_) if wake == until => return Outcome::Answered(Err(self.late(place))),
                Err(_) => {
                    // The task that was to leave may be in a runtime that stands still.
                    let claimed = self.queue().claim(Instant::now());
                    if claimed {
                        self.leave(runtime);
                    }
                    wake = until;
                }
            }
        }
    }

    /// Its place in the order of arrival.
    fn come(&self, waiting: Waiting) -> u64 {
        let runtime = waiting.runtime.clone();
        let (place, leave) = self.queue().come(waiting, Instant::now());
        match leave {
            Leave::Alone(waiting, under_way) => {
                runtime.spawn(Trip::new(self, vec![waiting], under_way).run());
            }
            Leave::WithTask => self.leave(&runtime),
            Leave::Later => {}
        }
        place
    }

    fn leave(&self, runtime: &Handle) {
        // Held by the task from its first moment: it may never be polled.
        let leaving = Leaving { gather: Some(self.clone()) };
        runtime.spawn(leaving.run());
    }

    fn late(&self, place: u64) -> StoreError {
        if self.queue().has_left(place) { late() } else { unsent() }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.0.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The task that sends the decisions that wait.
struct Leaving {
    /// `None`: it has left.
    gather: Option<Gather>,
}

impl Leaving {
    async fn run(mut self) {
        for _ in 0..YIELDS {
            yield_now().await;
        }
        if let Some(trip) = self.take() {
            trip.run().await;
        }
    }

    fn take(&mut self) -> Option<Trip> {
        let gather = self.gather.take()?;
        let now = Instant::now();
        let mut queue = gather.queue();
        let (batch, under_way) = queue.leave(now)?;
        // The others need not wait until it is back.
        let more = queue.claim(now);
        drop(queue);
        if more {
            gather.leave(&Handle::current());
        }
        Some(Trip::new(&gather, batch, under_way))
    }
}

impl Drop for Leaving {
    /// Its runtime has ended. Callers in other runtimes join again.
    fn drop(&mut self) {
        if let Some(gather) = self.gather.take() {
            let waiting = gather.queue().scatter();
            waiting.into_iter().for_each(Waiting::give_back);
        }
    }
}

/// A call, and its place among those in flight.
struct Trip {
    call: Call,
    place: Place,
}

impl Trip {
    fn new(gather: &Gather, batch: Vec<Waiting>, under_way: UnderWay) -> Self {
        let (until, _) = under_way;
        let call = Call::new(gather.0.link.clone(), batch, until);
        Self { call, place: Place { gather: gather.clone(), under_way } }
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
    under_way: UnderWay,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut queue = self.gather.queue();
        queue.end(self.under_way);
        if queue.claim(Instant::now()) {
            // The runtime of the latest caller, which is alive.
            let runtime = queue.runtime();
            drop(queue);
            if let Some(runtime) = runtime {
                self.gather.leave(&runtime);
            }
        }
    }
}
