//! The lock that the memory store is built on, replaced by shuttle's when a model of it is run.

#[cfg(not(tfw_shuttle))]
pub(crate) use std::sync::{Mutex, MutexGuard};

#[cfg(tfw_shuttle)]
pub(crate) use shuttle::sync::{Mutex, MutexGuard};

/// Calls a closure when it is dropped.
pub(crate) struct AtEnd<F: Fn()>(pub(crate) F);

impl<F: Fn()> Drop for AtEnd<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
