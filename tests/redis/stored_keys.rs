//! The keys in Redis: readable, each with an expiry.

use std::time::{Duration, Instant, UNIX_EPOCH};

use axum::Router;
use axum::body::Body;
use axum::routing::any;
use harness::{Server, wait_for};
use http::Request;
use tower::{Layer, ServiceExt};
use tower_fixed_window::{
    Decision, FixedWindow, FixedWindowLayer, Key, Limit, Limiter, Limits, Line, ManualClock,
    OnStoreFailure, Quota, Quotas,
};
use tower_fixed_window_redis::RedisStore;

use crate::conformance::connect;

const TURN: u64 = 1_700_000_040_000;

async fn limiter(server: &Server, quotas: &str) -> Limiter {
    limiter_on(RedisStore::from(connect(&server.url()).await), quotas)
}

fn limiter_on(store: RedisStore, quotas: &str) -> Limiter {
    let quotas: Quotas = quotas.parse().expect("quotas");
    let store = store.deadline(Duration::from_secs(20)).on_failure(OnStoreFailure::Deny);
    Limit::new(quotas).name("life").store(store)
}

/// Waits for the next window, so that what follows is in one.
pub(crate) async fn next_window(ms: u64) {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after it");
    let rest = ms - now.as_millis() as u64 % ms;
    tokio::time::sleep(Duration::from_millis(rest + 1)).await;
}

#[tokio::test]
async fn a_decision_is_one_call_of_however_many_limits_and_quotas() {
    let Some(server) = Server::start() else { return };
    for limits in 1..=3 {
        let names = &["life", "tokens", "cents"][..limits];
        let quotas: Quotas = "1000/minute, 2000/hour, 3000/day".parse().expect("quotas");
        let store = RedisStore::from(connect(&server.url()).await).prefix(&limits.to_string());
        let limits = Limits::new(names.iter().map(|name| Limit::new(quotas).name(name)));
        let store = store.deadline(Duration::from_secs(20)).on_failure(OnStoreFailure::Deny);
        let limits = limits.store(store);
        let lines: Vec<_> = names.iter().map(|name| Line::new(name, "alice", 1)).collect();
        // The first one brings the script.
        let _ = limits.check(&lines).await.expect("it answers");
        server.ask::<()>(&["CONFIG", "RESETSTAT"]);
        for _ in 0..100 {
            assert!(limits.check(&lines).await.expect("it answers").allowed());
        }
        let stats: String = server.ask(&["INFO", "commandstats"]);
        assert!(stats.contains("cmdstat_evalsha:calls=100,"), "{stats}");
        assert!(!stats.contains("cmdstat_eval:") && !stats.contains("cmdstat_script"), "{stats}");
        for name in names {
            assert_eq!(limits.of(name).peek("alice").await.expect("it answers").used(), 101);
        }
    }
}

#[tokio::test]
async fn keys_and_fields_are_readable_and_prefixed() {
    let Some(server) = Server::start() else { return };
    let clock = ManualClock::at_ms(TURN + 1);
    let store = RedisStore::from(connect(&server.url()).await).prefix("shop").clock(clock);
    let limiter = limiter_on(
        store.clone(),
        "9/minute rollover-up-to=20, 2000/hour starting-at=6m, 5/day staggered, 100/10s from-first-request",
    );
    let _ = limiter.charge(("ann", 7_u64), 2).await.expect("it answers");
    let hash: Vec<String> = server.ask(&["HGETALL", "shop:tfw1:{life:tann,u7}"]);
    assert_eq!(
        hash,
        [
            ("60000+0", "-9@1700000040000"),
            ("3600000+360000", "1699999560000002"),
            ("86400000s", "1699917480679002"),
            ("10000f", "2@1700000040001"),
        ]
        .map(<[&str; 2]>::from)
        .concat()
    );

    // A refusal leaves no trace.
    let tokens = limiter_on(store, "10/minute");
    let receipt = tokens.charge("bob", 7).await.expect("it answers").expect("it passed");
    assert!(tokens.charge("bob", 4).await.expect("it answers").is_err());
    let hash = || server.ask::<[String; 2]>(&["HGETALL", "shop:tfw1:{life:tbob}"]);
    assert_eq!(hash(), ["60000+0", "1700000040000007"]);

    // Debt: the count lives for two windows.
    tokens.settle(receipt, 15).await.expect("it answers");
    assert_eq!(hash(), ["60000+0", "15@1700000040000*2"]);

    tokens.reset("bob").await.expect("it answers");
    assert_eq!(server.ask::<u64>(&["EXISTS", "shop:tfw1:{life:tbob}"]), 0);
}

/// Whatever quotas a key was charged under, by plans or before a change.
#[tokio::test]
async fn a_reset_deletes_the_key_with_all_its_counts() {
    let Some(server) = Server::start() else { return };
    let store = RedisStore::from(connect(&server.url()).await).deadline(Duration::from_secs(20));
    let (free, pro) = (Quota::per_day(1), Quota::per_week(1).staggered());
    let control = free.name("plans").key(Key::global()).store(store.clone());
    let layer = FixedWindowLayer::new(&control);
    let by_plan = Limit::by_plan(move |_, _| pro).name("plans").key(Key::global());
    let by_plan = FixedWindowLayer::new(by_plan.store(store.clone()));
    let limiter = free.name("plans").store(store);
    let here = Service::new(&layer);
    let there = Service::new(&by_plan);
    let passes = async || {
        let last = limiter.with_quotas(Quota::new(1, Quota::MAX_WINDOW)).check(Key::global()).await;
        [here.passes().await, there.passes().await, last.expect("it answers").allowed()]
    };
    for _ in 0..2 {
        assert_eq!(passes().await, [true; 3]);
        assert_eq!(passes().await, [false; 3]);
        control.reset(Key::global()).await.expect("it answers");
        assert_eq!(server.ask::<u64>(&["DBSIZE"]), 0);
    }
    let limits = Limits::from(&by_plan);
    let standing = limits.of("plans");
    assert!(standing.peek(Key::global()).await.is_err(), "by which quotas?");
    let standing = control.with_quotas(pro).peek(Key::global()).await.expect("it answers");
    assert_eq!(standing.remaining(), 1);
}

struct Service(FixedWindow<Router>);

impl Service {
    fn new(layer: &FixedWindowLayer) -> Self {
        Self(layer.layer(Router::new().fallback(any(async || "hello"))))
    }

    async fn passes(&self) -> bool {
        let request = Request::new(Body::empty());
        self.0.clone().oneshot(request).await.expect("infallible").status() == 200
    }
}

#[tokio::test]
async fn credentials_are_hashed() {
    let Some(server) = Server::start() else { return };
    let limiter = limiter(&server, "5/minute").await;
    let _ = limiter.check(Key::secret("hunter2")).await.expect("it answers");
    let keys: Vec<String> = server.ask(&["KEYS", "*"]);
    // The SHA-256 of it.
    assert_eq!(
        keys,
        ["tfw1:{life:sf52fbd32b2b3b86ff88ef6c490628285f482af15ddcb29541f94bcf526a3f6c7}"]
    );
}

fn end(decision: &Decision) -> u64 {
    decision.reset_at().duration_since(UNIX_EPOCH).expect("after it").as_millis() as u64
}

#[tokio::test]
async fn a_key_expires_a_minute_after_the_last_of_its_counts() {
    let Some(server) = Server::start() else { return };
    let key = "tfw1:{life:tann}";
    let expiry = || server.ask::<u64>(&["PEXPIRETIME", key]);

    let day = limiter(&server, "5/day").await;
    let decision = day.check("ann").await.expect("it answers");
    assert_eq!(expiry(), end(&decision) + 60_000);
    // A shorter quota on the same key does not shorten its life.
    for quotas in ["5/minute", "5/second rollover-up-to=6"] {
        let shorter = limiter(&server, quotas).await;
        assert!(shorter.check("ann").await.expect("it answers").allowed());
        assert_eq!(expiry(), end(&decision) + 60_000);
    }
    // Debt lengthens it.
    let receipt = day.charge("ann", 1).await.expect("it answers").expect("it passed");
    day.settle(receipt, 11).await.expect("it answers");
    assert_eq!(expiry(), end(&decision) + 2 * 86_400_000 + 60_000);
}

#[tokio::test]
async fn a_key_of_short_windows_stays_for_one_more() {
    let Some(server) = Server::start() else { return };
    for quotas in ["5/10 seconds", "5/10 seconds rollover-up-to=6"] {
        let decision = limiter(&server, quotas).await.check("ann").await.expect("it answers");
        let expiry: u64 = server.ask(&["PEXPIRETIME", "tfw1:{life:tann}"]);
        assert_eq!(expiry, end(&decision) + 10_000, "{quotas}");
        server.ask::<u64>(&["DEL", "tfw1:{life:tann}"]);
    }
}

/// `MIGRATE` hands over how long a key lives, and not until when.
#[tokio::test]
async fn a_key_that_moves_to_a_node_whose_clock_is_behind_lives_until_its_counts_end() {
    let (Some(from), Some(to)) = (Server::ahead(10), Server::start()) else { return };
    let (key, port) = ("tfw1:{life:tann}", to.port.to_string());
    for quotas in [
        "5/minute",
        "5/minute rollover-up-to=6",
        "5/hour from-first-request",
        "5/month in Asia/Tokyo",
    ] {
        let decision = limiter(&from, quotas).await.check("ann").await.expect("it answers");
        let moved: String = from.ask(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]);
        assert_eq!(moved, "OK");
        let expiry: u64 = to.ask(&["PEXPIRETIME", key]);
        assert!(expiry >= end(&decision), "{quotas}: {} ms early", end(&decision) - expiry);
        to.ask::<u64>(&["DEL", key]);
    }
}

#[tokio::test]
async fn under_an_injected_clock_a_key_expires_an_hour_late() {
    let Some(server) = Server::start() else { return };
    let clock = ManualClock::at_ms(TURN + 20_000);
    let store = RedisStore::from(connect(&server.url()).await).clock(clock);
    let _ = limiter_on(store, "5/minute").check("ann").await.expect("it answers");
    let life: u64 = server.ask(&["PTTL", "tfw1:{life:tann}"]);
    assert!((3_660_000 + 35_000..=3_660_000 + 40_000).contains(&life), "{life}");
}

#[tokio::test]
async fn a_lost_expiry_comes_back_with_the_next_window() {
    let Some(server) = Server::start() else { return };
    for quotas in ["5/second", "5/second, 50/minute rollover-up-to=70"] {
        let limiter = limiter(&server, quotas).await;
        let key = "tfw1:{life:tann}";
        let _ = limiter.check("ann").await.expect("it answers");
        server.ask::<u64>(&["PERSIST", key]);
        next_window(1_000).await;
        assert_eq!(server.ask::<i64>(&["PTTL", key]), -1, "it has none");
        let _ = limiter.check("ann").await.expect("it answers");
        assert!(server.ask::<i64>(&["PTTL", key]) > 0, "it has one again");
    }
}

#[tokio::test]
async fn a_counter_that_redis_expires_late_counts_for_nothing() {
    let Some(server) = Server::start() else { return };
    let limiter = limiter(&server, "5/second").await;
    next_window(1_000).await;
    assert!(limiter.charge("ann", 5).await.expect("it answers").is_ok());
    server.ask::<u64>(&["PERSIST", "tfw1:{life:tann}"]);
    next_window(1_000).await;
    assert!(limiter.charge("ann", 5).await.expect("it answers").is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn every_key_has_an_expiry_and_disappears() {
    let Some(server) = Server::start() else { return };
    let store = RedisStore::new(server.url()).expect("an address");
    let limit = Quota::new(3, Duration::from_secs(10))
        .from_first_request()
        .name("life")
        .store(store.deadline(Duration::from_secs(20)).on_failure(OnStoreFailure::Deny));
    let tasks: Vec<_> = (0..64_u64)
        .map(|task| {
            let limit = limit.clone();
            tokio::spawn(async move {
                for i in 0..500 {
                    let _ = limit.check((task, i)).await.expect("it answers");
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("no panic");
    }
    let without: u64 = server.ask(&[
        "EVAL",
        "local n = 0
         for _, key in ipairs(redis.call('KEYS', '*')) do
             if redis.call('PTTL', key) == -1 then n = n + 1 end
         end
         return n",
        "0",
    ]);
    assert_eq!(without, 0, "keys without an expiry");
    assert!(server.ask::<u64>(&["DBSIZE"]) > 10_000, "it was a load");
    let start = Instant::now();
    wait_for("all keys to go", || {
        server.ask::<u64>(&["DBSIZE"]) == 0 || start.elapsed().as_secs() > 28
    });
    assert_eq!(server.ask::<u64>(&["DBSIZE"]), 0);
}
