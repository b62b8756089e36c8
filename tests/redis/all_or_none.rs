//! The limits of one charge over Redis pass together or none is charged (S37): by one script in one
//! round trip, or in order on a cluster.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use harness::Server;
use redis::cluster::ClusterClient;
use tower_fixed_window::store::{OnStoreFailure, Store};
use tower_fixed_window::{Decision, Limit, Limits, Line, Quota, Quotas};
use tower_fixed_window_redis::RedisStore;

use crate::cluster_and_sentinel::{cluster, urls};
use crate::gathered_calls::Crowd;
use crate::log::Log;
use crate::traffic::scripts;

const DEADLINE: Duration = Duration::from_secs(20);

fn store(server: &Server) -> RedisStore {
    let store = RedisStore::new(server.url()).expect("an address");
    store.deadline(DEADLINE).on_failure(OnStoreFailure::Deny)
}

/// The limits of an AI gateway.
fn gateway(store: impl Store) -> Limits {
    Limits::new([
        Quota::per_year(600).name("requests"),
        Quota::new(200_000, Duration::from_secs(86_400 * 300)).name("tokens"),
        Quota::new(50, Duration::from_secs(86_400 * 299)).name("cents"),
    ])
    .store(store)
}

fn lines(user: &str, cents: u64) -> [Line<'static>; 3] {
    [
        Line::new("requests", "acme", 1),
        Line::new("tokens", "acme", 600),
        Line::new("cents", user.to_owned(), cents),
    ]
}

async fn used(limits: &Limits, user: &str) -> [u64; 3] {
    let of =
        async |name, key: &str| limits.limiter(name).peek(key).await.expect("it answers").used();
    [of("requests", "acme").await, of("tokens", "acme").await, of("cents", user).await]
}

/// A call has up to 128 keys, and a group is never split between two calls.
#[tokio::test]
async fn groups_share_calls_with_single_charges() {
    let Some(server) = Server::start() else { return };
    let limits = gateway(store(&server));
    let warm = join_all((0..4).map(|_| limits.check(lines("ann", 0)))).await;
    assert!(warm.iter().all(|answer| answer.as_ref().is_ok_and(Decision::is_allowed)));
    server.ask::<()>(&["CONFIG", "RESETSTAT"]);
    let groups = join_all((0..200).map(|i| limits.check(lines(&format!("user {}", i % 7), 1))));
    let singles = join_all((0..56).map(|_| limits.limiter("cents").check("ann")));
    let (groups, singles) = tokio::join!(groups, singles);
    assert!(groups.iter().all(|answer| answer.as_ref().is_ok_and(Decision::is_allowed)));
    let passed = singles.iter().filter(|answer| answer.as_ref().is_ok_and(Decision::is_allowed));
    assert_eq!(passed.count(), 50);
    // 656 keys: the first three have a call of their own.
    let calls = scripts(&server);
    assert!((6..=14).contains(&calls), "{calls} calls");
    assert_eq!(used(&limits, "user 0").await, [204, 204 * 600, 29]);
}

#[tokio::test]
async fn an_error_of_one_key_is_the_groups_and_nothing_is_written() {
    let Some(server) = Server::start() else { return };
    let quotas: [(&str, Quotas); 3] = [
        ("plain", Quota::per_day(9).into()),
        ("both", Quota::per_day(9).and(Quota::per_week(20))),
        ("month", Quota::per_month(9).in_zone("Asia/Tokyo").into()),
    ];
    for shared in [false, true] {
        for bad in ["plain", "both", "month"] {
            for field in
                [None, Some("nonsense"), Some("12.5"), Some("1e308"), Some("nan"), Some(" 7")]
            {
                server.ask::<()>(&["FLUSHALL"]);
                let limiters = quotas.map(|(name, quotas)| Limit::new(quotas).name(name));
                let limits = Limits::new(limiters);
                let limits = match shared {
                    true => limits.store(Crowd::new(store(&server), Arc::default())),
                    false => limits.store(store(&server)),
                };
                let name = format!("tfw1:{{{bad}:tann}}");
                let of = quotas.iter().find(|(name, _)| *name == bad).expect("one of them").1;
                let counter = of.as_ref()[0].counter();
                match field {
                    Some(field) => server.ask::<()>(&["HSET", &name, &counter, field]),
                    None => server.ask::<()>(&["SET", &name, "a text"]),
                }
                let lines = quotas.map(|(name, _)| Line::new(name, "ann", 1));
                let error = limits.check(lines).await.expect_err("it can't be read");
                let text = error.to_string();
                assert!(text.starts_with("Redis has another value for this key"), "{text}");
                let keys: Vec<String> = server.ask(&["KEYS", "tfw1:*ann}"]);
                assert_eq!(keys, [name], "{bad}: nothing was written");
            }
        }
    }
}

/// The same arguments are sent once for both keys.
#[tokio::test]
async fn limits_of_equal_quotas_are_charged_together() {
    let Some(server) = Server::start() else { return };
    let quotas = ["one", "other"].map(|name| Quota::per_year(3).name(name));
    let limits = Limits::new(quotas).store(store(&server));
    let lines = ["one", "other"].map(|name| Line::new(name, "ann", 2));
    assert!(limits.limiter("other").charge("ann", 2).await.expect("it answers").is_ok());
    let decision = limits.check(&lines).await.expect("it answers");
    assert_eq!(decision.name(), "other");
    assert!(!decision.is_allowed());
    assert_eq!(limits.limiter("one").peek("ann").await.expect("it answers").used(), 0);
}

/// Keys are in several slots: in order, whether the store knows it from the start or finds out.
#[tokio::test(flavor = "multi_thread")]
async fn limits_on_a_cluster_are_charged_in_order() {
    let Some(nodes) = cluster() else { return };
    let known = RedisStore::cluster(urls(&nodes)).expect("addresses");
    let connection = ClusterClient::new(urls(&nodes)).expect("addresses");
    let connection = connection.get_async_connection().await.expect("it connects");
    for (name, store) in [("known", known), ("found out", RedisStore::from(connection))] {
        let store = store.deadline(DEADLINE).on_failure(OnStoreFailure::Deny).prefix(&name[..5]);
        let limits = gateway(store);
        assert!(limits.check(lines("ann", 50)).await.expect("it answers").is_allowed());
        let refused = limits.check(lines("ann", 1)).await.expect("it answers");
        assert_eq!(refused.name(), "cents", "{name}");
        assert_eq!(used(&limits, "ann").await, [1, 600, 50], "{name}: it was given back");
        let calls = || nodes.iter().map(scripts).sum::<u64>();
        let before = calls();
        for _ in 0..100 {
            let refused = limits.check(lines("ann", 1)).await.expect("it is known");
            assert!(!refused.is_allowed() && refused.of("requests").is_none());
        }
        // On a busy machine this takes longer than a second, and the store is asked again.
        let calls = calls() - before;
        assert!(calls < 20, "{name}: {calls} calls for 100 refusals");
    }
}

/// A single server of a cluster, called as a plain server.
#[tokio::test]
async fn a_group_that_crosses_slots_is_charged_in_order() {
    let Some(server) = Server::with(&["--save", "", "--cluster-enabled", "yes"]) else { return };
    server.ask::<()>(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    harness::wait_for("the cluster", || {
        server.ask::<String>(&["CLUSTER", "INFO"]).contains("cluster_state:ok")
    });
    // The store does not fail, so nothing stands in for it.
    let log = Log::start();
    let limits = gateway(store(&server).on_failure(OnStoreFailure::Local));
    for allowed in [true, true, false] {
        let decision = limits.check(lines("ann", 20)).await.expect("it answers");
        assert_eq!((decision.is_allowed(), decision.is_local()), (allowed, false));
    }
    assert_eq!(used(&limits, "ann").await, [2, 1_200, 40]);
    assert!(!log.text().contains("the store fails"), "{}", log.text());
}
