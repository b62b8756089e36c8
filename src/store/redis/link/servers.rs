//! The names of a store's servers, for the log: [`Servers`].

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The server of each shard that is known, as host and port. Any other store has one shard, 0.
#[derive(Default)]
pub(crate) struct Servers(Mutex<HashMap<u64, Arc<str>>>);

impl Servers {
    /// Notes the server of a store that is no cluster.
    pub(crate) fn set_only(&self, server: Option<String>) {
        self.set_all(server.map(|server| (0, server)));
    }

    pub(crate) fn set_all(&self, servers: impl IntoIterator<Item = (u64, String)>) {
        *self.lock() = servers.into_iter().map(|(node, server)| (node, server.into())).collect();
    }

    pub(crate) fn of(&self, node: u64) -> Option<Arc<str>> {
        self.lock().get(&node).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<str>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
