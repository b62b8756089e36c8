//! Commands that a server lacks, and rights that a user lacks: the first charge finds them before
//! anything is written, and the error names them. So does one after a right was withdrawn (S31).

use std::time::Duration;

use harness::Server;
use redis::IntoConnectionInfo;
use redis::sentinel::{SentinelClientBuilder, SentinelServerType};
use tower_fixed_window::{Limiter, Limits, Line, OnStoreFailure, Quota, Quotas};
use tower_fixed_window_redis::RedisStore;

use crate::cluster_and_sentinel::urls;
use crate::silent_hosts::watched;

/// The rights that the guide says a user needs, from `begins` to the end of the code.
fn documented_from(begins: &str) -> Vec<&'static str> {
    let guide = include_str!("../../redis/README.md");
    let from = guide.find(begins).expect("it is documented");
    guide[from..].split('`').next().expect("it ends").split_whitespace().collect()
}

fn documented() -> Vec<&'static str> {
    documented_from("~tfw1:* +")
}

fn change_user(server: &Server, rights: &[&str]) {
    let mut command = vec!["ACL", "SETUSER", "limiter"];
    command.extend(rights);
    server.ask::<String>(&command);
}

fn add_user(server: &Server) {
    change_user(server, &["reset", "on", ">secret"]);
    change_user(server, &documented());
}

fn store(server: &Server) -> RedisStore {
    let url = format!("redis://limiter:secret@127.0.0.1:{}/", server.port);
    RedisStore::new(url).expect("an address").deadline(Duration::from_secs(20))
}

fn limiter(store: RedisStore) -> Limiter {
    Quota::per_minute(5).name("rights").store(store.on_failure(OnStoreFailure::Deny))
}

/// Quotas for the fast path through the script, and for each of the others.
fn quotas_of_each_path() -> [Quotas; 4] {
    [
        Quota::per_minute(50).into(),
        Quota::per_minute(50).and(Quota::per_hour(500)),
        Quota::per_day(50).from_first_request().into(),
        Quota::per_month(50).in_zone("Asia/Tokyo").into(),
    ]
}

#[tokio::test]
async fn the_documented_rights_are_enough() {
    let Some(server) = Server::start() else { return };
    add_user(&server);
    server.ask::<String>(&["ACL", "SETUSER", "default", "resetpass", "off"]);
    let right = limiter(store(&server)).with_quotas(quotas_of_each_path()[1]);
    let receipt = right.charge("ann", 2).await.expect("it answers").expect("it passed");
    right.refund(receipt).await.expect("it may");
    assert!(right.with_quotas(Quota::per_hour(5)).check("ann").await.expect("it may").is_allowed());
    right.reset("ann").await.expect("it may");
    let wrong = RedisStore::new(format!("redis://limiter:wrong@127.0.0.1:{}/", server.port));
    let error = wrong.expect("an address").ping().await.expect_err("another password");
    assert_eq!(error.to_string(), "Redis refused the password");
}

/// On the master, and on the Sentinels.
#[tokio::test]
async fn the_documented_rights_are_enough_with_sentinel() {
    let Some(watched) = watched() else { return };
    add_user(&watched.master);
    change_user(&watched.master, &documented_from("+role"));
    for sentinel in &watched.sentinels {
        change_user(sentinel, &["reset", "on", ">secret"]);
        change_user(sentinel, &documented_from("+sentinel|masters"));
    }
    let store = RedisStore::sentinel(urls(&watched.sentinels), |url| {
        let sentinel = url.into_connection_info()?.addr().clone();
        SentinelClientBuilder::new([sentinel], "mymaster", SentinelServerType::Master)?
            .set_client_to_sentinel_username("limiter")
            .set_client_to_sentinel_password("secret")
            .set_client_to_redis_username("limiter")
            .set_client_to_redis_password("secret")
            .build()
    });
    let store = store.expect("an address").deadline(Duration::from_secs(20));
    store.ping().await.expect("it may");
}

#[tokio::test]
async fn the_first_charge_says_which_right_is_missing() {
    let Some(server) = Server::start() else { return };
    for right in documented().into_iter().filter_map(|right| right.strip_prefix('+')) {
        server.ask::<String>(&["SCRIPT", "FLUSH"]);
        add_user(&server);
        change_user(&server, &[&format!("-{right}")]);
        let limiter = limiter(store(&server));
        let error = limiter.check("ann").await.expect_err(right);
        let says = format!("Redis does not permit a command that is needed ({right})");
        assert_eq!(error.to_string(), says);
        assert_eq!(server.ask::<u64>(&["DBSIZE"]), 0, "{right}");
        // The limiter joins as soon as its user has the right.
        add_user(&server);
        let start = std::time::Instant::now();
        while limiter.check("ann").await.is_err() {
            assert!(start.elapsed().as_secs() < 10, "{right}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        server.ask::<()>(&["FLUSHALL"]);
    }
}

#[tokio::test]
async fn the_first_charge_says_which_command_is_missing() {
    for command in ["pexpireat", "hgetall", "hmget", "del"] {
        let Some(server) = Server::with(&["--save", "", "--rename-command", command, ""]) else {
            return;
        };
        let store = RedisStore::new(server.url()).expect("an address");
        let limiter = limiter(store.deadline(Duration::from_secs(20)));
        let says = format!("Redis lacks a command that is needed ({command})");
        assert_eq!(limiter.check("ann").await.expect_err("it is not there").to_string(), says);
        assert_eq!(server.ask::<u64>(&["DBSIZE"]), 0);
    }
}

/// The error names all of them.
#[tokio::test]
async fn several_missing_rights_are_said_at_once() {
    let Some(server) = Server::start() else { return };
    add_user(&server);
    change_user(&server, &["-@hash", "-@write"]);
    let error = store(&server).ping().await.expect_err("it may not write");
    let says = "Redis does not permit a command that is needed (hincrby, hget, hmget, hset, hlen, \
                hgetall, pexpireat, del)";
    assert_eq!(error.to_string(), says);
}

/// The connection and the loaded scripts remain.
#[tokio::test]
async fn a_right_that_is_withdrawn_fails_before_anything_is_written() {
    let Some(server) = Server::start() else { return };
    for shared in [true, false] {
        for quotas in quotas_of_each_path() {
            for right in
                ["hgetall", "pexpireat", "hlen", "hset", "hincrby", "hmget", "time", "evalsha"]
            {
                add_user(&server);
                server.ask::<()>(&["FLUSHALL"]);
                let one = store(&server);
                let one = if shared { one } else { one.one_by_one() };
                let limiter = limiter(one).with_quotas(quotas);
                assert!(limiter.check("ann").await.expect("it may").is_allowed());
                change_user(&server, &[&format!("-{right}")]);
                let before: Vec<String> = server.ask(&["HGETALL", "tfw1:{rights:tann}"]);
                let keys = ["bob", "cid", "dan", "eve"];
                let four = futures_util::future::join_all(keys.map(|key| limiter.check(key)));
                let says = format!("Redis does not permit a command that is needed ({right})");
                for answer in four.await {
                    assert_eq!(answer.expect_err(right).to_string(), says, "{quotas}");
                }
                let _ = limiter.check("ann").await;
                assert_eq!(server.ask::<u64>(&["DBSIZE"]), 1, "{right} {quotas}");
                let after: Vec<String> = server.ask(&["HGETALL", "tfw1:{rights:tann}"]);
                assert_eq!(after, before, "{right} {quotas}");
            }
        }
    }
}

/// The first limit takes the fast path, which needs no `HSET`; the second limit needs it.
#[tokio::test]
async fn several_limits_write_nothing_where_one_of_them_may_not_be_written() {
    let Some(server) = Server::start() else { return };
    add_user(&server);
    let limits =
        Limits::new([Quota::per_minute(50).name("plain"), Quota::per_month(50).name("month")]);
    let limits = limits.store(store(&server).on_failure(OnStoreFailure::Deny));
    let lines = |key| [Line::new("plain", key, 1), Line::new("month", key, 1)];
    assert!(limits.check(lines("ann")).await.expect("it may").is_allowed());
    change_user(&server, &["-hset"]);
    let error = limits.check(lines("bob")).await.expect_err("it may not");
    assert_eq!(error.to_string(), "Redis does not permit a command that is needed (hset)");
    assert_eq!(server.ask::<Vec<String>>(&["KEYS", "*bob}"]), [""; 0]);
}

/// The server refuses a call that has one such key before it executes any of it.
#[tokio::test]
async fn a_key_that_the_user_may_not_touch_fails_alone() {
    let Some(server) = Server::start() else { return };
    add_user(&server);
    change_user(&server, &["resetkeys", "~tfw1:{good*"]);
    for one_by_one in [false, true] {
        server.ask::<()>(&["FLUSHALL"]);
        let store = store(&server).on_failure(OnStoreFailure::Deny);
        let store = if one_by_one { store.one_by_one() } else { store };
        let [good, bad] =
            ["good", "bad"].map(|name| Quota::per_day(100).name(name).store(store.clone()));
        let limits =
            Limits::new([Quota::per_day(100).name("good"), Quota::per_day(50).name("good2")]);
        let limits = limits.store(store);
        assert!(good.check("ann").await.expect("it may").is_allowed());
        for round in 1..=20 {
            let lines = [Line::new("good", "eve", 1), Line::new("good2", "eve", 1)];
            let (all, several, refused) = tokio::join!(
                futures_util::future::join_all((0..17_u64).map(|key| good.check(key))),
                limits.check(lines),
                bad.check("ann"),
            );
            for answer in all {
                assert_eq!(answer.expect("its key is permitted").used(), round);
            }
            assert_eq!(several.expect("its keys are permitted").used(), round);
            let says = "Redis does not permit this user the key (NOPERM)";
            assert_eq!(refused.expect_err("it may not").to_string(), says);
        }
    }
}
