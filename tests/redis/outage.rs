//! Redis gone, frozen, back, or forgetful: every request gets its answer in time.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use harness::{ALONE, Proxy, Server, wait_for};
use tower_fixed_window::{Limiter, OnStoreFailure, Quota};
use tower_fixed_window_redis::RedisStore;

use crate::log::Log;

const DEADLINE: Duration = Duration::from_millis(250);
/// The delay that a noisy machine may add.
const NOISE: Duration = Duration::from_millis(500);
/// A second, and such a delay.
pub(crate) const SECOND: Duration = Duration::from_millis(1_500);
const LIMIT: u64 = 200;

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum By {
    Redis,
    Memory,
    Nobody,
}

pub(crate) struct Answer {
    asked: Instant,
    took: Duration,
    by: By,
    allowed: bool,
}

impl Answer {
    pub(crate) fn is_by(&self, by: By) -> bool {
        self.by == by
    }

    pub(crate) fn ends_after(&self, since: Instant) -> bool {
        self.asked + self.took > since
    }
}

/// Nodes under load, each with its own store.
pub(crate) struct Load {
    answers: Arc<Mutex<Vec<Answer>>>,
    stop: Arc<AtomicBool>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Load {
    /// Starts to send: each node has `tasks` concurrent requests, for `keys` keys in turn.
    pub(crate) fn start(limiters: &[Limiter], keys: u64, tasks: usize) -> Self {
        Self::of_keys(limiters, (0..keys).collect(), tasks)
    }

    pub(crate) fn of_keys(limiters: &[Limiter], keys: Vec<u64>, tasks: usize) -> Self {
        let (answers, stop) = (Arc::<Mutex<Vec<_>>>::default(), Arc::new(AtomicBool::new(false)));
        let tasks = limiters
            .iter()
            .flat_map(|limiter| (0..tasks).map(move |task| (task, limiter.clone())))
            .map(|(task, limiter)| {
                let (answers, stop) = (Arc::clone(&answers), Arc::clone(&stop));
                let mut keys = keys.clone().into_iter().cycle().skip(task);
                tokio::spawn(async move {
                    while !stop.load(Ordering::Relaxed) {
                        let key = keys.next().expect("some");
                        let asked = Instant::now();
                        let answer = limiter.check(key).await;
                        let by = match &answer {
                            Ok(decision) if decision.is_local() => By::Memory,
                            Ok(_) => By::Redis,
                            Err(_) => By::Nobody,
                        };
                        let allowed = answer.is_ok_and(|decision| decision.is_allowed());
                        let answer = Answer { asked, took: asked.elapsed(), by, allowed };
                        answers.lock().expect("no panic").push(answer);
                        tokio::time::sleep(Duration::from_millis(2)).await;
                    }
                })
            })
            .collect();
        Self { answers, stop, tasks }
    }

    /// Waits for a decision by `by` on a request sent after `since`.
    pub(crate) async fn answered_by(&self, by: By, since: Instant) -> Duration {
        loop {
            let found = |answer: &&Answer| answer.by == by && answer.asked >= since;
            if let Some(first) = self.answers.lock().expect("no panic").iter().find(found) {
                return first.asked + first.took - since;
            }
            assert!(since.elapsed() < Duration::from_secs(20), "no answer by {by:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Asserts that Redis answers again within a second.
    pub(crate) async fn joins(&self, since: Instant) {
        let back = self.answered_by(By::Redis, since).await;
        println!("joined after {back:?}");
        assert!(back < SECOND, "{back:?}");
    }

    /// Ends the load.
    pub(crate) async fn stop(self) -> Vec<Answer> {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.expect("no panic");
        }
        std::mem::take(&mut *self.answers.lock().expect("no panic"))
    }

    /// Ends the load, and asserts that each request had its answer in time.
    pub(crate) async fn finish(self, what: &str) -> Vec<Answer> {
        let answers = self.stop().await;
        let slowest = answers.iter().map(|answer| answer.took).max().expect("answers");
        let of = |by| answers.iter().filter(|answer| answer.by == by).count();
        println!(
            "{what}: {} answers, {} by memory, slowest {slowest:?} of a deadline of {DEADLINE:?}",
            answers.len(),
            of(By::Memory)
        );
        assert!(slowest < DEADLINE + NOISE, "{what}: the slowest took {slowest:?}");
        assert_eq!(of(By::Nobody), 0, "{what}: some were left without an answer");
        answers
    }
}

impl Load {
    /// Ends the load, and asserts that all keys were in Redis again within a second.
    pub(crate) async fn finish_by_redis(self, since: Instant, what: &str) -> Vec<Answer> {
        let answers = self.finish(what).await;
        assert!(answers.iter().any(|answer| answer.is_by(By::Redis)), "{what}: it joins");
        let late = answers.iter().filter(|answer| answer.is_by(By::Memory));
        let last = late.map(|answer| answer.asked.saturating_duration_since(since)).max();
        println!("{what}: the last by memory {last:?} later");
        assert!(last.unwrap_or_default() < SECOND, "{what}: memory answered after {last:?}");
        answers
    }
}

pub(crate) fn limiter(store: RedisStore, limit: u64) -> Limiter {
    // The window is an hour, so that all counts are in one window, but for one run in some
    // hundreds.
    Quota::per_hour(limit).from_first_request().name("outage").store(store)
}

fn nodes(url: &str) -> Vec<Limiter> {
    let node = |_| limiter(RedisStore::new(url).expect("an address"), LIMIT);
    (0..3).map(node).collect()
}

fn passed(answers: &[Answer], by: By) -> u64 {
    answers.iter().filter(|answer| answer.by == by && answer.allowed).count() as u64
}

fn used(server: &Server) -> u64 {
    let value: Option<String> = server.ask(&["HGET", "tfw1:{outage:u0}", "3600000f"]);
    value.map_or(0, |value| value.split('@').next().expect("a count").parse().expect("a number"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_was_killed_or_frozen_is_used_again() {
    let _alone = ALONE.lock().await;
    let Some(mut server) = Server::start() else { return };
    let load = Load::start(&nodes(&server.url()), 1, 16);
    load.answered_by(By::Redis, Instant::now()).await;
    for freezes in [false, true, false] {
        tokio::time::sleep(Duration::from_millis(500)).await;
        if freezes {
            server.freeze()
        } else {
            server.kill()
        }
        load.answered_by(By::Memory, Instant::now()).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        if freezes {
            server.thaw()
        } else {
            server.restart()
        }
        load.joins(Instant::now()).await;
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    let answers = load.finish("killed and frozen").await;
    // Redis was empty after each of two restarts, and memory limits once per node.
    assert_eq!(passed(&answers, By::Redis), LIMIT * 3, "a limit for each life of Redis");
    assert_eq!(passed(&answers, By::Memory), LIMIT * 3, "a limit for each node");
}

/// A store behind an address that can lead elsewhere later, and its port.
fn behind_an_address(server: &Server) -> (RedisStore, Arc<AtomicU16>) {
    let port = Arc::new(AtomicU16::new(server.port));
    let address = Arc::clone(&port);
    let store = RedisStore::connecting(move || {
        let port = address.load(Ordering::SeqCst);
        async move {
            let client = redis::Client::open(("127.0.0.1", port))?;
            client.get_multiplexed_async_connection().await
        }
    });
    (store, port)
}

/// Its deadline counts from that request, not from the loss of the connection.
#[tokio::test]
async fn the_first_request_after_an_outage_without_requests_waits_for_a_connection() {
    let Some(mut server) = Server::start() else { return };
    let store = RedisStore::new(server.url()).expect("an address");
    let limiter = limiter(store.deadline(Duration::from_secs(3)), LIMIT);
    let is_local = async || limiter.check(0).await.expect("it answers").is_local();
    assert!(!is_local().await);
    server.kill();
    while !is_local().await {}
    tokio::time::sleep(Duration::from_millis(3_500)).await;
    server.restart();
    assert!(!is_local().await, "the store had the whole deadline to connect");
}

/// A new connection may be closed together with the one before.
#[tokio::test]
async fn a_single_failed_attempt_to_connect_fails_no_request() {
    let Some(server) = Server::start() else { return };
    let (url, calls) = (server.url(), AtomicU16::new(0));
    let store = RedisStore::connecting(move || {
        let (url, first) = (url.clone(), calls.fetch_add(1, Ordering::SeqCst) == 0);
        async move {
            if first {
                return Err(io::Error::from(io::ErrorKind::ConnectionReset).into());
            }
            redis::Client::open(url)?.get_multiplexed_async_connection().await
        }
    });
    let limiter = limiter(store.deadline(Duration::from_secs(5)), LIMIT);
    assert!(!limiter.check(0).await.expect("it answers").is_local());
}

/// The node has not noticed the failover: its last call was refused by the limit, for which a
/// replica only reads.
#[tokio::test(flavor = "multi_thread")]
async fn charges_refunds_and_resets_follow_a_master_that_only_reads() {
    let _alone = ALONE.lock().await;
    for what in ["charge", "refund", "reset"] {
        let options = ["--save", "", "--repl-diskless-sync-delay", "0"];
        let servers = (Server::with(&options), Server::with(&options));
        let (Some(old), Some(new)) = servers else { return };
        let follow = |server: &Server, master: &Server| {
            server.ask::<String>(&["REPLICAOF", "127.0.0.1", &master.port.to_string()]);
            wait_for("the replica", || {
                server.ask::<String>(&["INFO", "replication"]).contains("link_status:up")
            });
        };
        follow(&new, &old);
        let (store, port) = behind_an_address(&old);
        let node = limiter(store.deadline(Duration::from_secs(2)), 5);
        let receipt = node.charge(0, 5).await.expect("it answers").expect("it passes");
        assert!(!receipt.decision().is_local());
        wait_for("the charge to be replicated", || used(&new) == 5);
        new.ask::<String>(&["REPLICAOF", "NO", "ONE"]);
        follow(&old, &new);
        let refused = node.check(0).await.expect("it answers");
        assert!(!refused.is_allowed() && !refused.is_local(), "by the replica");
        port.store(new.port, Ordering::SeqCst);
        match what {
            "charge" => {
                let passed = node.check(1).await.expect("it answers");
                assert!(passed.is_allowed() && !passed.is_local());
            }
            "refund" => {
                node.refund(receipt).await.expect("it answers");
                assert_eq!(used(&new), 0);
            }
            _ => {
                node.reset(0).await.expect("it answers");
                assert_eq!(used(&new), 0);
            }
        }
    }
}

/// The address still leads to the replica, which answers calls that write nothing.
#[tokio::test(flavor = "multi_thread")]
async fn connections_to_a_replica_are_not_made_as_fast_as_it_refuses() {
    let _alone = ALONE.lock().await;
    let (Some(old), Some(new)) = (Server::start(), Server::start()) else { return };
    let proxy = Proxy::to(old.port);
    let node = limiter(RedisStore::new(proxy.url()).expect("an address"), 5);
    for key in 0..1_000 {
        assert!(node.charge(key, 5).await.expect("it answers").is_ok());
    }
    old.ask::<String>(&["REPLICAOF", "127.0.0.1", &new.port.to_string()]);
    let (before, start) = (proxy.made(), Instant::now());
    let mut by_replica = 0;
    for key in 0..1_000 {
        let (refused, written) = tokio::join!(node.check(key), node.check(1_000 + key));
        by_replica += u64::from(!refused.expect("it answers").is_local());
        assert!(written.expect("memory answers").is_local());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let (made, took) = (proxy.made() - before, start.elapsed());
    println!("{made} connections in {took:?}, {by_replica} answers by the replica");
    assert!(by_replica > 0);
    assert!(u128::from(made) < 8 + took.as_millis() / 250, "{made} connections in {took:?}");
}

/// A call fails if two consecutive connections lead to replicas. Here, one in between led to a
/// master. A replica without data answers MASTERDOWN instead of READONLY.
#[tokio::test(flavor = "multi_thread")]
async fn a_master_that_becomes_a_replica_soon_after_another_failover_is_followed() {
    let _alone = ALONE.lock().await;
    let no_data = ["--save", "", "--replica-serve-stale-data", "no"];
    let (Some(one), Some(other)) = (Server::start(), Server::with(&no_data)) else { return };
    let (store, port) = behind_an_address(&one);
    let limiter = limiter(store.deadline(Duration::from_secs(5)), LIMIT);
    let is_local = async || limiter.check(0).await.expect("it answers").is_local();
    // The replica waits for a master that is gone.
    let fail_over = |from: &Server, to: &Server| {
        from.ask::<String>(&["REPLICAOF", "127.0.0.1", "1"]);
        to.ask::<String>(&["REPLICAOF", "NO", "ONE"]);
        port.store(to.port, Ordering::SeqCst);
    };
    assert!(!is_local().await);
    fail_over(&one, &other);
    assert!(!is_local().await);
    other.ask::<u64>(&["CLIENT", "KILL", "TYPE", "normal"]);
    tokio::time::sleep(Duration::from_millis(50)).await;
    while is_local().await {}
    // Within a second of that connection.
    fail_over(&other, &one);
    assert!(!is_local().await);
}

/// The call fails at once, at any distance and with any deadline.
#[tokio::test]
async fn a_call_that_two_replicas_refuse_has_failed() {
    let Some(server) = Server::start() else { return };
    let proxy = Proxy::to(server.port).delay(Duration::from_millis(150));
    let store = RedisStore::new(proxy.url()).expect("an address").deadline(Duration::from_secs(8));
    let node = limiter(store, LIMIT);
    assert!(!node.check(0).await.expect("it answers").is_local());
    server.ask::<String>(&["REPLICAOF", "127.0.0.1", "1"]);
    let (before, start) = (proxy.made(), Instant::now());
    assert!(node.check(0).await.expect("memory answers").is_local());
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    assert!(proxy.made() - before < 10, "{} connections", proxy.made() - before);
}

#[tokio::test]
async fn errors_name_no_address_and_no_key() {
    let store = RedisStore::new("redis://user:hunter2@127.0.0.1:1/").expect("an address");
    let limiter = limiter(store.clone().on_failure(OnStoreFailure::Deny), 5);
    let error = limiter.check("ann").await.expect_err("nobody is there");
    assert_eq!(error.to_string(), "Redis can't be reached (connection refused)");
    assert!(!format!("{store:?} {limiter:?} {error:?}").contains("hunter2"));
    assert!(
        format!("{store:?}").starts_with("RedisStore(Remote { deadline: Some(250ms), fallback: ")
    );
    let error = RedisStore::new("http://user:hunter2@127.0.0.1/").expect_err("no address");
    assert_eq!(error.to_string(), "not a URL of Redis: write redis://host:6379/");
}

#[tokio::test]
async fn a_server_on_a_unix_socket_is_used_and_named_by_its_path() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("redis.sock").display().to_string();
    let Some(mut server) = Server::with(&["--unixsocket", &path]) else { return };
    let log = Log::start();
    let limiter = limiter(RedisStore::new(format!("unix://{path}")).expect("an address"), LIMIT);
    let is_local = async || limiter.check("ann").await.expect("memory answers").is_local();
    assert!(!is_local().await);
    server.kill();
    assert!(is_local().await);
    assert!(log.text().contains(&format!("server=\"{path}\"")), "{}", log.text());
    server.restart();
    let start = Instant::now();
    while is_local().await {
        assert!(start.elapsed().as_secs() < 20);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The panic comes before the closure returns a future.
#[tokio::test]
async fn a_connect_closure_that_panics_is_not_called_in_a_circle() {
    let Some(server) = Server::start() else { return };
    let (calls, works) = (Arc::new(AtomicU16::new(0)), Arc::new(AtomicBool::new(false)));
    let (counted, may, url) = (Arc::clone(&calls), Arc::clone(&works), server.url());
    let store = RedisStore::connecting(move || {
        counted.fetch_add(1, Ordering::SeqCst);
        assert!(may.load(Ordering::SeqCst), "no address yet");
        let client = redis::Client::open(url.as_str());
        async move { client?.get_multiplexed_async_connection().await }
    });
    let limiter = limiter(store, LIMIT);
    assert!(limiter.check("ann").await.expect("memory answers").is_local());
    let calls = calls.load(Ordering::SeqCst);
    assert!(calls < 8, "{calls} calls");
    works.store(true, Ordering::SeqCst);
    let start = Instant::now();
    while limiter.check("ann").await.expect("it answers").is_local() {
        tokio::time::sleep(Duration::from_millis(10)).await;
        assert!(start.elapsed() < Duration::from_secs(5), "it connects");
    }
}
