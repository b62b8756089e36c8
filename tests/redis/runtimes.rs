//! Runtimes come and go, and stand still: the store is none of theirs.

use std::sync::OnceLock;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tower_fixed_window::store::RedisStore;
use tower_fixed_window::{Limiter, Quota};

use crate::proxy::Proxy;
use crate::server::{Server, wait_for};

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

fn limiter(url: &str) -> Limiter {
    let store = RedisStore::new(url).expect("an address");
    Limiter::new(Quota::per_day(1_000).from_first_request()).name("runtimes").store(store)
}

async fn used(limiter: &Limiter) -> (u64, bool) {
    let decision = limiter.check("ann").await.expect("it answers");
    (decision.used(), decision.is_local())
}

/// As with `#[tokio::test]`, which makes a runtime for each test.
#[test]
fn a_static_store_is_shared_by_runtimes_that_come_and_go() {
    static LIMITER: OnceLock<Limiter> = OnceLock::new();
    let Some(server) = Server::start() else { return };
    let used = async || used(LIMITER.get_or_init(|| limiter(&server.url()))).await;
    for i in 0..5 {
        let seen = runtime().block_on(async { [used().await, used().await] });
        assert_eq!(seen, [(2 * i + 1, false), (2 * i + 2, false)]);
    }
}

#[test]
fn a_store_that_was_made_in_a_runtime_that_stands_still_joins_in_another() {
    let Some(server) = Server::start() else { return };
    let still = runtime();
    let limiter = still.block_on(async { limiter(&server.url()) });
    assert_eq!(runtime().block_on(used(&limiter)), (1, false));
    drop(still);
}

/// Its connection is driven by nobody any more.
#[test]
fn a_runtime_that_stands_still_takes_nobody_along() {
    let Some(server) = Server::start() else { return };
    let still = runtime();
    let limiter = limiter(&server.url());
    assert_eq!(still.block_on(used(&limiter)), (1, false));
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

#[test]
fn a_store_that_is_dropped_leaves_no_connection_and_no_task() {
    let Some(server) = Server::start() else { return };
    let proxy = Proxy::to(server.port);
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("one");
    runtime.block_on(async {
        for i in 0..100 {
            let limiter = limiter(&proxy.url());
            if i % 2 == 0 {
                let _ = limiter.without_fallback().check(1).await.expect("Redis answers");
            }
        }
    });
    let tasks = || runtime.metrics().num_alive_tasks();
    wait_for("connections and tasks to end", || proxy.open() == 0 && tasks() == 0);
}
