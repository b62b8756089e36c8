//! Where the connections of a store come from, [`Origin`], and a connection of any kind,
//! [`Handle`].

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::aio::ConnectionLike;
use redis::{ErrorKind, RedisError, RedisResult, ServerErrorKind};
use tokio::time::Instant;

use super::shards::{Answering, Shards};
use crate::sync;

pub(crate) type Connected = (Box<dyn Handle>, Shards);
type Connect = Arc<dyn Fn(Arc<Servers>) -> Answering<Connected> + Send + Sync>;

pub(crate) struct Origin {
    pub(super) connect: Connect,
    pub(crate) sharded: bool,
    pub(crate) servers: Arc<Servers>,
    /// Parts that no connection can be had to: usually none, and then nothing is locked.
    cut_off: (AtomicBool, Mutex<HashSet<u64>>),
    since: Instant,
    /// When a runtime last got an answer, in milliseconds after `since`.
    answered_at: AtomicU64,
}

impl Origin {
    pub(crate) fn connecting<F, R, C>(connect: F) -> Self
    where
        F: Fn(Arc<Servers>) -> R + Send + Sync + 'static,
        R: Future<Output = RedisResult<C>> + Send + 'static,
        C: Handle,
    {
        let connect: Connect = Arc::new(move |servers| {
            let connected = connect(servers);
            Box::pin(async move { Ok((Box::new(connected.await?) as _, Shards::single())) })
        });
        Self::new(connect, false)
    }

    #[cfg(feature = "cluster")]
    pub(crate) fn sharded<F, R>(connect: F) -> Self
    where
        F: Fn(Arc<Servers>) -> R + Send + Sync + 'static,
        R: Future<Output = RedisResult<Connected>> + Send + 'static,
    {
        Self::new(Arc::new(move |servers| Box::pin(connect(servers))), true)
    }

    fn new(connect: Connect, sharded: bool) -> Self {
        let (cut_off, since) = (Default::default(), Instant::now());
        let answered_at = AtomicU64::new(0);
        let servers = Arc::default();
        Self { connect, sharded, servers, cut_off, since, answered_at }
    }

    pub(crate) fn now(&self) -> u64 {
        self.since.elapsed().as_millis() as u64
    }

    pub(crate) fn instant(&self, ms: u64) -> Instant {
        self.since + Duration::from_millis(ms)
    }

    pub(crate) fn note_answer(&self, now: u64) {
        self.answered_at.store(now, Ordering::Relaxed);
    }

    /// A runtime can't reach a shard: a failure, unless an answer came after `lost_since`. Then
    /// another runtime can. In a cluster, that answer may be another shard's.
    pub(crate) fn cut_off(&self, node: u64, lost_since: u64) {
        if self.sharded || self.answered_at.load(Ordering::Relaxed) <= lost_since {
            self.change_cut_off(|nodes| _ = nodes.insert(node));
        }
    }

    pub(crate) fn note_connected(&self, node: u64) {
        if self.is_cut_off() {
            self.change_cut_off(|nodes| _ = nodes.remove(&node));
        }
    }

    fn change_cut_off(&self, change: impl FnOnce(&mut HashSet<u64>)) {
        let mut nodes = sync::lock(&self.cut_off.1);
        change(&mut nodes);
        self.cut_off.0.store(!nodes.is_empty(), Ordering::Relaxed);
    }

    /// A part, at least.
    pub(crate) fn is_cut_off(&self) -> bool {
        self.cut_off.0.load(Ordering::Relaxed)
    }

    pub(crate) fn is_node_cut_off(&self, node: u64) -> bool {
        sync::lock(&self.cut_off.1).contains(&node)
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

/// For the log: host and port of each shard that is known. Any store but a cluster has one, 0.
#[derive(Default)]
pub(crate) struct Servers(Mutex<HashMap<u64, Arc<str>>>);

impl Servers {
    pub(crate) fn set_only(&self, server: Option<String>) {
        self.set_all(server.map(|server| (0, server)));
    }

    pub(crate) fn set_all(&self, servers: impl IntoIterator<Item = (u64, String)>) {
        let servers = servers.into_iter().map(|(node, server)| (node, server.into()));
        *sync::lock(&self.0) = servers.collect();
    }

    pub(crate) fn of(&self, node: u64) -> Option<Arc<str>> {
        sync::lock(&self.0).get(&node).cloned()
    }
}
