//! Calls to Redis, counted by the server: none where none is needed.

use std::time::{Duration, Instant};

use harness::Server;
use tower_fixed_window::{EmptyBody, FixedWindowLayer, Limiter, Limits, OnStoreFailure, Quota};
use tower_fixed_window_redis::RedisStore;

/// Scripts that the server has run.
pub(crate) fn scripts(server: &Server) -> u64 {
    commands(server, "evalsha")
}

/// How often the server has run a command, by itself or in scripts.
pub(crate) fn commands(server: &Server, name: &str) -> u64 {
    let info: String = server.ask(&["INFO", "commandstats"]);
    let calls = |line: &str| {
        let of = line.strip_prefix("cmdstat_")?.strip_prefix(name)?;
        of.strip_prefix(":calls=")?.split(',').next()?.parse::<u64>().ok()
    };
    info.lines().find_map(calls).unwrap_or(0)
}

/// A window that no test sees the end of.
fn limiter(server: &Server, limit: u64) -> Limiter {
    limiter_on(store(server), limit)
}

/// With a deadline that a busy machine meets.
fn store(server: &Server) -> RedisStore {
    RedisStore::new(server.url()).expect("an address").deadline(Duration::from_secs(20))
}

fn limiter_on(store: RedisStore, limit: u64) -> Limiter {
    Quota::new(limit, Quota::MAX_WINDOW).name("quiet").store(store.on_failure(OnStoreFailure::Deny))
}

async fn allowed(limiter: &Limiter) -> bool {
    limiter.check("ann").await.expect("it answers").allowed()
}

#[tokio::test]
async fn a_refused_key_causes_a_call_a_second() {
    let Some(server) = Server::start() else { return };
    let limiter = limiter(&server, 5);
    while allowed(&limiter).await {}
    let (before, start) = (scripts(&server), Instant::now());
    while start.elapsed() < Duration::from_millis(2_500) {
        assert!(!allowed(&limiter).await);
        tokio::task::yield_now().await;
    }
    let (calls, seconds) = (scripts(&server) - before, start.elapsed().as_secs());
    assert!((2..=seconds + 1).contains(&calls), "{calls} calls");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_key_causes_no_traffic_if_its_refusal_is_remembered_until_it_ends() {
    let Some(server) = Server::start() else { return };
    let limiter = limiter_on(store(&server).remember_refusals(Duration::MAX), 5);
    while allowed(&limiter).await {}
    let before = scripts(&server);
    let tasks: Vec<_> = (0..10)
        .map(|_| {
            let limiter = limiter.clone();
            tokio::spawn(async move {
                for _ in 0..10_000 {
                    assert!(!allowed(&limiter).await);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("no panic");
    }
    assert_eq!(scripts(&server), before, "of 100,000 requests none came here");
    // A raised limit takes effect at once.
    assert!(allowed(&limiter.with_quotas(Quota::new(6, Quota::MAX_WINDOW))).await);
    assert_eq!(scripts(&server), before + 1);
}

#[tokio::test]
async fn a_key_that_a_calendar_refuses_causes_no_traffic() {
    let Some(server) = Server::start() else { return };
    let store = store(&server).on_failure(OnStoreFailure::Deny).remember_refusals(Duration::MAX);
    let limiter = Quota::per_year(5).name("quiet").store(store);
    while allowed(&limiter).await {}
    let before = scripts(&server);
    for _ in 0..1_000 {
        assert!(!allowed(&limiter).await);
    }
    assert_eq!(scripts(&server), before);
}

/// Another store with its own connection stands for another process.
#[tokio::test]
async fn a_reset_or_refund_by_another_process_is_seen_within_a_second() {
    let Some(server) = Server::start() else { return };
    let (here, there) = (store(&server), store(&server));
    let (here, there) = (limiter_on(here, 1), limiter_on(there, 1));
    let passes_within_a_second = async |what: &str| {
        let start = Instant::now();
        while !allowed(&here).await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let took = start.elapsed();
        println!("{what} was seen after {took:?}");
        // The bound leaves time for a noisy machine.
        assert!(took < Duration::from_millis(1_500), "{what}: {took:?}");
    };
    let receipt = there.charge("ann", 1).await.expect("it answers").expect("it passes");
    assert!(!allowed(&here).await);
    there.refund(receipt).await.expect("it answers");
    passes_within_a_second("a refund").await;
    assert!(!allowed(&here).await);
    there.reset("ann").await.expect("it answers");
    passes_within_a_second("a reset").await;
    // In the meantime there is a call per second, not one per request.
    let before = scripts(&server);
    for _ in 0..10_000 {
        assert!(!allowed(&here).await);
    }
    let calls = scripts(&server) - before;
    assert!(calls < 20, "{calls} calls");
}

#[tokio::test]
async fn stores_with_different_prefixes_remember_refusals_separately() {
    let Some(server) = Server::start() else { return };
    let store = store(&server);
    let limiter = |store: RedisStore| {
        Quota::new(1, Quota::MAX_WINDOW).name("quiet").store(store.on_failure(OnStoreFailure::Deny))
    };
    let (one, other) =
        (limiter(store.clone().prefix("one")), limiter(store.clone().prefix("other")));
    assert!(allowed(&one).await && !allowed(&one).await);
    assert!(allowed(&other).await);
}

/// Resets and new quotas of a layer's control take effect at once in another layer on the same
/// store.
#[tokio::test]
async fn layers_on_one_store_share_remembered_refusals() {
    use tower::{Layer, ServiceExt, service_fn};
    use tower_fixed_window::Key;

    let Some(server) = Server::start() else { return };
    let store = store(&server);
    let layer = || {
        FixedWindowLayer::new(
            Quota::new(1, Quota::MAX_WINDOW).name("quiet").key(Key::global()).store(store.clone()),
        )
        .reject(EmptyBody)
    };
    let (one, other) = (layer(), layer());
    let status = async |layer: &FixedWindowLayer<EmptyBody>| {
        let service = layer.layer(service_fn(async |_: http::Request<()>| {
            Ok::<_, std::convert::Infallible>(http::Response::new(()))
        }));
        service.oneshot(http::Request::new(())).await.expect("infallible").status().as_u16()
    };
    assert_eq!((status(&one).await, status(&one).await), (200, 429));
    let before = scripts(&server);
    assert_eq!(status(&other).await, 429);
    assert_eq!(scripts(&server), before, "the other one knows");
    Limits::from(&other).of("quiet").reset(Key::global()).await.expect("it answers");
    assert_eq!((status(&one).await, status(&one).await), (200, 429));
    Limits::from(&one).of("quiet").set_quotas(Quota::new(2, Quota::MAX_WINDOW));
    assert_eq!((status(&one).await, status(&one).await), (200, 429));
}
