//! Those who wait for their windows, in order of arrival.
//!
//! Whoever is late, its window over before the service was ready, has to take tokens anew, and those
//! of one key do so one after the other: else the one that happens to be woken first would go first.

use std::collections::{BTreeMap, HashMap};
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::key::Key;
use crate::timer::{Instant, Sleep};

/// For how long somebody waits for its turn: those before it may be polled no more.
const PATIENCE: Duration = Duration::from_millis(100);

#[derive(Default)]
pub(crate) struct Line(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    arrivals: u64,
    waiting: HashMap<Key, BTreeMap<u64, Waiting>>,
}

struct Waiting {
    /// From here on it is late.
    until: Instant,
    /// It had tokens, of a window that is over when it is late.
    reserved: bool,
    /// Of one that waits for its turn.
    waker: Option<Waker>,
}

impl Line {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place in the line, for as long as it lives.
pub(crate) struct Place {
    line: Arc<Line>,
    key: Key,
    number: u64,
    arrived: Instant,
    /// When its tokens were asked for.
    asked: Instant,
    until: Option<Instant>,
    /// It has had tokens.
    pub(crate) reserved: bool,
    patience: Option<Sleep>,
}

impl Place {
    /// Behind those who are late; not behind those who only stand behind them, or under many requests
    /// the line would never end.
    pub(crate) fn new(line: &Arc<Line>, key: &Key) -> Self {
        let now = Instant::now();
        let mut inner = line.lock();
        inner.arrivals += 1;
        let number = inner.arrivals;
        let is_late = |waiting: &Waiting| waiting.reserved && waiting.until <= now;
        let behind = inner.waiting.get(key).is_some_and(|all| all.values().any(is_late));
        drop(inner);
        let (line, key) = (Arc::clone(line), key.clone());
        let (arrived, asked) = (now, now);
        let mut place = Self {
            line,
            key,
            number,
            arrived,
            asked,
            until: None,
            reserved: false,
            patience: None,
        };
        if behind {
            // As late as they are: it has no tokens yet.
            place.stand(now, false);
        }
        place
    }

    /// For how long it has been in the line, if it had to wait there.
    pub(crate) fn has_waited(&self) -> Option<Duration> {
        self.until.map(|_| self.arrived.elapsed())
    }

    /// Tokens are asked for now.
    pub(crate) fn asks(&mut self) {
        self.asked = Instant::now();
    }

    /// It has tokens that are good for so long after they were asked for.
    pub(crate) fn hold(&mut self, good_for: Duration) {
        self.stand(self.asked + good_for, true);
    }

    fn stand(&mut self, until: Instant, reserved: bool) {
        let waiting = Waiting { until, reserved, waker: None };
        let mut inner = self.line.lock();
        let all = inner.waiting.entry(self.key.clone()).or_default();
        let before = all.insert(self.number, waiting);
        let next = next(all);
        drop(inner);
        drop(before);
        (self.until, self.patience) = (Some(until), None);
        next.into_iter().for_each(Waker::wake);
    }

    /// Whether its tokens are those of a window that is over.
    pub(crate) fn is_late(&self) -> bool {
        self.until.is_some_and(|until| until <= Instant::now())
    }

    /// Its turn has come when nobody who was there before it is late.
    pub(crate) fn turn(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut inner = self.line.lock();
        if let Some(all) = inner.waiting.get_mut(&self.key)
            && late(all, self.number, Instant::now())
        {
            let waker = Some(cx.waker().clone());
            let before = all.get_mut(&self.number).map(|this| mem::replace(&mut this.waker, waker));
            drop(inner);
            drop(before);
            return self.patience.get_or_insert_with(|| Sleep::new(PATIENCE)).poll(cx);
        }
        Poll::Ready(())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.until.is_none() {
            return;
        }
        let mut inner = self.line.lock();
        let Some(all) = inner.waiting.get_mut(&self.key) else { return };
        let this = all.remove(&self.number);
        let next = next(all);
        if all.is_empty() {
            inner.waiting.remove(&self.key);
        }
        drop(inner);
        drop(this);
        next.into_iter().for_each(Waker::wake);
    }
}

/// Whether anybody before `number` is late.
fn late(all: &BTreeMap<u64, Waiting>, number: u64, now: Instant) -> bool {
    all.range(..number).any(|(_, waiting)| waiting.until <= now)
}

/// Whom to wake, without the lock: that may run others of the line, or drop them.
fn next(all: &mut BTreeMap<u64, Waiting>) -> Option<Waker> {
    all.values_mut().find_map(|waiting| waiting.waker.take())
}
