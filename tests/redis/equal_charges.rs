//! Equal charges of one key that share a call are counted by one command, and decided as if they
//! had been made one after the other.

use std::iter;
use std::time::Duration;

use fastrand::Rng;
use harness::Server;
use tower_fixed_window::store::{Account, Charge, Scope, Store};
use tower_fixed_window::{Decision, Key, ManualClock, Quota, Quotas};
use tower_fixed_window_redis::RedisStore;

use crate::agreement::Pair;
use crate::conformance::connect;
use crate::differential::{around, quota_around};
use crate::gathered_calls::{at_once, charges, connect_with_script, store, used};
use crate::random::{env, length, start, step_clock};
use crate::traffic::commands;

#[tokio::test]
async fn equal_charges_agree_with_memory() {
    let Some(server) = Server::start() else { return };
    let connection = connect_with_script(&server).await;
    let scope = Scope::named("equal");
    let (first, rounds) = (env("SEED", 1), env("ROUNDS", 60));
    let (mut asked, mut split, before) = (0, 0, commands(&server, "hincrby"));
    for seed in first..first + rounds {
        let mut rng = Rng::with_seed(seed);
        let mut now = start(&mut rng);
        let clock = ManualClock::at_ms(now);
        let pair = Pair::new(&connection, seed, &clock, |store| store);
        let length = length(&mut rng);
        let (anchor, offset) = (rng.u8(..3), rng.u64(..length));
        let kinds: Vec<Quotas> = (0..rng.usize(1..3))
            .map(|_| match rng.u8(..4) {
                // The crowd below is about as large.
                0 | 1 => Quota::new(rng.u64(1..400), Duration::from_millis(length)).into(),
                2 => Quota::new(length * rng.u64(900..5_000), Duration::from_millis(length)).into(),
                _ => quota_around(&mut rng, length, anchor, offset).into(),
            })
            .collect();
        let keys: Vec<Key> = (0..rng.u64(1..4)).map(Key::from).collect();
        // The last ones are together more than a window has microseconds: their number is the time.
        let part = (length * 1_000 / rng.u64(2..200)).max(1);
        let costs = [1, rng.u64(2..10), around(&mut rng, length), part];
        for _ in 0..4 {
            let mut crowd = Vec::new();
            while crowd.len() < 200 {
                let (quotas, key) = (rng.choice(&kinds), rng.choice(&keys));
                let account = Account::new(&scope, quotas.expect("some"), key.expect("some"));
                let charge = Charge::new(account, *rng.choice(&costs).expect("some"));
                let charge = match rng.u8(..8) {
                    0 => charge.reserving(),
                    2 => charge.peeking(),
                    _ => charge,
                };
                crowd.extend((0..rng.u8(1..100)).map(|_| charge));
            }
            asked += crowd.len();
            let decisions = pair.charge_at_once(&crowd).await;
            let splits = |of: &&[Decision]| of[0].is_allowed() != of[1].is_allowed();
            split += decisions.windows(2).filter(splits).count();
            now = step_clock(&mut rng, now, length);
            clock.set_ms(now);
        }
    }
    let counted = commands(&server, "hincrby") - before;
    println!("{asked} decisions, {split} changes of outcome, {counted} x HINCRBY");
    assert!(rounds < 60 || split > 400, "{split} times were some charges refused and others not");
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

#[tokio::test]
async fn equal_charges_of_an_unreadable_key_fail_alone() {
    let Some(server) = Server::start() else { return };
    let store = store(RedisStore::from(connect(&server.url()).await));
    server.ask::<String>(&["SET", "tfw1:{together:u5}", "no hash"]);
    server.ask::<u64>(&["HSET", "tfw1:{together:u9}", "86400000+0", "no count"]);
    let keys = [[1; 20], [5; 20], [2; 20], [9; 20], [3; 20]].concat();
    let answers = at_once(charges(&store, keys.iter().copied())).await;
    for (key, answer) in keys.into_iter().zip(answers) {
        assert_eq!(answer.is_err(), [5, 9].contains(&key), "{key}: {answer:?}");
    }
    assert_eq!([1, 2, 3].map(|key| used(&server, key)), [20; 3]);
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

#[tokio::test]
async fn a_window_that_equal_charges_begin_expires() {
    let Some(server) = Server::start() else { return };
    let clock = ManualClock::at_ms(1_700_000_000_000);
    let store = store(RedisStore::from(connect_with_script(&server).await)).clock(clock);
    let _ = at_once(charges(&store, [vec![11], vec![12; 20]].concat())).await;
    let [alone, equal] =
        [11, 12].map(|key| server.ask::<i64>(&["TTL", &format!("tfw1:{{together:u{key}}}")]));
    assert!(equal > 0 && (alone - equal).abs() < 100, "{alone} {equal}");
}
