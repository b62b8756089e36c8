//! What can be changed of a limit at run time.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::refused::Tracker;
use crate::limit::Limit;
use crate::quota::Quotas;

/// The generation of a handle whose quotas differ between requests.
pub(super) const UNKNOWN: u64 = u64::MAX;
/// A mark of a handle's generation: its decisions are [watched](Live::is_watched).
pub(super) const WATCHED: u64 = 1 << 62;

/// A limit as it was built, and what was changed of it since: shared by all clones of its limiter,
/// and by all layers and services that count by it.
pub(crate) struct Live {
    limit: Limit,
    /// Increases with each change of the quotas.
    generation: AtomicU64,
    /// The quotas in place of those it was built with.
    changed: Mutex<Option<Box<Quotas>>>,
    shadow: AtomicBool,
    tracker: Option<Arc<Tracker>>,
}

impl Live {
    pub(super) fn new(limit: Limit) -> Self {
        Self {
            generation: AtomicU64::new(0),
            changed: Mutex::default(),
            shadow: AtomicBool::new(limit.shadow),
            tracker: limit.tracked.as_ref().map(|tracked| Arc::new(Tracker::new(tracked))),
            limit,
        }
    }

    /// The same limit under other quotas.
    pub(super) fn with_quotas(&self, quotas: Quotas) -> Self {
        let limit = Limit { quotas, plan: None, tracked: None, ..self.limit.clone() };
        Self { tracker: self.tracker.clone(), ..Self::new(limit) }
    }

    /// The generation of a handle with the quotas that the limit was built with.
    pub(super) fn first_generation(&self) -> u64 {
        if self.is_watched() { WATCHED } else { 0 }
    }

    /// Whether more is made of its decisions than a report.
    pub(crate) fn is_watched(&self) -> bool {
        self.tracker.is_some()
    }

    /// Counts its refusals, if that is wanted.
    #[inline]
    pub(crate) fn tracker(&self) -> Option<&Tracker> {
        self.tracker.as_deref()
    }

    pub(crate) fn limit(&self) -> &Limit {
        &self.limit
    }

    pub(crate) fn quotas(&self) -> Quotas {
        let changed = self.changed.lock().unwrap_or_else(PoisonError::into_inner);
        changed.as_deref().copied().unwrap_or(self.limit.quotas)
    }

    pub(super) fn set_quotas(&self, quotas: Quotas) {
        if self.limit.plan.is_some() {
            return;
        }
        let mut changed = self.changed.lock().unwrap_or_else(PoisonError::into_inner);
        *changed = Some(Box::new(quotas));
        // Under the lock: a reader that sees the new generation reads the new quotas.
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Increases with each change of the quotas.
    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    #[inline]
    pub(crate) fn is_shadow(&self) -> bool {
        self.shadow.load(Ordering::Relaxed)
    }

    pub(super) fn set_shadow(&self, shadow: bool) {
        self.shadow.store(shadow, Ordering::Relaxed);
    }
}
