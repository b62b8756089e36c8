//! A store elsewhere, as others write it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use tower_fixed_window::store::{Account, Adjust, Charge, Reply, Scope, State, Store};
use tower_fixed_window::{Clock, Decision, Key, Quota};

/// Counts in a map, as a store elsewhere could: its decisions carry the states that it keeps. All
/// scopes have a name.
#[derive(Clone)]
pub struct Counts {
    clock: Arc<dyn Clock>,
    states: Arc<Mutex<Map>>,
}

impl Counts {
    pub fn with_clock(clock: impl Clock) -> Self {
        Self { clock: Arc::new(clock), states: Arc::default() }
    }

    fn locked(&self, account: &Account<'_>) -> (MutexGuard<'_, Map>, (String, Key)) {
        (self.lock(), (account.scope.name().to_owned(), account.key.clone()))
    }

    fn lock(&self) -> MutexGuard<'_, Map> {
        self.states.lock().expect("no panic")
    }
}

impl Store for Counts {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        let (mut all, id) = self.locked(&charge.lines().next().expect("a line").0);
        let states = all.entry(id).or_default();
        let (decision, writes) = charge.decide(self.clock.now_ms(), |_, quota| get(states, quota));
        put(states, writes.into_iter().map(|(_, quota, state)| (quota, state)));
        Reply::now(decision)
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        let (mut all, id) = self.locked(&adjust.account);
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
    states.get(&quota.counter()).copied()
}

fn put<'a>(
    states: &mut HashMap<String, State>,
    writes: impl IntoIterator<Item = (&'a Quota, State)>,
) {
    states.extend(writes.into_iter().map(|(quota, state)| (quota.counter(), state)));
}
