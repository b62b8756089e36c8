//! Makes connections, one after the other and beside each other, until one is good or no
//! caller asks any more.

use std::mem::replace;
use std::sync::{Arc, Weak};
use std::time::Duration;

use redis::{ErrorKind, RedisError, RedisResult};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::handle::{Connected, first, probe};
use super::shards::Shards;
use super::upkeep::{ATTEMPT, PAUSE, Status, Upkeep, Work};
use crate::observe;

/// Attempts that may be in flight before the pauses between them grow.
const FEW: u32 = 4;
/// Connections that are lost one after the other before the pause between them is the longest. It
/// doubles with each.
const IN_VAIN: u32 = 5;
/// Attempts go on for so long after the last caller has asked.
const WANTED: Duration = Duration::from_secs(1);

/// Makes connections until one is good, unless a task does so already.
pub(super) fn renew(upkeep: &Arc<Upkeep>) {
    if upkeep.source.connect.is_none() {
        return;
    }
    upkeep.ask(upkeep.now());
    if let Some(work) = Work::begin(upkeep) {
        upkeep.current.send_modify(|current| current.error = None);
        tokio::spawn(work.renew(upkeep.current.subscribe()));
    }
}

impl Work {
    async fn renew(self, mut changes: watch::Receiver<Status>) {
        let Some(pause) = self.pause() else { return };
        if first(sleep_until(pause), is_over(&mut changes)).await.is_none() {
            return;
        }
        let mut attempts = JoinSet::new();
        let mut failed_once = false;
        while let Some(due) = self.attempt(&mut attempts) {
            loop {
                let next = async {
                    match attempts.join_next().await {
                        Some(attempt) => attempt.ok(),
                        None => std::future::pending().await,
                    }
                };
                let ended = first(timeout_at(due, next), is_over(&mut changes)).await;
                let left = attempts.len();
                match ended {
                    // There is a good one, or no store any more.
                    None => return,
                    Some(Err(_)) => break,
                    Some(Ok(Some(Ok((connected, shards))))) => {
                        return self.install(connected, shards);
                    }
                    // It may have been closed together with the one before.
                    Some(Ok(Some(Err(_)))) if !replace(&mut failed_once, true) => break,
                    Some(Ok(Some(Err(error)))) => self.failed(error, left),
                    Some(Ok(None)) => {
                        let error = (ErrorKind::Client, "connecting has panicked").into();
                        self.failed(error, left);
                    }
                }
            }
        }
    }

    /// Where a new connection is no better than the one before (its address leads to a replica, or
    /// it is closed at once, too), they are not made as fast as they fail.
    fn pause(&self) -> Option<Instant> {
        let upkeep = self.upkeep()?;
        let pause = {
            let current = upkeep.current.borrow();
            let in_vain = match current.shards.led_to_replica() {
                // Which answers what it need not write.
                true => IN_VAIN * u32::from(current.after_replica),
                false if current.made == 0 || current.shards.is_proved() => 0,
                false => (current.in_vain + 1).min(IN_VAIN),
            };
            match in_vain {
                0 => Instant::now(),
                many => current.at + PAUSE / (1 << (IN_VAIN - many)),
            }
        };
        Some(pause)
    }

    /// Begins another attempt if callers still ask. When the next one is due; `None`: never.
    fn attempt(&self, attempts: &mut JoinSet<RedisResult<(Connected, Shards)>>) -> Option<Instant> {
        let upkeep = self.upkeep()?;
        if upkeep.asked().elapsed() < WANTED {
            let of = Arc::downgrade(&upkeep);
            attempts.spawn(async move {
                let late = || Err((ErrorKind::Io, "the server does not answer").into());
                timeout(ATTEMPT, find(of)).await.unwrap_or_else(|_| late())
            });
        } else if attempts.is_empty() {
            return None;
        }
        let many = (attempts.len() as u32).div_ceil(FEW).max(1);
        upkeep.current.send_if_modified(|current| {
            current.attempts = attempts.len();
            false
        });
        Some(Instant::now() + PAUSE * many)
    }

    fn install(&self, Connected { connection, slots, .. }: Connected, shards: Shards) {
        let Some(upkeep) = self.upkeep() else { return };
        observe::store_connected();
        let at = Instant::now();
        upkeep.current.send_modify(|current| {
            if current.connection.is_some() {
                shards.inherit(&current.shards);
            }
            // One that proved nothing in between changes nothing.
            current.after_replica = current.shards.led_to_replica()
                || current.after_replica && !current.shards.is_proved();
            let in_vain = current.made > 0 && !current.shards.is_proved();
            current.in_vain = if in_vain { current.in_vain + 1 } else { 0 };
            (current.connection, current.slots) = (Some(connection), slots);
            shards.well().for_each(|node| upkeep.source.breaker.connected(node));
            current.shards = Arc::new(shards);
            current.made += 1;
            current.at = at;
            current.error = None;
        });
    }

    fn failed(&self, error: RedisError, left: usize) {
        let Some(upkeep) = self.upkeep() else { return };
        upkeep.current.send_modify(|current| {
            current.attempts = left;
            current.error = Some(error).filter(|_| !current.is_whole());
        });
    }
}

/// Ends when no connection is needed any more.
async fn is_over(changes: &mut watch::Receiver<Status>) {
    let _ = changes.wait_for(Status::is_whole).await;
}

/// Connects. A connection to a cluster is good if it leads to a shard that is missed.
async fn find(upkeep: Weak<Upkeep>) -> RedisResult<(Connected, Shards)> {
    let start = Instant::now();
    let gone = || RedisError::from((ErrorKind::Io, "the store is gone"));
    // The app's closure may panic before it returns a future.
    let connect = |upkeep: Arc<Upkeep>| Some(upkeep.source.connect.as_ref()?());
    let connecting = upkeep.upgrade().and_then(connect).ok_or_else(gone)?;
    let mut connected = connecting.await?;
    let took = start.elapsed();
    let source = upkeep.upgrade().map(|upkeep| Arc::clone(&upkeep.source)).ok_or_else(gone)?;
    source.permit(&mut connected.permitted).await?;
    let (now, grace, missed) = {
        let upkeep = upkeep.upgrade().ok_or_else(gone)?;
        let current = upkeep.current.borrow();
        let first = current.connection.is_none();
        let missed = if first { Vec::new() } else { current.shards.missed() };
        (upkeep.now(), upkeep.grace().max(took), missed)
    };
    let shards = Shards::new(std::mem::take(&mut connected.ranges), now);
    let mut found = missed.is_empty();
    for key in missed {
        let probe = probe(Some(&key));
        let answer = timeout(grace, connected.connection.req_packed_command(&probe)).await;
        if answer.is_ok_and(|answer| answer.is_ok_and(|value| value.extract_error().is_ok())) {
            found = true;
            shards.found(&key);
        }
    }
    if !found {
        return Err((ErrorKind::Io, "the shard does not answer").into());
    }
    Ok((connected, shards))
}
