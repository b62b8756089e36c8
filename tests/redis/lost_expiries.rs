//! Keys that have lost their expiry, by `PERSIST` or `RESTORE`: it comes back with the next window, as late
//! as the last of all counts under the key needs it (S31).

use std::sync::Arc;
use std::time::Duration;

use harness::Server;
use tower_fixed_window::store::Store;
use tower_fixed_window::{OnStoreFailure, Quota, Quotas};
use tower_fixed_window_redis::RedisStore;

use crate::conformance::connect;
use crate::gathered_calls::Crowd;
use crate::stored_keys::next_window;

const KEY: &str = "tfw1:{lost:tann}";

/// The quotas that a key may have counts of, beside a quota a second.
fn others() -> [Quotas; 8] {
    [
        Quota::per_day(60).into(),
        Quota::per_day(60).staggered().into(),
        Quota::per_day(60).starting_at(Duration::from_secs(5_000)).into(),
        Quota::per_day(60).from_first_request().into(),
        Quota::per_day(60).rollover_up_to(80).into(),
        Quota::per_month(60).in_zone("America/New_York").into(),
        Quota::per_month(60).and(Quota::per_hour(70)),
        // More tokens than microseconds in the window are text.
        Quota::per_hour(10_000_000_000).into(),
    ]
}

/// Quotas a second: for the fast path through the script, and for a slow one.
fn seconds() -> [Quota; 2] {
    let second = Quota::per_second(50);
    [second, second.rollover_up_to(60)]
}

fn lose_expiry(server: &Server, by: &str) {
    match by {
        "PERSIST" => assert_eq!(server.ask::<u64>(&["PERSIST", KEY]), 1),
        _ => server.ask::<()>(&[
            "EVAL",
            "redis.call('RESTORE', KEYS[1], 0, redis.call('DUMP', KEYS[1]), 'REPLACE')",
            "1",
            KEY,
        ]),
    }
    assert_eq!(expiry(server), -1, "it has none");
}

fn expiry(server: &Server) -> i64 {
    server.ask(&["PEXPIRETIME", KEY])
}

async fn assert_expiry_returns<S: Store>(with: impl Fn(RedisStore) -> S) {
    let Some(server) = Server::start() else { return };
    let store = RedisStore::from(connect(&server.url()).await).deadline(Duration::from_secs(5));
    let store = store.on_failure(OnStoreFailure::Deny);
    let limiter = Quota::per_day(60).name("lost").store(with(store));
    for (i, second) in seconds().into_iter().enumerate() {
        for (j, other) in others().into_iter().enumerate() {
            let by = ["PERSIST", "RESTORE"][(i + j) % 2];
            let at = format!("{second} after {other}, {by}");
            let ask = async |quotas: Quotas, cost| {
                let limiter = limiter.with_quotas(quotas);
                match limiter.charge("ann", cost).await.expect("it answers") {
                    Ok(receipt) => receipt.decision().clone(),
                    Err(refused) => refused.decision().clone(),
                }
            };
            // The plans alternate: the other quota alone, or both quotas in one charge.
            let used = match j % 2 {
                0 => ask(other, 41).await,
                _ => ask(other.and(second), 41).await,
            };
            assert!(used.is_allowed(), "{at}");
            let (before, taken) = (expiry(&server), used.usage()[0].used());
            lose_expiry(&server, by);
            next_window(1_000).await;
            assert!(ask(second.into(), 1).await.is_allowed(), "{at}");
            assert_eq!(expiry(&server), before, "{at}");
            let left = ask(other, 0).await;
            assert_eq!(left.usage()[0].used(), taken, "{at}");
            server.ask::<u64>(&["DEL", KEY]);
        }
    }
}

#[tokio::test]
async fn a_lost_expiry_is_that_of_all_counts_of_the_key() {
    assert_expiry_returns(|store| store).await;
}

#[tokio::test]
async fn a_lost_expiry_is_that_of_all_counts_of_the_key_in_gathered_calls() {
    assert_expiry_returns(|store| Crowd::new(store, Arc::default())).await;
}

/// The length of a calendar's future windows is only known up to a bound.
#[tokio::test]
async fn a_lost_expiry_covers_debt() {
    let Some(server) = Server::start() else { return };
    let store = RedisStore::from(connect(&server.url()).await);
    let store = store.deadline(Duration::from_secs(20)).on_failure(OnStoreFailure::Deny);
    let limiter = Quota::per_day(5).name("lost").store(store);
    let month = Quota::per_month(5).in_zone("Europe/Paris");
    for (quota, most) in [(Quota::per_day(5), 0), (month, 92 * 86_400_000)] {
        let limiter = limiter.with_quotas(quota);
        let receipt = limiter.charge("ann", 1).await.expect("it answers").expect("it passed");
        limiter.settle(receipt, 14).await.expect("it answers");
        let before = expiry(&server);
        lose_expiry(&server, "PERSIST");
        next_window(1_000).await;
        let second = limiter.with_quotas(Quota::per_second(5));
        assert!(second.check("ann").await.expect("it answers").is_allowed());
        let after = expiry(&server);
        assert!((before..=before + most).contains(&after), "{before} {after}");
        server.ask::<u64>(&["DEL", KEY]);
    }
}
