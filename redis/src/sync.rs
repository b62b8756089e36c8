//! Locks and guards.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Under these locks nothing panics.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) struct AtEnd<F: Fn()>(pub(crate) F);

impl<F: Fn()> Drop for AtEnd<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
