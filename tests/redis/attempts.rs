//! What the store does again and again: attempts to connect, scripts that nobody keeps, and calls of a
//! runtime that stands still.

use std::time::{Duration, Instant};

use futures_util::future::join;
use harness::{ALONE, Proxy, Server};
use tower_fixed_window::{Limiter, OnStoreFailure, Quota};
use tower_fixed_window_redis::RedisStore;

fn limiter(store: RedisStore) -> Limiter {
    Quota::per_day(1_000_000).from_first_request().name("attempts").store(store)
}

#[tokio::test]
async fn attempts_to_connect_to_a_silent_server_hold_three_sockets() {
    let Some(server) = Server::start() else { return };
    let way = Proxy::to(server.port);
    let limiter = limiter(RedisStore::new(way.url()).expect("an address"));
    assert!(!limiter.check("ann").await.expect("it answers").is_local());
    way.set_silent(true);
    let (start, mut most) = (Instant::now(), 0);
    while start.elapsed() < Duration::from_secs(7) {
        let _ = limiter.check("ann").await;
        most = way.open().max(most);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let made = way.made();
    way.set_silent(false);
    let healed = Instant::now();
    while limiter.check("ann").await.expect("it answers").is_local() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    println!("{most} sockets, {made} made, shared again after {:?}", healed.elapsed());
    // With the one that was open before, and one that is being closed.
    assert!(most <= 5, "{most} sockets");
    assert!(healed.elapsed() < Duration::from_secs(2), "{:?}", healed.elapsed());
}

#[tokio::test]
async fn a_runtime_that_stands_still_is_named_and_not_the_store() {
    let _alone = ALONE.lock().await;
    let Some(server) = Server::start() else { return };
    let far = Proxy::to(server.port).delay(Duration::from_millis(400));
    let store = RedisStore::new(far.url()).expect("an address");
    // The first answer takes longer than 250 ms.
    let slow = limiter(store.clone().deadline(Duration::from_secs(10)));
    assert!(slow.check("ann").await.expect("it answers").is_allowed());
    far.set_delay(|| Duration::ZERO);
    assert!(slow.check("ann").await.expect("it answers").is_allowed());
    far.set_delay(|| Duration::from_millis(400));
    let limiter = limiter(store.on_failure(OnStoreFailure::Deny));
    let blocks = async {
        tokio::time::sleep(Duration::from_millis(15)).await;
        std::thread::sleep(Duration::from_millis(350));
    };
    let (answer, ()) = join(limiter.check("ann"), blocks).await;
    let error = answer.expect_err("its answer is on its way").to_string();
    assert!(error.starts_with("the runtime stood still"), "{error}");
}
