//! A store's connection and its state, and the work on another one: [`Upkeep`].

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
/// within these bounds. A freeze makes the measured round trip long.
const LEAST_GRACE: Duration = Duration::from_millis(20);
const MOST_GRACE: Duration = Duration::from_secs(1);
/// How long an attempt to connect may take. Others begin meanwhile.
pub(super) const ATTEMPT: Duration = Duration::from_secs(5);
/// The time between the beginnings of two attempts, while few are in flight.
pub(super) const PAUSE: Duration = Duration::from_millis(250);
/// A check is given up this long after it should have ended.
pub(super) const LATE: Duration = Duration::from_millis(100);

pub(super) struct Upkeep {
    pub(super) source: Arc<Origin>,
    pub(super) current: watch::Sender<Status>,
    /// When a caller last found no connection, in milliseconds of the source's clock.
    asked_at: AtomicU64,
    /// The longest patience of a caller that found no connection, in milliseconds.
    longest_patience: AtomicU64,
    /// How long a call takes at best, in microseconds.
    round_trip: AtomicU64,
}

/// The connection, and the work on another one.
pub(super) struct Status {
    /// The connection that was made last. A lost one stays, as it may only be late.
    pub(super) connection: Option<Box<dyn Handle>>,
    pub(super) shards: Shards,
    /// How many connections were made.
    pub(super) made: u64,
    pub(super) made_at: Instant,
    /// `true` if the connection before led to a replica.
    pub(super) after_replica: bool,
    /// Why the last attempt failed, or why the connection has to be replaced.
    pub(super) error: Option<RedisError>,
    /// How many attempts are in flight.
    pub(super) attempts: usize,
    /// Consecutive connections that were lost before they answered a call.
    pub(super) in_vain: u32,
    /// `true` if a task makes connections, or waits for the current one.
    pub(super) at_work: bool,
    /// `true` if slots have moved since the connection was made. Over such a connection of the
    /// client library, calls to all nodes may wait for a silent one.
    pub(super) is_stale: bool,
}

impl Status {
    /// Returns whether no other connection is needed.
    pub(super) fn is_whole(&self) -> bool {
        self.connection.is_some() && self.shards.are_well() && !self.is_stale
    }
}

impl Upkeep {
    pub(super) fn new(source: &Arc<Origin>) -> Self {
        let now = source.now();
        let shards = Shards::single();
        let connection = source.given.as_ref().map(|connection| connection.boxed());
        match connection {
            Some(_) => shards.mark_reachable(now),
            None => shards.shard_of(None).mark_lost(now),
        }
        let current = Status {
            connection,
            shards,
            made: 0,
            made_at: Instant::now(),
            after_replica: false,
            error: None,
            attempts: 0,
            in_vain: 0,
            at_work: false,
            is_stale: false,
        };
        Self {
            source: Arc::clone(source),
            current: watch::Sender::new(current),
            asked_at: AtomicU64::new(0),
            longest_patience: AtomicU64::new(0),
            round_trip: AtomicU64::new(0),
        }
    }

    /// Notes that a caller finds no connection.
    pub(super) fn note_asked(&self, now: u64) {
        self.asked_at.store(now, Ordering::Relaxed);
    }

    /// Notes that a caller waits for a connection until its patience has ended.
    pub(super) fn note_patience(&self, patience: u64) {
        self.longest_patience.fetch_max(patience, Ordering::Relaxed);
    }

    /// Returns whether no caller had more patience so far.
    pub(super) fn is_longest_patience(&self, patience: u64) -> bool {
        self.longest_patience.load(Ordering::Relaxed) <= patience
    }

    /// Returns when a caller last found no connection.
    pub(super) fn asked_at(&self) -> Instant {
        self.source.instant(self.asked_at.load(Ordering::Relaxed))
    }

    pub(super) fn grace(&self) -> Duration {
        let round_trip = Duration::from_micros(self.round_trip.load(Ordering::Relaxed));
        (2 * round_trip).clamp(LEAST_GRACE, MOST_GRACE)
    }

    pub(super) fn note_round_trip(&self, time: Duration) {
        let time = (time.as_micros() as u64).max(1);
        let known = self.round_trip.load(Ordering::Relaxed);
        // Keeps the least of late: longer ones raise it slowly.
        let next = if known == 0 || time < known { time } else { known + (time - known) / 256 };
        if next != known {
            self.round_trip.store(next, Ordering::Relaxed);
        }
    }

    /// Notes that a shard has answered. The error of attempts at another connection says nothing
    /// about this one.
    pub(super) fn note_well(&self, health: &Health) {
        health.mark_well(self.source.now());
        self.source.note_answer(self.source.now());
        self.source.breaker.note_connected(health.node);
        self.current.send_modify(|current| current.error = None);
    }

    /// Updates which node has which slots.
    pub(super) fn set_slots(&self, ranges: Ranges) {
        self.current.send_modify(|current| {
            let shards = current.shards.with_slots(ranges, self.source.now());
            // No call goes to a node that has left.
            let left = current.shards.nodes_missing_in(&shards);
            left.for_each(|node| self.source.breaker.note_connected(node));
            current.is_stale |= shards.ranges() != current.shards.ranges();
            current.shards = shards;
        });
    }

    /// Returns the shard that has a key now.
    pub(super) fn shard_of(&self, key: Option<&[u8]>) -> Arc<Health> {
        Arc::clone(self.current.borrow().shards.shard_of(key))
    }

    /// Ends the loss of a shard, as another one was lost.
    pub(super) fn clear_loss(&self, health: &Health) {
        health.clear_loss();
        self.source.breaker.note_connected(health.node);
        self.current.send_modify(|_| {});
    }

    /// Notes that a check got no answer. Callers no longer wait for it, and get the error of the
    /// attempts at another connection.
    pub(super) fn note_failed_check(&self, health: &Health) {
        health.set_check_end(0);
        self.current.send_modify(|_| {});
    }

    /// Begins the work on a connection, unless a task is at work. The work ends when the guard is
    /// dropped.
    pub(super) fn begin_work(self: &Arc<Self>) -> Option<AtEnd<impl Fn() + Send + use<>>> {
        let begins = self.current.send_if_modified(|current| !replace(&mut current.at_work, true));
        let this = Arc::downgrade(self);
        let end = |current: &mut Status| (current.at_work, current.attempts) = (false, 0);
        begins.then(|| {
            AtEnd(move || this.upgrade().into_iter().for_each(|this| this.current.send_modify(end)))
        })
    }
}
