//! Stores whose connections the simulation opens: a part of `RedisStore`.

use super::*;

impl RedisStore {
    /// `open` connects to a node.
    pub fn cluster_opened_by<F, R, C>(seeds: Vec<String>, open: F) -> Self
    where
        F: Fn(String) -> R + Send + Sync + 'static,
        R: Future<Output = RedisResult<C>> + Send + 'static,
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        let open = Arc::new(open);
        let connect = move |address: &str| {
            let (open, address) = (Arc::clone(&open), address.to_owned());
            Origin::connecting(move |_| open(address.clone()))
        };
        Self::from_calls(Calls::new(Servers::cluster(seeds, connect))).one_by_one()
    }

    /// `open` asks the Sentinel of a number, and connects to its master.
    pub fn sentinels_asked_by<F, R, C>(sentinels: usize, open: F) -> Self
    where
        F: Fn(usize) -> R + Send + Sync + 'static,
        R: Future<Output = RedisResult<C>> + Send + 'static,
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        Self::connecting(move || {
            first_success((0..sentinels).map(&open).collect::<Vec<_>>(), NO_SENTINEL.into())
        })
    }
}
