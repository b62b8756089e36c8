//! Decisions that travel together.
//!
//! Who is alone leaves at once. While calls are under way, decisions are asked for by a task that lets
//! others run for a moment and takes all that wait by then: there is no timer, and nobody waits for
//! company. As many calls are under way as the distance asks for; when there are more, decisions
//! wait until one of them is back.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::Cmd;
use tokio::runtime::Handle;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout_at};

use super::call::{Call, Fate, Waiting};
use super::link::Link;
use super::{ended, late, runtime, unsent};
use crate::store::{StoreError, Watch};

/// Decisions in one call. More would save little, and keep the server from others for longer.
const MOST: usize = 128;
/// Calls under way, whatever the distance: with one the server would be idle while its answer travels.
const CALLS: usize = 2;
/// And one more for each of these of the round trip: so a call may leave as often.
const PACE: Duration = Duration::from_micros(50);
/// Calls under way before the distance is known.
const UNKNOWN: usize = 1_024;
/// A call that is full may leave while there are so many more: what waits would be no smaller later.
const FULL: usize = 4;
/// How long the least round trip is remembered, at least: the distance may change.
const SPAN: Duration = Duration::from_secs(5);
/// How often the task that leaves lets others run before. tokio comes back after some sixty tasks,
/// and all who were answered are to have the chance to ask again.
const YIELDS: usize = 3;
/// After so long a task that was to leave is not counted on: it may be in a runtime that nobody runs.
const STUCK: Duration = Duration::from_millis(50);

/// Where the decisions for one server gather; clones share it.
#[derive(Clone)]
pub(super) struct Gather(Arc<Inner>);

struct Inner {
    link: Link,
    queue: Mutex<Queue>,
    /// It has turned out that no script may use two keys: the server is part of a cluster.
    apart: AtomicBool,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Waiting>,
    /// How many have come, and how many of these have left.
    came: u64,
    left: u64,
    /// Calls under way, by when they are not waited for any more: a runtime may stand still.
    calls: BTreeSet<(Instant, u64)>,
    /// How many calls have left.
    called: u64,
    /// Since when a task is about to leave.
    leaving: Option<Instant>,
    /// The last call took several.
    busy: bool,
    distance: Distance,
}

/// The least round trip of this span and of the one before.
#[derive(Default)]
struct Distance {
    since: Option<Instant>,
    least: Option<Duration>,
    before: Option<Duration>,
}

impl Distance {
    fn note(&mut self, now: Instant, took: Duration) {
        if self.since.is_none_or(|since| now - since >= SPAN) {
            self.since = Some(now);
            self.before = self.least.take();
        }
        self.least = Some(self.least.map_or(took, |least| least.min(took)));
    }

    /// How many calls may be under way.
    fn calls(&self) -> usize {
        match self.least.into_iter().chain(self.before).min() {
            None => UNKNOWN,
            Some(least) => CALLS + (least.as_nanos() / PACE.as_nanos()) as usize,
        }
    }
}

impl Queue {
    fn has_room(&mut self, now: Instant) -> bool {
        while self.calls.first().is_some_and(|(until, _)| *until <= now) {
            self.calls.pop_first();
        }
        let more = if self.waiting.len() >= MOST { FULL } else { 0 };
        self.calls.len() < self.distance.calls() + more
    }

    /// Whether a task has to be started that leaves with those who wait.
    fn claim(&mut self, now: Instant) -> bool {
        let claimed = !self.waiting.is_empty()
            && self.leaving.is_none_or(|since| now - since >= STUCK)
            && self.has_room(now);
        if claimed {
            self.leaving = Some(now);
        }
        claimed
    }

    fn batch(&mut self, now: Instant) -> Vec<Waiting> {
        let mut batch = Vec::with_capacity(MOST.min(self.waiting.len()));
        while batch.len() < MOST
            && let Some(next) = self.waiting.pop_front()
        {
            self.left += 1;
            match next.is_wanted(now) {
                true => batch.push(next),
                false => next.withdraw(),
            }
        }
        batch
    }
}

impl Gather {
    pub(super) fn new(link: Link) -> Self {
        Self(Arc::new(Inner { link, queue: Mutex::default(), apart: AtomicBool::new(false) }))
    }

    /// Whether nobody can travel with others here.
    pub(super) fn is_apart(&self) -> bool {
        self.0.apart.load(Ordering::Relaxed)
    }

    /// Has it decided. `Fate::Returned`: not here, as nobody can travel with others.
    pub(super) async fn join(&self, mut cmd: Cmd, until: Instant, watch: Option<Watch>) -> Fate {
        loop {
            let runtime = match runtime() {
                Ok(runtime) => runtime,
                Err(error) => return Fate::Known(Err(error)),
            };
            let (waiting, mut fate) = Waiting::new(cmd, until, runtime.clone(), watch.clone());
            let place = self.come(waiting);
            let mut wake = until.min(Instant::now() + STUCK);
            let fate = loop {
                match timeout_at(wake, &mut fate).await {
                    Ok(fate) => break fate.unwrap_or_else(|_| Fate::Known(Err(ended()))),
                    Err(_) if wake == until => break Fate::Known(Err(self.late(place))),
                    Err(_) => {
                        self.go_on(&runtime);
                        wake = until;
                    }
                }
            };
            match fate {
                Fate::Returned(same) if !self.is_apart() => cmd = same,
                fate => return fate,
            }
        }
    }

    /// Its place in the order of those who have come.
    fn come(&self, waiting: Waiting) -> u64 {
        let now = Instant::now();
        let (runtime, until) = (waiting.runtime.clone(), waiting.until);
        let mut queue = self.queue();
        let alone = queue.calls.is_empty()
            && queue.waiting.is_empty()
            && queue.leaving.is_none()
            && !queue.busy;
        queue.came += 1;
        let place = queue.came;
        if alone {
            queue.left += 1;
            let call = self.call(&mut queue, vec![waiting], until);
            drop(queue);
            runtime.spawn(call.run());
        } else {
            queue.waiting.push_back(waiting);
            let claimed = queue.claim(now);
            drop(queue);
            if claimed {
                self.leave(&runtime);
            }
        }
        place
    }

    /// In case that the task that was to leave is in a runtime that stands still.
    fn go_on(&self, runtime: &Handle) {
        let claimed = self.queue().claim(Instant::now());
        if claimed {
            self.leave(runtime);
        }
    }

    fn leave(&self, runtime: &Handle) {
        // Held by the task from its first moment: it may never be polled.
        let leaving = Leaving { gather: Some(self.clone()) };
        runtime.spawn(leaving.run());
    }

    fn call(&self, queue: &mut Queue, batch: Vec<Waiting>, until: Instant) -> Call {
        queue.called += 1;
        queue.busy = batch.len() > 1;
        let under_way = (until, queue.called);
        queue.calls.insert(under_way);
        let place = Place { gather: self.clone(), under_way };
        Call::of(self.0.link.clone(), batch, until, place)
    }

    fn late(&self, place: u64) -> StoreError {
        if self.queue().left < place { unsent() } else { late() }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.0.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The task that leaves with those who wait.
struct Leaving {
    /// `None`: it has left.
    gather: Option<Gather>,
}

impl Leaving {
    async fn run(mut self) {
        for _ in 0..YIELDS {
            yield_now().await;
        }
        if let Some(call) = self.take() {
            call.run().await;
        }
    }

    fn take(&mut self) -> Option<Call> {
        let gather = self.gather.take()?;
        let now = Instant::now();
        let mut queue = gather.queue();
        queue.leaving = None;
        if !queue.has_room(now) {
            return None;
        }
        let batch = queue.batch(now);
        let until = batch.iter().map(|waiting| waiting.until).max()?;
        let call = gather.call(&mut queue, batch, until);
        // The others need not wait until it is back.
        let more = queue.claim(now);
        drop(queue);
        if more {
            gather.leave(&Handle::current());
        }
        Some(call)
    }
}

impl Drop for Leaving {
    /// Its runtime has ended. Those who wait elsewhere come again.
    fn drop(&mut self) {
        if let Some(gather) = self.gather.take() {
            let mut queue = gather.queue();
            queue.leaving = None;
            queue.left += queue.waiting.len() as u64;
            let waiting = std::mem::take(&mut queue.waiting);
            drop(queue);
            waiting.into_iter().for_each(Waiting::give_back);
        }
    }
}

/// A place among the calls under way.
pub(super) struct Place {
    gather: Gather,
    under_way: (Instant, u64),
}

impl Place {
    pub(super) fn answered(&self, took: Duration) {
        self.gather.queue().distance.note(Instant::now(), took);
    }

    /// The server has refused to decide for several keys at once.
    pub(super) fn come_apart(&self) {
        self.gather.0.apart.store(true, Ordering::Relaxed);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut queue = self.gather.queue();
        queue.calls.remove(&self.under_way);
        if queue.claim(Instant::now()) {
            // Where somebody has asked lately, whoever had this call.
            let runtime = queue.waiting.back().map(|waiting| waiting.runtime.clone());
            drop(queue);
            if let Some(runtime) = runtime {
                self.gather.leave(&runtime);
            }
        }
    }
}
