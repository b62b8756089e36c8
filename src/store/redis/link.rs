//! A store's connection, which is tested before it is used: [`Link`].
//!
//! The client library has a connection manager for a single server, but none for Sentinel, none
//! that leaves a server that fell silent or became a replica, and none that notices a connection
//! that the network dropped. A link does this for all kinds of servers: only the closure that
//! connects differs.
//!
//! Each runtime has its own link, as another runtime may end or stand still. Without calls, no task
//! runs. A call that finds the connection idle or lost starts a task, and all calls wait for it.

use std::future::{Future, poll_fn};
use std::mem::replace;
use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, RedisError, RedisFuture, RedisResult, Value};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::connect::settings::{NEVER, silence};
use crate::store::remote::Breaker;

mod check;
mod handle;
mod renewal;
mod servers;
mod shards;
mod upkeep;

use check::Check;
#[cfg(feature = "redis-cluster")]
pub(super) use handle::Connected;
use handle::{Handle, needs_replacement};
pub(super) use handle::{Origin, is_from_replica};
use renewal::renew;
pub(super) use servers::Servers;
use shards::Health;
#[cfg(feature = "redis-cluster")]
pub(super) use shards::{Answering, Ranges, Shards, Slots};
use upkeep::{PAUSE, Status, Upkeep};

/// A connection without answers for this long is tested before it is used.
const IDLE: Duration = Duration::from_secs(1);

/// The connection of a store in a runtime; clones share it.
#[derive(Clone)]
pub(super) struct Link {
    upkeep: Arc<Upkeep>,
    /// A key of the shard to call, in a cluster.
    key: Option<Arc<[u8]>>,
}

impl Link {
    /// Creates the link of the current runtime, which begins to connect.
    pub(super) fn new(source: &Arc<Origin>) -> Self {
        let upkeep = Arc::new(Upkeep::new(source));
        renew(&upkeep);
        Self { upkeep, key: None }
    }

    /// Waits until all clones of the link are dropped.
    pub(super) fn wait_for_end(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut changes = self.upkeep.current.subscribe();
        async move { while changes.changed().await.is_ok() {} }
    }

    /// Returns the same link, for calls to the shard of a key.
    pub(super) fn for_key(&self, key: &[u8]) -> Self {
        Self {
            upkeep: Arc::clone(&self.upkeep),
            key: self.upkeep.source.sharded.then(|| key.into()),
        }
    }

    /// Returns the breaker, which counts failed calls.
    pub(super) fn breaker(&self) -> &Arc<Breaker> {
        &self.upkeep.source.breaker
    }

    /// Returns the number of the shard that has the key: a hash of its server's address.
    pub(super) fn fault_domain(&self) -> u64 {
        self.upkeep.shard_of(self.key.as_deref()).node
    }

    /// Returns a connection that is known to be alive. If it was lost, waits for one until
    /// `patience` after the loss; later, fails at once, while a task connects.
    pub(super) async fn get_connection(&self, patience: Duration) -> RedisResult<Connection> {
        let patience = patience.min(NEVER).as_millis() as u64;
        let mut changes = None;
        loop {
            match (self.try_get(patience)?, &mut changes) {
                (Ok(connection), _) => return Ok(connection),
                (Err(until), Some(changes)) => {
                    let changes: &mut watch::Receiver<Status> = changes;
                    let _ = timeout_at(until, changes.changed()).await;
                }
                // Look once more with the subscription, so that no change is missed.
                (Err(_), none) => *none = Some(self.upkeep.current.subscribe()),
            }
        }
    }

    /// Returns a connection, or until when to wait for a change.
    fn try_get(&self, patience: u64) -> RedisResult<Result<Connection, Instant>> {
        let upkeep = &self.upkeep;
        let now = upkeep.source.now();
        let current = upkeep.current.borrow();
        let health = Arc::clone(current.shards.shard_of(self.key.as_deref()));
        // An answer is overdue, and perhaps no caller waited for it.
        let silent = health.answer_due().is_some_and(|until| until <= now);
        if let Some(connection) = current.connection.as_ref().filter(|_| health.is_well()) {
            let idle = now.saturating_sub(health.answered_at()) >= IDLE.as_millis() as u64;
            if !idle && !silent {
                let Status { made, after_replica, made_at: since, .. } = *current;
                let connection = connection.boxed();
                let link = self.clone();
                return Ok(Ok(Connection {
                    connection,
                    link,
                    made,
                    health,
                    after_replica: after_replica && since.elapsed() < IDLE,
                    at: now,
                    patience,
                    unsent: false,
                }));
            }
            let check = Check::new(upkeep, self.key.clone(), &current, None);
            drop(current);
            if health.mark_suspect(now, check.ends_at) {
                tokio::spawn(check.run());
            }
            return Ok(Err(upkeep.source.instant(now) + PAUSE));
        }
        upkeep.note_asked(now);
        upkeep.note_patience(patience);
        // If a probe is needed, it reads a key that is really used.
        health.set_probe_key(self.key.as_ref());
        let checked = now < health.check_ends();
        if !checked && !current.at_work {
            // No caller asked for a while, so this one waits with all its patience.
            health.mark_lost(now);
            let connects_itself = current.connection.is_some() && upkeep.source.connect.is_none();
            drop(current);
            match connects_itself {
                true => self.start_check(&health, None),
                false => renew(upkeep),
            }
            return Ok(Err(upkeep.source.instant(now) + PAUSE));
        }
        if checked {
            return Ok(Err(upkeep.source.instant(health.check_ends())));
        }
        let until = health.lost_since().saturating_add(patience);
        let failed = current.attempts == 0 && current.error.is_some();
        if !failed && now < until {
            return Ok(Err(upkeep.source.instant(until)));
        }
        if failed || upkeep.is_longest_patience(patience) {
            upkeep.source.cut_off(health.node, health.lost_since());
        }
        Err(current.error.clone().unwrap_or_else(silence))
    }

    /// Notes the outcome of a call: an answer, an error, or `None` if no answer came.
    pub(super) fn report_outcome<T>(
        &self,
        over: &Connection,
        outcome: Option<Result<&T, &RedisError>>,
    ) {
        let Connection { made, at, .. } = *over;
        let (now, health) = (self.upkeep.source.now(), &self.current_health(over));
        match outcome {
            // A closed connection can be replaced at once.
            Some(Err(error)) if error.is_io_error() => self.mark_silent(made, health, now),
            // A server that refuses calls can't: callers get the error.
            Some(Err(error)) if needs_replacement(error) => {
                if is_from_replica(error) {
                    health.note_replica();
                }
                if self.mark_lost(made, health, 0) {
                    let error = Some(error.clone());
                    self.upkeep.current.send_modify(|current| current.error = error);
                }
            }
            Some(answer) => health.note_answer(now, answer.is_ok()),
            // No call was answered since this one was sent: more than this one is late.
            None if health.answered_at() <= at => self.mark_silent(made, health, at),
            // Another shard may have answered since, if slots have moved.
            None if self.upkeep.source.sharded && health.check_ends() <= now => {
                self.start_check(health, Some(at));
            }
            None => {}
        }
    }

    /// Returns the health of the shard that has the key now: slots may have moved.
    fn current_health(&self, over: &Connection) -> Arc<Health> {
        let current = self.upkeep.current.borrow();
        let moves = self.upkeep.source.sharded && current.made == over.made;
        Arc::clone(if moves { current.shards.shard_of(self.key.as_deref()) } else { &over.health })
    }

    /// Starts a task that tests a shard. `sent`: when a call was sent that has failed, if one has.
    fn start_check(&self, health: &Health, sent: Option<u64>) {
        let key = self.key.clone();
        let check = Check::new(&self.upkeep, key, &self.upkeep.current.borrow(), sent);
        health.set_check_end(check.ends_at);
        tokio::spawn(check.run());
    }

    /// Marks a shard as lost `since` then, and connects again. Calls wait for that until their
    /// patience, counted from `since`, has ended. Returns `false` if the shard was lost already, or
    /// the connection replaced.
    fn mark_lost(&self, made: u64, health: &Health, since: u64) -> bool {
        if self.upkeep.current.borrow().made != made {
            return false;
        }
        health.set_probe_key(self.key.as_ref());
        let first = health.mark_lost_once(since);
        if first {
            renew(&self.upkeep);
        }
        first
    }

    /// Marks a shard as lost whose connection is closed or silent. Tests it: it may answer again.
    fn mark_silent(&self, made: u64, health: &Health, since: u64) {
        if self.mark_lost(made, health, since) {
            self.start_check(health, Some(since));
        }
    }
}

/// The connection of one call.
pub(super) struct Connection {
    connection: Box<dyn Handle>,
    link: Link,
    made: u64,
    health: Arc<Health>,
    /// The connection before led to a replica: if this one does, the next one may, too.
    after_replica: bool,
    at: u64,
    /// The longest that its callers wait, in milliseconds.
    patience: u64,
    /// `true` if the last command was not sent.
    unsent: bool,
}

impl Connection {
    /// Returns when the connection was handed out.
    pub(super) fn handed_out_at(&self) -> Instant {
        self.link.upkeep.source.instant(self.at)
    }

    pub(super) async fn send(&mut self, cmd: &Cmd) -> RedisResult<Value> {
        let (upkeep, health) = (&*self.link.upkeep, &*self.health);
        let start = Instant::now();
        health.note_sent(upkeep.source.now() + self.patience);
        let (answer, unsent) = noting_unsent(self.connection.req_packed_command(cmd)).await;
        if answer.is_ok() {
            upkeep.note_round_trip(start.elapsed());
            let now = upkeep.source.now();
            health.note_answer(now, false);
            upkeep.source.note_answer(now);
        }
        self.unsent = unsent;
        answer
    }

    /// Returns the connection for calls that don't count for the shard's health.
    pub(super) fn handle(&mut self) -> &mut dyn Handle {
        &mut *self.connection
    }

    /// Returns whether the last command was not sent because the connection had ended, and another
    /// connection can be made.
    pub(super) fn is_unsent(&self) -> bool {
        self.unsent && self.link.upkeep.source.connect.is_some()
    }

    /// Returns whether another connection may lead to the master if this one leads to a replica.
    pub(super) fn is_replaceable(&self) -> bool {
        self.link.upkeep.source.connect.is_some() && !self.after_replica
    }

    /// Drops the connection, and has another one made.
    pub(super) fn replace(self) {
        let Self { link, made, health, unsent, .. } = self;
        let now = link.upkeep.source.now();
        if unsent {
            link.mark_silent(made, &health, now);
        } else {
            // Another server may be the master now.
            health.note_replica();
            link.mark_lost(made, &health, now);
        }
    }
}

fn means_ended(error: &RedisError) -> bool {
    needs_replacement(error) && !is_from_replica(error)
}

/// Awaits an answer, and returns with it whether the command was not sent: a connection that has
/// ended fails at the first poll. A later error proves nothing.
async fn noting_unsent(mut answer: RedisFuture<'_, Value>) -> (RedisResult<Value>, bool) {
    let mut is_first = true;
    poll_fn(|cx| {
        let first = replace(&mut is_first, false);
        answer.as_mut().poll(cx).map(|answer| {
            let unsent = first && answer.as_ref().is_err_and(means_ended);
            (answer, unsent)
        })
    })
    .await
}
