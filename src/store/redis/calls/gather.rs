//! Decisions that share a call.
//!
//! A single decision leaves at once. While calls are in flight, a task lets others run for a
//! moment, then sends all decisions that wait by then: there is no timer. The distance to the
//! server says how many calls may be in flight; beyond that, decisions wait until one of them is
//! back.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redis::Cmd;
use tokio::runtime::Handle;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout_at};

use super::super::link::Link;
use super::super::script::{self, Answer};
use super::call::call;
use super::failure::{ended, late, unsent};
use super::queue::{Answered, Batches, Departing, Question};
use crate::store::error::StoreError;
use crate::sync::AtEnd;

/// How often the task that leaves lets others run before. tokio comes back after some sixty tasks,
/// and callers that were answered are to have the chance to ask again.
const YIELDS: usize = 3;

/// Where the decisions of a runtime for one server gather.
pub(crate) struct Gather {
    pub(crate) link: Link,
    runtime: Handle,
    queue: Mutex<Batches>,
    /// It has turned out that no script may use two keys: the server is part of a cluster.
    apart: AtomicBool,
}

impl Gather {
    pub(super) fn new(link: Link, runtime: Handle) -> Self {
        Self { link, runtime, queue: Mutex::default(), apart: AtomicBool::new(false) }
    }

    /// Whether calls can't be shared here.
    pub(crate) fn is_apart(&self) -> bool {
        self.apart.load(Ordering::Relaxed)
    }

    /// Sends a command in a call of its own.
    pub(crate) async fn send_alone(&self, cmd: Cmd, until: Instant) -> Result<Answer, StoreError> {
        let link = self.link.for_key(script::key(&cmd));
        let (waiting, outcome) = Departing::new(Question::One(cmd), until);
        self.runtime.spawn(async move { call(&link, vec![waiting], until).await });
        outcome.await.ok().and_then(Result::ok).unwrap_or_else(|| Err(ended()))
    }

    /// Sends it in a shared call. Itself: calls can't be shared here.
    pub(crate) async fn join(self: Arc<Self>, asked: Question, until: Instant) -> Answered {
        let (waiting, outcome) = Departing::new(asked, until);
        // Its place in the order of arrival.
        let (place, alone) = self.change(|queue| queue.come(waiting));
        if let Some(waiting) = alone {
            self.runtime.spawn(self.travel(vec![waiting], until));
        }
        match timeout_at(until, outcome).await {
            Ok(outcome) => outcome.unwrap_or_else(|_| Ok(Err(ended()))),
            Err(_) if self.queue().has_left(place) => Ok(Err(late())),
            Err(_) => Ok(Err(unsent())),
        }
    }

    /// Changes the queue. Has a task send what waits then, if it may.
    fn change<T>(self: &Arc<Self>, change: impl FnOnce(&mut Batches) -> T) -> T {
        let mut queue = self.queue();
        let changed = change(&mut queue);
        let more = queue.claim();
        drop(queue);
        if more {
            self.runtime.spawn(Arc::clone(self).send());
        }
        changed
    }

    /// Sends the decisions that wait.
    async fn send(self: Arc<Self>) {
        for _ in 0..YIELDS {
            yield_now().await;
        }
        // The others need not wait until it is back.
        if let Some((batch, until)) = self.change(Batches::leave) {
            self.travel(batch, until).await;
        }
    }

    /// A call, which has its place among those in flight until it is dropped.
    fn travel(
        self: &Arc<Self>,
        batch: Vec<Departing>,
        until: Instant,
    ) -> impl Future<Output = ()> + Send + use<> {
        let (this, of) = (Arc::clone(self), Arc::clone(self));
        let place = AtEnd(move || of.change(Batches::end));
        async move {
            match call(&this.link, batch, until).await {
                Ok(Some(took)) => this.queue().note(Instant::now(), took),
                Ok(None) => {}
                Err(batch) => {
                    this.apart.store(true, Ordering::Relaxed);
                    batch.into_iter().for_each(Departing::give_back);
                }
            }
            // The next one has waited for this.
            drop(place);
        }
    }

    fn queue(&self) -> MutexGuard<'_, Batches> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
