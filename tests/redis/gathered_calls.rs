//! Decisions that travel together are those that would have been made one after the other. Equal charges
//! of one key are counted by one command.

use std::iter;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fastrand::Rng;
use futures_util::future::join4;
use harness::{ALONE, Proxy, Server};
use redis::aio::MultiplexedConnection;
use tower_fixed_window::store::{Account, Adjust, Charge, Reply, Scope, Store};
use tower_fixed_window::{Decision, Key, ManualClock, OnStoreFailure, Quota, Quotas};
use tower_fixed_window_redis::RedisStore;

use crate::agreement::{Pair, assert_all_expire, at_once};
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

/// Of any quotas, of limits around the largest count that Redis has as a number, and of charges that
/// are equal, which one command counts.
#[tokio::test]
async fn gathered_calls_are_decided_in_the_order_they_were_made() {
    let Some(server) = Server::start() else { return };
    let connection = connect_with_script(&server).await;
    let scope = Scope::named("together");
    let (first, rounds) = (env("SEED", 1), env("ROUNDS", 180));
    let (mut asked, mut crossings, mut splits, before) = (0, 0, 0, scripts(&server));
    for seed in first..first + rounds {
        let mut rng = Rng::with_seed(seed);
        let mut now = start(&mut rng);
        let clock = ManualClock::at_ms(now);
        let mut pair = Pair::new(&connection, seed, &clock, |store| store);
        let (around_text, equal) = (seed % 3 == 1, seed % 3 == 2);
        let window = |rng: &mut Rng| {
            let length = length(rng);
            (length, rng.u8(..6), rng.u64(..length))
        };
        let windows: Vec<_> =
            (0..[1, 1, 2, 4][seed as usize % 4]).map(|_| window(&mut rng)).collect();
        let (length, anchor, offset) = windows[0];
        // The last ones are together more than a window has microseconds: their number is the time.
        let part = (length * 1_000 / rng.u64(2..200)).max(1);
        let costs = [1, rng.u64(2..10), around(&mut rng, length), part];
        let (mut is_text, keys) = ([false; 5], [0, 1, 2, 3, 4_u64].map(Key::from));
        for _ in 0..4 {
            // All these have the same windows, and so the same counters.
            let quotas = |rng: &mut Rng| match rng.u8(..4) {
                _ if !around_text && !equal => with_limits(rng, &windows),
                // The crowd below is about as large.
                0 | 1 if equal => Quota::new(rng.u64(1..400), Duration::from_millis(length)).into(),
                _ => quota_around(rng, length, anchor % 3, offset).into(),
            };
            let kinds: Vec<Quotas> = (0..rng.usize(1..8)).map(|_| quotas(&mut rng)).collect();
            let (mut of, mut crowd) = (Vec::new(), Vec::new());
            while crowd.len() < 200 {
                let (quotas, key) = (rng.choice(&kinds).expect("some"), rng.usize(..keys.len()));
                let cost = match (around_text, equal) {
                    (true, _) if rng.bool() => around(&mut rng, length),
                    (true, _) => 1,
                    (_, true) => *rng.choice(&costs).expect("some"),
                    _ => tokens(&mut rng),
                };
                let charge = Charge::new(Account::new(&scope, quotas, &keys[key]), cost);
                let charge = match rng.u8(..8) {
                    0 => charge.reserving(),
                    2 => charge.peeking(),
                    _ => charge,
                };
                let times = if equal { rng.usize(1..100) } else { 1 };
                of.extend([key].repeat(times));
                crowd.extend([charge].repeat(times));
            }
            asked += crowd.len() as u64;
            let decisions = pair.charge_at_once(&crowd).await;
            let outcome = |two: &[Decision]| two[0].is_allowed() != two[1].is_allowed();
            splits +=
                u32::from(equal) * decisions.windows(2).filter(|of| outcome(of)).count() as u32;
            let passed = of.into_iter().zip(&decisions).filter(|(_, of)| of.is_allowed());
            for (key, decision) in passed.filter(|_| around_text) {
                let text = decision.used() >= length * 1_000;
                crossings += u32::from(text != is_text[key]);
                is_text[key] = text;
            }
            now = step_clock(&mut rng, now, length);
            clock.set_ms(now);
        }
    }
    assert_all_expire(&server);
    let calls = scripts(&server) - before;
    println!("{asked} decisions in {calls} calls, {crossings} crossings, {splits} splits");
    assert!(calls * 20 < asked, "{asked} decisions in {calls} calls");
    assert!(rounds < 180 || crossings >= 100, "{crossings} times a count changed its form");
    assert!(rounds < 180 || splits > 400, "{splits} times some charges were refused, others not");
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
async fn a_key_with_an_unreadable_value_fails_alone() {
    let Some(server) = Server::start() else { return };
    let store = store(RedisStore::from(connect(&server.url()).await));
    server.ask::<String>(&["SET", "tfw1:{together:u5}", "no hash"]);
    for key in [9, 10, 59] {
        server.ask::<u64>(&[
            "HSET",
            &format!("tfw1:{{together:u{key}}}"),
            "86400000+0",
            "no count",
        ]);
    }
    let bad = [5, 9, 10, 59];
    // Some are asked for again, in charges that are equal.
    let keys: Vec<u64> = (0..60).chain([[1; 20], [5; 20], [9; 20]].concat()).collect();
    let (answers, mut used) = (at_once(charges(&store, keys.iter().copied())).await, [0; 60]);
    for (key, answer) in keys.into_iter().zip(answers) {
        match answer {
            Err(error) => {
                assert!(bad.contains(&key), "{key}: {error:?}");
                let text = error.to_string();
                assert_eq!(text, "Redis has another value for this key (WRONGTYPE)");
            }
            Ok(decision) => {
                let used = &mut used[key as usize];
                *used += 1;
                assert_eq!((decision.used(), bad.contains(&key)), (*used, false), "{key}");
            }
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

/// One charge leaves alone, and then up to 128 together.
#[tokio::test]
async fn one_command_counts_all_equal_charges() {
    let Some(server) = Server::start() else { return };
    let store = store(RedisStore::new(server.url()).expect("an address"));
    // Loads the script: a call that finds it missing is repeated after later ones.
    let _ = at_once(charges(&store, 10..19)).await;
    let before = commands(&server, "hincrby");
    let answers = at_once(charges(&store, [7; 129])).await;
    for (i, answer) in (1..).zip(answers) {
        assert_eq!(answer.expect("it answers").used(), i);
    }
    assert_eq!(used(&server, 7), 129);
    // The first command finds no window, and a second one begins it.
    assert_eq!(commands(&server, "hincrby") - before, 2 + 1);

    // The limit is a million.
    let (scope, quotas) = (Scope::named("together"), Quota::per_day(1_000_000).into());
    let key = Key::from(7_u64);
    let charge = Charge::new(Account::new(&scope, &quotas, &key), 500_000);
    let answers = at_once([charge; 10].map(|charge| store.charge(charge))).await;
    let allowed = answers.into_iter().map(|answer| answer.expect("it answers").is_allowed());
    assert_eq!(allowed.filter(|allowed| *allowed).count(), 1);
    assert_eq!(used(&server, 7), 500_129);
}

/// Others that ask for the key in a group come between.
#[tokio::test]
async fn equal_charges_around_a_group_keep_their_order() {
    let Some(server) = Server::start() else { return };
    let store = store(RedisStore::from(connect_with_script(&server).await));
    let (scope, quotas) = (Scope::named("together"), Quota::per_day(50).into());
    let beside = Scope::named("beside");
    for at in [0, 1] {
        let [key, other] = [100, 200].map(|key| Key::from(key + at as u64));
        let charge = |key| Charge::new(Account::new(&scope, &quotas, key), 1);
        let mut group = [(Account::new(&beside, &quotas, &key), 1); 2];
        group[at] = (Account::new(&scope, &quotas, &key), 1);
        let three = || (0..3).map(|_| store.charge(charge(&key)));
        let all = iter::once(store.charge(charge(&other)))
            .chain(three())
            .chain([store.charge(Charge::together(&group))])
            .chain(three());
        let answers = at_once(all.collect::<Vec<_>>()).await;
        let used = answers.into_iter().skip(1).map(|answer| answer.expect("it answers").used());
        assert_eq!(used.collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6, 7], "{at}");
    }
}
