//! A distant server, as its nodes see it: on tokio's paused clock, which only moves while the test
//! waits.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use harness::TokioClock;
use tokio::time::sleep;
use tower_fixed_window::store::{Account, Adjust, Charge, Remote, Reply, Scope, State, Store};
use tower_fixed_window::{
    Clock, Decision, Key, ManualClock, MemoryStore, Quota, StoreError, SystemClock,
};

use crate::pairs::Down;

/// The start of an hour.
pub(crate) const TURN: u64 = 1_700_002_800_000;

/// A third party's store that all nodes call. It can charge several limits in one step, or in turns
/// only; then each scope is on a shard of its own.
#[derive(Clone)]
pub(crate) struct Server(Arc<Inner>);

struct Inner {
    clock: TokioClock,
    /// By how many milliseconds it was set.
    stepped: AtomicI64,
    states: Mutex<HashMap<Id, State>>,
    calls: AtomicU64,
    in_turns: bool,
    /// The delays on the way there and back, in milliseconds.
    ways: Mutex<[u64; 2]>,
    /// The scopes whose calls fail.
    down: Mutex<HashSet<String>>,
}

type Id = (String, Key, String);

fn id(account: &Account<'_>, quota: &Quota) -> Id {
    (account.scope.name().to_owned(), account.key.clone(), quota.counter())
}

impl Server {
    pub(crate) fn start() -> Self {
        Self::new(false)
    }

    pub(crate) fn in_turns() -> Self {
        Self::new(true)
    }

    fn new(in_turns: bool) -> Self {
        Self(Arc::new(Inner {
            clock: TokioClock::at_ms(TURN),
            stepped: AtomicI64::new(0),
            states: Mutex::default(),
            calls: AtomicU64::new(0),
            in_turns,
            ways: Mutex::default(),
            down: Mutex::default(),
        }))
    }

    /// A process. Its clones share what it remembers.
    pub(crate) fn node(&self) -> Remote {
        Remote::around(self.clone())
    }

    /// Sets the delays of later calls, in milliseconds.
    pub(crate) fn slow(&self, there: u64, back: u64) {
        *self.0.ways.lock().expect("no panic") = [there, back];
    }

    /// Sets the clock forward, or back.
    pub(crate) fn step(&self, ms: i64) {
        self.0.stepped.fetch_add(ms, Ordering::SeqCst);
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

    /// Calls so far.
    pub(crate) fn calls(&self) -> u64 {
        self.0.calls.load(Ordering::SeqCst)
    }

    /// Decides without distance, and without counting a call.
    pub(crate) fn decide(&self, charge: Charge<'_>) -> Decision {
        let mut states = self.0.states.lock().expect("no panic");
        let load = |account: &Account<'_>, quota: &Quota| states.get(&id(account, quota)).copied();
        let (decision, writes) = charge.decide(self.now_ms(), load);
        let writes = writes.into_iter().map(|(of, quota, state)| (id(&of, quota), state));
        states.extend(writes.collect::<Vec<_>>());
        decision
    }

    fn call<T: Send + 'static>(
        &self,
        scopes: Vec<String>,
        ask: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> Reply<T> {
        let (this, [there, back]) = (self.clone(), *self.0.ways.lock().expect("no panic"));
        Reply::later(async move {
            pass(there).await;
            this.0.calls.fetch_add(1, Ordering::SeqCst);
            if scopes.iter().any(|scope| this.0.down.lock().expect("no panic").contains(scope)) {
                return Err(StoreError::new("down"));
            }
            let answer = ask(&this);
            pass(back).await;
            Ok(answer)
        })
    }
}

/// A distance of 0 has no timer, since timers end at whole milliseconds.
async fn pass(way: u64) {
    if way > 0 {
        sleep(Duration::from_millis(way)).await;
    }
}

impl Store for Server {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        let scopes = charge.lines().map(|(of, _)| of.scope.name().to_owned()).collect();
        let charge = charge.to_owned();
        self.call(scopes, move |this| this.decide(charge.as_charge()))
    }

    fn charges_together(&self) -> bool {
        !self.0.in_turns
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        let scopes = vec![adjust.account.scope.name().to_owned()];
        let adjust = adjust.to_owned();
        self.call(scopes, move |this| {
            let (adjust, mut states) =
                (adjust.as_adjust(), this.0.states.lock().expect("no panic"));
            let id = |quota: &Quota| id(&adjust.account, quota);
            let writes = adjust.apply(this.now_ms(), |quota| states.get(&id(quota)).copied());
            states.extend(writes.into_iter().map(|(quota, state)| (id(quota), state)));
        })
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        let (scope, key) = (scope.name().to_owned(), key.clone());
        self.call(vec![scope.clone()], move |this| {
            let mut states = this.0.states.lock().expect("no panic");
            states.retain(|(of, id, _), _| (of, id) != (&scope, &key));
        })
    }

    fn fault_domain(&self, scope: &Scope, _: &Key) -> u64 {
        let hash = |all: u64, byte: u8| all.wrapping_mul(31).wrapping_add(byte.into());
        if self.0.in_turns { scope.name().bytes().fold(1, hash) } else { 0 }
    }

    fn now_ms(&self) -> u64 {
        self.0.clock.now_ms().saturating_add_signed(self.0.stepped.load(Ordering::SeqCst))
    }
}

struct Around(Remote);

impl Store for Around {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        self.0.charge(charge)
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        self.0.adjust(adjust)
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        self.0.reset(scope, key)
    }

    fn remote(&self) -> Option<Remote> {
        Some(self.0.clone())
    }
}

/// The other functions of a store have defaults.
#[test]
fn a_store_around_a_remote_is_shared_named_and_timed_as_it_is() {
    let remote = Remote::around(MemoryStore::new().clock(ManualClock::at_ms(7)));
    let around = Around(remote.clone());
    assert_eq!((around.is_shared(), around.charges_together()), (false, true));
    assert_eq!((around.identity(), around.now_ms()), (remote.identity(), 7));
    // Temporary changes end by the system's clock, unless the store has another one.
    assert!(Down.now_ms().abs_diff(SystemClock.now_ms()) < 60_000);
}
