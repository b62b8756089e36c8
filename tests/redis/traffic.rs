//! Calls to Redis, counted by the server: none where none is needed.

use std::time::Duration;

use harness::Server;
use tower_fixed_window::{Limiter, OnStoreFailure, Quota};
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

/// With a deadline that a busy machine meets.
fn store(server: &Server) -> RedisStore {
    RedisStore::new(server.url()).expect("an address").deadline(Duration::from_secs(20))
}

fn limiter_on(store: RedisStore, limit: u64) -> Limiter {
    Quota::new(limit, Quota::MAX_WINDOW).name("quiet").store(store.on_failure(OnStoreFailure::Deny))
}

async fn allowed(limiter: &Limiter) -> bool {
    limiter.check("ann").await.expect("it answers").is_allowed()
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
async fn stores_with_different_prefixes_remember_refusals_separately() {
    let Some(server) = Server::start() else { return };
    let store = store(&server);
    let [one, other] = ["one", "other"].map(|prefix| limiter_on(store.clone().prefix(prefix), 1));
    assert!(allowed(&one).await && !allowed(&one).await);
    assert!(allowed(&other).await);
}
