//! A store's connection, which is tested before it is used: [`Link`].
//!
//! The client library has a connection manager for a single server, but none for Sentinel, none
//! that leaves a server that fell silent or became a replica, and none that notices a connection
//! that the network dropped. A link does this for all kinds of servers.
//!
//! Each runtime has its own link, as another one may end or stand still. Without calls, no task is
//! at work. A call that finds the connection idle or lost starts one, and all calls wait for it:
//!
//! ```text
//! call ──> is the shard well? ── yes ──────────────────────────> send ──> note the outcome
//!             │ idle, or an answer is overdue: check                          │
//!             │ lost: renew                                                   │
//!             └──> wait, until a task has an answer or patience ends <── silent, closed, replica
//! ```
//!
//! Another connection is made ([`Upkeep::renew`](upkeep::Upkeep::renew)):
//!
//! - when the store is used first in a runtime, and when a call finds its shard lost and no task at
//!   work;
//! - when a call ended by an I/O error, a replica's refusal or another error that the connection
//!   does not outlive, or had no answer while nothing else was answered since it was sent;
//! - when an idle connection does not answer a check, or a cluster's slots have moved.
//!
//! Attempts go on until one is good, the old connection answers after all, or no call has asked for
//! a second. While attempts hang, the pauses between them grow.
//!
//! - `Link`: gives calls a connection, and notes how each call ended. `Connection`: what one call
//!   sends over (both here).
//! - `Upkeep`: the connection of a link, its `Status`, and the tasks that check it and make others.
//! - `Shards`: the parts of a cluster, each with its `Health`. Any other store is a single shard.
//! - `Origin`: where connections come from, common to all runtimes. `Handle`: a connection of the
//!   client library, of any kind. `Servers`: their names, for the log.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use redis::{Cmd, ErrorKind, RedisError, RedisResult, Value};
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};

use super::connect::{NEVER, silence};

mod origin;
mod shards;
mod upkeep;

use origin::needs_replacement;
#[cfg(feature = "cluster")]
pub(super) use origin::{Connected, Servers};
pub(super) use origin::{Handle, Origin, is_from_replica};
use shards::Health;
#[cfg(feature = "cluster")]
pub(super) use shards::{Answering, Ranges, Shards, Slots, owner_of};
use upkeep::{PAUSE, Status, Upkeep, probe_for};

/// Without answers for this long, a connection is tested before it is used.
const IDLE: Duration = Duration::from_secs(1);

#[derive(Clone)]
pub(super) struct Link {
    upkeep: Arc<Upkeep>,
    /// In a cluster, a key of the shard to call.
    key: Option<Arc<[u8]>>,
}

impl Link {
    /// Begins to connect, in the current runtime.
    pub(super) fn new(origin: &Arc<Origin>) -> Self {
        let upkeep = Arc::new(Upkeep::new(origin));
        upkeep.renew();
        Self { upkeep, key: None }
    }

    pub(super) fn wait_for_end(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut changes = self.upkeep.status.subscribe();
        async move { while changes.changed().await.is_ok() {} }
    }

    pub(super) fn for_key(&self, key: &[u8]) -> Self {
        Self {
            upkeep: Arc::clone(&self.upkeep),
            key: self.upkeep.origin.sharded.then(|| key.into()),
        }
    }

    /// A hash of the server's address.
    pub(super) fn fault_domain(&self) -> u64 {
        self.upkeep.status.borrow().shards.shard_of(self.key.as_deref()).node
    }

    /// Returns a connection that is known to be alive. If it was lost, waits for one until
    /// `patience` after the loss; later, fails at once, while a task connects.
    pub(super) async fn get_connection(&self, patience: Duration) -> RedisResult<Connection> {
        let patience = patience.min(NEVER).as_millis() as u64;
        let mut changes = None::<watch::Receiver<Status>>;
        loop {
            match (self.try_get(patience)?, &mut changes) {
                (Ok(connection), _) => return Ok(connection),
                (Err(until), Some(changes)) => {
                    let _ = timeout_at(until, changes.changed()).await;
                }
                // Look once more with the subscription, so that no change is missed.
                (Err(_), none) => *none = Some(self.upkeep.status.subscribe()),
            }
        }
    }

    /// Or until when to wait for a change.
    fn try_get(&self, patience: u64) -> RedisResult<Result<Connection, Instant>> {
        let (upkeep, origin) = (&self.upkeep, &self.upkeep.origin);
        let now = origin.now();
        let status = upkeep.status.borrow();
        let health = Arc::clone(status.shards.shard_of(self.key.as_deref()));
        // An answer is overdue, and perhaps no caller waited for it.
        let silent = health.answer_due().is_some_and(|until| until <= now);
        if let Some(connection) = status.connection.as_ref().filter(|_| health.is_well()) {
            let answered_at = health.answered_at.load(Relaxed);
            if now.saturating_sub(answered_at) < IDLE.as_millis() as u64 && !silent {
                return Ok(Ok(Connection {
                    connection: connection.boxed(),
                    link: self.clone(),
                    made: status.made,
                    health,
                    after_replica: status.after_replica && status.made_at.elapsed() < IDLE,
                    at: now,
                    unsent: false,
                }));
            }
            let (check, ends_at) = upkeep.check(self.key.clone(), &status, None);
            drop(status);
            if health.mark_suspect(now, ends_at) {
                tokio::spawn(check);
            }
            return Ok(Err(origin.instant(now) + PAUSE));
        }
        upkeep.asked_at.store(now, Relaxed);
        // If a probe is needed, it reads a key that is really used.
        health.set_probe_key(self.key.as_ref());
        let check_ends = health.check_ends.load(Relaxed);
        if now < check_ends {
            return Ok(Err(origin.instant(check_ends)));
        }
        if status.attempts.is_none() {
            // No caller asked for a while, so this one waits with all its patience.
            health.mark_lost(now);
            drop(status);
            upkeep.renew();
            return Ok(Err(origin.instant(now) + PAUSE));
        }
        let until = health.lost_since().saturating_add(patience);
        let failed = status.attempts == Some(0) && status.error.is_some();
        if !failed && now < until {
            return Ok(Err(origin.instant(until)));
        }
        if failed || now >= health.lost_since().saturating_add(upkeep.pace()) {
            origin.cut_off(health.node, health.lost_since());
        }
        Err(status.error.clone().unwrap_or_else(silence))
    }

    /// `sent`: when the call was sent that has failed.
    fn start_check(&self, health: &Health, sent: u64) {
        let status = self.upkeep.status.borrow();
        let (check, ends_at) = self.upkeep.check(self.key.clone(), &status, Some(sent));
        health.check_ends.store(ends_at, Relaxed);
        tokio::spawn(check);
    }

    /// Calls wait for another connection until their patience, counted from `since`, has ended.
    /// Returns `false` if the shard was lost already, or the connection replaced.
    fn mark_lost(&self, made: u64, health: &Health, since: u64) -> bool {
        if self.upkeep.status.borrow().made != made {
            return false;
        }
        health.set_probe_key(self.key.as_ref());
        let first = health.mark_lost_once(since);
        if first {
            self.upkeep.renew();
        }
        first
    }

    /// Slots may have moved since the call.
    fn current_health(&self, made: u64, health: &Arc<Health>) -> Arc<Health> {
        let status = self.upkeep.status.borrow();
        let is_current = self.upkeep.origin.sharded && status.made == made;
        let current = if is_current { status.shards.shard_of(self.key.as_deref()) } else { health };
        Arc::clone(current)
    }

    /// A call that was sent at `at` has no answer. One whose callers waited for less than it takes
    /// to judge a connection says nothing about it.
    fn report_silence(&self, made: u64, health: &Arc<Health>, at: u64) {
        let Upkeep { origin, .. } = &*self.upkeep;
        let (now, health) = (origin.now(), &self.current_health(made, health));
        if now < at.saturating_add(self.upkeep.pace()) {
            return;
        }
        if health.answered_at.load(Relaxed) <= at {
            // No call was answered since this one was sent: more than this one is late.
            self.mark_silent(made, health, at);
        } else if origin.sharded && health.check_ends.load(Relaxed) <= now {
            // Another shard may have answered since, if slots have moved.
            self.start_check(health, at);
        }
    }

    /// Tests the shard: it may answer again.
    fn mark_silent(&self, made: u64, health: &Health, since: u64) {
        if self.mark_lost(made, health, since) {
            self.start_check(health, since);
        }
    }
}

pub(super) struct Connection {
    connection: Box<dyn Handle>,
    link: Link,
    made: u64,
    health: Arc<Health>,
    /// The connection before led to a replica: if this one does, the next one may, too.
    after_replica: bool,
    at: u64,
    unsent: bool,
}

impl Connection {
    pub(super) async fn send(&mut self, cmd: &Cmd) -> RedisResult<Value> {
        let (upkeep, health) = (&*self.link.upkeep, &*self.health);
        if health.rests_since(upkeep.origin.now()) {
            // Its answer is not awaited. A connection that does not take it has ended.
            let mut probe = probe_for(self.link.key.as_deref());
            let taken = self.connection.req_packed_command(probe.set_no_response(true)).await;
            self.unsent = taken.is_err();
            taken?;
        }
        let start = Instant::now();
        health.note_sent(upkeep.origin.now() + upkeep.pace());
        let mut answer = self.connection.req_packed_command(cmd);
        let answer = match timeout(Duration::from_millis(upkeep.pace()), &mut answer).await {
            Ok(answer) => answer,
            Err(_) => {
                self.link.report_silence(self.made, &self.health, self.at);
                answer.await
            }
        };
        let answer = answer.map_err(name_end);
        if answer.is_ok() {
            upkeep.note_round_trip(start.elapsed());
            let now = upkeep.origin.now();
            health.note_answer(now, false);
            upkeep.origin.note_answer(now);
        }
        answer
    }

    /// `None` if no answer came.
    pub(super) fn report_outcome<T>(&self, outcome: Option<Result<&T, &RedisError>>) {
        let &Self { ref link, made, at, .. } = self;
        let upkeep = &link.upkeep;
        let (now, health) = (upkeep.origin.now(), &link.current_health(made, &self.health));
        match outcome {
            // A closed connection can be replaced at once.
            Some(Err(error)) if error.is_io_error() => link.mark_silent(made, health, now),
            // A server that refuses calls can't: callers get the error.
            Some(Err(error)) if needs_replacement(error) => {
                if is_from_replica(error) {
                    health.led_to_replica.store(true, Relaxed);
                }
                if link.mark_lost(made, health, 0) {
                    let error = Some(error.clone());
                    upkeep.status.send_modify(|status| status.error = error);
                }
            }
            Some(answer) => health.note_answer(now, answer.is_ok()),
            None => link.report_silence(made, health, at),
        }
    }

    /// The shard fails. Slots may have left it: a redirection that was followed is not noted.
    pub(super) fn check_slots(&self) {
        let origin = &self.link.upkeep.origin;
        let health = self.link.current_health(self.made, &self.health);
        if origin.sharded && health.check_ends.load(Relaxed) <= origin.now() {
            self.link.start_check(&health, self.at);
        }
    }

    pub(super) fn keeps_scripts(&self) -> bool {
        self.health.keeps_scripts()
    }

    /// `None`: the script itself was sent.
    pub(super) fn note_script(&self, is_missing: Option<bool>) {
        match is_missing {
            Some(is_missing) => self.health.note_script(self.at, is_missing),
            None => self.health.note_script_sent(self.link.upkeep.origin.now()),
        }
    }

    /// The connection had ended before the last command was handed to it.
    pub(super) fn is_unsent(&self) -> bool {
        self.unsent
    }

    /// Another connection may lead to the master if this one leads to a replica.
    pub(super) fn is_replaceable(&self) -> bool {
        !self.after_replica
    }

    pub(super) fn replace(self) {
        let Self { link, made, health, unsent, .. } = self;
        let now = link.upkeep.origin.now();
        if unsent {
            link.mark_silent(made, &health, now);
        } else {
            // Another server may be the master now.
            health.led_to_replica.store(true, Relaxed);
            link.mark_lost(made, &health, now);
        }
    }
}

/// The library can't parse an answer inside of which the connection has ended.
fn name_end(error: RedisError) -> RedisError {
    let says = |text| error.detail().is_some_and(|said| said.contains(text));
    match error.kind() == ErrorKind::Parse && says("end of input") {
        true => io::Error::from(io::ErrorKind::UnexpectedEof).into(),
        false => error,
    }
}
