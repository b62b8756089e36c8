//! Decisions that wait to travel, and how many calls may be in flight.

use std::collections::VecDeque;
use std::time::Duration;

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
#[derive(Default)]
pub(super) struct Queue {
    waiting: VecDeque<Waiting>,
    /// How many have come, and how many of these have left.
    came: u64,
    left: u64,
    /// How many calls are in flight.
    calls: usize,
    /// A task is about to leave.
    leaving: bool,
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

/// How a decision is to be sent.
pub(super) enum Leave {
    /// At once, in a call of its own.
    Alone(Waiting),
    /// With a task that is to be started.
    WithTask,
    /// With others' task.
    Later,
}

impl Queue {
    /// Its place in the order of arrival, and how it is sent.
    pub(super) fn come(&mut self, waiting: Waiting) -> (u64, Leave) {
        let is_alone = self.calls == 0 && self.waiting.is_empty() && !self.leaving && !self.busy;
        self.came += 1;
        let leave = if is_alone {
            self.left += 1;
            self.begin(1);
            Leave::Alone(waiting)
        } else {
            self.waiting.push_back(waiting);
            if self.claim() { Leave::WithTask } else { Leave::Later }
        };
        (self.came, leave)
    }

    /// Whether it has left.
    pub(super) fn has_left(&self, place: u64) -> bool {
        self.left >= place
    }

    /// A call begins.
    fn begin(&mut self, decisions: usize) {
        self.busy = decisions > 1;
        self.calls += 1;
    }

    /// One is back.
    pub(super) fn end(&mut self) {
        self.calls -= 1;
    }

    pub(super) fn note(&mut self, now: Instant, took: Duration) {
        self.distance.note(now, took);
    }

    /// The decisions of the next call, which has begun, and until when they wait for it.
    pub(super) fn leave(&mut self) -> Option<(Vec<Waiting>, Instant)> {
        self.leaving = false;
        if !self.has_room() {
            return None;
        }
        let batch = self.batch(Instant::now());
        let until = batch.iter().map(|waiting| waiting.until).max()?;
        self.begin(batch.len());
        Some((batch, until))
    }

    fn has_room(&self) -> bool {
        let more = if self.waiting.len() >= MAX_BATCH { FULL } else { 0 };
        self.calls < self.distance.calls() + more
    }

    /// Whether a task has to be started that sends what waits.
    pub(super) fn claim(&mut self) -> bool {
        let claimed = !self.waiting.is_empty() && !self.leaving && self.has_room();
        self.leaving |= claimed;
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
