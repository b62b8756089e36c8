//! Where the connections to a server come from, [`Origin`], and a connection of any kind, [`Handle`].

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::aio::ConnectionLike;
use redis::{ErrorKind, RedisError, RedisResult, ServerErrorKind};
use tokio::time::Instant;

use crate::sync;

pub(crate) type Answering<T> = Pin<Box<dyn Future<Output = RedisResult<T>> + Send>>;

/// Common to all runtimes.
pub(crate) struct Origin {
    /// The number of this part of the store.
    pub(crate) number: u64,
    connect: Box<dyn Fn(Name) -> Answering<Box<dyn Handle>> + Send + Sync>,
    pub(crate) name: Name,
    since: Instant,
}

/// Host and port of a server, as far as they are known: for the log, and to tell a cluster's nodes apart.
#[derive(Clone, Default)]
pub(crate) struct Name(Arc<Mutex<Option<Arc<str>>>>);

impl Name {
    pub(crate) fn get(&self) -> Option<Arc<str>> {
        sync::lock(&self.0).clone()
    }

    pub(crate) fn set(&self, name: Option<String>) {
        *sync::lock(&self.0) = name.map(Arc::from);
    }
}

impl Origin {
    pub(crate) fn connecting<F, R, C>(connect: F) -> Self
    where
        F: Fn(Name) -> R + Send + Sync + 'static,
        R: Future<Output = RedisResult<C>> + Send + 'static,
        C: Handle,
    {
        let connect = move |name| -> Answering<Box<dyn Handle>> {
            let connected = connect(name);
            Box::pin(async move { Ok(Box::new(connected.await?) as _) })
        };
        Self { number: 0, connect: Box::new(connect), name: Name::default(), since: Instant::now() }
    }

    pub(crate) fn connect(&self) -> Answering<Box<dyn Handle>> {
        (self.connect)(self.name.clone())
    }

    /// From 1 on: 0 is never.
    pub(super) fn now(&self) -> u64 {
        1 + self.since.elapsed().as_millis() as u64
    }

    pub(super) fn instant(&self, ms: u64) -> Instant {
        self.since + Duration::from_millis(ms.saturating_sub(1))
    }
}

/// Clones of the library's connections send over the same socket.
pub(crate) trait Handle: ConnectionLike + Send + Sync + 'static {
    fn boxed(&self) -> Box<dyn Handle>;
}

impl<C: ConnectionLike + Clone + Send + Sync + 'static> Handle for C {
    fn boxed(&self) -> Box<dyn Handle> {
        Box::new(self.clone())
    }
}

pub(super) fn needs_replacement(error: &RedisError) -> bool {
    error.is_unrecoverable_error() || error.is_io_error() || is_from_replica(error)
}

/// The replica has done nothing then.
pub(crate) fn is_from_replica(error: &RedisError) -> bool {
    use ServerErrorKind::{MasterDown, ReadOnly};

    matches!(error.kind(), ErrorKind::Server(ReadOnly | MasterDown))
}
