//! The stores of `tests/sim`, whose connections lead to a simulated network.

use std::future::Future;

use redis::RedisResult;
use redis::cluster_async::{ClusterConnection, Connect};

use super::connect::{cluster, sentinel};
use super::link::Origin;
use super::*;

impl RedisStore {
    /// Creates a store for a cluster, as [`RedisStore::cluster`] does. `open` has how long to wait
    /// for a connection, if not as long as the app has set, and for each answer.
    pub fn cluster_opened_by<F, R, C>(open: F) -> Self
    where
        F: Fn(Option<Duration>, Duration) -> R + Send + Sync + 'static,
        R: Future<Output = RedisResult<ClusterConnection<C>>> + Send + 'static,
        C: ConnectionLike + Connect + Clone + Send + Sync + Unpin + 'static,
    {
        let (open, servers) = (Arc::new(open), Arc::<Servers>::default());
        let of = Arc::clone(&servers);
        let connect = move |asks| {
            let open = Arc::clone(&open);
            let open = move |connecting, answering| open(connecting, answering);
            cluster::connect(open, asks, Arc::clone(&of))
        };
        Self::from_origin(Origin::sharded(connect).with_servers(servers)).one_by_one()
    }

    /// Creates a store for the master that Sentinels name, as [`RedisStore::sentinel`] does. `open`
    /// asks the Sentinel of a number, and connects to its master.
    pub fn sentinels_asked_by<F, R, C>(sentinels: usize, open: F) -> Self
    where
        F: Fn(usize) -> R + Send + Sync + 'static,
        R: Future<Output = RedisResult<C>> + Send + 'static,
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        Self::from_origin(Origin::connecting(move || {
            let masters: Vec<_> = (0..sentinels).map(&open).collect();
            sentinel::connect(masters)
        }))
    }
}
