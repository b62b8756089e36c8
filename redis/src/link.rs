//! A connection to a server, which is tested before it is used: [`Link`].
//!
//! The client library multiplexes the calls of a connection, and for more than that has a manager
//! that reconnects to one address. A link does what the library does not:
//!
//! - *A check of idle connections.* One that was silent for a second, or owes an answer, is asked
//!   `PING` before a charge is sent over it, and races another one if it does not answer soon:
//!   `TcpSettings::set_user_timeout` notices lost packets, but neither a firewall that forgot the
//!   connection before anything was sent, nor a server that stands still.
//! - *No decision lost that was not in flight.* What was certainly not sent goes over the next
//!   connection. The library's error is the same whether a call was sent or not, so a connection
//!   that rests is touched first.
//! - *One health for a connection*, by all calls over it: the first silence, loss or refusal of a
//!   replica is known to all, and one task makes the next connection.
//! - *Another server.* Where a name has several addresses, Sentinels name another master, or a
//!   connection leads to a replica, the next connection goes elsewhere.
//! - *Nodes of a cluster that fail apart* ([`Links`]). The library has one driver for all nodes,
//!   which stops while it connects to a silent one, and it follows redirections only together with
//!   repeats of calls whose outcome is unknown.
//!
//! Each runtime has its own link, as another one may end or stand still. Without calls, no task is
//! at work. A call that finds the connection idle or lost starts one, and all calls wait for it:
//!
//! ```text
//! call ──> is it well? ── yes ──────────────────────────> send ──> note the outcome
//!             │ idle, or an answer is overdue: check                     │
//!             │ lost: renew                                              │
//!             └──> wait, until a task has an answer or patience ends <── silent, closed, replica
//! ```
//!
//! Attempts at another connection go on until one is good, the old connection answers after all, or
//! no call has asked for a second. While attempts hang, the pauses between them grow.
//!
//! - `Links`: the link of a store, or one for each node of a cluster. `Servers`: the same, common to
//!   all runtimes.
//! - `Link`: gives calls a connection, and notes how each call ended. `Connection`: what one call
//!   sends over (both here).
//! - `Upkeep`: the connection of a link, its `Status`, and the tasks that check it and make others.
//! - `Health`: what calls over one connection have told of it.
//! - `Origin`: where connections come from, common to all runtimes. `Handle`: a connection of the
//!   client library, of any kind.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use redis::{Cmd, ErrorKind, RedisError, RedisResult, Value, cmd, pipe};
use tokio::sync::{OwnedMutexGuard, watch};
use tokio::time::{Instant, timeout, timeout_at};

use super::connect::{NEVER, silence};

mod health;
mod nodes;
mod origin;
mod upkeep;

use health::Health;
pub(super) use nodes::{Links, Servers};
#[cfg(feature = "sentinel")]
pub(super) use origin::Name;
use origin::{Handle, needs_replacement};
pub(super) use origin::{Origin, is_from_replica};
use upkeep::{PAUSE, Status, Upkeep};

/// Without answers for this long, a connection is tested before it is used.
const IDLE: Duration = Duration::from_secs(1);

#[derive(Clone)]
struct Link(Arc<Upkeep>);

impl Link {
    /// Begins to connect, in the current runtime.
    fn new(origin: &Arc<Origin>) -> Self {
        let upkeep = Arc::new(Upkeep::new(origin));
        upkeep.renew();
        Self(upkeep)
    }

    /// Returns a connection that is known to be alive. If it was lost, waits for one until
    /// `patience` after the loss; later, fails at once, while a task connects.
    async fn get_connection(&self, patience: Duration) -> RedisResult<Connection> {
        let patience = patience.min(NEVER).as_millis() as u64;
        // Calls go in order of arrival, those that come when a connection is there, too.
        let turns = &self.0.turns;
        let mut turn = Arc::clone(turns).try_lock_owned().ok();
        let mut changes = None::<watch::Receiver<Status>>;
        loop {
            match (self.try_get(patience)?, &turn, &mut changes) {
                (Ok(connection), Some(_), _) => return Ok(Connection { turn, ..connection }),
                (Ok(_), None, _) => turn = Some(Arc::clone(turns).lock_owned().await),
                (Err(until), None, _) => {
                    turn = timeout_at(until, Arc::clone(turns).lock_owned()).await.ok();
                }
                (Err(until), _, Some(changes)) => {
                    let _ = timeout_at(until, changes.changed()).await;
                }
                // Look once more with the subscription, so that no change is missed.
                (Err(_), _, none) => *none = Some(self.0.status.subscribe()),
            }
        }
    }

    /// Or until when to wait for a change.
    fn try_get(&self, patience: u64) -> RedisResult<Result<Connection, Instant>> {
        let Self(upkeep) = self;
        let origin = &upkeep.origin;
        let now = origin.now();
        let status = upkeep.status.borrow();
        let health = Arc::clone(&status.health);
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
                    turn: None,
                    asks: false,
                    unsent: false,
                }));
            }
            let (check, ends_at) = upkeep.check(&status, None);
            drop(status);
            if health.mark_suspect(now, ends_at) {
                tokio::spawn(check);
            }
            return Ok(Err(origin.instant(now) + PAUSE));
        }
        upkeep.asked_at.store(now, Relaxed);
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
            origin.cut_off(health.lost_since());
        }
        Err(status.error.clone().unwrap_or_else(silence))
    }

    /// Calls wait for another connection until their patience, counted from `since`, has ended.
    /// Returns `false` if it was lost already, or replaced.
    fn mark_lost(&self, made: u64, health: &Health, since: u64) -> bool {
        let first = self.0.status.borrow().made == made && health.mark_lost_once(since);
        if first {
            self.0.renew();
        }
        first
    }

    /// A call that was sent at `at` has no answer. One whose callers waited for less than it takes
    /// to judge a connection says nothing about it.
    fn report_silence(&self, made: u64, health: &Health, at: u64) {
        let is_judged = self.0.origin.now() >= at.saturating_add(self.0.pace());
        // No call was answered since this one was sent: more than this one is late.
        if is_judged && health.answered_at.load(Relaxed) <= at {
            self.mark_silent(made, health, at);
        }
    }

    /// Tests the connection: it may answer again.
    fn mark_silent(&self, made: u64, health: &Health, since: u64) {
        if self.mark_lost(made, health, since) {
            let (check, ends_at) = self.0.check(&self.0.status.borrow(), Some(since));
            health.check_ends.store(ends_at, Relaxed);
            tokio::spawn(check);
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
    /// Until the first call is handed over.
    turn: Option<OwnedMutexGuard<()>>,
    /// The key is on its way to this node of a cluster.
    asks: bool,
    unsent: bool,
}

impl Connection {
    pub(super) async fn send(&mut self, call: &Cmd) -> RedisResult<Value> {
        let Link(upkeep) = &self.link;
        let health = &*self.health;
        if health.rests_since(upkeep.origin.now()) {
            // Its answer is not awaited. A connection that does not take it has ended.
            let mut probe = cmd("PING");
            let taken = self.connection.req_packed_command(probe.set_no_response(true)).await;
            self.unsent = taken.is_err();
            taken?;
        }
        let start = Instant::now();
        health.note_sent(upkeep.origin.now() + upkeep.pace());
        // In one piece: `ASKING` is of the next command, whichever that is.
        let asking = self.asks.then(|| pipe().cmd("ASKING").add_command(call.clone()).clone());
        let mut answer = match &asking {
            None => self.connection.req_packed_command(call),
            Some(calls) => {
                let answers = self.connection.req_packed_commands(calls, 1, 1);
                Box::pin(async { Ok(answers.await?.pop().unwrap_or(Value::Nil)) })
            }
        };
        self.turn = None;
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
        let &Self { ref link, made, ref health, at, .. } = self;
        let Link(upkeep) = link;
        let now = upkeep.origin.now();
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

    pub(super) fn keeps_scripts(&self) -> bool {
        self.health.keeps_scripts()
    }

    /// `None`: the script itself was sent.
    pub(super) fn note_script(&self, is_missing: Option<bool>) {
        match is_missing {
            Some(is_missing) => self.health.note_script(self.at, is_missing),
            None => self.health.note_script_sent(self.link.0.origin.now()),
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
        let now = link.0.origin.now();
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
