//! The keys in Redis: readable, each with an expiry.

use std::time::{Duration, UNIX_EPOCH};

use harness::Server;
use tower_fixed_window::{
    Decision, Limit, Limiter, Limits, Line, ManualClock, OnStoreFailure, Quotas,
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
        // None of their windows ends meanwhile.
        let quotas: Quotas = "1000/3650d, 2000/3649d, 3000/3648d".parse().expect("quotas");
        let store = RedisStore::from(connect(&server.url()).await).prefix(&limits.to_string());
        let limits = Limits::new(names.iter().map(|name| Limit::new(quotas).name(name)));
        let store = store.deadline(Duration::from_secs(20)).on_failure(OnStoreFailure::Deny);
        let limits = limits.store(store);
        let lines: Vec<_> = names.iter().map(|name| Line::new(name, "alice", 1)).collect();
        // The first one brings the script.
        let _ = limits.check(&lines).await.expect("it answers");
        server.ask::<()>(&["CONFIG", "RESETSTAT"]);
        for _ in 0..100 {
            assert!(limits.check(&lines).await.expect("it answers").is_allowed());
        }
        let stats: String = server.ask(&["INFO", "commandstats"]);
        assert!(stats.contains("cmdstat_evalsha:calls=100,"), "{stats}");
        assert!(!stats.contains("cmdstat_eval:") && !stats.contains("cmdstat_script"), "{stats}");
        for name in names {
            assert_eq!(limits.limiter(name).peek("alice").await.expect("it answers").used(), 101);
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

fn end(decision: &Decision) -> u64 {
    decision.reset_at().duration_since(UNIX_EPOCH).expect("after it").as_millis() as u64
}

/// Or a window after it, if that is shorter.
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
        assert!(shorter.check("ann").await.expect("it answers").is_allowed());
        assert_eq!(expiry(), end(&decision) + 60_000);
    }
    // Debt lengthens it.
    let receipt = day.charge("ann", 1).await.expect("it answers").expect("it passed");
    day.settle(receipt, 11).await.expect("it answers");
    assert_eq!(expiry(), end(&decision) + 2 * 86_400_000 + 60_000);
    for quotas in ["5/10 seconds", "5/10 seconds rollover-up-to=6"] {
        server.ask::<u64>(&["DEL", key]);
        let decision = limiter(&server, quotas).await.check("ann").await.expect("it answers");
        assert_eq!(expiry(), end(&decision) + 10_000, "{quotas}");
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
