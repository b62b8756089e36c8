//! State that all services of a layer share: [`Shared`], and per-thread copies of it in [`Lanes`].

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::available_parallelism;

use super::options::Options;
use super::settings::Settings;
use super::twice::Watch;
use crate::limits::Limits;
use crate::queue::Queue;

pub(crate) struct Shared<J> {
    pub(crate) limits: Limits,
    pub(crate) options: Options,
    /// The queue in which requests wait, if the layer has one.
    pub(crate) queue: Option<Arc<Queue>>,
    pub(crate) reject: Arc<J>,
    pub(crate) watch: Watch,
}

/// The layer's state and the quotas in force. A request holds one `Arc` of it.
pub(crate) struct Current<J> {
    pub(crate) shared: Arc<Shared<J>>,
    /// The settings of the first limit.
    pub(crate) settings: Settings,
    /// The settings of the other limits.
    others: Box<[Settings]>,
}

impl<J> Current<J> {
    #[cold]
    pub(crate) fn new(shared: &Arc<Shared<J>>) -> Arc<Self> {
        let mut all = shared.limits.iter().map(|limiter| Settings::new(limiter, &shared.options));
        Arc::new(Self {
            settings: all.next().expect("a layer has a limit"),
            others: all.collect(),
            shared: Arc::clone(shared),
        })
    }

    /// Returns the number of limits.
    #[inline]
    pub(crate) fn count(&self) -> usize {
        1 + self.others.len()
    }

    /// Returns the settings of the limit with this index.
    pub(crate) fn settings_of(&self, limit: usize) -> &Settings {
        match limit {
            0 => &self.settings,
            other => &self.others[other - 1],
        }
    }

    /// Returns whether no limit's quotas have changed since this was made, and none of its changes
    /// ends by itself.
    #[inline]
    fn is_current(&self) -> bool {
        self.settings.are_current() && self.others.iter().all(Settings::are_current)
    }

    /// Ends changes whose time is over, and returns whether no limit's quotas have changed.
    pub(crate) fn is_current_now(&self) -> bool {
        self.settings.are_current_now() && self.others.iter().all(Settings::are_current_now)
    }
}

/// A [`Current`] for each thread that can run at a time. Requests on different threads share no
/// memory that they write, such as reference counts and prepared header values.
pub(crate) struct Lanes<J> {
    shared: Arc<Shared<J>>,
    lanes: Box<[Lane<J>]>,
}

/// A thread's copy, on cache lines of its own.
#[repr(align(128))]
struct Lane<J> {
    /// The first settings, read without a lock. Most layers never change them.
    first: OnceLock<Arc<Current<J>>>,
    /// The settings after a change of quotas.
    changed: Mutex<Option<Arc<Current<J>>>>,
}

impl<J> Lane<J> {
    #[cold]
    fn renew(&self, shared: &Arc<Shared<J>>) -> Arc<Current<J>> {
        let first = self.first.get_or_init(|| Current::new(shared));
        if first.is_current_now() {
            return Arc::clone(first);
        }
        let mut changed = self.changed.lock().unwrap_or_else(PoisonError::into_inner);
        match &*changed {
            Some(current) if current.is_current_now() => Arc::clone(current),
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

    /// Returns the settings in force.
    #[inline]
    pub(crate) fn current(&self) -> Arc<Current<J>> {
        let lane = &self.lanes[number_of_thread() & (self.lanes.len() - 1)];
        match lane.first.get() {
            Some(current) if current.is_current() => Arc::clone(current),
            _ => lane.renew(&self.shared),
        }
    }
}

/// Returns how many threads can run at a time, as a power of two.
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
