//! A connection that is made again whenever it is lost.
//!
//! The client library has a manager for the single server, but none for Sentinel, none that leaves
//! a server that has fallen silent or become a replica, and none that waits for a cluster to come
//! up. This is one for all: what differs is the closure that connects.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use redis::aio::ConnectionLike;
use redis::{
    Cmd, ErrorKind, Pipeline, RedisError, RedisFuture, RedisResult, ServerErrorKind, Value,
};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// How long an attempt to connect may take. A frozen server lets it hang.
const ATTEMPT: Duration = Duration::from_secs(1);
/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(200);
/// Calls without an answer, one after the other, until another connection is tried.
const SILENCE: u32 = 2;

type Connect =
    Box<dyn Fn() -> Pin<Box<dyn Future<Output = RedisResult<Connection>> + Send>> + Send + Sync>;

/// The connection of a store; clones share it.
#[derive(Clone)]
pub(super) struct Link(Arc<Inner>);

struct Inner {
    /// `None`: the connection keeps itself up.
    connect: Option<Connect>,
    state: watch::Sender<State>,
    silence: AtomicU32,
}

#[derive(Default)]
struct State {
    /// The last one that was made. It stays when it is lost: calls over it fail at once, and if it
    /// was only silent, it may speak again.
    connection: Option<Connection>,
    /// How many were made.
    made: u64,
    at: Option<Instant>,
    connecting: bool,
    /// Why the last attempt failed.
    error: Option<RedisError>,
}

/// What a call is sent over, and which of the connections that were made it is.
pub(super) struct Lease {
    pub(super) connection: Connection,
    made: u64,
}

impl Link {
    pub(super) fn fixed(connection: impl Clonable) -> Self {
        let state =
            State { connection: Some(Connection(Box::new(connection))), ..State::default() };
        Self(Arc::new(Inner {
            connect: None,
            state: watch::Sender::new(state),
            silence: AtomicU32::new(0),
        }))
    }

    pub(super) fn connecting<F, R, C>(connect: F) -> Self
    where
        F: Fn() -> R + Send + Sync + 'static,
        R: Future<Output = RedisResult<C>> + Send + 'static,
        C: Clonable,
    {
        let connect: Connect = Box::new(move || {
            let connected = connect();
            Box::pin(async move { Ok(Connection(Box::new(connected.await?))) })
        });
        let link = Self(Arc::new(Inner {
            connect: Some(connect),
            state: watch::Sender::default(),
            silence: AtomicU32::new(0),
        }));
        if Handle::try_current().is_ok() {
            link.renew(0);
        }
        link
    }

    /// The connection. Waits for the first one, but not for one that has been tried in vain.
    pub(super) async fn get(&self) -> RedisResult<Lease> {
        if let Some(lease) = self.0.state.borrow().lease() {
            return Ok(lease);
        }
        self.renew(0);
        let mut changes = self.0.state.subscribe();
        let state = changes
            .wait_for(|state| state.connection.is_some() || state.error.is_some())
            .await
            .expect("the sender is in this link");
        state.lease().ok_or_else(|| state.error.clone().expect("or an error"))
    }

    /// Takes note of what became of a call: without an answer, with an error, or well.
    pub(super) fn report<T>(&self, lease: &Lease, outcome: Option<Result<&T, &RedisError>>) {
        let lost = match outcome {
            None => self.0.silence.fetch_add(1, Ordering::Relaxed) + 1 >= SILENCE,
            Some(answer) => {
                if self.0.silence.load(Ordering::Relaxed) > 0 {
                    self.0.silence.store(0, Ordering::Relaxed);
                }
                answer.is_err_and(leads_nowhere)
            }
        };
        if lost {
            self.renew(lease.made);
        }
    }

    /// Makes another connection in place of the one that was made as number `made`, unless that
    /// is being done already.
    fn renew(&self, made: u64) {
        if self.0.connect.is_none() {
            return;
        }
        let claimed = self.0.state.send_if_modified(|state| {
            let claimed = !state.connecting && state.made == made;
            state.connecting |= claimed;
            claimed
        });
        if claimed {
            // Held by the task from its first moment: it may never be polled.
            let claim = Claim(Arc::downgrade(&self.0));
            tokio::spawn(claim.run());
        }
    }
}

impl State {
    fn lease(&self) -> Option<Lease> {
        let connection = self.connection.clone()?;
        Some(Lease { connection, made: self.made })
    }
}

/// The right to make the next connection. A task that ends with its runtime gives it back.
struct Claim(Weak<Inner>);

impl Claim {
    async fn run(self) {
        // Where a new connection is no better than the one before (its address leads to a
        // replica), they are not made as fast as they fail.
        let last = self.0.upgrade().and_then(|inner| inner.state.borrow().at);
        if let Some(last) = last {
            sleep_until(last + PAUSE).await;
        }
        // As long as the store exists.
        while let Some(inner) = self.0.upgrade() {
            let connect = inner.connect.as_ref().expect("or it would not be renewed");
            let attempt = timeout(ATTEMPT, connect())
                .await
                .unwrap_or_else(|_| Err((ErrorKind::Io, "the server does not answer").into()));
            let done = attempt.is_ok();
            inner.state.send_modify(|state| match attempt {
                Ok(connection) => {
                    state.connection = Some(connection);
                    state.made += 1;
                    state.at = Some(Instant::now());
                    state.error = None;
                }
                Err(error) => state.error = Some(error),
            });
            if done {
                inner.silence.store(0, Ordering::Relaxed);
                return;
            }
            drop(inner);
            sleep(PAUSE).await;
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(inner) = self.0.upgrade() {
            inner.state.send_modify(|state| state.connecting = false);
        }
    }
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

pub(super) struct Connection(Box<dyn Clonable>);

impl Clone for Connection {
    fn clone(&self) -> Self {
        Self((*self.0).boxed())
    }
}

impl ConnectionLike for Connection {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        self.0.req_packed_command(cmd)
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        self.0.req_packed_commands(pipeline, offset, count)
    }

    fn get_db(&self) -> i64 {
        self.0.get_db()
    }
}
