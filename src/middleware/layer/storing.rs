//! Where the counters live, and what happens if the store fails.

use super::FixedWindowLayer;
use crate::store::{OnStoreFailure, Store};

impl<J> FixedWindowLayer<J> {
    /// Sets the store of the counters. The default is a [`MemoryStore`](crate::MemoryStore) of the
    /// layer's own.
    ///
    /// ```
    /// use std::time::Duration;
    /// use http::Request;
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, ManualClock, MemoryStore, Quota};
    ///
    /// let clock = ManualClock::at_ms(1_700_000_040_000);
    /// let layer = FixedWindowLayer::new(Quota::per_minute(1))
    ///     .key(global())
    ///     .store(MemoryStore::with_clock(clock.clone()));
    ///
    /// assert_eq!(ask(&layer, Request::get("/")).status(), 200);
    /// assert_eq!(ask(&layer, Request::get("/")).status(), 429);
    /// clock.advance(Duration::from_secs(60));
    /// assert_eq!(ask(&layer, Request::get("/")).status(), 200);
    /// ```
    ///
    /// # Panics
    /// After [`control`](Self::control).
    #[track_caller]
    pub fn store(mut self, store: impl Store) -> Self {
        self.assert_uncontrolled();
        self.limiter = self.limiter.store_named_later(store);
        self.fork();
        self
    }

    /// Makes [resets](crate::Control::reset) by another process effective within a second.
    ///
    /// A node remembers a refusal by a remote store until its window ends, so that refused clients
    /// cause no calls. Resets and refunds of this process, and raised limits, take effect at once;
    /// a reset by another process takes effect when the refusal ends. With this option, the node
    /// asks the store again after a second, for all layers of this name. It does so anyway if
    /// requests may be refunded
    /// ([`count_if`](Self::count_if), [`refund_dropped`](Self::refund_dropped),
    /// [`settle_true_cost`](Self::settle_true_cost), `queue`).
    ///
    /// ```no_run
    /// # #[cfg(feature = "redis")]
    /// use tower_fixed_window::{FixedWindowLayer, Quota, RedisStore};
    ///
    /// # #[cfg(not(feature = "redis"))] fn main() {}
    /// # #[cfg(feature = "redis")]
    /// # fn main() -> Result<(), tower_fixed_window::StoreError> {
    /// let store = RedisStore::new("redis://127.0.0.1/")?;
    /// let login =
    ///     FixedWindowLayer::new(Quota::per_hour(5)).name("login").store(store).revalidate_refusals();
    /// # let _ = login; Ok(()) }
    /// ```
    pub fn revalidate_refusals(mut self) -> Self {
        self.limiter = self.limiter.revalidate_refusals();
        self
    }

    /// Lets this process take up to `max` tokens of a busy key from a remote store with one call,
    /// and spend them in memory. By default there are no leases; 0 and 1 also mean none.
    ///
    /// Never more than the limit passes, whatever happens to nodes or the store: a node takes
    /// tokens from the shared count before it spends them, and unspent tokens end with the window.
    /// The cost is that another node may hold the last tokens, so that nodes refuse slightly early.
    /// A lease is at most a 16th of the tokens left, and at most the key's heat. Heat starts at 1,
    /// doubles if a lease is spent within a hundredth of the window (at most 10 s), and halves
    /// otherwise. Tokens unused for a 16th of the window, or for 10 s if that is shorter, are
    /// returned, and at a shutdown all of them. So `n` nodes refuse at most `(n - 1) * (min(max,
    /// limit / 16) - 1)` requests too many in a window. `used` in responses includes leased tokens.
    ///
    /// Leases need a single quota of at least 32 tokens, without rollover and without a
    /// [`queue`](Self::queue); otherwise this has no effect. Requests of cost 1 take leases;
    /// requests with a higher cost use leased tokens if they suffice. A reset by another process
    /// does not revoke leased tokens.
    ///
    /// ```no_run
    /// # #[cfg(feature = "redis")]
    /// use tower_fixed_window::{FixedWindowLayer, Quota, RedisStore};
    ///
    /// # #[cfg(not(feature = "redis"))] fn main() {}
    /// # #[cfg(feature = "redis")]
    /// # fn main() -> Result<(), tower_fixed_window::StoreError> {
    /// let store = RedisStore::new("redis://127.0.0.1/")?;
    /// let api = FixedWindowLayer::new(Quota::per_minute(60_000)).name("api").store(store).leases(100);
    /// # let _ = api; Ok(()) }
    /// ```
    ///
    /// # Panics
    /// After [`control`](Self::control).
    #[cfg(feature = "tokio")]
    #[track_caller]
    pub fn leases(mut self, max: u64) -> Self {
        self.assert_uncontrolled();
        self.limiter = self.limiter.leases(max);
        self
    }

    /// Sets the policy for requests while the store fails. By default, this process enforces the
    /// same quotas in its memory.
    ///
    /// ```
    /// use http::Request;
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::store::{Adjust, Charge, Remote, Reply, Scope, Store};
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{Decision, FixedWindowLayer, Key, OnStoreFailure, Quota, StoreError};
    ///
    /// struct Down(Remote);
    ///
    /// impl Store for Down {
    ///     fn charge(&self, _: Charge<'_>) -> Reply<Decision> { Reply::failed(StoreError::new("down")) }
    ///     fn adjust(&self, _: Adjust<'_>) -> Reply<()> { Reply::failed(StoreError::new("down")) }
    ///     fn reset(&self, _: &Scope, _: &Key) -> Reply<()> { Reply::failed(StoreError::new("down")) }
    ///     fn remote(&self) -> Option<&Remote> { Some(&self.0) }
    /// }
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(60))
    ///     .name("api")
    ///     .key(global())
    ///     .store(Down(Remote::new()))
    ///     .on_store_failure(OnStoreFailure::Deny);
    ///
    /// assert_eq!(ask(&layer, Request::get("/")).status(), 503);
    /// ```
    ///
    /// # Panics
    /// After [`control`](Self::control).
    #[track_caller]
    pub fn on_store_failure(mut self, policy: OnStoreFailure) -> Self {
        self.assert_uncontrolled();
        self.options.on_store_failure = policy;
        self
    }
}
