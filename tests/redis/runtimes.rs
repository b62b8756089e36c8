//! Runtimes that start, end, and stand still: the store depends on none of them.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use harness::{ALONE, Server, wait_for};
use tokio::runtime::{Builder, Runtime};
use tower::{Layer, ServiceExt, service_fn};
use tower_fixed_window::{
    CostMeter, EmptyBody, FixedWindowLayer, Key, Limiter, OnStoreFailure, Quota, TrueCost,
};
use tower_fixed_window_redis::RedisStore;

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

fn store(url: &str) -> RedisStore {
    RedisStore::new(url).expect("an address")
}

/// With a deadline that a busy machine meets.
fn patient(store: &RedisStore) -> Limiter {
    limiter(store.clone().deadline(Duration::from_secs(20)))
}

fn limiter(store: RedisStore) -> Limiter {
    Quota::per_day(1_000).from_first_request().name("runtimes").store(store)
}

async fn used(limiter: &Limiter) -> (u64, bool) {
    let decision = limiter.check("ann").await.expect("it answers");
    (decision.used(), decision.is_local())
}

/// The other one is killed, and Redis has no room for it again: as where a process has no file
/// descriptors left.
#[test]
fn a_runtime_that_loses_its_connection_fails_no_request_of_another() {
    let _alone = ALONE.blocking_lock();
    let Some(server) = Server::start() else { return };
    let store = RedisStore::new(server.url()).expect("an address");
    let store = store.deadline(Duration::from_secs(5));
    let limiter = Quota::per_day(1_000_000_000).name("runtimes").store(store);
    let is_local = async |key| limiter.check(key).await.expect("it answers").is_local();
    let (stop, cut_off) = (AtomicBool::new(false), AtomicUsize::new(0));
    let well = runtime();
    std::thread::scope(|scope| {
        assert!(!well.block_on(is_local("well")));
        let asker = redis::Client::open(server.url()).expect("an address");
        let mut asker = asker.get_connection().expect("it connects");
        let own: u64 = redis::cmd("CLIENT").arg("ID").query(&mut asker).expect("a number");
        scope.spawn(|| {
            runtime().block_on(async {
                while !stop.load(Ordering::Relaxed) {
                    cut_off.fetch_add(usize::from(is_local("cut off").await), Ordering::Relaxed);
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            });
        });
        wait_for("the other one to be answered", || {
            let keys = redis::cmd("KEYS").arg("tfw1:*").query::<Vec<String>>(&mut asker);
            keys.is_ok_and(|keys| keys.len() == 2)
        });
        redis::cmd("CONFIG").arg(&["SET", "maxclients", "1"]).exec(&mut asker).expect("it can");
        let list: String = redis::cmd("CLIENT").arg("LIST").query(&mut asker).expect("a text");
        // In order of their numbers.
        let mut ids = list.lines().filter_map(|line| line.strip_prefix("id=")?.split(' ').next());
        let last = ids.next_back().expect("one");
        assert_ne!(last, own.to_string());
        redis::cmd("CLIENT").arg(&["KILL", "ID", last]).exec(&mut asker).expect("it can");
        wait_for("the other one to be cut off", || cut_off.load(Ordering::Relaxed) >= 50);
        let locals = well.block_on(async {
            let mut locals = 0;
            for _ in 0..20 {
                locals += usize::from(is_local("well").await);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            locals
        });
        stop.store(true, Ordering::Relaxed);
        assert_eq!(locals, 0, "of 20");
    });
}

/// Starts threads that make a runtime for every 25 requests, and returns how many requests Redis
/// did not answer.
fn come_and_go(limiter: &Limiter) -> usize {
    let rounds = |thread: u64| {
        let ask = async |key| limiter.check(key).await.expect("it answers").is_local();
        let local = |_| {
            runtime().block_on(async {
                let mut local = 0;
                for _ in 0..25 {
                    local += usize::from(ask(thread).await);
                }
                local
            })
        };
        (0..30).map(local).sum::<usize>()
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..8).map(|thread| scope.spawn(move || rounds(thread % 2))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).sum()
    })
}

/// A connection ends with the runtime that it was made in, and the others have their own.
#[test]
fn the_end_of_a_runtime_fails_no_request_of_another() {
    let _alone = ALONE.blocking_lock();
    let Some(server) = Server::start() else { return };
    let store = RedisStore::new(server.url()).expect("an address");
    // A busy machine is late now and then.
    let store = store.deadline(Duration::from_secs(5));
    let limiter = Quota::per_day(1_000_000_000).name("runtimes").store(store);
    assert_eq!(come_and_go(&limiter), 0);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let lasting = scope.spawn(|| {
            runtime().block_on(async {
                let mut local = 0;
                while !stop.load(Ordering::Relaxed) {
                    local +=
                        usize::from(limiter.check(0_u64).await.expect("it answers").is_local());
                }
                local
            })
        });
        let local = come_and_go(&limiter);
        stop.store(true, Ordering::Relaxed);
        assert_eq!(local + lasting.join().expect("no panic"), 0, "beside one that lasts");
    });
}

/// The connection was made in a runtime that no thread drives any more, which has the maximum of calls
/// in flight.
#[test]
fn a_blocked_runtime_does_not_block_other_runtimes() {
    let Some(server) = Server::start() else { return };
    let still = runtime();
    let store = store(&server.url());
    assert_eq!(still.block_on(used(&patient(&store))), (1, false));
    let limiter = limiter(store);
    still.block_on(async {
        for _ in 0..100 {
            let limiter = limiter.clone();
            tokio::spawn(async move { used(&limiter).await });
            for _ in 0..6 {
                tokio::task::yield_now().await;
            }
        }
    });
    runtime().block_on(async {
        let joins = async {
            while used(&limiter).await.1 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(2), joins).await.expect("it joins");
    });
    drop(still);
}

/// The last owner of a body may drop it anywhere.
#[test]
fn a_reported_cost_is_kept_when_the_body_is_dropped_outside_of_a_runtime() {
    let Some(server) = Server::start() else { return };
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("one");
    let store = RedisStore::new(server.url()).expect("an address");
    let layer = FixedWindowLayer::new(
        Quota::per_day(1_000)
            .from_first_request()
            .name("runtimes")
            .key(Key::global())
            .settled()
            .store(store.clone()),
    )
    .reject(EmptyBody);
    let service = layer.layer(service_fn(async |_: http::Request<()>| {
        let (cost, meter) = TrueCost::metered();
        let mut response = http::Response::new(());
        response.extensions_mut().insert(cost);
        response.extensions_mut().insert(Arc::new(Mutex::new(Some(meter))));
        Ok::<_, std::convert::Infallible>(response)
    }));
    let response = runtime.block_on(service.oneshot(http::Request::new(()))).expect("infallible");
    let meter = response.extensions().get::<Arc<Mutex<Option<CostMeter>>>>().expect("it is there");
    let mut meter = meter.lock().expect("no panic").take().expect("one");
    meter.set("runtimes", 100);
    std::thread::spawn(move || drop(meter)).join().expect("no panic");
    let limit = Quota::per_day(1_000).from_first_request().name("runtimes");
    let store = store.deadline(Duration::from_secs(20)).on_failure(OnStoreFailure::Deny);
    let limiter = limit.store(store);
    wait_for("the cost to be counted", || {
        let standing = runtime.block_on(limiter.peek(Key::global()));
        standing.expect("it answers").used() == 100
    });
}

#[test]
fn ping_checks_at_startup_whether_redis_can_be_reached() {
    let Some(server) = Server::start() else { return };
    runtime().block_on(async {
        let ping = async |url: String| {
            let store = RedisStore::new(url).expect("an address");
            store.ping().await.map_err(|error| error.to_string())
        };
        assert_eq!(ping(server.url()).await, Ok(()));
        assert_eq!(server.ask::<u64>(&["DBSIZE"]), 0, "nothing was written");
        server.ask::<String>(&["REPLICAOF", "127.0.0.1", "1"]);
        let error = ping(server.url()).await.expect_err("a replica takes no writes");
        assert_eq!(error, "Redis is a replica here (READONLY)");
        let nobody = "redis://127.0.0.1:1/".to_owned();
        let error = ping(nobody).await.expect_err("nobody is there");
        assert_eq!(error, "Redis can't be reached (connection refused)");
        server.ask::<String>(&["CONFIG", "SET", "requirepass", "hunter2"]);
        let error = ping(server.url()).await.expect_err("it wants a password");
        assert_eq!(error, "Redis refused the command (NOAUTH)");
    });
}
