//! What makes a limit of a quota: [`IntoLimit`].

use http::request::Parts;

use super::Limiter;
use crate::limit::{Limit, NearLimit};
use crate::store::Store;

/// The options of a [`Limit`] on a [`Quota`](crate::Quota) and on [`Quotas`](crate::Quotas), where
/// `name`, `key` and `key_fn` are without this trait.
///
/// ```
/// use tower_fixed_window::{FixedWindowLayer, IntoLimit, MemoryStore, Quota};
///
/// let watched = FixedWindowLayer::new(Quota::per_minute(60).shadow());
/// let jobs = Quota::per_hour(9).and(Quota::per_day(99)).store(MemoryStore::new());
/// # let _ = (watched, jobs);
/// ```
pub trait IntoLimit: Into<Limit> {
    /// Makes a limit of this cost: [`Limit::cost_fn`].
    fn cost_fn<F>(self, cost: F) -> Limit
    where
        F: Fn(&Parts) -> u64 + Send + Sync + 'static,
    {
        self.into().cost_fn(cost)
    }

    /// Makes a limit with true costs: [`Limit::settled`].
    fn settled(self) -> Limit {
        self.into().settled()
    }

    /// Makes a limit that refuses nothing: [`Limit::shadow`].
    fn shadow(self) -> Limit {
        self.into().shadow()
    }

    /// Makes a limit that warns: [`Limit::warn_at`].
    #[track_caller]
    fn warn_at<F>(self, percent: u8, warn: F) -> Limit
    where
        F: Fn(&NearLimit<'_>) + Send + Sync + 'static,
    {
        self.into().warn_at(percent, warn)
    }

    /// Makes a limit that counts which keys it refuses: [`Limit::track_refused`].
    fn track_refused(self, keys: usize) -> Limit {
        self.into().track_refused(keys)
    }

    /// The same, and by route: [`Limit::track_refused_by`].
    fn track_refused_by<F>(self, keys: usize, route: F) -> Limit
    where
        F: Fn(&Parts) -> Option<&str> + Send + Sync + 'static,
    {
        self.into().track_refused_by(keys, route)
    }

    /// Makes a limit that counts in this store: [`Limit::store`].
    #[track_caller]
    fn store(self, store: impl Store) -> Limiter {
        self.into().store(store)
    }
}

impl<T: Into<Limit>> IntoLimit for T {}
