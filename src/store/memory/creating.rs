//! An empty store.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::super::charged_quotas::NotedScopes;
use super::super::sharded::{Sharded, shares};
use super::time::Time;
use super::{Memory, MemoryStore};
use crate::clock::Clock;
use crate::quota::SavedWindows;
use crate::sync::unique_number;

impl MemoryStore {
    /// Creates a store for up to a million entries, which takes [at most 37 MB](Self#memory).
    pub fn new() -> Self {
        Self::with_max_keys(1_000_000)
    }

    /// Creates a store for up to `max_keys` entries. A key takes one entry for each of its quotas.
    ///
    /// # Panics
    /// If `max_keys` is 0.
    #[track_caller]
    #[doc(alias = "with_capacity")]
    pub fn with_max_keys(max_keys: usize) -> Self {
        assert!(
            max_keys > 0,
            "a store of no keys can't count: write MemoryStore::with_max_keys(100_000)"
        );
        let (shards, buckets) = shares(max_keys);
        Self::around(Memory {
            shards: Sharded::new(shards),
            buckets,
            charged: NotedScopes::default().into(),
            windows: SavedWindows::default(),
            time: Time::system(),
            max_keys,
            number: unique_number(),
            quiet_until: AtomicU64::new(0),
            #[cfg(feature = "saved")]
            error_if_broken: false,
        })
    }

    /// Reads the time from another clock, for tests: [`ManualClock`](crate::ManualClock) has an
    /// example. Counts stay.
    ///
    /// # Panics
    /// If the store was already cloned, because the clones would have another time. If it has a
    /// file: set the clock first.
    #[must_use]
    #[track_caller]
    pub fn clock(mut self, clock: impl Clock) -> Self {
        let memory = Arc::get_mut(&mut self.memory);
        let memory = memory.expect("a store's clock is set before the store is cloned or saved");
        memory.time = Time::Other(Box::new(clock));
        self
    }

    pub(super) fn around(memory: Memory) -> Self {
        Self {
            memory: Arc::new(memory),
            #[cfg(feature = "saved")]
            saver: None,
        }
    }
}
