//! What more than one of the test binaries needs.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::time::Instant;
use tower_fixed_window::store::{Account, Adjust, Charge, Reply, Scope, State, Store};
use tower_fixed_window::{Clock, Decision, Key, Quota};

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

/// Counts in a map, as a store elsewhere could: its decisions carry the states that it keeps. All
/// scopes have a name.
#[derive(Clone)]
pub(crate) struct Counts {
    clock: Arc<dyn Clock>,
    states: Arc<Mutex<Map>>,
}

impl Counts {
    pub(crate) fn with_clock(clock: impl Clock) -> Self {
        Self { clock: Arc::new(clock), states: Arc::default() }
    }

    fn of(&self, account: &Account<'_>) -> (MutexGuard<'_, Map>, (String, Key)) {
        (self.lock(), (account.scope().name().to_owned(), account.key().clone()))
    }

    fn lock(&self) -> MutexGuard<'_, Map> {
        self.states.lock().expect("no panic")
    }
}

impl Store for Counts {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        let (mut all, id) = self.of(&charge.account());
        let states = all.entry(id).or_default();
        let (decision, writes) = charge.decide(self.clock.now_ms(), |quota| get(states, quota));
        put(states, writes);
        Reply::now(decision)
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        let (mut all, id) = self.of(&adjust.account());
        let states = all.entry(id).or_default();
        put(states, adjust.apply(self.clock.now_ms(), |quota| get(states, quota)));
        Reply::now(())
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        self.lock().remove(&(scope.name().to_owned(), key.clone()));
        Reply::now(())
    }

    fn is_shared(&self) -> bool {
        false
    }

    fn now_ms(&self) -> u64 {
        self.clock.now_ms()
    }
}

type Map = HashMap<(String, Key), HashMap<String, State>>;

fn get(states: &HashMap<String, State>, quota: &Quota) -> Option<State> {
    states.get(&quota.counter().to_string()).copied()
}

fn put(states: &mut HashMap<String, State>, writes: Vec<(&Quota, State)>) {
    states.extend(writes.into_iter().map(|(quota, state)| (quota.counter().to_string(), state)));
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

/// Implements `Store` by a field that is a `Remote`, with two of its settings.
macro_rules! forward_to_remote {
    ($store:ty, $this:ident => $to:expr) => {
        impl $store {
            #[allow(dead_code)]
            pub(crate) fn on_failure(self, policy: tower_fixed_window::OnStoreFailure) -> Self {
                Self { remote: self.remote.on_failure(policy), ..self }
            }

            #[allow(dead_code)]
            pub(crate) fn leases(self, max: u64) -> Self {
                Self { remote: self.remote.leases(max), ..self }
            }

            #[allow(dead_code)]
            pub(crate) fn revalidate_refusals(self) -> Self {
                Self { remote: self.remote.revalidate_refusals(), ..self }
            }
        }

        impl tower_fixed_window::Store for $store {
            fn charge(
                &$this,
                charge: tower_fixed_window::store::Charge<'_>,
            ) -> tower_fixed_window::store::Reply<tower_fixed_window::Decision> {
                $to.charge(charge)
            }

            fn adjust(
                &$this,
                adjust: tower_fixed_window::store::Adjust<'_>,
            ) -> tower_fixed_window::store::Reply<()> {
                $to.adjust(adjust)
            }

            fn reset(
                &$this,
                scope: &tower_fixed_window::store::Scope,
                key: &tower_fixed_window::Key,
            ) -> tower_fixed_window::store::Reply<()> {
                $to.reset(scope, key)
            }

            fn is_shared(&$this) -> bool {
                $to.is_shared()
            }

            fn answers_within(&$this) -> Option<std::time::Duration> {
                $to.answers_within()
            }

            fn now_ms(&$this) -> u64 {
                $to.now_ms()
            }

            fn stand_in(
                &$this,
                charge: tower_fixed_window::store::Charge<'_>,
                error: tower_fixed_window::StoreError,
            ) -> tower_fixed_window::store::Reply<tower_fixed_window::Decision> {
                $to.stand_in(charge, error)
            }
        }
    };
}

pub(crate) use forward_to_remote;
