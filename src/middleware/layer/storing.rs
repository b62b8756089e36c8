//! Where the counters live.

use super::FixedWindowLayer;
use crate::store::Store;

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
}
