//! The runtimes that call a store. Each has a connection of its own, and calls of its own in
//! flight: what becomes of one runtime is nothing to the others.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::runtime::{Handle, Id};

use super::super::link::Link;
use super::super::link::Source;
use super::failure::runtime;
use super::gather::Gather;
use crate::store::error::StoreError;
use crate::store::remote::Breaker;

/// Clones share it.
#[derive(Clone)]
pub(crate) struct Runtimes(Arc<Shared>);

struct Shared {
    source: Arc<Source>,
    homes: Mutex<HashMap<Id, Home>>,
}

/// What a runtime has.
#[derive(Clone)]
pub(crate) struct Home {
    pub(crate) link: Link,
    pub(crate) gather: Gather,
}

impl Runtimes {
    /// Connects at once, if there is a runtime.
    pub(crate) fn new(source: Source) -> Self {
        let (source, homes) = (Arc::new(source), Mutex::default());
        let this = Self(Arc::new(Shared { source, homes }));
        let _ = this.here();
        this
    }

    /// What the current runtime has.
    pub(crate) fn here(&self) -> Result<Home, StoreError> {
        let runtime = runtime()?;
        let mut homes = self.0.homes();
        if let Some(home) = homes.get(&runtime.id()) {
            return Ok(home.clone());
        }
        let link = Link::new(&self.0.source);
        let home = Home { gather: Gather::new(link.clone(), runtime.clone()), link };
        homes.insert(runtime.id(), home.clone());
        drop(homes);
        let tenant = Tenant { of: Arc::downgrade(&self.0), runtime: runtime.id() };
        let end = home.link.end();
        runtime.spawn(async move {
            end.await;
            drop(tenant);
        });
        Ok(home)
    }

    pub(crate) fn breaker(&self) -> &Breaker {
        &self.0.source.breaker
    }

    /// What fails together with this key.
    pub(crate) fn domain(&self, key: impl FnOnce() -> String) -> u64 {
        if !self.0.source.sharded {
            return 0;
        }
        let homes = self.0.homes();
        let here = Handle::try_current().ok().and_then(|runtime| homes.get(&runtime.id()));
        let home = here.or_else(|| homes.values().next());
        home.map_or(0, |home| home.link.domain(key))
    }
}

impl Shared {
    fn homes(&self) -> MutexGuard<'_, HashMap<Id, Home>> {
        self.homes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Leaves its home when its runtime ends.
struct Tenant {
    of: Weak<Shared>,
    runtime: Id,
}

impl Drop for Tenant {
    fn drop(&mut self) {
        if let Some(of) = self.of.upgrade() {
            of.homes().remove(&self.runtime);
        }
    }
}
