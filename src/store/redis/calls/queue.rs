//! Decisions that wait to travel, and how many calls may be in flight.

use std::collections::VecDeque;
use std::slice;
use std::time::Duration;

use redis::Cmd;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::super::script::Answer;
use super::failure::unsent;
use crate::store::error::StoreError;

/// Keys in one call. More would save little, and keep the server from others for longer.
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

/// Decisions that wait, and the calls in flight.
#[derive(Default)]
pub(super) struct Batches {
    waiting: VecDeque<Departing>,
    /// How many keys these are about.
    keys: usize,
    /// How many have come, and how many of these have left.
    came: u64,
    left: u64,
    /// How many calls are in flight.
    calls: usize,
    /// A task is about to leave.
    leaving: bool,
    /// The last call took several.
    busy: bool,
    /// The least round trip of this span and of the one before, and since when this one is.
    least: [Option<Duration>; 2],
    since: Option<Instant>,
}

impl Batches {
    /// Its place in the order of arrival. It comes back if it leaves at once, in a call of its own.
    pub(super) fn come(&mut self, waiting: Departing) -> (u64, Option<Departing>) {
        let is_alone = self.calls == 0 && self.waiting.is_empty() && !self.leaving && !self.busy;
        self.came += 1;
        if is_alone {
            self.left += 1;
            self.begin(1);
            return (self.came, Some(waiting));
        }
        self.keys += waiting.asked.cmds().len();
        self.waiting.push_back(waiting);
        (self.came, None)
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

    /// How long a call took.
    pub(super) fn note(&mut self, now: Instant, took: Duration) {
        if self.since.is_none_or(|since| now - since >= SPAN) {
            self.since = Some(now);
            self.least = [None, self.least[0]];
        }
        self.least[0] = Some(self.least[0].map_or(took, |least| least.min(took)));
    }

    /// The decisions of the next call, which has begun, and until when they wait for it.
    pub(super) fn leave(&mut self) -> Option<(Vec<Departing>, Instant)> {
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
        let more = if self.keys >= MAX_BATCH { FULL } else { 0 };
        let calls = match self.least.into_iter().flatten().min() {
            None => UNKNOWN,
            Some(least) => CALLS + (least.as_nanos() / PACE.as_nanos()) as usize,
        };
        self.calls < calls + more
    }

    /// Whether a task has to be started that sends what waits.
    pub(super) fn claim(&mut self) -> bool {
        let claimed = !self.waiting.is_empty() && !self.leaving && self.has_room();
        self.leaving |= claimed;
        claimed
    }

    fn batch(&mut self, now: Instant) -> Vec<Departing> {
        let mut batch = Vec::with_capacity(MAX_BATCH.min(self.waiting.len()));
        let mut room = MAX_BATCH;
        // A group is never split.
        while let Some(keys) = self.waiting.front().map(|next| next.asked.cmds().len())
            && keys <= room
            && let Some(next) = self.waiting.pop_front()
        {
            (self.left, self.keys) = (self.left + 1, self.keys - keys);
            match next.is_wanted(now) {
                true => {
                    room -= keys;
                    batch.push(next);
                }
                false => next.withdraw(),
            }
        }
        batch
    }
}

/// What became of a question. Itself: it was not sent in this way, and is to be sent in another.
pub(crate) type Answered = Result<Result<Answer, StoreError>, Question>;

/// A command of one key, or a group of them that are decided in one step.
pub(crate) enum Question {
    One(Cmd),
    All(Vec<Cmd>),
}

impl Question {
    pub(crate) fn cmds(&self) -> &[Cmd] {
        match self {
            Self::One(cmd) => slice::from_ref(cmd),
            Self::All(cmds) => cmds,
        }
    }
}

/// What waits to be sent, and for its answer.
pub(crate) struct Departing {
    pub(crate) asked: Question,
    pub(crate) until: Instant,
    /// How long it may wait for a connection.
    pub(crate) patience: Duration,
    reply: oneshot::Sender<Answered>,
}

impl Departing {
    pub(crate) fn new(asked: Question, until: Instant) -> (Self, oneshot::Receiver<Answered>) {
        let (reply, outcome) = oneshot::channel();
        let patience = until - Instant::now();
        (Self { asked, until, patience, reply }, outcome)
    }

    /// What is late or was dropped is not sent.
    pub(crate) fn is_wanted(&self, now: Instant) -> bool {
        now < self.until && !self.reply.is_closed()
    }

    /// It is not sent any more.
    pub(crate) fn withdraw(self) {
        self.answer(Err(unsent()));
    }

    pub(crate) fn give_back(self) {
        // Who is gone needs no answer, here and below.
        let _ = self.reply.send(Err(self.asked));
    }

    pub(crate) fn answer(self, answer: Result<Answer, StoreError>) {
        let _ = self.reply.send(Ok(answer));
    }
}
