//! Decisions that share calls: [`Gather`].
//!
//! A single decision is sent at once. While calls are in flight, a task lets other tasks run for a
//! moment, then sends all decisions that wait by then: there is no timer. The distance to the
//! server limits the calls in flight. Beyond that, decisions wait until a call ends.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redis::Cmd;
use tokio::runtime::Handle;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout_at};

use super::super::link::Link;
use super::super::script::{self, Answer};
use super::call::call_server;
use super::failure::{late_error, runtime_ended_error, unsent_error};
use super::queue::{Answered, Batches, Question, QueuedQuestion};
use crate::store::error::StoreError;
use crate::sync::AtEnd;

/// How often a sender yields before it sends. tokio returns to it after some sixty tasks, and
/// callers that were just answered should have the chance to ask again.
const YIELDS: usize = 3;

/// Collects the decisions of a runtime for one server.
pub(crate) struct Gather {
    pub(crate) link: Link,
    runtime: Handle,
    queue: Mutex<Batches>,
    /// `true` once the server has refused a script with two keys, as nodes of a cluster do.
    one_by_one: AtomicBool,
}

impl Gather {
    pub(super) fn new(link: Link, runtime: Handle) -> Self {
        Self { link, runtime, queue: Mutex::default(), one_by_one: AtomicBool::new(false) }
    }

    /// Returns whether calls can't be shared here.
    pub(crate) fn is_one_by_one(&self) -> bool {
        self.one_by_one.load(Ordering::Relaxed)
    }

    /// Sends a command in a call of its own.
    pub(crate) async fn send_alone(&self, cmd: Cmd, until: Instant) -> Result<Answer, StoreError> {
        let link = self.link.for_key(script::key_of(&cmd));
        let (waiting, outcome) = QueuedQuestion::new(vec![cmd], until);
        self.runtime.spawn(async move { call_server(&link, vec![waiting], until).await });
        outcome.await.ok().and_then(Result::ok).unwrap_or_else(|| Err(runtime_ended_error()))
    }

    /// Sends a question in a shared call. Returns the question if calls can't be shared here.
    pub(crate) async fn send_shared(self: Arc<Self>, asked: Question, until: Instant) -> Answered {
        let (waiting, outcome) = QueuedQuestion::new(asked, until);
        let (number, alone) = self.change_queue(|queue| queue.push(waiting));
        if let Some(waiting) = alone {
            self.runtime.spawn(self.make_call(vec![waiting], until));
        }
        match timeout_at(until, outcome).await {
            Ok(outcome) => outcome.unwrap_or_else(|_| Ok(Err(runtime_ended_error()))),
            Err(_) if self.queue().is_removed(number) => Ok(Err(late_error())),
            Err(_) => Ok(Err(unsent_error())),
        }
    }

    /// Changes the queue, and starts a task that sends the waiting questions, if one may start.
    fn change_queue<T>(self: &Arc<Self>, change: impl FnOnce(&mut Batches) -> T) -> T {
        let mut queue = self.queue();
        let changed = change(&mut queue);
        let starts = queue.claim_sender();
        drop(queue);
        if starts {
            self.runtime.spawn(Arc::clone(self).send_batch());
        }
        changed
    }

    /// Sends the next batch.
    async fn send_batch(self: Arc<Self>) {
        for _ in 0..YIELDS {
            yield_now().await;
        }
        // Other batches need not wait until this call ends.
        if let Some((batch, until)) = self.change_queue(Batches::take_batch) {
            self.make_call(batch, until).await;
        }
    }

    /// Makes a call, which counts as in flight until the future is dropped.
    fn make_call(
        self: &Arc<Self>,
        batch: Vec<QueuedQuestion>,
        until: Instant,
    ) -> impl Future<Output = ()> + Send + use<> {
        let (this, of) = (Arc::clone(self), Arc::clone(self));
        let in_flight = AtEnd(move || of.change_queue(Batches::end_call));
        async move {
            match call_server(&this.link, batch, until).await {
                Ok(Some(took)) => this.queue().note_round_trip(Instant::now(), took),
                Ok(None) => {}
                Err(batch) => {
                    this.one_by_one.store(true, Ordering::Relaxed);
                    batch.into_iter().for_each(QueuedQuestion::return_question);
                }
            }
            // The next call may have waited for this.
            drop(in_flight);
        }
    }

    fn queue(&self) -> MutexGuard<'_, Batches> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
