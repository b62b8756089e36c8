//! Where the counters live, and what happens while they can't be reached.

use super::FixedWindowLayer;
use crate::store::{OnStoreFailure, Store};

impl<J> FixedWindowLayer<J> {
    /// Where the counters live; in memory by default, in a store of the layer's own.
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
    pub fn store(mut self, store: impl Store) -> Self {
        self.assert_uncontrolled();
        self.limiter = self.limiter.store_named_later(store);
        self.fork();
        self
    }

    /// Makes a [reset](Control::reset) by another process be seen within a second.
    ///
    /// A refusal by a remote store is remembered until it ends, so that refused clients cause no
    /// traffic to the store. What this process resets or refunds is seen at once, and so is a raised
    /// limit; what another one does, when the refusal ends. With this the store is asked again after
    /// a second, as it is anyhow where requests may give back what they took
    /// ([`count_if`](Self::count_if), [`refund_dropped`](Self::refund_dropped),
    /// [`settle_true_cost`](Self::settle_true_cost), [`queue`](Self::queue)).
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

    /// Lets this process take up to `max` tokens of a busy key at once from a remote store, and
    /// spend them by itself: a hot key then costs a call for many requests instead of one for each.
    /// Off unless set; 0 and 1 are off.
    ///
    /// Never more than the limit passes, whatever happens to nodes or store: tokens are taken from
    /// the shared count before they are spent, and what is left of them ends with the window. What it
    /// costs is that the last tokens may lie on a node that does not need them, so that others refuse
    /// a little early. A lease is at most a 16th of what is left, and at most the key's heat, which
    /// starts at 1, doubles while leases are spent within a hundredth of the window, and halves when
    /// they are not; what is not spent within a 16th of the window is given back. So `n` nodes refuse
    /// at most `(n - 1) * (min(max, limit / 16) - 1)` requests too many in a window. `used`, as
    /// responses say it, has leased tokens in it.
    ///
    /// Leases are for layers of a single quota of at least 32 tokens, without rollover and without a
    /// [`queue`](Self::queue); elsewhere this changes nothing. Requests of cost 1 take them, and
    /// larger ones are paid from them where they suffice. A reset by another process does not reach
    /// the tokens leased here.
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
    pub fn leases(mut self, max: u64) -> Self {
        self.assert_uncontrolled();
        self.limiter = self.limiter.leases(max);
        self
    }

    /// What happens to requests while the store fails: by default the same quotas are enforced in
    /// this process's memory.
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
    pub fn on_store_failure(mut self, policy: OnStoreFailure) -> Self {
        self.assert_uncontrolled();
        self.options.on_store_failure = policy;
        self
    }
}
