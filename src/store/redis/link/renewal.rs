//! Makes connections, one after the other and concurrently, until one is good or no caller asks any
//! more.

use std::mem::replace;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use redis::{ErrorKind, RedisError, RedisResult};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::super::connect::settings::silence;
use super::handle::{Connected, probe_for, unless_ended};
use super::upkeep::{ATTEMPT, PAUSE, Status, Upkeep};
use crate::observe;

/// Attempts that may be in flight before the pauses between them grow.
const FEW: u32 = 4;
/// Consecutive lost connections before the pause between them is the longest. It doubles with each.
const IN_VAIN: u32 = 5;
/// Attempts go on for this long after the last caller has asked.
const WANTED: Duration = Duration::from_secs(1);

/// Makes connections until one is good, unless a task does so already.
pub(super) fn renew(upkeep: &Arc<Upkeep>) {
    if upkeep.source.connect.is_none() {
        return;
    }
    upkeep.note_asked(upkeep.source.now());
    if let Some(work) = upkeep.begin_work() {
        upkeep.current.send_modify(|current| current.error = None);
        let (of, changes) = (Arc::downgrade(upkeep), upkeep.current.subscribe());
        let start = upkeep.first_attempt_at();
        tokio::spawn(async move {
            make_connections(of, start, changes).await;
            drop(work);
        });
    }
}

/// Makes connections from `start` on, until one is good or the store is dropped.
async fn make_connections(of: Weak<Upkeep>, start: Instant, mut changes: watch::Receiver<Status>) {
    if unless_ended(sleep_until(start), wait_until_whole(&mut changes)).await.is_none() {
        return;
    }
    let mut attempts = JoinSet::new();
    let mut failed_once = false;
    while let Some(due) = of.upgrade().and_then(|upkeep| upkeep.begin_attempt(&mut attempts)) {
        loop {
            let next = async {
                match attempts.join_next().await {
                    Some(attempt) => attempt.unwrap_or_else(|_| {
                        Err((ErrorKind::Client, "connecting has panicked").into())
                    }),
                    None => std::future::pending().await,
                }
            };
            let ended = unless_ended(timeout_at(due, next), wait_until_whole(&mut changes)).await;
            match (ended, of.upgrade()) {
                // There is a good connection, or no store any more.
                (None, _) | (_, None) => return,
                (Some(Err(_)), _) => break,
                (Some(Ok(Ok(made))), Some(upkeep)) => return upkeep.install_connection(made),
                // The first may have been closed together with the connection before.
                (Some(Ok(Err(_))), _) if !replace(&mut failed_once, true) => break,
                (Some(Ok(Err(error))), Some(upkeep)) => {
                    upkeep.note_failed_attempt(error, attempts.len())
                }
            }
        }
    }
}

impl Upkeep {
    /// Returns when to connect. While new connections are no better than the one before (they lead
    /// to a replica, or are closed at once), there are pauses between them.
    fn first_attempt_at(&self) -> Instant {
        let current = self.current.borrow();
        let in_vain = match current.shards.led_to_replica() {
            // A replica answers calls that write nothing: answers prove nothing here.
            true => IN_VAIN * u32::from(current.after_replica),
            false if current.made == 0 || current.shards.is_proved() => 0,
            false => (current.in_vain + 1).min(IN_VAIN),
        };
        match in_vain {
            0 => Instant::now(),
            many => current.made_at + PAUSE / (1 << (IN_VAIN - many)),
        }
    }

    /// Begins another attempt if callers still ask. Returns when the next one is due, or `None` if
    /// no caller asks and no attempt is in flight.
    fn begin_attempt(
        self: Arc<Self>,
        attempts: &mut JoinSet<RedisResult<Connected>>,
    ) -> Option<Instant> {
        if self.asked_at().elapsed() < WANTED {
            let of = Arc::downgrade(&self);
            attempts.spawn(async move {
                let attempt = timeout(ATTEMPT, connect_and_probe(of)).await;
                attempt.unwrap_or_else(|_| Err(silence()))
            });
        } else if attempts.is_empty() {
            return None;
        }
        let many = (attempts.len() as u32).div_ceil(FEW).max(1);
        self.current.send_if_modified(|current| {
            current.attempts = attempts.len();
            false
        });
        Some(Instant::now() + PAUSE * many)
    }

    fn install_connection(&self, (connection, shards): Connected) {
        observe::store_connected();
        let made_at = Instant::now();
        self.current.send_modify(|current| {
            // Which node lost calls over a stale connection is not known.
            if current.connection.is_some() && !current.is_stale {
                shards.inherit_losses(&current.shards);
            }
            // A connection in between that proved nothing changes nothing.
            current.after_replica = current.shards.led_to_replica()
                || current.after_replica && !current.shards.is_proved();
            let in_vain = current.made > 0 && !current.shards.is_proved();
            current.in_vain = if in_vain { current.in_vain + 1 } else { 0 };
            shards.well_nodes().for_each(|node| self.source.breaker.note_connected(node));
            (current.connection, current.shards) = (Some(connection), shards);
            current.is_stale = false;
            current.made += 1;
            current.made_at = made_at;
            current.error = None;
        });
    }

    fn note_failed_attempt(&self, error: RedisError, left: usize) {
        self.current.send_modify(|current| {
            current.attempts = left;
            current.error = Some(error).filter(|_| !current.is_whole());
        });
    }
}

/// Waits until no connection is needed any more.
async fn wait_until_whole(changes: &mut watch::Receiver<Status>) {
    let _ = changes.wait_for(Status::is_whole).await;
}

/// Connects. Fails if shards of a cluster are lost, and none of them answers.
async fn connect_and_probe(upkeep: Weak<Upkeep>) -> RedisResult<Connected> {
    let start = Instant::now();
    let gone = || RedisError::from((ErrorKind::Io, "the store is gone"));
    let connect = |upkeep: Arc<Upkeep>| {
        let asks = !upkeep.source.permitted.load(Ordering::Relaxed);
        // The app's closure may panic before it returns a future.
        Some(upkeep.source.connect.as_ref()?(asks))
    };
    let connecting = upkeep.upgrade().and_then(connect).ok_or_else(gone)?;
    let (mut connection, shards) = connecting.await?;
    let (grace, lost) = {
        let upkeep = upkeep.upgrade().ok_or_else(gone)?;
        upkeep.source.permitted.store(true, Ordering::Relaxed);
        shards.mark_reachable(upkeep.source.now());
        let current = upkeep.current.borrow();
        let first = current.connection.is_none();
        let lost = if first { Vec::new() } else { current.shards.lost_keys() };
        (upkeep.grace().max(start.elapsed()), lost)
    };
    let mut found = lost.is_empty();
    if !found {
        // Slots may have moved from the lost shards to others.
        let upkeep = upkeep.upgrade().ok_or_else(gone)?;
        upkeep.set_slots(shards.ranges().clone());
        // Then other shards need this connection, even if the lost ones are silent.
        if upkeep.current.borrow().is_stale {
            return Ok((connection, shards));
        }
    }
    for key in lost {
        let probe = probe_for(Some(&key));
        let answer = timeout(grace, connection.req_packed_command(&probe)).await;
        if answer.is_ok_and(|answer| answer.is_ok_and(|value| value.extract_error().is_ok())) {
            found = true;
            shards.mark_proved(&key);
        }
    }
    if !found {
        return Err(silence());
    }
    Ok((connection, shards))
}
