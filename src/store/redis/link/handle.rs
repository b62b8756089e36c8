//! A connection of any kind, where it comes from, and what its answers say of it.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use redis::aio::ConnectionLike;
use redis::{Cmd, ErrorKind, RedisError, RedisResult, ServerErrorKind};
use tokio::time::Instant;

use super::shards::{Answering, Shards};
use crate::store::redis::script::{MANY, ONE, rights};
use crate::store::remote::Breaker;

/// A connection, and the shards that it leads to.
pub(crate) type Connected = (Box<dyn Handle>, Shards);
/// Connects, and fails if a command is missing, for which it has to ask if it gets `true`.
pub(crate) type Connect = Arc<dyn Fn(bool) -> Answering<Connected> + Send + Sync>;

/// Where the connections of a store come from.
pub(crate) struct Origin {
    /// The one that there is, if it was given.
    pub(crate) given: Option<Box<dyn Handle>>,
    pub(crate) connect: Option<Connect>,
    pub(crate) sharded: bool,
    /// Hears of calls that fail, and of parts that nothing can be sent to.
    pub(crate) breaker: Arc<Breaker>,
    since: Instant,
    /// When any runtime had an answer, in milliseconds since then.
    heard: AtomicU64,
    /// A server had all commands that are needed. Another one says so when it gets the scripts.
    pub(super) permitted: AtomicBool,
}

impl Origin {
    fn new(given: Option<Box<dyn Handle>>, connect: Option<Connect>, sharded: bool) -> Self {
        let (breaker, since, heard) = (Arc::default(), Instant::now(), AtomicU64::new(0));
        let permitted = AtomicBool::new(false);
        Self { given, connect, sharded, breaker, since, heard, permitted }
    }

    pub(crate) fn given(connection: impl Handle) -> Self {
        Self::new(Some(Box::new(connection)), None, false)
    }

    pub(crate) fn connecting<F, R, C>(connect: F) -> Self
    where
        F: Fn() -> R + Send + Sync + 'static,
        R: Future<Output = RedisResult<C>> + Send + 'static,
        C: Handle,
    {
        let connect: Connect = Arc::new(move |asks| {
            let connected = connect();
            Box::pin(async move {
                let mut connection: Box<dyn Handle> = Box::new(connected.await?);
                if asks {
                    // Who lacks the password gets no answer to what is long.
                    rights::bring(&[], &mut *connection).await?;
                    rights::bring(&[&ONE, &MANY], &mut *connection).await?;
                }
                Ok((connection, Shards::one()))
            })
        });
        Self::new(None, Some(connect), false)
    }

    /// The same for a cluster, whose shards fail each by itself.
    #[cfg(feature = "redis-cluster")]
    pub(crate) fn sharded<F, R>(connect: F) -> Self
    where
        F: Fn(bool) -> R + Send + Sync + 'static,
        R: Future<Output = RedisResult<Connected>> + Send + 'static,
    {
        let connect: Connect = Arc::new(move |asks| Box::pin(connect(asks)));
        Self::new(None, Some(connect), true)
    }

    pub(crate) fn now(&self) -> u64 {
        self.since.elapsed().as_millis() as u64
    }

    pub(crate) fn instant(&self, ms: u64) -> Instant {
        self.since + Duration::from_millis(ms)
    }

    pub(crate) fn hear(&self, now: u64) {
        self.heard.store(now, Ordering::Relaxed);
    }

    /// A runtime can't send anything to a part. If another one can, the store has not failed.
    /// Shards answer each by itself.
    pub(crate) fn cut_off(&self, node: u64, lost: u64) {
        if self.sharded || self.heard.load(Ordering::Relaxed) <= lost {
            self.breaker.cut_off(node);
        }
    }
}

/// A connection of any kind. The library's are handles: clones send over the same socket.
pub(crate) trait Handle: ConnectionLike + Send + Sync + 'static {
    fn boxed(&self) -> Box<dyn Handle>;
}

impl<C: ConnectionLike + Clone + Send + Sync + 'static> Handle for C {
    fn boxed(&self) -> Box<dyn Handle> {
        Box::new(self.clone())
    }
}

/// Whether another connection may do better.
pub(super) fn leads_nowhere(error: &RedisError) -> bool {
    error.is_unrecoverable_error() || error.is_io_error() || is_of_replica(error)
}

/// Whether a replica has refused a call, and done nothing.
pub(crate) fn is_of_replica(error: &RedisError) -> bool {
    use ServerErrorKind::{MasterDown, ReadOnly};

    matches!(error.kind(), ErrorKind::Server(ReadOnly | MasterDown))
}

/// Any answer is a sign of life, also that this user may not ask.
pub(crate) async fn is_alive(connection: &mut Box<dyn Handle>, probe: &Cmd) -> bool {
    match connection.req_packed_command(probe).await {
        Ok(_) => true,
        Err(error) => !leads_nowhere(&error),
    }
}

/// On a cluster `PING` would go to all of it.
pub(crate) fn probe(key: Option<&[u8]>) -> Cmd {
    match key {
        None => redis::cmd("PING"),
        Some(key) => {
            let mut cmd = redis::cmd("HMGET");
            cmd.arg(key).arg("0");
            cmd
        }
    }
}

/// What `future` ends with, unless `end` comes first.
pub(crate) async fn first<T>(
    future: impl Future<Output = T>,
    end: impl Future<Output = ()>,
) -> Option<T> {
    let (mut future, mut end) = (pin!(future), pin!(end));
    poll_fn(|cx| {
        if let Poll::Ready(value) = future.as_mut().poll(cx) {
            return Poll::Ready(Some(value));
        }
        end.as_mut().poll(cx).map(|()| None)
    })
    .await
}
