//! What all services of a layer have in common.

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::available_parallelism;

use super::live::{Live, Settings};
use super::options::Options;
use super::twice::Watch;
use crate::limiter::Limiter;
use crate::line::Queue;

pub(crate) struct Shared<J> {
    pub(crate) limiter: Limiter,
    pub(crate) options: Options,
    pub(crate) live: Arc<Live>,
    /// Where requests may wait.
    pub(crate) queue: Option<Arc<Queue>>,
    pub(crate) reject: Arc<J>,
    pub(crate) watch: Watch,
}

/// What a request holds of its layer, by a single count.
pub(crate) struct Current<J> {
    pub(crate) shared: Arc<Shared<J>>,
    pub(crate) settings: Settings,
}

impl<J> Current<J> {
    #[cold]
    pub(crate) fn new(shared: &Arc<Shared<J>>) -> Arc<Self> {
        let name = shared.limiter.scope().name();
        let settings = shared.live.settings(name, &shared.options);
        Arc::new(Self { shared: Arc::clone(shared), settings })
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
struct Lane<J>(Mutex<Option<Arc<Current<J>>>>);

impl<J> Lanes<J> {
    pub(crate) fn new(shared: Shared<J>) -> Self {
        let lane = || Lane(Mutex::new(None));
        Self { shared: Arc::new(shared), lanes: (0..threads()).map(|_| lane()).collect() }
    }

    pub(crate) fn shared(&self) -> &Shared<J> {
        &self.shared
    }

    /// The settings in force.
    #[inline]
    pub(crate) fn current(&self) -> Arc<Current<J>> {
        let Lane(lane) = &self.lanes[number_of_thread() & (self.lanes.len() - 1)];
        let mut lane = lane.lock().unwrap_or_else(PoisonError::into_inner);
        match &*lane {
            Some(current) if self.shared.live.is_current(&current.settings) => Arc::clone(current),
            _ => Arc::clone(lane.insert(Current::new(&self.shared))),
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
