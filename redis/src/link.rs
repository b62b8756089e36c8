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
//! - `Link`: gives calls a connection and notes how each call ended (here), and has the connection,
//!   its `Status`, and the task that checks it and makes others (`upkeep`).
//! - `Connection`: what one call sends over.
//! - `Health`: what calls over one connection have told of it.
//! - `Origin`: where connections come from, common to all runtimes. `Handle`: a connection of the
//!   client library, of any kind.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use redis::{Cmd, ErrorKind, RedisError, RedisResult, Value, cmd, pipe};
use tokio::sync::OwnedMutexGuard;
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
use upkeep::{Link, PAUSE};

/// Without answers for this long, a connection is tested before it is used.
const IDLE: Duration = Duration::from_secs(1);

impl Link {
    /// Returns a connection that is known to be alive. If it was lost, waits for one until
    /// `patience` after the loss; later, fails at once, while a task connects.
    async fn get_connection(self: &Arc<Self>, patience: Duration) -> RedisResult<Connection> {
        let patience = patience.min(NEVER).as_millis() as u64;
        // Calls go in order of arrival, those that come when a connection is there, too.
        let mut turn = Arc::clone(&self.turns).try_lock_owned().ok();
        let mut changes = self.status.subscribe();
        loop {
            let until = match self.try_get(patience)? {
                Ok(connection) if turn.is_some() => return Ok(Connection { turn, ..connection }),
                Ok(_) => Instant::now() + PAUSE,
                Err(until) => until,
            };
            if turn.is_some() {
                let _ = timeout_at(until, changes.changed()).await;
            } else {
                turn = timeout_at(until, Arc::clone(&self.turns).lock_owned()).await.ok();
            }
        }
    }

    /// Or until when to wait for a change.
    fn try_get(self: &Arc<Self>, patience: u64) -> RedisResult<Result<Connection, Instant>> {
        let origin = &self.origin;
        let now = origin.now();
        let status = self.status.borrow();
        let health = Arc::clone(&status.health);
        // An answer is overdue, and perhaps no caller waited for it.
        let silent = (1..=now).contains(&health.answer_due.load(Relaxed));
        if let Some(connection) = &status.connection
            && health.is_well()
        {
            let answered_at = health.answered_at.load(Relaxed);
            if now.saturating_sub(answered_at) < IDLE.as_millis() as u64 && !silent {
                return Ok(Ok(Connection {
                    connection: connection.boxed(),
                    link: Arc::clone(self),
                    health,
                    is_replaceable: status.in_vain == 0 || status.made_at.elapsed() >= IDLE,
                    at: now,
                    turn: None,
                    asks: false,
                    unsent: false,
                }));
            }
            drop(status);
            self.renew();
            return Ok(Err(origin.instant(now) + PAUSE));
        }
        self.asked_at.store(now, Relaxed);
        if status.attempts.is_none() {
            // No caller asked for a while, so this one waits with all its patience.
            health.lost_since.store(now, Relaxed);
            drop(status);
            self.renew();
            return Ok(Err(origin.instant(now) + PAUSE));
        }
        let lost_since = health.lost_since.load(Relaxed);
        let until = lost_since.saturating_add(patience);
        let failed = status.attempts == Some(0) && status.error.is_some();
        if !failed && now < until {
            return Ok(Err(origin.instant(until)));
        }
        if failed || now >= lost_since + self.pace() {
            self.is_cut_off.store(true, Relaxed);
        }
        Err(status.error.clone().unwrap_or_else(silence))
    }

    /// Calls wait for another connection until their patience, counted from `since`, has ended.
    /// Returns `false` if it was lost already, or replaced.
    fn mark_lost(self: &Arc<Self>, health: &Arc<Health>, since: u64) -> bool {
        let is_current = Arc::ptr_eq(&self.status.borrow().health, health);
        let first = is_current && health.mark_lost_once(since);
        if first {
            self.renew();
        }
        first
    }

    /// A call that was sent at `at` has no answer. One whose callers waited for less than it takes
    /// to judge a connection says nothing about it.
    fn report_silence(self: &Arc<Self>, health: &Arc<Health>, at: u64) {
        let now = self.origin.now();
        let is_judged = now >= at.saturating_add(self.pace());
        // No call was answered since this one was sent: more than this one is late.
        if is_judged && health.answered_at.load(Relaxed) <= at {
            // Calls that come now wait for the check, too.
            let checked = at + 2 * self.grace().as_millis() as u64;
            self.mark_lost(health, checked.min(now));
        }
    }
}

pub(super) struct Connection {
    connection: Box<dyn Handle>,
    link: Arc<Link>,
    pub(super) health: Arc<Health>,
    /// If it leads to a replica: the connection before was of use, and the next one may be.
    pub(super) is_replaceable: bool,
    at: u64,
    /// Until the first call is handed over.
    turn: Option<OwnedMutexGuard<()>>,
    /// The key is on its way to this node of a cluster.
    asks: bool,
    /// The connection had ended before the last command was handed to it.
    pub(super) unsent: bool,
}

impl Connection {
    pub(super) async fn send(&mut self, call: &Cmd) -> RedisResult<Value> {
        let link = &self.link;
        let health = &*self.health;
        if health.rests_since(link.origin.now()) {
            // Its answer is not awaited. A connection that does not take it has ended.
            let mut probe = cmd("PING");
            let taken = self.connection.req_packed_command(probe.set_no_response(true)).await;
            self.unsent = taken.is_err();
            taken?;
        }
        let start = Instant::now();
        health.note_sent(link.origin.now() + link.pace());
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
        let answer = match timeout(Duration::from_millis(link.pace()), &mut answer).await {
            Ok(answer) => answer,
            Err(_) => {
                self.link.report_silence(&self.health, self.at);
                answer.await
            }
        };
        let answer = answer.map_err(name_end);
        if answer.is_ok() {
            link.note_round_trip(start.elapsed());
            health.note_answer(link.origin.now(), false);
        }
        answer
    }

    /// `None` if no answer came.
    pub(super) fn report_outcome<T>(&self, outcome: Option<Result<&T, &RedisError>>) {
        let Self { link, health, .. } = self;
        let now = link.origin.now();
        match outcome {
            // A closed connection can be replaced at once.
            Some(Err(error)) if error.is_io_error() => _ = link.mark_lost(health, now),
            // A server that refuses calls can't: callers get the error.
            Some(Err(error)) if needs_replacement(error) => {
                health.refuses.store(true, Relaxed);
                if link.mark_lost(health, 1) {
                    let error = Some(error.clone());
                    link.status.send_modify(|status| status.error = error);
                }
            }
            Some(answer) => health.note_answer(now, answer.is_ok()),
            None => link.report_silence(health, self.at),
        }
    }

    pub(super) fn replace(self) {
        let Self { link, health, unsent, .. } = self;
        // If a call was sent, a replica has refused it. Another server may be the master now.
        health.refuses.fetch_or(!unsent, Relaxed);
        link.mark_lost(&health, link.origin.now());
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
