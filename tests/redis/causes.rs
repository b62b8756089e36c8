//! What the log says when Redis fails: the cause, and not another one.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use harness::{Fate, Server, contains, free_port, gateway};
use redis::sentinel::{SentinelClient, SentinelServerType};
use tower_fixed_window::{Limiter, OnStoreFailure, Quota};
use tower_fixed_window_redis::RedisStore;

use crate::cluster_and_sentinel::cluster;

const DEADLINE: Duration = Duration::from_secs(20);

fn limiter(store: RedisStore) -> Limiter {
    let store = store.deadline(DEADLINE).on_failure(OnStoreFailure::Deny);
    Quota::new(1_000, Quota::MAX_WINDOW).name("cause").store(store)
}

fn limiter_at(url: &str) -> Limiter {
    limiter(RedisStore::new(url).expect("an address"))
}

async fn cause(limiter: &Limiter) -> String {
    limiter.check("ann").await.expect_err("Redis fails").to_string()
}

/// A server that answers everything with this text. Returns its address.
fn speaking(answer: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    std::thread::spawn(move || {
        for mut client in listener.incoming().flatten() {
            std::thread::spawn(move || answer_always(&mut client, answer));
        }
    });
    format!("redis://127.0.0.1:{port}/")
}

fn answer_always(client: &mut TcpStream, answer: &str) {
    let mut asked = [0; 4_096];
    while std::io::Read::read(client, &mut asked).is_ok_and(|read| read > 0) {
        let _ = client.write_all(answer.as_bytes());
    }
}

#[tokio::test]
async fn an_address_that_leads_elsewhere_is_named_as_such() {
    let http = speaking("HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n");
    let other = "this is not Redis' protocol: another service, or TLS (rediss://)";
    assert_eq!(cause(&limiter_at(&http)).await, other);
    // A TLS alert, as a port for TLS answers to plain text.
    assert_eq!(cause(&limiter_at(&speaking("\x15\x03\x03\x00\x02\x02\x0a"))).await, other);
    let unresolved = "Redis can't be reached (its name can't be resolved)";
    assert_eq!(cause(&limiter_at("redis://redis.invalid:6379/")).await, unresolved);
    let Some(server) = Server::start() else { return };
    let database = cause(&limiter_at(&format!("{}99", server.url()))).await;
    assert_eq!(database, "Redis has no database of this number");
}

#[tokio::test]
async fn sentinels_that_know_no_master_are_named() {
    let Some(sentinel) = Server::with(&["--sentinel"]) else { return };
    let store = RedisStore::sentinel([sentinel.url()], |url| {
        SentinelClient::build(vec![url], "mymaster", None, SentinelServerType::Master)
    });
    let limiter = limiter(store.expect("an address"));
    assert_eq!(cause(&limiter).await, "the Sentinels know no master of this name");
}

#[tokio::test]
async fn a_node_of_a_cluster_names_the_store_for_clusters() {
    let Some(nodes) = cluster() else { return };
    let limiter = limiter_at(&nodes[0].url());
    for key in 0..100_u64 {
        if let Err(error) = limiter.check(key).await {
            let says = "this is a node of a cluster: connect with RedisStore::cluster (MOVED)";
            assert_eq!(error.to_string(), says);
            return;
        }
    }
    panic!("another node has some of the keys");
}

#[tokio::test]
async fn a_server_that_hangs_has_not_answered_in_time() {
    let Some(server) = Server::start() else { return };
    let store = RedisStore::new(server.url()).expect("an address");
    let store = store.deadline(Duration::from_millis(100)).on_failure(OnStoreFailure::Deny);
    let limiter = Quota::new(1_000, Quota::MAX_WINDOW).name("cause").store(store);
    while limiter.check("ann").await.is_err() {}
    server.freeze();
    let open = "the store keeps failing: the circuit breaker is open";
    let start = std::time::Instant::now();
    while start.elapsed() < Duration::from_secs(2) {
        let cause = cause(&limiter).await;
        assert!(cause == "Redis did not answer in time" || cause == open, "{cause}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    server.thaw();
}

#[tokio::test]
async fn rights_that_are_withdrawn_while_running_are_named() {
    let Some(server) = Server::start() else { return };
    let change = |rights: &str| {
        let mut command = vec!["ACL", "SETUSER", "app"];
        command.extend(rights.split_whitespace());
        server.ask::<()>(&command);
    };
    for (withdrawn, says) in [
        ("-hset", "Redis does not permit a command that is needed (hset)"),
        ("-hmget", "Redis does not permit a command that is needed (hmget)"),
        ("-time", "Redis does not permit a command that is needed (time)"),
        ("-evalsha", "Redis does not permit a command that is needed (evalsha)"),
        ("resetkeys ~other:*", "Redis does not permit this user the key (NOPERM)"),
    ] {
        change("reset on >secret ~* +@all");
        let quotas = Quota::new(1_000, Quota::MAX_WINDOW).and(Quota::per_hour(100));
        let url = format!("redis://app:secret@127.0.0.1:{}/", server.port);
        let limiter = limiter_at(&url).with_quotas(quotas);
        assert!(limiter.check("ann").await.expect("it may").allowed());
        change(withdrawn);
        assert_eq!(cause(&limiter).await, says, "{withdrawn}");
    }
}

/// What a server may answer to a charge, and what the log says.
#[tokio::test]
async fn each_answer_of_a_server_has_its_cause() {
    let Some(server) = Server::start() else { return };
    for (answer, says) in [
        (
            "-ERR max number of clients reached",
            "Redis has as many clients as its maxclients allows",
        ),
        ("-READONLY You can't write", "Redis is a replica here (READONLY)"),
        ("-LOADING Redis is loading", "Redis refused the command (LOADING)"),
        ("-ERR something else", "Redis refused the command"),
        ("-NOAUTH Authentication required.", "Redis refused the command (NOAUTH)"),
        ("-WRONGTYPE Operation against", "Redis has another value for this key (WRONGTYPE)"),
        (
            "-ASK 1 127.0.0.1:1",
            "this is a node of a cluster: connect with RedisStore::cluster (ASK)",
        ),
        ("*1\r\n+OK", "Redis returned an unexpected answer"),
        ("+OK", "Redis returned an unexpected answer"),
    ] {
        let port = server.port;
        let port = gateway(move |command| match contains(command, "tfw1:{cause") {
            true => Fate::Answer(answer.to_owned()),
            false => Fate::To(port),
        });
        assert_eq!(
            cause(&limiter_at(&format!("redis://127.0.0.1:{port}/"))).await,
            says,
            "{answer}"
        );
    }
    let nobody = format!("redis://127.0.0.1:{}/", free_port());
    assert_eq!(cause(&limiter_at(&nobody)).await, "Redis can't be reached (connection refused)");
}

#[tokio::test]
async fn an_error_without_a_code_has_none() {
    let Some(server) = Server::start() else { return };
    let port = server.port;
    let says = gateway(move |command| match contains(command, "tfw1:{cause") {
        true => Fate::Answer("- ".to_owned()),
        false => Fate::To(port),
    });
    let limiter = limiter_at(&format!("redis://127.0.0.1:{says}/"));
    assert_eq!(cause(&limiter).await, "Redis refused the command");
}

#[tokio::test]
async fn a_process_with_too_many_open_files_is_named_as_such() {
    let full = || std::future::ready(Err(std::io::Error::from_raw_os_error(24).into()));
    let store = RedisStore::connecting::<_, _, redis::aio::MultiplexedConnection>(full);
    assert_eq!(cause(&limiter(store)).await, "Redis can't be reached (too many open files)");
}
