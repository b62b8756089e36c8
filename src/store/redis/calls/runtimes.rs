//! The runtimes that call a store. Each has a connection of its own, and calls of its own in
//! flight: what becomes of one runtime is nothing to the others.

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
    /// What each has.
    homes: Mutex<HashMap<Id, Arc<Gather>>>,
}

impl Runtimes {
    /// Connects at once, if there is a runtime.
    pub(crate) fn new(source: Origin) -> Arc<Self> {
        let this = Arc::new(Self { source: Arc::new(source), homes: Mutex::default() });
        let _ = this.here();
        this
    }

    /// What the current runtime has.
    pub(crate) fn here(self: &Arc<Self>) -> Result<Arc<Gather>, StoreError> {
        let outside = |_| StoreError::new("Redis is called outside of a tokio runtime");
        let runtime = Handle::try_current().map_err(outside)?;
        let (mut homes, id) = (self.homes(), runtime.id());
        if let Some(home) = homes.get(&id) {
            return Ok(Arc::clone(home));
        }
        let home = Arc::new(Gather::new(Link::new(&self.source), runtime.clone()));
        homes.insert(id, Arc::clone(&home));
        drop(homes);
        let of = Arc::downgrade(self);
        let leave = AtEnd(move || {
            if let Some(of) = of.upgrade() {
                of.homes().remove(&id);
            }
        });
        let end = home.link.wait_for_end();
        // Also dropped when its runtime ends.
        runtime.spawn(async move {
            end.await;
            drop(leave);
        });
        Ok(home)
    }

    pub(crate) fn breaker(&self) -> &Arc<Breaker> {
        &self.source.breaker
    }

    /// What fails together with this key.
    pub(crate) fn domain(&self, key: impl FnOnce() -> String) -> u64 {
        if !self.source.sharded {
            return 0;
        }
        let homes = self.homes();
        let here = Handle::try_current().ok().and_then(|runtime| homes.get(&runtime.id()));
        let home = here.or_else(|| homes.values().next());
        home.map_or(0, |home| home.link.for_key(key().as_bytes()).fault_domain())
    }

    fn homes(&self) -> MutexGuard<'_, HashMap<Id, Arc<Gather>>> {
        self.homes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
