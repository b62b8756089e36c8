//! The runtimes that call a store: [`Runtimes`]. Each has a connection of its own, and calls of its
//! own in flight, so that the end of a runtime does not affect the others.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::runtime::{Handle, Id};

use super::super::link::{Link, Origin};
use super::gather::Gather;
use crate::store::error::StoreError;
use crate::store::remote::Breaker;
use crate::sync::AtEnd;

pub(crate) struct Runtimes {
    source: Arc<Origin>,
    /// The connection and the calls of each runtime.
    gathers: Mutex<HashMap<Id, Arc<Gather>>>,
}

impl Runtimes {
    /// Connects at once if called in a runtime.
    pub(crate) fn new(source: Origin) -> Arc<Self> {
        let this = Arc::new(Self { source: Arc::new(source), gathers: Mutex::default() });
        let _ = this.current_gather();
        this
    }

    /// Returns the connection and the calls of the current runtime. The first call connects.
    pub(crate) fn current_gather(self: &Arc<Self>) -> Result<Arc<Gather>, StoreError> {
        let outside = |_| StoreError::new("Redis is called outside of a tokio runtime").unsent();
        let runtime = Handle::try_current().map_err(outside)?;
        let (mut gathers, id) = (self.gathers(), runtime.id());
        if let Some(gather) = gathers.get(&id) {
            return Ok(Arc::clone(gather));
        }
        let gather = Arc::new(Gather::new(Link::new(&self.source), runtime.clone()));
        gathers.insert(id, Arc::clone(&gather));
        drop(gathers);
        let of = Arc::downgrade(self);
        let leave = AtEnd(move || {
            if let Some(of) = of.upgrade() {
                of.gathers().remove(&id);
            }
        });
        let end = gather.link.wait_for_end();
        // The task is also dropped when its runtime ends.
        runtime.spawn(async move {
            end.await;
            drop(leave);
        });
        Ok(gather)
    }

    pub(crate) fn breaker(&self) -> &Arc<Breaker> {
        &self.source.breaker
    }

    /// Returns the number of the shard that has a key.
    pub(crate) fn fault_domain(&self, key: impl FnOnce() -> String) -> u64 {
        if !self.source.sharded {
            return 0;
        }
        let gathers = self.gathers();
        let here = Handle::try_current().ok().and_then(|runtime| gathers.get(&runtime.id()));
        let gather = here.or_else(|| gathers.values().next());
        gather.map_or(0, |gather| gather.link.for_key(key().as_bytes()).fault_domain())
    }

    /// Returns the name of a shard's server, if it is known.
    pub(crate) fn server_of(&self, domain: u64) -> Option<Arc<str>> {
        self.source.servers.of(domain)
    }

    fn gathers(&self) -> MutexGuard<'_, HashMap<Id, Arc<Gather>>> {
        self.gathers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
