//! What all services of a layer have in common.

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::available_parallelism;

use super::options::Options;
use super::settings::Settings;
use super::twice::Watch;
use crate::limit::Limit;
use crate::limiter::Limiter;
use crate::limits::Limits;
use crate::line::Queue;

pub(crate) struct Shared<J> {
    /// Of the only limit, or the first one.
    pub(crate) limiter: Limiter,
    pub(crate) limit: Limit,
    /// All limits, where there are several.
    pub(crate) several: Option<Limits>,
    /// Whether tokens may come back, whatever limit they are of.
    pub(crate) refunds: bool,
    pub(crate) options: Options,
    /// Where requests may wait.
    pub(crate) queue: Option<Arc<Queue>>,
    pub(crate) reject: Arc<J>,
    pub(crate) watch: Watch,
}

/// What a request holds of its layer, by a single count.
pub(crate) struct Current<J> {
    pub(crate) shared: Arc<Shared<J>>,
    /// Of the only limit, or the first one.
    pub(crate) settings: Settings,
    /// Of the other limits.
    others: Box<[Settings]>,
}

impl<J> Current<J> {
    #[cold]
    pub(crate) fn new(shared: &Arc<Shared<J>>) -> Arc<Self> {
        let settings = |limiter| Settings::new(limiter, &shared.options);
        let others = shared.several.iter().flat_map(|limits| &limits.limiters()[1..]).map(settings);
        Arc::new(Self {
            settings: settings(&shared.limiter),
            others: others.collect(),
            shared: Arc::clone(shared),
        })
    }

    /// The settings of one of several limits.
    pub(crate) fn settings_of(&self, limit: usize) -> &Settings {
        match limit {
            0 => &self.settings,
            other => &self.others[other - 1],
        }
    }

    /// Whether no quotas have changed since.
    #[inline]
    pub(crate) fn is_current(&self, shared: &Shared<J>) -> bool {
        self.settings.are_current(&shared.limiter)
            && (self.others.is_empty() || self.others_are_current())
    }

    fn others_are_current(&self) -> bool {
        let Some(limits) = &self.shared.several else { return true };
        let others = self.others.iter().zip(&limits.limiters()[1..]);
        others.into_iter().all(|(settings, limiter)| settings.are_current(limiter))
    }
}

/// A copy of the settings for each thread that can run at a time: requests of different threads
/// write no memory that they share, neither counts of references nor prepared values.
pub(crate) struct Lanes<J> {
    shared: Arc<Shared<J>>,
    lanes: Box<[Lane<J>]>,
}

/// On cache lines of its own.
#[repr(align(128))]
struct Lane<J> {
    /// The first settings, which most layers keep: they are read without a lock.
    first: OnceLock<Arc<Current<J>>>,
    /// Those after a change.
    changed: Mutex<Option<Arc<Current<J>>>>,
}

impl<J> Lane<J> {
    #[cold]
    fn renew(&self, shared: &Arc<Shared<J>>) -> Arc<Current<J>> {
        let first = self.first.get_or_init(|| Current::new(shared));
        if first.is_current(shared) {
            return Arc::clone(first);
        }
        let mut changed = self.changed.lock().unwrap_or_else(PoisonError::into_inner);
        match &*changed {
            Some(current) if current.is_current(shared) => Arc::clone(current),
            _ => Arc::clone(changed.insert(Current::new(shared))),
        }
    }
}

impl<J> Lanes<J> {
    pub(crate) fn new(shared: Shared<J>) -> Self {
        let lane = || Lane { first: OnceLock::new(), changed: Mutex::new(None) };
        Self { shared: Arc::new(shared), lanes: (0..threads()).map(|_| lane()).collect() }
    }

    pub(crate) fn shared(&self) -> &Shared<J> {
        &self.shared
    }

    /// The settings in force.
    #[inline]
    pub(crate) fn current(&self) -> Arc<Current<J>> {
        let lane = &self.lanes[number_of_thread() & (self.lanes.len() - 1)];
        match lane.first.get() {
            Some(current) if current.is_current(&self.shared) => Arc::clone(current),
            _ => lane.renew(&self.shared),
        }
    }
}

/// How many threads can run at a time: a power of two.
fn threads() -> usize {
    const MOST: usize = 64;
    static THREADS: OnceLock<usize> = OnceLock::new();

    *THREADS.get_or_init(|| {
        available_parallelism().map_or(1, NonZero::get).next_power_of_two().min(MOST)
    })
}

#[inline]
fn number_of_thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static NUMBER: usize = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    NUMBER.with(|number| *number)
}
