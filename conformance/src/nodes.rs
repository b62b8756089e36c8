//! Two handles of the same counters, as two nodes have: [`Nodes`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tower_fixed_window::store::{Adjust, Charge, Remote, Reply, Scope};
use tower_fixed_window::{Decision, Key, ManualClock, Store};

/// As a store: each call is made by one of the two handles, in an order without a period, so that
/// no pattern of calls keeps to one of them.
pub(super) struct Nodes<S> {
    handles: [Arc<S>; 2],
    calls: AtomicU64,
}

impl<S: Store> Nodes<S> {
    pub(super) fn new(new: &impl Fn(ManualClock) -> [S; 2], clock: ManualClock) -> Self {
        Self { handles: new(clock).map(Arc::new), calls: AtomicU64::new(0) }
    }

    /// The handle of a thread of a race.
    pub(super) fn handle(&self, thread: u64) -> Arc<S> {
        Arc::clone(&self.handles[thread as usize % 2])
    }

    fn next(&self) -> &S {
        // The sequence of Thue and Morse.
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        &self.handles[call.count_ones() as usize % 2]
    }
}

impl<S: Store> Store for Nodes<S> {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        self.next().charge(charge)
    }

    fn charges_together(&self) -> bool {
        self.handles[0].charges_together()
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        self.next().adjust(adjust)
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        self.next().reset(scope, key)
    }

    fn is_shared(&self) -> bool {
        self.handles[0].is_shared()
    }

    fn fault_domain(&self, scope: &Scope, key: &Key) -> u64 {
        self.handles[0].fault_domain(scope, key)
    }

    fn remote(&self) -> Option<Remote> {
        self.handles[0].remote()
    }
}
