//! A distant server, as its nodes see it: on tokio's paused clock, which only moves while the test
//! waits.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use harness::{Counts, Operation, TokioClock, forward_to_memory, forward_to_remote};
use tokio::time::sleep;
use tower_fixed_window::store::{Adjust, Charge, Remote, Reply, Scope, Store};
use tower_fixed_window::{Clock, Decision, Key, ManualClock, MemoryStore, StoreError};

/// The start of an hour.
pub(crate) const TURN: u64 = 1_700_002_800_000;

type Range = std::ops::RangeInclusive<u64>;

/// The server that all nodes call.
#[derive(Clone)]
pub(crate) struct Server(Arc<Inner>);

/// The server's time, by a clock that can be set back.
#[derive(Clone)]
struct Wall {
    clock: TokioClock,
    behind: Arc<AtomicU64>,
}

impl Clock for Wall {
    fn now_ms(&self) -> u64 {
        self.clock.now_ms() - self.behind.load(Ordering::SeqCst)
    }
}

struct Inner {
    memory: Counts,
    wall: Wall,
    calls: AtomicU64,
    down: AtomicBool,
    /// The ranges of delays on the way there and back, in milliseconds.
    ways: Mutex<(Range, Range, Rng)>,
}

impl Server {
    pub(crate) fn start() -> Self {
        let wall = Wall { clock: TokioClock::at_ms(TURN), behind: Arc::default() };
        Self(Arc::new(Inner {
            memory: Counts::with_clock(wall.clone()),
            wall,
            calls: AtomicU64::new(0),
            down: AtomicBool::new(false),
            ways: Mutex::new((0..=0, 0..=0, Rng::with_seed(1))),
        }))
    }

    /// Sets the ranges of delays for later calls, in milliseconds.
    pub(crate) fn slow(&self, seed: u64, there: Range, back: Range) {
        *self.0.ways.lock().expect("no panic") = (there, back, Rng::with_seed(seed));
    }

    /// Sets the clock back.
    pub(crate) fn step_back(&self, by: Duration) {
        self.0.wall.behind.fetch_add(by.as_millis() as u64, Ordering::SeqCst);
    }

    pub(crate) fn set_down(&self, down: bool) {
        self.0.down.store(down, Ordering::SeqCst);
    }

    /// Calls so far.
    pub(crate) fn calls(&self) -> u64 {
        self.0.calls.load(Ordering::SeqCst)
    }

    /// A process. Its clones share what it remembers.
    pub(crate) fn node(&self) -> Node {
        Node { remote: Remote::around(Way { server: self.clone() }) }
    }

    /// The store itself, without distance, and without counting a call.
    pub(crate) fn memory(&self) -> &Counts {
        &self.0.memory
    }

    fn way(&self) -> (Duration, Duration) {
        let (there, back, rng) = &mut *self.0.ways.lock().expect("no panic");
        let mut way = |range: &Range| Duration::from_millis(rng.u64(range.clone()));
        (way(there), way(back))
    }
}

#[derive(Clone)]
pub(crate) struct Node {
    pub(crate) remote: Remote,
}

forward_to_remote!(Node, self => self.remote);

/// The calls of a process.
struct Way {
    server: Server,
}

impl Way {
    fn forward<T: Send + 'static>(
        &self,
        _: Operation,
        ask: impl FnOnce(&Counts) -> Reply<T> + Send + 'static,
    ) -> Reply<T> {
        let (server, (there, back)) = (self.server.clone(), self.server.way());
        Reply::later(async move {
            pass(there).await;
            if server.0.down.load(Ordering::SeqCst) {
                return Err(StoreError::new("down"));
            }
            server.0.calls.fetch_add(1, Ordering::SeqCst);
            let answer = ask(&server.0.memory).await;
            pass(back).await;
            answer
        })
    }
}

forward_to_memory!(Way, {});

/// A distance of 0 has no timer, since timers end at whole milliseconds.
async fn pass(way: Duration) {
    if !way.is_zero() {
        sleep(way).await;
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
}
