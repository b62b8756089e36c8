//! What is known of a store's connection, and of the work on it.

use std::mem::replace;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redis::RedisError;
use tokio::sync::watch;
use tokio::time::Instant;

use super::handle::{Handle, Origin};
use super::shards::{Health, Ranges, Shards};
use crate::sync::AtEnd;

/// How long an idle connection has to answer before another one is made beside it: two round trips,
/// within these bounds. What was frozen for a while has shown a long one.
const LEAST_GRACE: Duration = Duration::from_millis(20);
const MOST_GRACE: Duration = Duration::from_secs(1);
/// How long an attempt to connect may take. Others begin meanwhile.
pub(super) const ATTEMPT: Duration = Duration::from_secs(5);
/// Between the beginnings of two attempts, as long as few are in flight.
pub(super) const PAUSE: Duration = Duration::from_millis(250);
/// A check expires so long after it should have ended.
pub(super) const LATE: Duration = Duration::from_millis(100);

pub(super) struct Upkeep {
    pub(super) source: Arc<Origin>,
    pub(super) current: watch::Sender<Status>,
    /// When a caller found no connection, in milliseconds of the source's clock.
    asked: AtomicU64,
    /// The longest that a caller waits, in milliseconds.
    longest: AtomicU64,
    /// How long a call takes at best, in microseconds.
    round_trip: AtomicU64,
}

/// The connection, and the work on another one.
pub(super) struct Status {
    /// The last one that was made. It stays when it is lost, as it may only have been late.
    pub(super) connection: Option<Box<dyn Handle>>,
    pub(super) shards: Shards,
    /// How many were made.
    pub(super) made: u64,
    pub(super) at: Instant,
    /// Whether the one before led to a replica.
    pub(super) after_replica: bool,
    /// Why the last attempt failed, or why the connection is to be left.
    pub(super) error: Option<RedisError>,
    pub(super) attempts: usize,
    /// Connections that were lost one after the other before they answered a call.
    pub(super) in_vain: u32,
    /// Whether a task makes connections, or waits for the one that there is.
    pub(super) at_work: bool,
}

impl Status {
    /// Whether no other connection is needed.
    pub(super) fn is_whole(&self) -> bool {
        self.connection.is_some() && self.shards.are_well()
    }
}

impl Upkeep {
    pub(super) fn new(source: &Arc<Origin>) -> Self {
        let now = source.now();
        let shards = Shards::one();
        let connection = source.given.as_ref().map(|connection| connection.boxed());
        match connection {
            Some(_) => shards.begin(now),
            None => shards.of(None).lose(now),
        }
        let current = Status {
            connection,
            shards,
            made: 0,
            at: Instant::now(),
            after_replica: false,
            error: None,
            attempts: 0,
            in_vain: 0,
            at_work: false,
        };
        Self {
            source: Arc::clone(source),
            current: watch::Sender::new(current),
            asked: AtomicU64::new(0),
            longest: AtomicU64::new(0),
            round_trip: AtomicU64::new(0),
        }
    }

    /// A caller finds no connection.
    pub(super) fn ask(&self, now: u64) {
        self.asked.store(now, Ordering::Relaxed);
    }

    /// Whether no caller waits longer.
    pub(super) fn is_longest(&self, patience: u64) -> bool {
        self.longest.fetch_max(patience, Ordering::Relaxed) <= patience
    }

    /// When that was last.
    pub(super) fn asked(&self) -> Instant {
        self.source.instant(self.asked.load(Ordering::Relaxed))
    }

    pub(super) fn grace(&self) -> Duration {
        let round_trip = Duration::from_micros(self.round_trip.load(Ordering::Relaxed));
        (2 * round_trip).clamp(LEAST_GRACE, MOST_GRACE)
    }

    pub(super) fn took(&self, time: Duration) {
        let time = (time.as_micros() as u64).max(1);
        let known = self.round_trip.load(Ordering::Relaxed);
        // The least, of late.
        let next = if known == 0 || time < known { time } else { known + (time - known) / 256 };
        if next != known {
            self.round_trip.store(next, Ordering::Relaxed);
        }
    }

    /// It has answered. Why others could not be made says nothing of it.
    pub(super) fn well(&self, health: &Health) {
        health.recover(self.source.now());
        self.source.hear(self.source.now());
        self.source.breaker.connected(health.node);
        self.current.send_modify(|current| current.error = None);
    }

    /// Slots have moved, perhaps.
    pub(super) fn found(&self, ranges: Ranges) {
        self.current.send_modify(|current| {
            let shards = current.shards.after_moves(ranges, self.source.now());
            // No call goes to a node that has left.
            current.shards.left_by(&shards).for_each(|node| self.source.breaker.connected(node));
            current.shards = shards;
        });
    }

    /// The shard that has a key by now.
    pub(super) fn shard(&self, key: Option<&[u8]>) -> Arc<Health> {
        Arc::clone(self.current.borrow().shards.of(key))
    }

    /// A shard is not the one that was missed.
    pub(super) fn acquit(&self, health: &Health) {
        health.acquit();
        self.source.breaker.connected(health.node);
        self.current.send_modify(|_| {});
    }

    /// Its check brought no answer: callers get the reason why there is no other one.
    pub(super) fn ill(&self, health: &Health) {
        health.checked_until(0);
        self.current.send_modify(|_| {});
    }

    /// Begins the work on a connection, for one task at a time. It ends when the guard is dropped.
    pub(super) fn begin_work(self: &Arc<Self>) -> Option<AtEnd<impl Fn() + Send + use<>>> {
        let begins = self.current.send_if_modified(|current| !replace(&mut current.at_work, true));
        let this = Arc::downgrade(self);
        let end = |current: &mut Status| (current.at_work, current.attempts) = (false, 0);
        begins.then(|| {
            AtEnd(move || this.upgrade().into_iter().for_each(|this| this.current.send_modify(end)))
        })
    }
}
