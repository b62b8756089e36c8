//! The lock that the memory store is built on, replaced by shuttle's when a model of it is run.

#[cfg(not(shuttle))]
pub(crate) use std::sync::{Mutex, MutexGuard};

#[cfg(shuttle)]
pub(crate) use shuttle::sync::{Mutex, MutexGuard};
