//! Limiters are made of limits.

use std::sync::{Arc, OnceLock};

use super::live::{Live, UNKNOWN};
use super::{Limiter, UNNAMED, likely_mistakes};
use crate::limit::Limit;
use crate::quota::Quotas;
use crate::store::{AnyStore, MemoryStore, Store};

impl Limiter {
    /// Creates a limiter that counts in memory, in a store of its own. [`Limit::store`] creates one
    /// that counts elsewhere.
    pub fn new(limit: impl Into<Limit>) -> Self {
        limit.into().into()
    }

    pub(crate) fn in_store(limit: Limit, store: AnyStore) -> Self {
        likely_mistakes::note_zero(&limit);
        Self::made(limit, store)
    }

    fn made(limit: Limit, store: AnyStore) -> Self {
        if limit.cost.is_some() || limit.settled {
            limit.scope.observe().has_costs();
        }
        let is_plan = limit.plan.is_some();
        let live = Live::new(limit);
        Self {
            scope: live.limit().scope.clone(),
            quotas: live.limit().quotas,
            generation: if is_plan { UNKNOWN } else { live.first_generation() },
            store,
            live: Arc::new(live),
            refuser: OnceLock::new(),
        }
    }

    /// The same limit in another store. It is no longer changed with this one.
    pub(crate) fn moved_to(&self, store: AnyStore) -> Self {
        let (quotas, shadow) = self.live.usual();
        let limit = Limit { quotas, shadow, ..self.live.limit().clone() };
        Self::made(limit, store)
    }

    /// Returns a limiter for the same counters under other quotas, such as those of a customer's
    /// plan.
    ///
    /// ```
    /// use tower_fixed_window::{Limiter, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let free = Limiter::new(Quota::per_hour(60).name("api"));
    /// let pro = free.with_quotas(Quota::per_hour(5_000));
    /// assert!(free.check("alice").await?.allowed());
    /// // It is the same counter: the limit is no part of its identity.
    /// assert_eq!(pro.peek("alice").await?.remaining(), 4_999);
    /// // Another window is another counter.
    /// assert_eq!(free.with_quotas(Quota::per_day(9)).peek("alice").await?.used(), 0);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn with_quotas(&self, quotas: impl Into<Quotas>) -> Self {
        let quotas = quotas.into();
        let live = self.live.with_quotas(quotas);
        let generation = live.first_generation();
        let refuser = OnceLock::from(None);
        Self { quotas, generation, live: Arc::new(live), refuser, ..self.clone() }
    }
}

impl Limit {
    /// Counts in this store. What happens while it fails says a handle of the store itself, such as
    /// [`RedisStore::on_failure`]: by default, this process enforces the same quotas in its memory.
    ///
    /// ```no_run
    /// # #[cfg(feature = "redis")]
    /// use tower_fixed_window::{FixedWindowLayer, OnStoreFailure, Quota, RedisStore};
    ///
    /// # #[cfg(not(feature = "redis"))] fn main() {}
    /// # #[cfg(feature = "redis")]
    /// # fn main() -> Result<(), tower_fixed_window::StoreError> {
    /// let store = RedisStore::new("redis://127.0.0.1/")?.on_failure(OnStoreFailure::Deny);
    /// let codes = Quota::per_hour(5).name("codes").store(store.clone());
    /// let login = FixedWindowLayer::new(Quota::per_minute(5).name("login").store(store));
    /// # let _ = (codes, login); Ok(()) }
    /// ```
    ///
    /// # Panics
    /// If the store is shared ([`Store::is_shared`]) and the limit has no name.
    ///
    /// [`RedisStore::on_failure`]: crate::store::Remote::on_failure
    #[track_caller]
    pub fn store(self, store: impl Store) -> Limiter {
        let id = likely_mistakes::identity(&store);
        let limiter = Limiter::in_store(self, AnyStore::new(store));
        assert!(limiter.can_be_found(), "{UNNAMED}");
        likely_mistakes::note_name(id, limiter.live());
        limiter
    }
}

impl From<Limit> for Limiter {
    fn from(limit: Limit) -> Self {
        likely_mistakes::note_own_store(&limit);
        Self::in_store(limit, AnyStore::new(MemoryStore::new()))
    }
}
