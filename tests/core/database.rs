//! A third party's store elsewhere, on tokio's clock.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use harness::TokioClock;
use tokio::time::sleep;
use tower_fixed_window::store::{Account, Adjust, Charge, Reply, Scope, State, Store};
use tower_fixed_window::{Clock, Decision, Key, Quota, StoreError};

use crate::simulated_server::TURN;

type Id = (String, Key, String);

fn id(account: &Account<'_>, quota: &Quota) -> Id {
    (account.scope.name().to_owned(), account.key.clone(), quota.counter())
}

/// A database that can charge several limits in one step, or in turns only; then each scope is on a
/// shard of its own.
#[derive(Clone)]
pub(crate) struct Database(Arc<Inner>);

struct Inner {
    clock: TokioClock,
    states: Mutex<HashMap<Id, State>>,
    calls: AtomicU64,
    in_turns: AtomicBool,
    there: AtomicU64,
    back: AtomicU64,
    down: Mutex<HashSet<String>>,
}

impl Database {
    pub(crate) fn start() -> Self {
        Self(Arc::new(Inner {
            clock: TokioClock::at_ms(TURN),
            states: Mutex::default(),
            calls: AtomicU64::new(0),
            in_turns: AtomicBool::new(false),
            there: AtomicU64::new(0),
            back: AtomicU64::new(0),
            down: Mutex::default(),
        }))
    }

    pub(crate) fn in_turns() -> Self {
        let this = Self::start();
        this.0.in_turns.store(true, Ordering::SeqCst);
        this
    }

    /// Sets the delays of later calls, in milliseconds.
    pub(crate) fn slow(&self, there: u64, back: u64) {
        self.0.there.store(there, Ordering::SeqCst);
        self.0.back.store(back, Ordering::SeqCst);
    }

    /// Lets the calls of a scope fail, or no longer.
    pub(crate) fn fail(&self, scope: &str, fails: bool) {
        let mut down = self.0.down.lock().expect("no panic");
        if fails {
            down.insert(scope.to_owned())
        } else {
            down.remove(scope)
        };
    }

    pub(crate) fn calls(&self) -> u64 {
        self.0.calls.load(Ordering::SeqCst)
    }

    fn later<T: Send + 'static>(
        &self,
        scopes: Vec<String>,
        ask: impl FnOnce(&mut HashMap<Id, State>, u64) -> T + Send + 'static,
    ) -> Reply<T> {
        let this = self.clone();
        let (there, back) =
            (self.0.there.load(Ordering::SeqCst), self.0.back.load(Ordering::SeqCst));
        Reply::later(async move {
            if there > 0 {
                sleep(Duration::from_millis(there)).await;
            }
            this.0.calls.fetch_add(1, Ordering::SeqCst);
            if scopes.iter().any(|scope| this.0.down.lock().expect("no panic").contains(scope)) {
                return Err(StoreError::new("down"));
            }
            let answer = ask(&mut this.0.states.lock().expect("no panic"), this.0.clock.now_ms());
            if back > 0 {
                sleep(Duration::from_millis(back)).await;
            }
            Ok(answer)
        })
    }
}

impl Store for Database {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        let scopes = charge.lines().map(|(of, _)| of.scope.name().to_owned()).collect();
        let charge = charge.to_owned();
        self.later(scopes, move |states, now| {
            let load =
                |account: &Account<'_>, quota: &Quota| states.get(&id(account, quota)).copied();
            let (decision, writes) = charge.as_charge().decide(now, load);
            let writes = writes.into_iter().map(|(of, quota, state)| (id(&of, quota), state));
            states.extend(writes.collect::<Vec<_>>());
            decision
        })
    }

    fn charges_together(&self) -> bool {
        !self.0.in_turns.load(Ordering::SeqCst)
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        let scopes = vec![adjust.account.scope.name().to_owned()];
        let adjust = adjust.to_owned();
        self.later(scopes, move |states, now| {
            let adjust = adjust.as_adjust();
            let id = |quota: &Quota| id(&adjust.account, quota);
            let writes = adjust.apply(now, |quota| states.get(&id(quota)).copied());
            let writes = writes.into_iter().map(|(quota, state)| (id(quota), state));
            states.extend(writes.collect::<Vec<_>>());
        })
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        let (scope, key) = (scope.name().to_owned(), key.clone());
        self.later(vec![scope.clone()], move |states, _| {
            states.retain(|(of, id, _), _| (of, id) != (&scope, &key));
        })
    }

    fn fault_domain(&self, scope: &Scope, _: &Key) -> u64 {
        let in_turns = self.0.in_turns.load(Ordering::SeqCst);
        let hash = |all: u64, byte: u8| all.wrapping_mul(31).wrapping_add(byte.into());
        if in_turns { scope.name().bytes().fold(1, hash) } else { 0 }
    }

    fn now_ms(&self) -> u64 {
        self.0.clock.now_ms()
    }
}
