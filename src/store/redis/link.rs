//! A connection that is known to be alive.
//!
//! The client library has a manager for the single server, but none for Sentinel, none that leaves
//! a server that has fallen silent or become a replica, and none that notices what a network has
//! forgotten. This is one for all: what differs is the closure that connects.
//!
//! Each runtime has its own, so that none depends on another one's, which may end or stand still.
//! Nothing runs while there are no calls. A call that finds the connection idle or lost starts a
//! task, and all calls wait for that.

use std::future::{Future, poll_fn};
use std::mem::replace;
use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, ErrorKind, RedisError, RedisFuture, RedisResult, Value};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::connect::settings::NEVER;
use crate::store::remote::Breaker;

mod check;
mod handle;
mod renewal;
mod shards;
mod upkeep;

use check::Check;
#[cfg(feature = "redis-cluster")]
pub(super) use handle::Connected;
use handle::{Handle, leads_nowhere};
pub(super) use handle::{Origin, is_of_replica};
use renewal::renew;
use shards::Health;
#[cfg(feature = "redis-cluster")]
pub(super) use shards::{Ranges, Shards, Slots};
use upkeep::{PAUSE, Status, Upkeep};

/// A connection that was silent for so long is tried before it is used.
const IDLE: Duration = Duration::from_secs(1);

/// The connection of a store in a runtime; clones share it.
#[derive(Clone)]
pub(super) struct Link {
    upkeep: Arc<Upkeep>,
    /// A key of the shard that is to be asked, where there are shards.
    key: Option<Arc<[u8]>>,
}

impl Link {
    /// Of the current runtime.
    pub(super) fn new(source: &Arc<Origin>) -> Self {
        let upkeep = Arc::new(Upkeep::new(source));
        renew(&upkeep);
        Self { upkeep, key: None }
    }

    /// Ends with the link.
    pub(super) fn end(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut changes = self.upkeep.current.subscribe();
        async move { while changes.changed().await.is_ok() {} }
    }

    /// The same link, for calls to the shard of a key.
    pub(super) fn of(&self, key: &[u8]) -> Self {
        Self {
            upkeep: Arc::clone(&self.upkeep),
            key: self.upkeep.source.sharded.then(|| key.into()),
        }
    }

    /// Hears of calls that fail.
    pub(super) fn breaker(&self) -> &Arc<Breaker> {
        &self.upkeep.source.breaker
    }

    pub(super) fn is_sharded(&self) -> bool {
        self.upkeep.source.sharded
    }

    /// What fails together with the key: its shard, by the address of its server.
    pub(super) fn domain(&self) -> u64 {
        self.upkeep.shard(self.key.as_deref()).node
    }

    /// The connection, which is known to be alive. Waits for it until it was missed for `patience`;
    /// later it fails at once, while others are made.
    pub(super) async fn get(&self, patience: Duration) -> RedisResult<Connection> {
        let patience = patience.min(NEVER).as_millis() as u64;
        let mut changes = None;
        loop {
            match (self.look(patience)?, &mut changes) {
                (Ok(connection), _) => return Ok(connection),
                (Err(until), Some(changes)) => {
                    let changes: &mut watch::Receiver<Status> = changes;
                    let _ = timeout_at(until, changes.changed()).await;
                }
                // What changes from here on is not missed.
                (Err(_), none) => *none = Some(self.upkeep.current.subscribe()),
            }
        }
    }

    /// What there is for a call, or until when to wait, unless something changes.
    fn look(&self, patience: u64) -> RedisResult<Result<Connection, Instant>> {
        let upkeep = &self.upkeep;
        let now = upkeep.source.now();
        let current = upkeep.current.borrow();
        let health = Arc::clone(current.shards.of(self.key.as_deref()));
        // Perhaps no caller waited for an answer that did not come.
        let silent = health.unanswered().is_some_and(|until| until <= now);
        if let Some(connection) = current.connection.as_ref().filter(|_| health.is_well()) {
            let idle = now.saturating_sub(health.heard()) >= IDLE.as_millis() as u64;
            if !idle && !silent {
                let Status { made, after_replica, at: since, .. } = *current;
                let connection = connection.boxed();
                let link = self.clone();
                return Ok(Ok(Connection {
                    connection,
                    link,
                    made,
                    health,
                    hopeless: after_replica && since.elapsed() < IDLE,
                    at: now,
                    patience,
                    unsent: false,
                }));
            }
            let check = Check::new(upkeep, self.key.clone(), &current, None);
            drop(current);
            if health.suspect(now, check.ends) {
                tokio::spawn(check.run());
            }
            return Ok(Err(upkeep.source.instant(now) + PAUSE));
        }
        upkeep.ask(now);
        // Where a probe is needed, it asks for a key that is really used.
        health.set_key(self.key.as_ref());
        let checked = now < health.checked_by();
        if !checked && !current.at_work {
            // No caller has asked for a while: this one may wait again.
            health.lose(now);
            let connects_itself = current.connection.is_some() && upkeep.source.connect.is_none();
            drop(current);
            match connects_itself {
                true => self.check(&health, None),
                false => renew(upkeep),
            }
            return Ok(Err(upkeep.source.instant(now) + PAUSE));
        }
        if checked {
            return Ok(Err(upkeep.source.instant(health.checked_by())));
        }
        let until = health.lost().saturating_add(patience);
        let failed = current.attempts == 0 && current.error.is_some();
        if !failed && now < until {
            return Ok(Err(upkeep.source.instant(until)));
        }
        if failed || upkeep.is_longest(patience) {
            upkeep.source.cut_off(health.node, health.lost());
        }
        let silent = || (ErrorKind::Io, "the server does not answer").into();
        Err(current.error.clone().unwrap_or_else(silent))
    }

    /// Takes note of what became of a call: without an answer, with an error, or well.
    pub(super) fn report<T>(&self, over: &Connection, outcome: Option<Result<&T, &RedisError>>) {
        let Connection { made, at, .. } = *over;
        let (now, health) = (self.upkeep.source.now(), &self.place(over));
        match outcome {
            // One that was closed can be replaced at once.
            Some(Err(error)) if error.is_io_error() => self.silent(made, health, now),
            // One that refuses can't: callers get the error.
            Some(Err(error)) if leads_nowhere(error) => {
                if is_of_replica(error) {
                    health.found_replica();
                }
                if self.lose(made, health, 0) {
                    let error = Some(error.clone());
                    self.upkeep.current.send_modify(|current| current.error = error);
                }
            }
            Some(answer) => health.hear(now, answer.is_ok()),
            // If something was heard since it was sent, only this one was late.
            None if health.heard() <= at => self.silent(made, health, at),
            // Or another shard has answered, if slots have moved.
            None if self.upkeep.source.sharded && health.checked_by() <= now => {
                self.check(health, Some(at));
            }
            None => {}
        }
    }

    /// Where calls of this kind are sent by now: slots may have moved.
    fn place(&self, over: &Connection) -> Arc<Health> {
        let current = self.upkeep.current.borrow();
        let moves = self.upkeep.source.sharded && current.made == over.made;
        Arc::clone(if moves { current.shards.of(self.key.as_deref()) } else { &over.health })
    }

    /// Has a task try a shard: after a call that was sent at that time, if it has failed.
    fn check(&self, health: &Health, sent: Option<u64>) {
        let key = self.key.clone();
        let check = Check::new(&self.upkeep, key, &self.upkeep.current.borrow(), sent);
        health.checked_until(check.ends);
        tokio::spawn(check.run());
    }

    /// Another connection is needed. While there is none, calls wait until a caller's patience has
    /// ended who has waited `since` then. Whether that is new.
    fn lose(&self, made: u64, health: &Health, since: u64) -> bool {
        if self.upkeep.current.borrow().made != made {
            return false;
        }
        health.set_key(self.key.as_ref());
        let first = health.lose_once(since);
        if first {
            renew(&self.upkeep);
        }
        first
    }

    /// The same where it is closed or silent: it may speak again.
    fn silent(&self, made: u64, health: &Health, since: u64) {
        if self.lose(made, health, since) {
            self.check(health, Some(since));
        }
    }
}

/// What a call is sent over.
pub(super) struct Connection {
    connection: Box<dyn Handle>,
    link: Link,
    made: u64,
    health: Arc<Health>,
    /// The one before led to a replica, and so may the next one, if this one does.
    hopeless: bool,
    at: u64,
    /// How long its callers wait, in milliseconds.
    patience: u64,
    /// The last command was not sent.
    unsent: bool,
}

impl Connection {
    /// When it was handed out.
    pub(super) fn at(&self) -> Instant {
        self.link.upkeep.source.instant(self.at)
    }

    pub(super) async fn send(&mut self, cmd: &Cmd) -> RedisResult<Value> {
        let (upkeep, health) = (&*self.link.upkeep, &*self.health);
        let start = Instant::now();
        health.send(upkeep.source.now() + self.patience);
        let (answer, unsent) = noting_unsent(self.connection.req_packed_command(cmd)).await;
        if answer.is_ok() {
            upkeep.took(start.elapsed());
            let now = upkeep.source.now();
            health.hear(now, false);
            upkeep.source.hear(now);
        }
        self.unsent = unsent;
        answer
    }

    /// For calls that say nothing of its health.
    pub(super) fn handle(&mut self) -> &mut dyn Handle {
        &mut *self.connection
    }

    /// Whether the last command was not sent because the connection had ended, and there may be
    /// another one.
    pub(super) fn had_ended(&self) -> bool {
        self.unsent && self.link.upkeep.source.connect.is_some()
    }

    /// The same where all that was sent has changed nothing.
    pub(super) fn has_ended(&mut self, error: &RedisError) -> bool {
        self.unsent |= has_ended(error) && !self.link.upkeep.source.sharded;
        self.had_ended()
    }

    /// Whether another one may lead to the master if this one leads to a replica.
    pub(super) fn is_replaceable(&self) -> bool {
        self.link.upkeep.source.connect.is_some() && !self.hopeless
    }

    /// Another one is needed.
    pub(super) fn leave(self) {
        let Self { link, made, health, unsent, .. } = self;
        let now = link.upkeep.source.now();
        if unsent {
            link.silent(made, &health, now);
        } else {
            // There may be another master.
            health.found_replica();
            link.lose(made, &health, now);
        }
    }
}

fn has_ended(error: &RedisError) -> bool {
    leads_nowhere(error) && !is_of_replica(error)
}

/// Whether an answer says that nothing was sent: what has ended says so when it is handed the
/// command. A later error proves nothing.
async fn noting_unsent(mut answer: RedisFuture<'_, Value>) -> (RedisResult<Value>, bool) {
    let mut is_first = true;
    poll_fn(|cx| {
        let first = replace(&mut is_first, false);
        answer.as_mut().poll(cx).map(|answer| {
            let unsent = first && answer.as_ref().is_err_and(has_ended);
            (answer, unsent)
        })
    })
    .await
}
