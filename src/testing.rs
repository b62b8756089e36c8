//! Tests of limits and of stores.
//!
//! [`ask`] sends one request through a layer. [`conformance`] checks a [`Store`] of your own.
//! [`replay`], which is part of that, runs traces in the format of `vectors.json`.
//!
//! ```
//! use tower_fixed_window::MemoryStore;
//! use tower_fixed_window::testing::{block_on, conformance};
//!
//! conformance(MemoryStore::with_clock, |job| block_on(job));
//! ```

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use crate::clock::ManualClock;
use crate::store::Store;

mod ask;
mod contract;
mod races;
mod replay;

pub use ask::{Hello, ask, ask_around};
pub use replay::{Failure, Report, replay};

/// The shared traces, each with the expected answer of every step.
pub const VECTORS: &str = include_str!("testing/vectors.json");

/// A future that the store's runtime runs.
pub type Job<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// Checks a store against the contract of [`Store`]: the arithmetic on all shared traces, atomic
/// steps under concurrency, the identity of counters, and their life.
///
/// `new` creates an empty store that reads the given clock. `block_on` waits for a future on the
/// current thread: [`block_on`] of this module, or a runtime's.
///
/// # Panics
/// If the store breaks the contract, with a message that says how.
pub fn conformance<S: Store>(
    new: impl Fn(ManualClock) -> S + Send + Sync,
    block_on: impl Fn(Job<'_>) + Send + Sync,
) {
    let report = Mutex::new(None);
    block_on(Box::pin(async {
        let replayed = replay(VECTORS, &new).await.expect("the shared traces are well-formed");
        *report.lock().expect("no panic") = Some(replayed);
    }));
    let report = report.into_inner().expect("no panic").expect("block_on waits");
    assert!(report.failures.is_empty(), "{report}");
    block_on(Box::pin(contract::check(&new)));
    races::exact(&new, &block_on);
    races::all_or_nothing(&new, &block_on);
    races::refunds_once(&new, &block_on);
}

/// Waits for a future on this thread, which sleeps meanwhile. For stores that need no runtime.
pub fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}
