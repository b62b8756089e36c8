//! Decisions that wait to travel, and how many calls may be in flight.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::Instant;

use super::waiting::Waiting;

/// Decisions in one call. More would save little, and keep the server from others for longer.
const MAX_BATCH: usize = 128;
/// Calls in flight, whatever the distance: with one the server would be idle while its answer
/// travels.
const CALLS: usize = 2;
/// And one more for each of these of the round trip: so a call may leave as often.
const PACE: Duration = Duration::from_micros(50);
/// Calls in flight before the distance is known.
const UNKNOWN: usize = 1_024;
/// A full call may leave while there are this many more: what waits would be no smaller later.
const FULL: usize = 4;
/// How long the least round trip is remembered, at least: the distance may change.
const SPAN: Duration = Duration::from_secs(5);
/// After so long a task that was to leave is not counted on: it may be in a runtime that does not
/// run.
pub(super) const STUCK: Duration = Duration::from_millis(50);

#[derive(Default)]
pub(super) struct Queue {
    waiting: VecDeque<Waiting>,
    /// How many have come, and how many of these have left.
    came: u64,
    left: u64,
    /// Calls in flight, by when they are not waited for any more: a runtime may stand still.
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

    /// How many calls may be in flight.
    fn calls(&self) -> usize {
        match self.least.into_iter().chain(self.before).min() {
            None => UNKNOWN,
            Some(least) => CALLS + (least.as_nanos() / PACE.as_nanos()) as usize,
        }
    }
}

/// A call in flight.
pub(super) type UnderWay = (Instant, u64);

/// How a decision is to be sent.
pub(super) enum Leave {
    /// At once, in a call of its own.
    Alone(Waiting, UnderWay),
    /// With a task that is to be started.
    WithTask,
    /// With others' task.
    Later,
}

impl Queue {
    /// Its place in the order of arrival, and how it is sent.
    pub(super) fn come(&mut self, waiting: Waiting, now: Instant) -> (u64, Leave) {
        let is_alone = self.calls.is_empty()
            && self.waiting.is_empty()
            && self.leaving.is_none()
            && !self.busy;
        self.came += 1;
        let leave = if is_alone {
            self.left += 1;
            let under_way = self.begin(waiting.until, 1);
            Leave::Alone(waiting, under_way)
        } else {
            self.waiting.push_back(waiting);
            if self.claim(now) { Leave::WithTask } else { Leave::Later }
        };
        (self.came, leave)
    }

    /// Whether it has left.
    pub(super) fn has_left(&self, place: u64) -> bool {
        self.left >= place
    }

    /// A call begins.
    fn begin(&mut self, until: Instant, decisions: usize) -> UnderWay {
        self.called += 1;
        self.busy = decisions > 1;
        let under_way = (until, self.called);
        self.calls.insert(under_way);
        under_way
    }

    /// It is back.
    pub(super) fn end(&mut self, under_way: UnderWay) {
        self.calls.remove(&under_way);
    }

    pub(super) fn note(&mut self, now: Instant, took: Duration) {
        self.distance.note(now, took);
    }

    /// The decisions of the next call, which has begun.
    pub(super) fn leave(&mut self, now: Instant) -> Option<(Vec<Waiting>, UnderWay)> {
        self.leaving = None;
        if !self.has_room(now) {
            return None;
        }
        let batch = self.batch(now);
        let until = batch.iter().map(|waiting| waiting.until).max()?;
        let under_way = self.begin(until, batch.len());
        Some((batch, under_way))
    }

    /// All that wait, when the task that was to send them has ended.
    pub(super) fn scatter(&mut self) -> VecDeque<Waiting> {
        self.leaving = None;
        self.left += self.waiting.len() as u64;
        std::mem::take(&mut self.waiting)
    }

    /// The runtime of the latest caller.
    pub(super) fn runtime(&self) -> Option<Handle> {
        self.waiting.back().map(|waiting| waiting.runtime.clone())
    }

    fn has_room(&mut self, now: Instant) -> bool {
        while self.calls.first().is_some_and(|(until, _)| *until <= now) {
            self.calls.pop_first();
        }
        let more = if self.waiting.len() >= MAX_BATCH { FULL } else { 0 };
        self.calls.len() < self.distance.calls() + more
    }

    /// Whether a task has to be started that sends what waits.
    pub(super) fn claim(&mut self, now: Instant) -> bool {
        let claimed = !self.waiting.is_empty()
            && self.leaving.is_none_or(|since| now - since >= STUCK)
            && self.has_room(now);
        if claimed {
            self.leaving = Some(now);
        }
        claimed
    }

    fn batch(&mut self, now: Instant) -> Vec<Waiting> {
        let mut batch = Vec::with_capacity(MAX_BATCH.min(self.waiting.len()));
        while batch.len() < MAX_BATCH
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
