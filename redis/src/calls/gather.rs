//! Decisions that share calls: [`Gather`].
//!
//! A single decision is sent at once. While calls are in flight, a task lets other tasks run for a
//! moment, then sends all decisions that wait by then: there is no timer. The distance to the
//! server limits the calls in flight. Beyond that, decisions wait until a call ends.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout, timeout_at};

use super::super::link::Links;
use super::super::script::{Answer, Command};
use super::call::call_server;
use super::failure::{apart_error, late_error, unsent_error};
use crate::sync::{self, AtEnd};
use tower_fixed_window::StoreError;

/// Yields of a sender before it sends. tokio returns to it after some sixty tasks, and callers that
/// were just answered should have the chance to ask again.
const YIELDS: usize = 3;
/// Keys in one call. Larger batches save little and block the server longer.
const MAX_BATCH: usize = 128;
/// In flight at any distance: with one, the server would be idle while its answer travels.
const MIN_CALLS: usize = 2;
/// A further call may be in flight for each such part of a round trip.
const INTERVAL: Duration = Duration::from_micros(50);
/// Before the distance is known.
const UNMEASURED: usize = 1_024;
/// In flight beyond that for full calls, which gain nothing by waiting.
const MORE_IF_FULL: usize = 4;
/// How long the least round trip is remembered, at least: the distance may change.
const SPAN: Duration = Duration::from_secs(5);
/// How long a call has a place among those in flight. A connection that is silent for longer was
/// replaced, and the call may wait for it as long as its most patient caller.
const IN_FLIGHT: Duration = Duration::from_millis(225);
const ENDED: &str = "the runtime of the call to Redis has ended";

pub(crate) struct Gather {
    pub(super) links: Arc<Links>,
    runtime: Handle,
    queue: Mutex<Batches>,
    /// The server has refused a script with two keys, as nodes of a cluster do.
    pub(super) one_by_one: AtomicBool,
}

impl Gather {
    pub(super) fn new(links: Arc<Links>, runtime: Handle) -> Self {
        Self { links, runtime, queue: Mutex::default(), one_by_one: AtomicBool::new(false) }
    }

    /// `alone`: in a call of its own.
    pub(crate) async fn send(
        self: Arc<Self>,
        asked: Question,
        until: Instant,
        alone: bool,
    ) -> Answered {
        let (waiting, outcome) = QueuedQuestion::new(asked, until);
        let is_sent = Arc::clone(&waiting.is_sent);
        if let Some(waiting) = self.change_queue(|queue| queue.push(waiting, alone)) {
            self.runtime.spawn(self.make_call(vec![waiting]));
        }
        match timeout_at(until, outcome).await {
            Ok(outcome) => outcome.unwrap_or_else(|_| Err(StoreError::new(ENDED))),
            Err(_) if is_sent.load(Ordering::Relaxed) => Err(late_error(until)),
            Err(_) => Err(unsent_error(until)),
        }
    }

    fn change_queue<T>(self: &Arc<Self>, change: impl FnOnce(&mut Batches) -> T) -> T {
        let mut queue = sync::lock(&self.queue);
        let changed = change(&mut queue);
        let starts = queue.claim_sender();
        drop(queue);
        if starts {
            self.runtime.spawn(Arc::clone(self).send_batch());
        }
        changed
    }

    async fn send_batch(self: Arc<Self>) {
        for _ in 0..YIELDS {
            yield_now().await;
        }
        // Other batches need not wait until this call ends.
        if let Some(batch) = self.change_queue(Batches::take_batch) {
            self.make_call(batch).await;
        }
    }

    /// The call counts as in flight for a while, or until the future is dropped.
    fn make_call(
        self: &Arc<Self>,
        batch: Vec<QueuedQuestion>,
    ) -> impl Future<Output = ()> + Send + use<> {
        let (this, of) = (Arc::clone(self), Arc::clone(self));
        let in_flight = AtEnd(move || of.change_queue(|queue| queue.in_flight -= 1));
        async move {
            let mut call = pin!(call_server(&this.links, batch));
            let in_time = timeout(IN_FLIGHT, call.as_mut()).await.ok();
            let in_flight = in_time.is_some().then_some(in_flight);
            match if let Some(called) = in_time { called } else { call.await } {
                Ok(Some(took)) => sync::lock(&this.queue).note_round_trip(Instant::now(), took),
                Ok(None) => {}
                Err((batch, by_slots)) => {
                    this.one_by_one.fetch_or(by_slots, Ordering::Relaxed);
                    for waiting in batch {
                        if by_slots && waiting.asked.len() > 1 {
                            waiting.send_answer(Err(apart_error()));
                        } else {
                            sync::lock(&this.queue).in_flight += 1;
                            this.runtime.spawn(this.make_call(vec![waiting]));
                        }
                    }
                }
            }
            // The next call may have waited for this.
            drop(in_flight);
        }
    }
}

#[derive(Default)]
struct Batches {
    waiting: VecDeque<QueuedQuestion>,
    keys: usize,
    in_flight: usize,
    has_sender: bool,
    last_was_shared: bool,
    /// The least round trip of this span and of the one before, and when this one began.
    least: [Option<Duration>; 2],
    span_start: Option<Instant>,
}

impl Batches {
    /// Returns the question if it is to be sent at once, in a call of its own.
    fn push(&mut self, waiting: QueuedQuestion, alone: bool) -> Option<QueuedQuestion> {
        let is_idle = self.in_flight == 0 && self.waiting.is_empty() && !self.has_sender;
        if alone || is_idle && !self.last_was_shared {
            self.in_flight += 1;
            return Some(waiting);
        }
        self.keys += waiting.asked.len();
        self.waiting.push_back(waiting);
        None
    }

    fn note_round_trip(&mut self, now: Instant, took: Duration) {
        if self.span_start.is_none_or(|start| now - start >= SPAN) {
            self.span_start = Some(now);
            self.least = [None, self.least[0]];
        }
        self.least[0] = Some(self.least[0].map_or(took, |least| least.min(took)));
    }

    /// `None` if no more calls may be in flight.
    fn take_batch(&mut self) -> Option<Vec<QueuedQuestion>> {
        self.has_sender = false;
        if !self.has_room() || self.waiting.is_empty() {
            return None;
        }
        let mut batch = Vec::with_capacity(MAX_BATCH.min(self.waiting.len()));
        let mut room = MAX_BATCH;
        // A group is never split.
        while let Some(keys) = self.waiting.front().map(|next| next.asked.len())
            && keys <= room
            && let Some(next) = self.waiting.pop_front()
        {
            (self.keys, room) = (self.keys - keys, room - keys);
            batch.push(next);
        }
        (self.last_was_shared, self.in_flight) = (batch.len() > 1, self.in_flight + 1);
        Some(batch)
    }

    fn has_room(&self) -> bool {
        let more = if self.keys >= MAX_BATCH { MORE_IF_FULL } else { 0 };
        let calls = match self.least.into_iter().flatten().min() {
            None => UNMEASURED,
            Some(least) => MIN_CALLS + (least.as_nanos() / INTERVAL.as_nanos()) as usize,
        };
        self.in_flight < calls + more
    }

    fn claim_sender(&mut self) -> bool {
        let claimed = !self.waiting.is_empty() && !self.has_sender && self.has_room();
        self.has_sender |= claimed;
        claimed
    }
}

pub(crate) type Answered = Result<Vec<Answer>, StoreError>;

/// A command of one key, or those of several that are decided in one step.
pub(crate) type Question = Vec<Command>;

pub(crate) struct QueuedQuestion {
    pub(crate) asked: Question,
    pub(crate) until: Instant,
    /// The question was handed to a connection, and not only waits for one.
    is_sent: Arc<AtomicBool>,
    pub(crate) reply: oneshot::Sender<Answered>,
}

impl QueuedQuestion {
    pub(crate) fn new(asked: Question, until: Instant) -> (Self, oneshot::Receiver<Answered>) {
        let (reply, outcome) = oneshot::channel();
        (Self { asked, until, is_sent: Arc::default(), reply }, outcome)
    }

    pub(crate) fn note_sent(&self, is_sent: bool) {
        self.is_sent.store(is_sent, Ordering::Relaxed);
    }

    pub(crate) fn send_answer(self, answer: Answered) {
        let _ = self.reply.send(answer);
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/gather.rs"]
mod tests;
