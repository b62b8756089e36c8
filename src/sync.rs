//! The lock and the atomics of the memory store, replaced by shuttle's when a model of it is run.

use std::sync::{PoisonError, TryLockError};

#[cfg(not(tfw_shuttle))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic};

#[cfg(tfw_shuttle)]
pub(crate) use shuttle::sync::{Mutex, MutexGuard, atomic};

/// Locks a mutex under which nothing panics. If something did, the counters would still be valid.
#[inline(always)]
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    match mutex.try_lock() {
        Ok(guard) => guard,
        Err(_) => wait_for(mutex),
    }
}

/// Waits longer from try to try before the thread sleeps: threads that use one key take the lock
/// many times in a row each, and its memory moves between their cores less often.
#[cold]
#[inline(never)]
fn wait_for<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A model has no use for tries that fail.
    let pauses = if cfg!(tfw_shuttle) { &[][..] } else { &[4, 8, 16, 32, 64, 128, 256] };
    for &pauses in pauses {
        (0..pauses).for_each(|_| std::hint::spin_loop());
        match mutex.try_lock() {
            Ok(guard) => return guard,
            Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {}
        }
    }
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls a closure when it is dropped.
pub(crate) struct AtEnd<F: Fn()>(pub(crate) F);

impl<F: Fn()> Drop for AtEnd<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
