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

/// What a server may answer to a charge, and what the log says. A code of Redis is short, and has no
/// lower-case letters; a command is short, and has no digits. Other text may be a secret.
#[tokio::test]
async fn each_answer_of_a_server_has_its_cause_and_no_other_text_of_it_is_shown() {
    let Some(server) = Server::start() else { return };
    let long: &str = format!("-ERR unknown command '{}'", "x".repeat(101)).leak();
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
        ("- ", "Redis refused the command"),
        ("-OOM of hunter2", "Redis refused the command (OOM)"),
        ("-hunter2 is wrong", "Redis refused the command"),
        ("-HUNTER2HUNTER2HUNTER2HUNTER2HUNTER2 is wrong", "Redis refused the command"),
        ("-ERR unknown command 'hunter2'", "Redis lacks a command that is needed"),
        ("-ERR unknown command 'hunter'", "Redis lacks a command that is needed (hunter)"),
        (long, "Redis lacks a command that is needed"),
        (
            "-NOPERM no permissions to run the 'hunter2' command",
            "Redis does not permit a command that is needed (NOPERM)",
        ),
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
async fn a_process_with_too_many_open_files_is_named_as_such() {
    let full = || std::future::ready(Err(std::io::Error::from_raw_os_error(24).into()));
    let store = RedisStore::connecting::<_, _, redis::aio::MultiplexedConnection>(full);
    assert_eq!(cause(&limiter(store)).await, "Redis can't be reached (too many open files)");
}
