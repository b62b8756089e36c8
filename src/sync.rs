//! Locks, atomics and timers. A model of the memory store has shuttle's lock and atomics. Tests
//! pause the clock of tokio's timers; without the feature `tokio` nothing waits.

use std::sync::{PoisonError, TryLockError};
use std::task::{Context, Poll};
#[cfg(feature = "tokio")]
use std::{cell::Cell, future::Future, panic::catch_unwind, pin::Pin};

#[cfg(feature = "tokio")]
use tokio::runtime::{Handle, Id};

#[cfg(not(tfw_shuttle))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic};

#[cfg(tfw_shuttle)]
pub(crate) use shuttle::sync::{Mutex, MutexGuard, atomic};

#[cfg(not(feature = "tokio"))]
pub(crate) use std::time::Instant;
#[cfg(feature = "tokio")]
pub(crate) use tokio::time::Instant;

/// Under these locks, only a clock of the app can panic. The counters are valid then.
#[inline(always)]
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    match try_lock(mutex) {
        Some(guard) => guard,
        None => wait_for(mutex),
    }
}

/// `None`: another thread has the lock.
#[inline(always)]
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Waits longer from try to try before it sleeps: threads that use one key take the lock many times
/// in a row, and its memory then moves between their cores less often.
#[cold]
fn wait_for<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A model has no use for tries that fail.
    let pauses = if cfg!(tfw_shuttle) { &[][..] } else { &[4, 8, 16, 32, 64, 128, 256] };
    for &pauses in pauses {
        (0..pauses).for_each(|_| std::hint::spin_loop());
        if let Some(guard) = try_lock(mutex) {
            return guard;
        }
    }
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number that nothing else in this process has. An address may be another one's later.
pub(crate) fn unique_number() -> u64 {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

pub(crate) struct AtEnd<F: Fn()>(pub(crate) F);

impl<F: Fn()> Drop for AtEnd<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Decisions that tests hold up: `testing::hold_up_decisions`.
#[cfg(feature = "testing")]
pub(crate) mod held_up {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::thread;
    use std::time::Duration;

    pub(crate) static GUARDS: AtomicU64 = AtomicU64::new(0);

    pub(crate) fn wait() {
        static DECISIONS: AtomicU64 = AtomicU64::new(0);

        let some = || DECISIONS.fetch_add(1, Ordering::Relaxed).is_multiple_of(5);
        if GUARDS.load(Ordering::Relaxed) > 0 && some() {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Returns `f`, to be called in the runtime of this thread from a thread that has none.
pub(crate) fn in_this_runtime<T>(f: impl FnOnce(&T)) -> impl FnOnce(&T) {
    #[cfg(feature = "tokio")]
    let runtime = Handle::try_current().ok();
    move |of| {
        #[cfg(feature = "tokio")]
        let missing = runtime.as_ref().filter(|_| Handle::try_current().is_err());
        #[cfg(feature = "tokio")]
        let _entered = missing.map(Handle::enter);
        f(of);
    }
}

pub(crate) struct Sleep(#[cfg(feature = "tokio")] Pin<Box<tokio::time::Sleep>>);

#[cfg_attr(not(feature = "tokio"), allow(unused))]
impl Sleep {
    /// Returns `None` outside of a runtime, and in one without timers.
    pub(crate) fn until(instant: Instant) -> Option<Self> {
        #[cfg(feature = "tokio")]
        {
            thread_local! {
                static WITHOUT_TIMERS: Cell<Option<Id>> = const { Cell::new(None) };
            }
            let runtime = Handle::try_current().ok()?.id();
            if WITHOUT_TIMERS.get() == Some(runtime) {
                return None;
            }
            // Without timers tokio panics, and its message has the line to write. There is no way
            // to ask before.
            let sleep = catch_unwind(|| Self(Box::pin(tokio::time::sleep_until(instant)))).ok();
            if sleep.is_none() {
                WITHOUT_TIMERS.set(Some(runtime));
            }
            sleep
        }
        #[cfg(not(feature = "tokio"))]
        None
    }

    pub(crate) fn set(&mut self, until: Instant) {
        #[cfg(feature = "tokio")]
        if self.0.deadline() != until {
            self.0.as_mut().reset(until);
        }
    }

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        #[cfg(feature = "tokio")]
        return self.0.as_mut().poll(cx);
        #[cfg(not(feature = "tokio"))]
        Poll::Pending
    }
}
