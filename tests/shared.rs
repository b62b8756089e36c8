//! What more than one of the test binaries needs.

use tokio::time::Instant;
use tower_fixed_window::Clock;

/// A wall clock that moves with tokio's: in a test that pauses tokio's, only while all tasks wait.
#[derive(Clone, Copy)]
pub(crate) struct TokioClock {
    start: Instant,
    start_ms: u64,
}

impl TokioClock {
    /// It is this time now.
    pub(crate) fn at_ms(start_ms: u64) -> Self {
        Self { start: Instant::now(), start_ms }
    }
}

impl Clock for TokioClock {
    fn now_ms(&self) -> u64 {
        self.start_ms + self.start.elapsed().as_millis() as u64
    }
}

/// What is asked of a store.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Operation {
    Charge,
    Adjust,
    Reset,
}

/// Implements `Store` by a method `forward(&self, operation, ask)`, which calls `ask` with a store in
/// memory: later, somewhere else, or not at all.
macro_rules! forward_to_memory {
    ($store:ty, { $($more:item)* }) => {
        impl tower_fixed_window::Store for $store {
            fn charge(
                &self,
                charge: tower_fixed_window::store::Charge<'_>,
            ) -> tower_fixed_window::store::Reply<tower_fixed_window::Decision> {
                let charge = charge.to_owned();
                self.forward(crate::shared::Operation::Charge, move |memory| {
                    memory.charge(charge.as_charge())
                })
            }

            fn adjust(
                &self,
                adjust: tower_fixed_window::store::Adjust<'_>,
            ) -> tower_fixed_window::store::Reply<()> {
                let adjust = adjust.to_owned();
                self.forward(crate::shared::Operation::Adjust, move |memory| {
                    memory.adjust(adjust.as_adjust())
                })
            }

            fn reset(
                &self,
                scope: &tower_fixed_window::store::Scope,
                key: &tower_fixed_window::Key,
            ) -> tower_fixed_window::store::Reply<()> {
                let (scope, key) = (scope.clone(), key.clone());
                self.forward(crate::shared::Operation::Reset, move |memory| {
                    memory.reset(&scope, &key)
                })
            }

            $($more)*
        }
    };
}

pub(crate) use forward_to_memory;
