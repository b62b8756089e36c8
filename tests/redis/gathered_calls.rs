//! Decisions that travel together are those that would have been made one after the other.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use fastrand::Rng;
use futures_util::future::join4;
use harness::{ALONE, Proxy, Server};
use redis::aio::MultiplexedConnection;
use tower_fixed_window::store::{Account, Adjust, Charge, Reply, Scope, Store};
use tower_fixed_window::{Decision, Key, ManualClock, OnStoreFailure, Quota, Quotas, StoreError};
use tower_fixed_window_redis::RedisStore;

use crate::agreement::Pair;
use crate::conformance::connect;
use crate::differential::{around, quota_around};
use crate::random::{env, length, start, step_clock, tokens, with_limits};
use crate::traffic::{commands, scripts};

/// A store that puts each charge into a call with others: it sends another key's charge first, and
/// charges made while that is in flight leave together.
pub(crate) struct Crowd {
    store: RedisStore,
    scope: Scope,
    quotas: Quotas,
    asked: Arc<AtomicU64>,
}

impl Crowd {
    pub(crate) fn new(store: RedisStore, asked: Arc<AtomicU64>) -> Self {
        let quotas = Quota::per_minute(1).rollover_up_to(2).into();
        Self { store, scope: Scope::named("crowd"), quotas, asked }
    }
}

impl Store for Crowd {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        let key = Key::from("somebody else");
        let other = Charge::new(Account::new(&self.scope, &self.quotas, &key), 1).peeking();
        let other = || self.store.charge(other);
        self.asked.fetch_add(4, Ordering::Relaxed);
        let all = join4(other(), other(), self.store.charge(charge), other());
        Reply::later(async move { all.await.2 })
    }

    fn charges_together(&self) -> bool {
        self.store.charges_together()
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        self.store.adjust(adjust)
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        self.store.reset(scope, key)
    }
}

/// Of more tokens than the window has microseconds.
#[tokio::test]
async fn large_limits_take_one_redis_command() {
    let Some(server) = Server::start() else { return };
    let store = store(RedisStore::new(server.url()).expect("an address"));
    let scope = Scope::named("together");
    let (key, quotas) = (Key::from("hot"), Quota::per_day(1_000_000_000_000).into());
    let account = Account::new(&scope, &quotas, &key);
    let charge = async |cost| {
        let decision = store.charge(Charge::new(account, cost)).await.expect("it answers");
        (decision.is_allowed(), decision.used())
    };
    for i in 1..=50 {
        assert_eq!(charge(1).await, (true, i));
    }
    let stats: String = server.ask(&["INFO", "commandstats"]);
    assert!(!stats.contains("cmdstat_hmget"), "one command counts");
}

/// Denies on failure, so that no failure is hidden by memory. A busy machine meets the deadline.
pub(crate) fn store(store: RedisStore) -> RedisStore {
    store.deadline(Duration::from_secs(20)).on_failure(OnStoreFailure::Deny)
}

/// Polls the replies in this order, all before the first answer.
pub(crate) async fn at_once(
    replies: impl IntoIterator<Item = Reply<Decision>>,
) -> Vec<Result<Decision, StoreError>> {
    let mut all: Vec<_> = replies.into_iter().map(|reply| (reply, None)).collect();
    poll_fn(|cx| {
        let mut done = true;
        for (reply, answer) in &mut all {
            if answer.is_none()
                && let Poll::Ready(ready) = Pin::new(reply).poll(cx)
            {
                *answer = Some(ready);
            }
            done &= answer.is_some();
        }
        if done { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    all.into_iter().map(|(_, answer)| answer.expect("it is done")).collect()
}

pub(crate) fn charges(
    store: &RedisStore,
    keys: impl IntoIterator<Item = u64>,
) -> Vec<Reply<Decision>> {
    let (scope, quotas) = (Scope::named("together"), Quota::per_day(1_000_000).into());
    let charge = |key: u64| {
        let key = Key::from(key);
        store.charge(Charge::new(Account::new(&scope, &quotas, &key), 1))
    };
    keys.into_iter().map(charge).collect()
}

/// The stored count of a key.
pub(crate) fn used(server: &Server, key: u64) -> u64 {
    let value: Option<u64> =
        server.ask(&["HGET", &format!("tfw1:{{together:u{key}}}"), "86400000+0"]);
    // A day has this many microseconds.
    value.unwrap_or(0) % 86_400_000_000
}

/// Loads the script: a call that finds it missing is repeated after later ones.
pub(crate) async fn connect_with_script(server: &Server) -> MultiplexedConnection {
    let connection = connect(&server.url()).await;
    let _ = at_once(charges(&RedisStore::from(connection.clone()), 0..9)).await;
    connection
}

#[tokio::test]
async fn gathered_calls_are_decided_in_the_order_they_were_made() {
    let Some(server) = Server::start() else { return };
    let connection = connect_with_script(&server).await;
    let scope = Scope::named("together");
    let (first, rounds) = (env("SEED", 1), env("ROUNDS", 60));
    let (mut asked, before) = (0, scripts(&server));
    for seed in first..first + rounds {
        let mut rng = Rng::with_seed(seed);
        let clock = ManualClock::at_ms(start(&mut rng));
        let pair = Pair::new(&connection, seed, &clock, |store| store);
        let windows: Vec<_> = (0..4)
            .map(|_| {
                let length = length(&mut rng);
                (length, rng.u8(..6), rng.u64(..length))
            })
            .collect();
        let mut now = start(&mut rng);
        for _ in 0..4 {
            now = step_clock(&mut rng, now, windows[0].0);
            clock.set_ms(now);
            // All these kinds of quotas have the same windows, and so the same counters.
            let kinds: Vec<Quotas> = (0..rng.usize(1..5))
                .map(|_| with_limits(&mut rng, &windows[..[1, 1, 2, 4][seed as usize % 4]]))
                .collect();
            let keys: Vec<Key> = (0..rng.u64(1..20)).map(Key::from).collect();
            let crowd: Vec<_> = (0..rng.usize(1..300))
                .map(|_| {
                    let (quotas, key) = (rng.choice(&kinds), rng.choice(&keys));
                    let account = Account::new(&scope, quotas.expect("some"), key.expect("some"));
                    let charge = Charge::new(account, tokens(&mut rng));
                    match rng.u8(..6) {
                        0 => charge.reserving(),
                        2 => charge.peeking(),
                        _ => charge,
                    }
                })
                .collect();
            asked += crowd.len() as u64;
            let _ = pair.charge_at_once(&crowd).await;
        }
    }
    let calls = scripts(&server) - before;
    println!("{asked} decisions in {calls} calls");
    assert!(calls * 20 < asked, "{asked} decisions in {calls} calls");
}

/// Also if the call before has left the count as text or as a number, and this one changes that.
/// Each in a call of its own, before there is a connection.
#[tokio::test]
async fn calls_that_wait_for_a_connection_go_in_the_order_they_were_made() {
    let Some(server) = Server::start() else { return };
    let proxy = Proxy::to(server.port).delay(Duration::from_millis(20));
    let store = store(RedisStore::new(proxy.url()).expect("an address").one_by_one());
    let used = at_once(charges(&store, [1; 20])).await;
    let used = used.into_iter().map(|answer| answer.expect("it answers").used());
    assert_eq!(used.collect::<Vec<_>>(), (1..=20).collect::<Vec<_>>());
}

#[tokio::test]
async fn gathered_calls_may_alternate_between_number_and_text() {
    let Some(server) = Server::start() else { return };
    let connection = connect_with_script(&server).await;
    let scope = Scope::named("together");
    let (first, rounds) = (env("SEED", 1), env("ROUNDS", 100));
    let mut crossings = 0;
    for seed in first..first + rounds {
        let mut rng = Rng::with_seed(seed);
        let clock = ManualClock::at_ms(1_700_000_000_000);
        let pair = Pair::new(&connection, seed, &clock, |store| store);
        let length = length(&mut rng);
        let (anchor, offset) = (rng.u8(..3), rng.u64(..length));
        let kinds: Vec<Quotas> =
            (0..8).map(|_| quota_around(&mut rng, length, anchor, offset).into()).collect();
        let keys: Vec<Key> = (0..5_u64).map(Key::from).collect();
        let mut is_text = [false; 5];
        for _ in 0..3 {
            let (of, crowd): (Vec<_>, Vec<_>) = (0..100)
                .map(|_| {
                    let (quotas, key) = (rng.choice(&kinds).expect("some"), rng.usize(..5));
                    let cost = if rng.bool() { 1 } else { around(&mut rng, length) };
                    (key, Charge::new(Account::new(&scope, quotas, &keys[key]), cost))
                })
                .unzip();
            let decisions = of.into_iter().zip(pair.charge_at_once(&crowd).await);
            for (key, decision) in decisions.filter(|(_, decision)| decision.is_allowed()) {
                let text = decision.used() >= length * 1_000;
                crossings += u32::from(text != is_text[key]);
                is_text[key] = text;
            }
            // The clock moves to another window, also to an earlier one.
            clock.set_ms(1_700_000_000_000 + rng.u64(..3) * length);
        }
    }
    println!("{crossings} crossings");
    assert!(rounds < 100 || crossings >= 100, "{crossings} crossings");
}

#[tokio::test]
async fn a_key_with_an_unreadable_value_fails_alone() {
    let Some(server) = Server::start() else { return };
    let store = store(RedisStore::from(connect(&server.url()).await));
    server.ask::<String>(&["SET", "tfw1:{together:u5}", "no hash"]);
    for key in [9, 10, 127] {
        server.ask::<u64>(&[
            "HSET",
            &format!("tfw1:{{together:u{key}}}"),
            "86400000+0",
            "no count",
        ]);
    }
    let bad = [5, 9, 10, 127];
    let answers = at_once(charges(&store, 0..128)).await;
    for (key, answer) in (0..).zip(answers) {
        match answer {
            Err(error) => {
                assert!(bad.contains(&key), "{key}: {error:?}");
                let text = error.to_string();
                assert_eq!(text, "Redis has another value for this key (WRONGTYPE)");
            }
            Ok(decision) => assert_eq!((decision.used(), bad.contains(&key)), (1, false), "{key}"),
        }
    }
    assert_eq!(scripts(&server), 2, "one alone, and all others");
    assert_eq!(commands(&server, "eval"), 2, "both once more, with their script");
}

#[tokio::test]
async fn a_missing_script_fails_no_call_and_counts_none_twice() {
    let Some(server) = Server::start() else { return };
    let store = store(RedisStore::from(connect(&server.url()).await));
    for round in 1..=20 {
        server.ask::<String>(&["SCRIPT", "FLUSH"]);
        for answer in at_once(charges(&store, (0..300).map(|i| i % 100))).await {
            assert!(answer.expect("it answers").is_allowed());
        }
        assert_eq!(used(&server, 7), 3 * round);
    }
}

/// Each charge counts as often as it was sent: once, to a server that did no more work.
#[tokio::test(flavor = "multi_thread")]
async fn calls_in_flight_when_the_server_dies_are_not_sent_again() {
    let _alone = ALONE.lock().await;
    let Some(mut server) = Server::with(&["--appendonly", "yes", "--appendfsync", "always"]) else {
        return;
    };
    let store = store(RedisStore::new(server.url()).expect("an address"));
    for answer in at_once(charges(&store, 0..300)).await {
        assert!(answer.expect("it answers").is_allowed());
    }
    server.freeze();
    let asked = Instant::now();
    let crowd = charges(&store, 0..300);
    let crowd = tokio::spawn(async move { (at_once(crowd).await, asked.elapsed()) });
    tokio::time::sleep(Duration::from_millis(50)).await;
    server.kill();
    let (answers, took) = crowd.await.expect("no panic");
    assert!(answers.iter().all(Result::is_err), "nobody was there");
    assert!(took < Duration::from_millis(750), "all of them in time: {took:?}");
    server.restart();
    // A store that repeats its calls would do so within this time.
    tokio::time::sleep(Duration::from_secs(1)).await;
    for key in 0..300 {
        assert_eq!(used(&server, key), 1, "of key {key}");
    }
    loop {
        // The lost calls don't delay later ones.
        let answers = at_once(charges(&store, 0..300)).await;
        if answers.iter().all(Result::is_ok) {
            break;
        }
        assert!(asked.elapsed() < Duration::from_secs(10), "it answers again");
    }
}

/// The store knows that the charges were not sent, so no key is charged.
#[tokio::test]
async fn calls_that_expire_or_are_dropped_before_they_are_sent_charge_nothing() {
    let _alone = ALONE.lock().await;
    let Some(server) = Server::start() else { return };
    let store = store(RedisStore::new(server.url()).expect("an address"));
    let hasty = store.clone().deadline(Duration::from_millis(50));
    let store = store.deadline(Duration::from_secs(20));
    for charge in charges(&store, (0..10).chain([50; 50])) {
        assert!(charge.await.expect("it answers").is_allowed());
    }
    server.freeze();
    // More calls than can be in flight at this distance, also on a slow machine, but soon: the
    // breaker opens after some 400 ms.
    let mut crowd = Vec::new();
    for charge in charges(&store, 100..500) {
        crowd.push(tokio::spawn(charge));
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
    }
    let waiting = tokio::spawn(at_once(charges(&store, 2..4)));
    let dropped = tokio::spawn(at_once(charges(&store, 4..7)));
    for answer in at_once(charges(&hasty, 7..10)).await {
        let error = answer.expect_err("late").to_string();
        // Of a busy machine.
        let stood_still = error.starts_with("the runtime stood still");
        assert!(stood_still || error == "the call to Redis could not be sent in time", "{error}");
    }
    dropped.abort();
    assert!(dropped.await.is_err(), "it is gone");
    server.thaw();
    for answer in waiting.await.expect("no panic") {
        assert!(answer.expect("it answers").is_allowed());
    }
    for answer in crowd {
        assert!(answer.await.expect("no panic").expect("it answers").is_allowed());
    }
    let counts: Vec<u64> = (0..10).map(|key| used(&server, key)).collect();
    assert_eq!(counts, [1, 1, 2, 2, 1, 1, 1, 1, 1, 1]);
}

/// They share a call with others, which wait longer.
#[tokio::test]
async fn calls_that_expire_while_there_is_no_connection_are_not_sent() {
    let Some(server) = Server::start() else { return };
    let proxy = Proxy::to(server.port);
    proxy.set_silent(true);
    let store = store(RedisStore::new(proxy.url()).expect("an address"));
    let hasty = store.clone().deadline(Duration::from_millis(50));
    let mut all = charges(&store.deadline(Duration::from_secs(20)), 0..2);
    all.extend(charges(&hasty, [2]));
    let all = tokio::spawn(at_once(all));
    tokio::time::sleep(Duration::from_millis(100)).await;
    proxy.set_silent(false);
    let mut answers = all.await.expect("no panic");
    let error = answers.pop().expect("three").expect_err("late").to_string();
    // Of a busy machine.
    let stood_still = error.starts_with("the runtime stood still");
    assert!(stood_still || error == "the call to Redis could not be sent in time", "{error}");
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    assert_eq!(used(&server, 2), 0);
}

/// The same where decisions share no calls.
#[tokio::test]
async fn a_call_of_its_own_that_is_late_is_not_sent() {
    let Some(server) = Server::start() else { return };
    let store = store(RedisStore::new(server.url()).expect("an address").one_by_one());
    let late = store.clone().deadline(Duration::ZERO);
    for charge in charges(&store.deadline(Duration::from_secs(20)), [1]) {
        assert!(charge.await.expect("it answers").is_allowed());
    }
    for charge in charges(&late, [1]) {
        assert_eq!(
            charge.await.expect_err("late").to_string(),
            "the call to Redis could not be sent in time"
        );
    }
    assert_eq!(used(&server, 1), 1);
}

/// Streams and selects may poll a future once, and then drop or delay it.
#[tokio::test]
async fn a_future_that_is_not_polled_again_blocks_no_other_call() {
    let Some(server) = Server::start() else { return };
    let store =
        store(RedisStore::from(connect(&server.url()).await).deadline(Duration::from_secs(20)));
    let mut busy = charges(&store, 0..2);
    poll_fn(|cx| {
        assert!(busy.iter_mut().all(|reply| Pin::new(reply).poll(cx).is_pending()));
        Poll::Ready(())
    })
    .await;
    let others = at_once(charges(&store, 2..9));
    let answers = tokio::time::timeout(Duration::from_secs(10), others).await.expect("in time");
    assert!(answers.iter().all(Result::is_ok));
    for answer in at_once(busy).await {
        assert!(answer.expect("it is there").is_allowed());
    }
}
