//! Corrections and charges whose outcome is unknown: they are not sent again, by nobody (S32).

use std::future::ready;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use harness::{Fate, Proxy, Server, gateway, wait_for};
use redis::Cmd;
use tokio::time::timeout;
use tower_fixed_window::{Limiter, OnStoreFailure, Quota};
use tower_fixed_window_redis::RedisStore;

use crate::cluster_and_sentinel::{cluster, urls};
use crate::idle_connections::answering;

fn limiter(store: RedisStore) -> Limiter {
    let store = store.deadline(Duration::from_secs(5)).on_failure(OnStoreFailure::Deny);
    Quota::per_day(10).from_first_request().name("lost").store(store)
}

/// Takes the limit, returns half of it, of which the answer is lost, and says what is used then.
async fn used_after_a_lost_return(limiter: &Limiter) -> u64 {
    for _ in 0..20 {
        if limiter.peek("ann").await.is_ok() {
            break;
        }
    }
    let mut receipts = Vec::new();
    for _ in 0..2 {
        receipts.push(limiter.charge("ann", 5).await.expect("it answers").expect("it passes"));
    }
    let lost = limiter.refund(receipts.swap_remove(0)).await;
    assert!(lost.is_err(), "its answer is lost");
    // Who repeats a call does so within this time.
    tokio::time::sleep(Duration::from_secs(3)).await;
    loop {
        match limiter.peek("ann").await {
            Ok(decision) => return decision.used(),
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

#[tokio::test]
async fn a_return_whose_answer_is_lost_is_not_repeated_on_a_cluster() {
    let Some(nodes) = cluster() else { return };
    let returns = Arc::new(AtomicU32::new(0));
    for node in &nodes {
        let (port, returns) = (node.port, Arc::clone(&returns));
        let way = gateway(move |command| match command.iter().any(|arg| arg == b"return") {
            true => {
                returns.fetch_add(1, Ordering::SeqCst);
                Fate::Lose(port)
            }
            false => Fate::To(port),
        });
        node.ask::<()>(&["CONFIG", "SET", "cluster-announce-port", &way.to_string()]);
    }
    let ports = nodes.iter().map(|node| node.port);
    wait_for("all nodes to know the ways", || {
        let slots: Vec<String> = nodes.iter().map(|node| node.ask(&["CLUSTER", "NODES"])).collect();
        ports.clone().all(|port| slots.iter().all(|all| !all.contains(&format!(":{port}@"))))
    });
    let limiter = limiter(RedisStore::cluster(urls(&nodes)).expect("addresses"));
    assert_eq!(used_after_a_lost_return(&limiter).await, 5);
    assert_eq!(returns.load(Ordering::SeqCst), 1, "it was sent once");
}

/// The answers of this connection are there at once. The first one to a command with this text is
/// lost once the server has executed it.
#[tokio::test]
async fn what_is_lost_at_once_is_not_taken_for_unsent() {
    let Some(server) = Server::start() else { return };
    let of = |text: &'static str| {
        server.ask::<()>(&["FLUSHALL"]);
        let (url, loses) = (server.url(), AtomicBool::new(true));
        let (store, _) = answering(&server, move |_, command: &Cmd| {
            let client = redis::Client::open(url.as_str()).expect("an address");
            let answer = command.query(&mut client.get_connection().expect("a server"));
            let args = String::from_utf8_lossy(&command.get_packed_command()).into_owned();
            let is_lost = args.contains(text) && loses.swap(false, Ordering::SeqCst);
            let lost = || Err(io::Error::from(io::ErrorKind::BrokenPipe).into());
            Some(Box::pin(ready(if is_lost { lost() } else { answer })))
        });
        limiter(store)
    };
    assert_eq!(used_after_a_lost_return(&of("\r\nreturn\r\n")).await, 5);
    let charged = of("\r\ncharge\r\n");
    assert!(charged.check("ann").await.is_err(), "its answer is lost");
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(charged.peek("ann").await.expect("it answers").used(), 1);
}

/// All callers may be as impatient: after a missing script, the next call brings it.
#[tokio::test]
async fn a_charge_whose_caller_has_left_is_not_sent_again_with_its_script() {
    let Some(server) = Server::start() else { return };
    let far = Proxy::to(server.port).delay(Duration::from_millis(300));
    for keys in [1..2_u64, 2..5] {
        let limiter = limiter(RedisStore::new(far.url()).expect("an address"));
        // The second one finds the script.
        for _ in 0..2 {
            assert!(limiter.check("bob").await.expect("it answers").is_allowed());
        }
        server.ask::<String>(&["SCRIPT", "FLUSH"]);
        let crowd = || join_all(keys.clone().map(|key| limiter.check(key)));
        let mut counted = Vec::new();
        for _ in 0..3 {
            // Sent, and not answered.
            assert!(timeout(Duration::from_millis(400), crowd()).await.is_err());
            tokio::time::sleep(Duration::from_millis(800)).await;
            counted.push(server.ask::<u64>(&["DBSIZE"]));
        }
        assert_eq!(counted[0], keys.start, "nothing was counted");
        let answered = timeout(Duration::from_millis(1_150), crowd()).await;
        let answers = answered.expect("one round trip is enough");
        assert!(answers.iter().all(|answer| answer.as_ref().is_ok_and(|of| of.used() > 0)));
    }
}

/// Each has 2 s, and calls of their own would take five for all.
#[tokio::test]
async fn refunds_share_calls_as_charges_do() {
    let Some(server) = Server::start() else { return };
    let port = server.port;
    let slow = gateway(move |_| {
        std::thread::sleep(Duration::from_millis(5));
        Fate::To(port)
    });
    let url = format!("redis://127.0.0.1:{slow}/");
    let store = RedisStore::new(url).expect("an address").on_failure(OnStoreFailure::Deny);
    let store = store.deadline(Duration::from_secs(2));
    let limiter = Quota::per_day(10_000).from_first_request().name("shared").store(store);
    let mut receipts = Vec::new();
    while receipts.len() < 1_000 {
        let charged = join_all((0..100).map(|_| limiter.charge("ann", 1))).await;
        receipts.extend(charged.into_iter().flatten().flatten());
    }
    let before = limiter.peek("ann").await.expect("it answers").used();
    let returned = join_all(receipts.into_iter().map(|receipt| limiter.refund(receipt))).await;
    let lost = returned.iter().filter(|answer| answer.is_err()).count();
    let after = limiter.peek("ann").await.expect("it answers").used();
    println!("{lost} lost, {before} were used, and then {after}");
    assert_eq!((lost, before - after), (0, returned.len() as u64));
}
