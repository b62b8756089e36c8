//! Random operations on layers, on the front of a store and on the store, with clients that
//! disconnect, services that panic and costs that come later: no more passes than the limit, and no
//! token is lost where a refund was promised.
//!
//! A round is a window. Requests begin in its first half, and before it ends the store's counts are
//! compared with what they should be. A million operations with `FULL_SIZE=1`, from another seed each
//! time (a minute or two).

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::Future;
use std::panic;
use std::pin::Pin;
use std::sync::{Arc, Mutex, Once};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response, StatusCode};
use tokio::task::JoinSet;
use tokio::time::{Instant, Sleep, sleep, sleep_until, timeout};
use tower::{Layer, Service, ServiceExt};
use tower_fixed_window::key::extension;
use tower_fixed_window::{
    Decision, FixedWindow, FixedWindowLayer, Key, Limit, Limiter, Quota, TrueCost,
};

use crate::support::{FarStore, MINUTE_MS};

const OPS: u64 = 5_000;
const FULL_SIZE: u64 = 1_000_000;
/// Operations that begin in a window, over all keys.
const ROUND: u64 = 600;
const LIMIT: u64 = 40;
const RESERVED: u64 = 30;
const WINDOW: Duration = Duration::from_secs(60);
const KEYS: [u64; 3] = [1, 2, 3];

/// The scopes: each has a count of its own for each key.
const AT_ONCE: &str = "at-once";
const QUEUED: &str = "queued";
const LATE: &str = "late";

/// The expected counts, by scope, key and window.
#[derive(Clone, Default)]
struct Ledger(Arc<Mutex<BTreeMap<Account, Count>>>);

type Account = (&'static str, u64, u64);

#[derive(Clone, Copy, Default, Debug)]
struct Count {
    /// Tokens that were granted, without those that were promised back.
    granted: i64,
    /// Tokens that were used on top of that (S15).
    debt: i64,
    /// Requests that reached the service, without those whose tokens were promised back.
    passed: i64,
}

impl Ledger {
    fn change(&self, account: Account, change: impl FnOnce(&mut Count)) {
        let mut ledger = self.0.lock().unwrap();
        let count = ledger.entry(account).or_default();
        change(count);
        assert!(count.passed <= LIMIT as i64, "more than the limit: {account:?}, {count:?}");
    }

    fn get(&self, account: Account) -> Count {
        self.0.lock().unwrap().get(&account).copied().unwrap_or_default()
    }

    /// The expected count of a window at its end.
    fn used(&self, scope: &'static str, key: u64, window: u64) -> i64 {
        if scope == QUEUED {
            // The next window's reservations count, too.
            return self.get((scope, key, window)).granted
                + self.get((scope, key, window + 1)).granted;
        }
        (0..=window).fold(0, |used, window| {
            let count = self.get((scope, key, window));
            (used - LIMIT as i64).max(0) + count.granted + count.debt
        })
    }
}

/// The window that a charge was taken from.
fn taken_from(decision: &Decision) -> u64 {
    let at = decision.ready_at().unwrap_or(decision.decided_at());
    let ms = at.duration_since(std::time::UNIX_EPOCH).expect("later").as_millis() as u64;
    (ms - MINUTE_MS) / WINDOW.as_millis() as u64
}

/// A request, as its client and the inner service have planned it.
#[derive(Clone)]
struct Plan {
    scope: &'static str,
    key: u64,
    /// The duration of the service's work.
    after: Duration,
    fate: Fate,
    /// The layer refunds requests that are dropped before their response.
    refunds: bool,
    /// The window from which the request took a token.
    granted: Arc<Mutex<Option<u64>>>,
    reached: Arc<Mutex<bool>>,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Fate {
    Counts,
    DoesNotCount,
    Panics,
    /// Its body ends later, with this cost.
    PaysLater(u64),
}

impl From<&Plan> for Key {
    fn from(plan: &Plan) -> Self {
        Self::from(plan.key)
    }
}

/// The inner service. In one scope it is busy now and then, at times for longer than a window.
struct Inner {
    start: Instant,
    ledger: Ledger,
    rng: Option<Arc<Mutex<fastrand::Rng>>>,
    busy: Option<Pin<Box<Sleep>>>,
}

impl Clone for Inner {
    fn clone(&self) -> Self {
        let busy = self.rng.as_ref().and_then(|rng| {
            let mut rng = rng.lock().unwrap();
            let most = [0, 0, 0, 0, 0, 0, 300, 300, 300, 130_000][rng.usize(..10)];
            (most > 0).then(|| Box::pin(sleep(Duration::from_millis(rng.u64(..most)))))
        });
        Self { start: self.start, ledger: self.ledger.clone(), rng: self.rng.clone(), busy }
    }
}

/// Tokens that are promised back if the request is dropped.
struct Passed(Option<(Ledger, Account)>);

impl Drop for Passed {
    fn drop(&mut self) {
        if let Some((ledger, account)) = self.0.take() {
            ledger.change(account, |count| {
                count.granted -= 1;
                count.passed -= 1;
            });
        }
    }
}

impl Service<Request<Body>> for Inner {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        if let Some(busy) = &mut self.busy {
            ready!(busy.as_mut().poll(cx));
            self.busy = None;
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let plan: Plan = request.extensions().get().cloned().expect("a plan");
        let ledger = self.ledger.clone();
        *plan.reached.lock().unwrap() = true;
        // The call's own time decides: no request passes in a window that is not its own.
        let now = self.start.elapsed().as_millis() / WINDOW.as_millis();
        let account = (plan.scope, plan.key, now as u64);
        ledger.change(account, |count| count.passed += 1);
        let mut passed = Passed(plan.refunds.then(|| (ledger.clone(), account)));
        Box::pin(async move {
            let mut response = Response::new(Body::empty());
            match plan.fate {
                Fate::Counts => sleep(plan.after).await,
                Fate::DoesNotCount => {
                    sleep(plan.after).await;
                    *response.status_mut() = StatusCode::NOT_FOUND;
                    drop(Passed(Some((ledger, account))));
                }
                Fate::Panics => {
                    sleep(plan.after).await;
                    panic!("on purpose");
                }
                Fate::PaysLater(cost) => {
                    let (reported, mut meter) = TrueCost::metered();
                    response.extensions_mut().insert(reported);
                    tokio::spawn(async move {
                        sleep(plan.after).await;
                        meter.add(AT_ONCE, cost);
                        match cost {
                            0 => drop(Passed(Some((ledger, account)))),
                            _ => ledger.change(account, |count| count.debt += cost as i64 - 1),
                        }
                    });
                }
            }
            passed.0.take();
            Ok(response)
        })
    }
}

/// Keeps panics that the test makes on purpose out of the output.
fn silence_expected_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let hook = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if info.payload().downcast_ref::<&str>() != Some(&"on purpose") {
                hook(info);
            }
        }));
    });
}

struct World {
    rng: fastrand::Rng,
    ledger: Ledger,
    services: Vec<(&'static str, FixedWindow<Inner>)>,
    /// The limiters, one for each scope.
    limiters: Vec<(&'static str, Limiter)>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let delays = Mutex::new(rng.fork());
        let store = FarStore::new(move || delays.lock().unwrap().u64(..40));
        let quota = Quota::new(LIMIT, WINDOW);
        let ledger = Ledger::default();
        let counting = |scope: &'static str, settled: bool| {
            let ledger = ledger.clone();
            let limit = quota.name(scope).key(extension::<Plan>());
            let limit = if settled { limit.settled() } else { limit };
            let layer = FixedWindowLayer::new(limit.store(store.clone()));
            layer.on_decision(move |parts, decision| {
                let plan: &Plan = parts.extensions.get().expect("a plan");
                if decision.allowed() {
                    let window = taken_from(decision);
                    *plan.granted.lock().unwrap() = Some(window);
                    ledger.change((scope, plan.key, window), |count| count.granted += 1);
                }
            })
        };
        let layer = |scope| counting(scope, false);
        let max_wait = Duration::from_secs(130);
        let layers = [
            (AT_ONCE, layer(AT_ONCE)),
            (AT_ONCE, layer(AT_ONCE).refund_dropped()),
            (AT_ONCE, layer(AT_ONCE).count_if(|response| response.status != 404)),
            (AT_ONCE, counting(AT_ONCE, true)),
            (QUEUED, layer(QUEUED).queue(RESERVED, max_wait)),
            (LATE, layer(LATE).queue(RESERVED, max_wait)),
        ];
        let busy = Arc::new(Mutex::new(rng.fork()));
        let start = Instant::now();
        let services = layers.map(|(scope, layer)| {
            let rng = (scope == LATE).then(|| Arc::clone(&busy));
            (scope, layer.layer(Inner { start, ledger: ledger.clone(), rng, busy: None }))
        });
        let limiters = [AT_ONCE, QUEUED]
            .map(|scope| (scope, Limit::new(quota).name(scope).store(store.clone())));
        Self { rng, ledger, services: services.into(), limiters: limiters.into() }
    }

    /// Starts one operation, at some time in the first half of the window.
    fn begin(&mut self, tasks: &mut JoinSet<()>) {
        let rng = &mut self.rng;
        let at = Duration::from_millis(rng.u64(..30_000));
        let after = Duration::from_millis(rng.u64(..5_000));
        let key = KEYS[rng.usize(..KEYS.len())];
        let which = [0, 1, 1, 2, 3, 4, 4, 4, 5, 5, 6][rng.usize(..11)];
        let Some((scope, service)) = self.services.get(which).cloned() else {
            return self.receipt(tasks, key, at, after);
        };
        let fate = match which {
            1 if rng.u8(..4) == 0 => Fate::Panics,
            2 if rng.bool() => Fate::DoesNotCount,
            3 => Fate::PaysLater(rng.u64(..4)),
            _ => Fate::Counts,
        };
        // The client hangs up while the store decides, while the service works, or in the queue.
        let patience = match (which, rng.u8(..3)) {
            (1, 0) => rng.u64(..120),
            (1, 1) => rng.u64(..4_000),
            (4, 0) => rng.u64(120..20_000),
            _ => 1 << 40,
        };
        let plan = Plan {
            scope,
            key,
            after,
            fate,
            refunds: which == 1,
            granted: Arc::default(),
            reached: Arc::default(),
        };
        let ledger = self.ledger.clone();
        tasks.spawn(async move {
            sleep(at).await;
            let request = Request::get("/").extension(plan.clone()).body(Body::empty());
            let request = service.oneshot(request.expect("a request"));
            if timeout(Duration::from_millis(patience), request).await.is_err()
                && !*plan.reached.lock().unwrap()
                && let Some(window) = *plan.granted.lock().unwrap()
            {
                // The request was still in the queue.
                ledger.change((scope, key, window), |count| count.granted -= 1);
            }
        });
    }

    /// A charge without HTTP, which is corrected later.
    fn receipt(&mut self, tasks: &mut JoinSet<()>, key: u64, at: Duration, after: Duration) {
        let (limiter, ledger) = (self.limiters[0].1.clone(), self.ledger.clone());
        let (cost, actual) = (self.rng.u64(1..6), self.rng.u64(..8));
        tasks.spawn(async move {
            sleep(at).await;
            let Ok(receipt) = limiter.charge(key, cost).await.expect("it never fails") else {
                return;
            };
            let account = (AT_ONCE, key, taken_from(receipt.decision()));
            ledger.change(account, |count| {
                count.granted += cost as i64;
                count.passed += cost as i64;
            });
            sleep(after).await;
            let more = actual as i64 - cost as i64;
            ledger.change(account, |count| {
                count.granted += more.min(0);
                count.passed += more.min(0);
                count.debt += more.max(0);
            });
            limiter.settle(receipt, actual).await.expect("it never fails");
        });
    }
}

#[tokio::test(start_paused = true)]
async fn random_operations_never_exceed_the_limit_or_lose_a_refund() {
    silence_expected_panics();
    let full = std::env::var_os("FULL_SIZE").is_some();
    let (ops, seed) = if full { (FULL_SIZE, fastrand::u64(..)) } else { (OPS, 14) };
    println!("seed {seed}");
    let start = Instant::now();
    let mut world = World::new(seed);
    let mut tasks = JoinSet::new();
    let mut failures = 0;
    for round in 0..ops.div_ceil(ROUND) {
        (0..ROUND).for_each(|_| world.begin(&mut tasks));
        let end = start + WINDOW * (round as u32 + 1);
        sleep_until(end - Duration::from_secs(1)).await;
        while let Some(ended) = tasks.try_join_next() {
            failures += u64::from(ended.is_err_and(|error| {
                let panic = error.into_panic();
                panic.downcast_ref::<&str>() != Some(&"on purpose")
            }));
        }
        assert_eq!(failures, 0, "round {round}: see above");
        for (scope, limiter) in &world.limiters {
            for key in KEYS {
                let standing = limiter.peek(key).await.expect("it never fails");
                let used = world.ledger.used(scope, key, round);
                assert_eq!(standing.used() as i64, used, "{scope}, {key}, round {round}");
            }
        }
        sleep_until(end).await;
    }
    let passed: i64 = world.ledger.0.lock().unwrap().values().map(|count| count.passed).sum();
    println!("{ops} operations, {passed} tokens passed");
}
