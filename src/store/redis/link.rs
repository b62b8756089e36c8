//! A connection that is known to be alive.
//!
//! The client library has a manager for the single server, but none for Sentinel, none that leaves a
//! server that has fallen silent or become a replica, and none that notices what a network has
//! forgotten. This is one for all: what differs is the closure that connects.
//!
//! Nothing runs while nobody asks. Whoever finds the connection idle or lost starts a task in their own
//! runtime, which all who ask wait for. A task may end with its runtime, or stand still with it: what it
//! has claimed expires, and the next one who asks starts another.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use redis::aio::ConnectionLike;
use redis::{
    Cmd, ErrorKind, Pipeline, RedisError, RedisFuture, RedisResult, ServerErrorKind, Value,
};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::NEVER;
use super::shards::{Range, Shards};
use crate::observe;

/// A connection that was silent for so long is tried before it is used.
const IDLE: Duration = Duration::from_secs(1);
/// How long an idle connection has to answer before another one is made beside it; at least two
/// round trips.
const GRACE: Duration = Duration::from_millis(20);
/// How long an attempt to connect may take. Others begin meanwhile.
const ATTEMPT: Duration = Duration::from_secs(5);
/// Between the beginnings of two attempts, as long as few are under way.
const PAUSE: Duration = Duration::from_millis(250);
/// So many.
const FEW: u32 = 4;
/// Attempts go on for so long after somebody has asked.
const WANTED: Duration = Duration::from_secs(1);
/// A claim expires so long after its holder should have been back.
const LATE: Duration = Duration::from_millis(100);

/// A connection, and what parts of the keys it leads to if that is a cluster.
type Connected = (Box<dyn Clonable>, Vec<Range>);
type Connecting = Pin<Box<dyn Future<Output = RedisResult<Connected>> + Send>>;
type Connect = Box<dyn Fn() -> Connecting + Send + Sync>;

/// The connection of a store; clones share it.
#[derive(Clone)]
pub(super) struct Link {
    inner: Arc<Inner>,
    /// A key of the shard that is to be asked, where there are shards.
    key: Option<Arc<[u8]>>,
}

struct Inner {
    /// `None`: the connection keeps itself up.
    connect: Option<Connect>,
    sharded: bool,
    state: watch::Sender<State>,
    since: Instant,
    /// How long a call may wait for a connection, in milliseconds.
    patience: AtomicU64,
    /// When somebody found no connection, in milliseconds since `since`.
    asked: AtomicU64,
    /// How long a call takes at best, in microseconds.
    round_trip: AtomicU64,
}

struct State {
    /// The last one that was made. It stays when it is lost, as it may only have been late.
    connection: Option<Box<dyn Clonable>>,
    shards: Arc<Shards>,
    /// How many were made.
    made: u64,
    at: Instant,
    /// Why the last attempt failed, or why the connection is to be left.
    error: Option<RedisError>,
    attempts: usize,
    /// Who makes connections, and when that one is given up.
    renewal: u64,
    renewed_by: Option<Instant>,
}

/// What a call is sent over.
pub(super) struct Lease {
    pub(super) connection: Connection,
}

/// What there is for a call.
enum Look {
    Ready(Lease),
    /// Until then, or until something changes.
    Wait(Instant),
}

impl Link {
    pub(super) fn fixed(connection: impl Clonable) -> Self {
        Self::new(Some(Box::new(connection)), None, false)
    }

    pub(super) fn connecting<F, R, C>(connect: F) -> Self
    where
        F: Fn() -> R + Send + Sync + 'static,
        R: Future<Output = RedisResult<C>> + Send + 'static,
        C: Clonable,
    {
        let connect: Connect = Box::new(move || {
            let connected = connect();
            Box::pin(async move { Ok((Box::new(connected.await?) as _, Vec::new())) })
        });
        Self::new(None, Some(connect), false)
    }

    /// The same for a cluster, whose shards fail each by itself.
    #[cfg(feature = "redis-cluster")]
    pub(super) fn sharded<F, R, C>(connect: F) -> Self
    where
        F: Fn() -> R + Send + Sync + 'static,
        R: Future<Output = RedisResult<(C, Vec<Range>)>> + Send + 'static,
        C: Clonable,
    {
        let connect: Connect = Box::new(move || {
            let connected = connect();
            Box::pin(async move {
                let (connection, ranges) = connected.await?;
                Ok((Box::new(connection) as _, ranges))
            })
        });
        Self::new(None, Some(connect), true)
    }

    fn new(connection: Option<Box<dyn Clonable>>, connect: Option<Connect>, sharded: bool) -> Self {
        let now = Instant::now();
        let state = State {
            connection,
            shards: Arc::new(Shards::new(Vec::new(), 0)),
            made: 0,
            at: now,
            error: None,
            attempts: 0,
            renewal: 0,
            renewed_by: None,
        };
        let inner = Inner {
            connect,
            sharded,
            state: watch::Sender::new(state),
            since: now,
            patience: AtomicU64::new(0),
            asked: AtomicU64::new(0),
            round_trip: AtomicU64::new(0),
        };
        let link = Self { inner: Arc::new(inner), key: None };
        if link.inner.connect.is_some() && Handle::try_current().is_ok() {
            link.renew();
        }
        link
    }

    /// How long a call may wait for a connection.
    pub(super) fn set_patience(&self, patience: Duration) {
        self.inner.patience.store(patience.min(NEVER).as_millis() as u64, Ordering::Relaxed);
    }

    /// The same link, for calls to the shard of a key.
    pub(super) fn of(&self, key: &[u8]) -> Self {
        Self { inner: Arc::clone(&self.inner), key: self.inner.sharded.then(|| key.into()) }
    }

    /// What fails together with this key: its shard, by the address of its server.
    pub(super) fn domain(&self, key: impl FnOnce() -> String) -> u64 {
        if !self.inner.sharded {
            return 0;
        }
        let shards = Arc::clone(&self.inner.state.borrow().shards);
        shards.node(shards.of(Some(key().as_bytes())))
    }

    /// The connection, which is known to be alive. Waits for it as long as nobody has waited too long;
    /// later it fails at once, while others are made.
    pub(super) async fn get(&self) -> RedisResult<Lease> {
        let mut changes = None;
        loop {
            match (self.look()?, &mut changes) {
                (Look::Ready(lease), _) => return Ok(lease),
                (Look::Wait(until), Some(changes)) => {
                    let changes: &mut watch::Receiver<State> = changes;
                    let _ = timeout_at(until, changes.changed()).await;
                }
                // What changes from here on is not missed.
                (Look::Wait(_), none) => *none = Some(self.inner.state.subscribe()),
            }
        }
    }

    fn look(&self) -> RedisResult<Look> {
        let inner = &*self.inner;
        let now = inner.now();
        let state = inner.state.borrow();
        let shards = Arc::clone(&state.shards);
        let part = shards.of(self.key.as_deref());
        let health = shards.health(part);
        let patience = inner.patience.load(Ordering::Relaxed);
        // Nobody may have waited for an answer that did not come.
        let silent = health.unanswered().is_some_and(|sent| sent.saturating_add(patience) <= now);
        if let Some(connection) = state.connection.as_ref().filter(|_| health.is_well()) {
            let idle = now.saturating_sub(health.heard()) >= IDLE.as_millis() as u64;
            if !idle && !silent {
                let (connection, made) = (connection.boxed(), state.made);
                let link = self.clone();
                let connection = Connection { connection, link, made, shards, part, at: now };
                return Ok(Look::Ready(Lease { connection }));
            }
            let check = Check::of(self, &state, part);
            drop(state);
            if health.suspect(now, check.ends()) {
                tokio::spawn(check.run());
            }
            return Ok(Look::Wait(inner.instant(now) + PAUSE));
        }
        inner.asked.store(now, Ordering::Relaxed);
        // Where a probe is needed, it asks for a key that is really used.
        health.set_key(self.key.as_ref());
        let at_work = state.renewed_by.is_some_and(|until| Instant::now() < until)
            || now < health.checked_by();
        if !at_work {
            // Nobody has asked for a while: this one may wait again.
            health.lose(now);
            match state.connection.as_ref() {
                Some(_) if inner.connect.is_none() => {
                    let check = Check::of(self, &state, part);
                    drop(state);
                    health.checked_until(check.ends());
                    tokio::spawn(check.run());
                }
                _ => {
                    drop(state);
                    self.renew();
                }
            }
            return Ok(Look::Wait(inner.instant(now) + PAUSE));
        }
        let until = health.lost().saturating_add(patience);
        match &state.error {
            Some(error) if state.attempts == 0 || now >= until => Err(error.clone()),
            None if now >= until => Err((ErrorKind::Io, "the server does not answer").into()),
            _ => {
                let by = state.renewed_by.unwrap_or_else(|| inner.instant(health.checked_by()));
                Ok(Look::Wait(by.min(inner.instant(until)).max(Instant::now() + TICK)))
            }
        }
    }

    /// Takes note of what became of a call: without an answer, with an error, or well.
    pub(super) fn report<T>(&self, lease: &Lease, outcome: Option<Result<&T, &RedisError>>) {
        let Connection { made, shards, part, at, .. } = &lease.connection;
        let (inner, health) = (&*self.inner, shards.health(*part));
        let now = inner.now();
        match outcome {
            Some(Err(error)) if leads_nowhere(error) => {
                // One that was closed can be replaced at once; one that refuses can't.
                let young = error.is_io_error();
                let (since, why) = if young { (now, None) } else { (0, Some(error)) };
                self.lost(*made, shards, *part, since, why);
            }
            Some(answer) => health.hear(now, answer.is_ok()),
            // If something was heard since it was sent, only this one was late.
            None if health.heard() <= *at => self.lost(*made, shards, *part, *at, None),
            None => {}
        }
    }

    /// Another connection is needed. While there is none, calls wait until somebody's patience has ended
    /// who has waited `since` then. An error is what they are told meanwhile.
    fn lost(
        &self,
        made: u64,
        shards: &Arc<Shards>,
        part: usize,
        since: u64,
        error: Option<&RedisError>,
    ) {
        let inner = &*self.inner;
        if inner.state.borrow().made != made {
            return;
        }
        let health = shards.health(part);
        health.set_key(self.key.as_ref());
        if !health.lose_once(since) {
            return;
        }
        if Handle::try_current().is_err() {
            return;
        }
        if error.is_none() {
            // It may speak again.
            let check = Check::of(self, &inner.state.borrow(), part);
            health.checked_until(check.ends());
            tokio::spawn(check.run());
        }
        self.renew();
        if let Some(error) = error {
            inner.state.send_modify(|state| state.error = Some(error.clone()));
        }
    }

    /// Makes connections until one is good, unless somebody does so already.
    fn renew(&self) {
        if self.inner.connect.is_none() {
            return;
        }
        let now = Instant::now();
        let mut turn = 0;
        let claimed = self.inner.state.send_if_modified(|state| {
            let claimed = state.renewed_by.is_none_or(|until| until <= now);
            if claimed {
                state.renewed_by = Some(now + LATE);
                state.renewal += 1;
                state.error = None;
                turn = state.renewal;
            }
            claimed
        });
        self.inner.asked.store(self.inner.now(), Ordering::Relaxed);
        if claimed {
            let changes = self.inner.state.subscribe();
            // Held by the task from its first moment: it may never be polled.
            let renewal = Renewal { inner: Arc::downgrade(&self.inner), changes, turn };
            tokio::spawn(renewal.run());
        }
    }
}

/// The least that is waited for.
const TICK: Duration = Duration::from_millis(1);

impl Inner {
    fn now(&self) -> u64 {
        self.since.elapsed().as_millis() as u64
    }

    fn instant(&self, ms: u64) -> Instant {
        self.since + Duration::from_millis(ms)
    }

    fn grace(&self) -> Duration {
        let round_trip = Duration::from_micros(self.round_trip.load(Ordering::Relaxed));
        GRACE.max(2 * round_trip)
    }

    fn took(&self, time: Duration) {
        let time = (time.as_micros() as u64).max(1);
        let known = self.round_trip.load(Ordering::Relaxed);
        // The least, of late.
        let next = if known == 0 || time < known { time } else { known + (time - known) / 256 };
        if next != known {
            self.round_trip.store(next, Ordering::Relaxed);
        }
    }

    /// It has answered.
    fn well(&self, shards: &Shards, part: usize) {
        shards.health(part).recover(self.now());
        self.state.send_modify(|_| {});
    }
}

/// Tries a connection that was silent for a while.
struct Check {
    inner: Weak<Inner>,
    link: LinkKey,
    connection: Option<Box<dyn Clonable>>,
    shards: Arc<Shards>,
    part: usize,
    grace: Duration,
    ends: u64,
    made: u64,
}

/// A link that does not keep its store alive.
type LinkKey = Option<Arc<[u8]>>;

impl Check {
    fn of(link: &Link, state: &State, part: usize) -> Self {
        let inner = &link.inner;
        let grace = inner.grace();
        // Where there is no other connection, nobody else has to begin.
        let last = if inner.connect.is_some() { grace } else { grace + ATTEMPT };
        Self {
            inner: Arc::downgrade(inner),
            link: link.key.clone(),
            connection: state.connection.as_ref().map(|connection| connection.boxed()),
            shards: Arc::clone(&state.shards),
            part,
            grace,
            ends: inner.now() + (last + LATE).as_millis() as u64,
            made: state.made,
        }
    }

    fn ends(&self) -> u64 {
        self.ends
    }

    async fn run(self) {
        let Self { inner, link, connection, shards, part, grace, made, .. } = self;
        let Some(mut connection) = connection else { return };
        let mut changes = match inner.upgrade() {
            Some(inner) => inner.state.subscribe(),
            None => return,
        };
        observe::store_checked();
        let start = Instant::now();
        let probe = probe(link.as_deref());
        let mut alive = pin!(async {
            // What connects by itself may do so at the first one.
            is_alive(&mut connection, &probe).await || is_alive(&mut connection, &probe).await
        });
        let mut answer = timeout(grace, alive.as_mut()).await.ok();
        if answer != Some(true) {
            let Some(inner) = inner.upgrade() else { return };
            if inner.connect.is_none() && answer.is_some() {
                // Calls are to say what is wrong with it.
                return inner.well(&shards, part);
            }
            Link { inner, key: link }.renew();
        }
        if answer.is_none() {
            // It may only be late. Until there is another one, and as long as there is the store.
            let replaced = async {
                while changes.changed().await.is_ok() && changes.borrow_and_update().made == made {}
            };
            answer = first(timeout(ATTEMPT, alive.as_mut()), replaced).await.and_then(Result::ok);
        }
        if let Some(inner) = inner.upgrade()
            && answer == Some(true)
        {
            inner.took(start.elapsed());
            inner.well(&shards, part);
        }
    }
}

/// Any answer is a sign of life, also that this user may not ask.
async fn is_alive(connection: &mut Box<dyn Clonable>, probe: &Cmd) -> bool {
    match connection.req_packed_command(probe).await {
        Ok(_) => true,
        Err(error) => !leads_nowhere(&error),
    }
}

/// On a cluster `PING` would go to all of it.
fn probe(key: Option<&[u8]>) -> Cmd {
    match key {
        None => redis::cmd("PING"),
        Some(key) => {
            let mut cmd = redis::cmd("HMGET");
            cmd.arg(key).arg("0");
            cmd
        }
    }
}

/// Makes connections, one after the other and beside each other, until one is good or nobody asks
/// any more.
struct Renewal {
    inner: Weak<Inner>,
    changes: watch::Receiver<State>,
    turn: u64,
}

impl Renewal {
    async fn run(mut self) {
        let Some(pause) = self.pause() else { return };
        if first(sleep_until(pause), self.is_over()).await.is_none() {
            return;
        }
        let mut attempts = JoinSet::new();
        while let Some(due) = self.attempt(&mut attempts) {
            loop {
                let next = async {
                    match attempts.join_next().await {
                        Some(attempt) => attempt.ok(),
                        None => std::future::pending().await,
                    }
                };
                let ended = first(timeout_at(due, next), self.is_over()).await;
                let left = attempts.len();
                match ended {
                    // There is a good one, or no store any more.
                    None => return,
                    Some(Err(_)) => break,
                    Some(Ok(Some(Ok(found)))) => return self.install(found),
                    Some(Ok(Some(Err(error)))) => self.failed(error, left),
                    Some(Ok(None)) => {
                        let error = (ErrorKind::Client, "connecting has panicked").into();
                        self.failed(error, left);
                    }
                }
            }
        }
    }

    /// Where a new connection is no better than the one before (its address leads to a replica), they
    /// are not made as fast as they fail.
    fn pause(&self) -> Option<Instant> {
        let inner = self.inner.upgrade()?;
        let (proved, at) = {
            let state = inner.state.borrow();
            (state.made == 0 || state.shards.is_proved(), state.at)
        };
        let pause = if proved { Instant::now() } else { at + PAUSE };
        self.claim(&inner, pause, 0);
        Some(pause)
    }

    fn claim(&self, inner: &Inner, until: Instant, attempts: usize) {
        inner.state.send_if_modified(|state| {
            if state.renewal == self.turn {
                state.renewed_by = Some(until + LATE);
                state.attempts = attempts;
            }
            false
        });
    }

    /// Ends when no connection is needed any more.
    async fn is_over(&mut self) {
        let turn = self.turn;
        let over = |state: &State| {
            state.renewal != turn || state.connection.is_some() && state.shards.are_well()
        };
        let _ = self.changes.wait_for(over).await;
    }

    /// Begins another attempt if somebody still asks. When the next one is due; `None`: never.
    fn attempt(&self, attempts: &mut JoinSet<RedisResult<Found>>) -> Option<Instant> {
        let inner = self.inner.upgrade()?;
        let asked = inner.instant(inner.asked.load(Ordering::Relaxed));
        if asked.elapsed() < WANTED {
            let connecting = inner.connect.as_ref()?();
            let of = Weak::clone(&self.inner);
            attempts.spawn(async move {
                let late = || Err((ErrorKind::Io, "the server does not answer").into());
                timeout(ATTEMPT, find(of, connecting)).await.unwrap_or_else(|_| late())
            });
        } else if attempts.is_empty() {
            return None;
        }
        let many = (attempts.len() as u32).div_ceil(FEW).max(1);
        let due = Instant::now() + PAUSE * many;
        self.claim(&inner, due, attempts.len());
        Some(due)
    }

    fn install(&self, Found { connection, shards }: Found) {
        let Some(inner) = self.inner.upgrade() else { return };
        observe::store_connected();
        let at = Instant::now();
        inner.state.send_modify(|state| {
            if state.connection.is_some() {
                shards.inherit(&state.shards);
            }
            state.connection = Some(connection);
            state.shards = Arc::new(shards);
            state.made += 1;
            state.at = at;
            state.error = None;
        });
    }

    fn failed(&self, error: RedisError, left: usize) {
        let Some(inner) = self.inner.upgrade() else { return };
        inner.state.send_modify(|state| {
            if state.renewal == self.turn {
                state.attempts = left;
                state.error = Some(error);
            }
        });
    }
}

impl Drop for Renewal {
    /// Also with the runtime that it ran in.
    fn drop(&mut self) {
        if let Some(inner) = self.inner.upgrade() {
            inner.state.send_if_modified(|state| {
                let mine = state.renewal == self.turn;
                if mine {
                    state.renewed_by = None;
                    state.attempts = 0;
                }
                mine
            });
        }
    }
}

struct Found {
    connection: Box<dyn Clonable>,
    shards: Shards,
}

/// Connects. A connection to a cluster is good if it leads to a shard that is missed.
async fn find(inner: Weak<Inner>, connecting: Connecting) -> RedisResult<Found> {
    let start = Instant::now();
    let (mut connection, ranges) = connecting.await?;
    let took = start.elapsed();
    let gone = || RedisError::from((ErrorKind::Io, "the store is gone"));
    let (now, grace, missed) = {
        let inner = inner.upgrade().ok_or_else(gone)?;
        let state = inner.state.borrow();
        let first = state.connection.is_none();
        let missed = if first { Vec::new() } else { state.shards.missed() };
        (inner.now(), inner.grace().max(took), missed)
    };
    let shards = Shards::new(ranges, now);
    let mut found = missed.is_empty();
    for key in missed {
        let probe = probe(Some(&key));
        let answer = timeout(grace, connection.req_packed_command(&probe)).await;
        if answer.is_ok_and(|answer| answer.is_ok_and(|value| value.extract_error().is_ok())) {
            found = true;
            shards.found(&key);
        }
    }
    if !found {
        return Err((ErrorKind::Io, "the shard does not answer").into());
    }
    Ok(Found { connection, shards })
}

/// What `future` ends with, unless `end` comes first.
async fn first<T>(future: impl Future<Output = T>, end: impl Future<Output = ()>) -> Option<T> {
    let (mut future, mut end) = (pin!(future), pin!(end));
    poll_fn(|cx| {
        if let Poll::Ready(value) = future.as_mut().poll(cx) {
            return Poll::Ready(Some(value));
        }
        end.as_mut().poll(cx).map(|()| None)
    })
    .await
}

/// Whether another connection may do better.
fn leads_nowhere(error: &RedisError) -> bool {
    error.is_unrecoverable_error()
        || error.is_io_error()
        || error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly)
}

/// A connection of any kind. The library's are handles: clones send over the same socket.
pub(super) trait Clonable: ConnectionLike + Send + Sync + 'static {
    fn boxed(&self) -> Box<dyn Clonable>;
}

impl<C: ConnectionLike + Clone + Send + Sync + 'static> Clonable for C {
    fn boxed(&self) -> Box<dyn Clonable> {
        Box::new(self.clone())
    }
}

/// What a call is sent over: a connection, and if that turns out to have ended before anything was
/// sent, the next one.
pub(super) struct Connection {
    connection: Box<dyn Clonable>,
    link: Link,
    made: u64,
    shards: Arc<Shards>,
    part: usize,
    at: u64,
}

impl Connection {
    /// The answer, and whether it says that nothing was sent.
    async fn send(&mut self, cmd: &Cmd) -> (RedisResult<Value>, bool) {
        let (inner, health) = (&*self.link.inner, self.shards.health(self.part));
        let start = Instant::now();
        health.send(inner.now());
        let answer = noting_unsent(self.connection.req_packed_command(cmd)).await;
        if answer.0.is_ok() {
            inner.took(start.elapsed());
            health.hear(inner.now(), false);
        }
        answer
    }

    /// Takes the next one.
    async fn replace(&mut self) -> RedisResult<()> {
        let now = self.link.inner.now();
        self.link.lost(self.made, &self.shards, self.part, now, None);
        let link = self.link.clone();
        *self = link.get().await?.connection;
        Ok(())
    }
}

impl ConnectionLike for Connection {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        Box::pin(async move {
            let (answer, unsent) = self.send(cmd).await;
            if !unsent || self.link.inner.connect.is_none() {
                return answer;
            }
            self.replace().await?;
            self.send(cmd).await.0
        })
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        self.connection.req_packed_commands(pipeline, offset, count)
    }

    fn get_db(&self) -> i64 {
        self.connection.get_db()
    }
}

/// Whether an answer says that nothing was sent: what has ended says so when it is handed the command.
/// A later error proves nothing.
async fn noting_unsent(mut answer: RedisFuture<'_, Value>) -> (RedisResult<Value>, bool) {
    let first_poll = AtomicBool::new(true);
    poll_fn(|cx| {
        let first = first_poll.swap(false, Ordering::Relaxed);
        answer.as_mut().poll(cx).map(|answer| {
            let unsent = first && answer.as_ref().is_err_and(leads_nowhere);
            (answer, unsent)
        })
    })
    .await
}
