//! Several limits in one charge over Redis (S37): one script, one round trip, all or none.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use futures_util::future::join_all;
use harness::Server;
use redis::cluster::ClusterClient;
use tower_fixed_window::store::{
    Account, Adjust, Charge, OnStoreFailure, RedisStore, Scope, State, Store,
};
use tower_fixed_window::{
    Decision, Key, Limit, Limits, Line, ManualClock, MemoryStore, Quota, Quotas,
};
use tower_fixed_window_conformance::{TOGETHER_VECTORS, replay};

use crate::cluster_and_sentinel::{cluster, urls};
use crate::conformance::connect;
use crate::gathered_calls::Crowd;
use crate::outage::Log;
use crate::random::{env, length, some_quotas, start, step_clock, tokens};
use crate::traffic::scripts;

const DEADLINE: Duration = Duration::from_secs(20);

fn store(server: &Server) -> RedisStore {
    let store = RedisStore::new(server.url()).expect("an address");
    store.deadline(DEADLINE).on_failure(OnStoreFailure::Deny)
}

/// The limits of an AI gateway.
fn gateway(store: impl Store) -> Limits {
    Limits::new([
        Quota::per_year(600).name("requests"),
        Quota::new(200_000, Duration::from_secs(86_400 * 300)).name("tokens"),
        Quota::new(50, Duration::from_secs(86_400 * 299)).name("cents"),
    ])
    .store(store)
}

fn lines(user: &str, cents: u64) -> [Line<'static>; 3] {
    [
        Line::new("requests", "acme", 1),
        Line::new("tokens", "acme", 600),
        Line::new("cents", user.to_owned(), cents),
    ]
}

async fn used(limits: &Limits, user: &str) -> [u64; 3] {
    let of = async |name, key: &str| limits.of(name).peek(key).await.expect("it answers").used();
    [of("requests", "acme").await, of("tokens", "acme").await, of("cents", user).await]
}

async fn replays<S: Store>(excepted: &[&str], with: impl Fn(RedisStore) -> S) {
    let Some(server) = Server::start() else { return };
    let connection = connect(&server.url()).await;
    let next = std::cell::Cell::new(0);
    let new = |clock| {
        next.set(next.get() + 1);
        let store = RedisStore::from(connection.clone()).deadline(DEADLINE);
        with(store.prefix(&next.get().to_string()).clock(clock))
    };
    let report = replay(TOGETHER_VECTORS, new).await.expect("the traces are well-formed");
    let failed: Vec<_> = report.failures.iter().map(|failure| &*failure.trace).collect();
    assert!(failed.iter().all(|id| excepted.contains(id)), "{report}");
    assert_eq!(report.passed + report.failed, 41);
    assert!(report.failed as usize <= excepted.len());
}

#[tokio::test]
async fn the_shared_traces_pass_alone() {
    replays(&[], |store| store).await;
}

#[tokio::test]
async fn the_shared_traces_pass_in_shared_calls() {
    replays(&[], |store| Crowd::new(store, Arc::default())).await;
}

/// Keys may be on several servers there, so limits are charged in order (S37).
#[tokio::test]
async fn the_shared_traces_pass_one_by_one() {
    replays(&["G11", "T002", "T015"], RedisStore::one_by_one).await;
}

#[tokio::test]
async fn a_charge_of_three_limits_is_one_call() {
    let Some(server) = Server::start() else { return };
    let limits = gateway(store(&server));
    assert!(limits.check(lines("ann", 1)).await.expect("it answers").allowed());
    server.ask::<()>(&["CONFIG", "RESETSTAT"]);
    for i in 2..=20 {
        let decision = limits.check(lines("ann", 1)).await.expect("it answers");
        assert_eq!(decision.of("cents").expect("it took part").used(), i);
    }
    assert_eq!(scripts(&server), 19);
    assert_eq!(used(&limits, "ann").await, [20, 12_000, 20]);
}

/// A call has up to 128 keys, and a group is never split between two calls.
#[tokio::test]
async fn groups_share_calls_with_single_charges() {
    let Some(server) = Server::start() else { return };
    let limits = gateway(store(&server));
    let warm = join_all((0..4).map(|_| limits.check(lines("ann", 0)))).await;
    assert!(warm.iter().all(|answer| answer.as_ref().is_ok_and(Decision::allowed)));
    server.ask::<()>(&["CONFIG", "RESETSTAT"]);
    let groups = join_all((0..200).map(|i| limits.check(lines(&format!("user {}", i % 7), 1))));
    let singles = join_all((0..56).map(|_| limits.of("cents").check("ann")));
    let (groups, singles) = tokio::join!(groups, singles);
    assert!(groups.iter().all(|answer| answer.as_ref().is_ok_and(Decision::allowed)));
    let passed = singles.iter().filter(|answer| answer.as_ref().is_ok_and(Decision::allowed));
    assert_eq!(passed.count(), 50);
    // 656 keys: the first three have a call of their own.
    let calls = scripts(&server);
    assert!((6..=14).contains(&calls), "{calls} calls");
    assert_eq!(used(&limits, "user 0").await, [204, 204 * 600, 29]);
}

#[tokio::test]
async fn a_refused_group_takes_nothing_and_is_remembered() {
    let Some(server) = Server::start() else { return };
    let limits = gateway(store(&server));
    assert!(limits.check(lines("ann", 48)).await.expect("it answers").allowed());
    let refused = limits.check(lines("ann", 3)).await.expect("it answers");
    assert!(!refused.allowed());
    let passes = |name| refused.of(name).expect("it took part").allowed();
    assert_eq!([passes("requests"), passes("tokens"), passes("cents")], [true, true, false]);
    let calls = scripts(&server);
    for _ in 0..1_000 {
        let refused = limits.check(lines("ann", 3)).await.expect("it answers");
        assert_eq!(refused.governing_limit(), "cents");
        assert!(refused.of("tokens").is_none(), "nothing is known of it");
        assert!(refused.retry_at().is_some() && !refused.is_local());
    }
    assert_eq!(scripts(&server), calls, "none of them came here");
    // Other keys and smaller costs need a call.
    assert!(limits.check(lines("bob", 3)).await.expect("it answers").allowed());
    assert!(limits.check(lines("ann", 2)).await.expect("it answers").allowed());
    assert_eq!(used(&limits, "ann").await, [3, 1_800, 50]);
    // A refusal that a limit remembers on its own refuses the group.
    let bob = limits.of("cents").check_cost("bob", 48).await.expect("it answers");
    assert!(!bob.allowed());
    let calls = scripts(&server);
    assert!(!limits.check(lines("bob", 48)).await.expect("it answers").allowed());
    assert_eq!(scripts(&server), calls);
    // A reset on this node ends the refusal.
    limits.of("cents").reset("ann").await.expect("it answers");
    assert!(limits.check(lines("ann", 3)).await.expect("it answers").allowed());
}

/// A refusal by S13's comparison: other reservations may pass.
#[tokio::test]
async fn a_reservation_that_is_late_for_another_limit_is_not_remembered() {
    let Some(server) = Server::start() else { return };
    let hour = Duration::from_secs(3_600);
    let limits = Limits::new([
        Quota::new(10, 24_000 * hour).reserve_up_to(20).name("long"),
        Quota::new(100, 7_000 * hour).name("short"),
    ])
    .store(store(&server));
    let lines = [Line::new("long", "k", 10), Line::new("short", "k", 10)];
    assert!(limits.reserve(&lines).await.expect("it answers").is_ok());
    for _ in 0..2 {
        let calls = scripts(&server);
        let late = limits.reserve(&lines).await.expect("it answers").expect_err("it is late");
        assert!(!late.decision().exceeds_capacity());
        assert_eq!(scripts(&server), calls + 1, "the server decides");
    }
    let short = limits.of("short").peek("k").await.expect("it answers");
    assert_eq!(short.used(), 10, "it took nothing");
}

#[tokio::test]
async fn an_error_of_one_key_is_the_groups_and_nothing_is_written() {
    let Some(server) = Server::start() else { return };
    let quotas: [(&str, Quotas); 3] = [
        ("plain", Quota::per_day(9).into()),
        ("both", Quota::per_day(9).and(Quota::per_week(20))),
        ("month", Quota::per_month(9).in_zone("Asia/Tokyo").into()),
    ];
    for shared in [false, true] {
        for bad in ["plain", "both", "month"] {
            for field in [false, true] {
                server.ask::<()>(&["FLUSHALL"]);
                let limiters = quotas.map(|(name, quotas)| Limit::new(quotas).name(name));
                let limits = Limits::new(limiters);
                let limits = match shared {
                    true => limits.store(Crowd::new(store(&server), Arc::default())),
                    false => limits.store(store(&server)),
                };
                let name = format!("tfw1:{{{bad}:tann}}");
                let of = quotas.iter().find(|(name, _)| *name == bad).expect("one of them").1;
                let counter = of.as_ref()[0].counter().to_string();
                match field {
                    true => server.ask::<()>(&["HSET", &name, &counter, "nonsense"]),
                    false => server.ask::<()>(&["SET", &name, "a text"]),
                }
                let lines = quotas.map(|(name, _)| Line::new(name, "ann", 1));
                let error = limits.check(lines).await.expect_err("it can't be read");
                let text = error.to_string();
                assert!(text.starts_with("Redis has another value for this key"), "{text}");
                let keys: Vec<String> = server.ask(&["KEYS", "tfw1:*ann}"]);
                assert_eq!(keys, [name], "{bad}: nothing was written");
            }
        }
    }
}

/// Random limits, decided together.
struct Group {
    scopes: Vec<Scope>,
    windows: Vec<Vec<&'static str>>,
    plain: Vec<u64>,
}

const WINDOWS: [&str; 8] =
    ["second", "minute", "hour", "day", "month", "week in Europe/Berlin", "10s staggered", ""];

impl Group {
    fn new(rng: &mut Rng) -> Self {
        let n = rng.usize(2..=4);
        let windows = |rng: &mut Rng| {
            (0..rng.usize(1..=2)).map(|_| *rng.choice(&WINDOWS).expect("some")).collect()
        };
        Self {
            scopes: (0..n).map(|i| Scope::named(&format!("limit-{i}"))).collect(),
            windows: (0..n).map(|_| windows(rng)).collect(),
            plain: (0..n).map(|_| length(rng)).collect(),
        }
    }

    fn quotas(&self, rng: &mut Rng) -> Vec<Quotas> {
        let of = |rng: &mut Rng, i: usize| {
            let quota = |limit, window: &&str| match *window {
                "" => Quota::new(limit, Duration::from_millis(self.plain[i])).from_first_request(),
                window => {
                    let text = match window.strip_suffix(" staggered") {
                        Some(window) => format!("{limit}/{window} staggered"),
                        None => format!("{limit}/{window}"),
                    };
                    text.parse().expect("a quota")
                }
            };
            if rng.bool() {
                let limit = rng.u64(..30);
                return quota(limit, &self.windows[i][0]).into();
            }
            let some = if rng.bool() { tokens } else { few_tokens };
            some_quotas(rng, some, &self.windows[i], quota)
        };
        (0..self.scopes.len()).map(|i| of(rng, i)).collect()
    }
}

#[tokio::test]
async fn an_error_of_a_group_is_not_the_answer_of_others_in_its_call() {
    let Some(server) = Server::start() else { return };
    let limits = gateway(store(&server));
    server.ask::<String>(&["SET", "tfw1:{requests:tacme}", "somebody else's"]);

    let group = |user: usize| {
        let user = format!("user{user}");
        let (bad, good) = (lines(&user, 1), vec![Line::new("tokens", user.clone(), 600)]);
        let good = [good, vec![Line::new("cents", user, 2)]].concat();
        [limits.check(bad), limits.check(good)]
    };
    for (i, answer) in join_all((0..64).flat_map(group)).await.into_iter().enumerate() {
        match i % 2 {
            0 => assert!(answer.is_err(), "{i}: {answer:?}"),
            _ => {
                let decision = answer.unwrap_or_else(|error| panic!("{i}: {error:?}"));
                let used = ["tokens", "cents"].map(|name| decision.of(name).unwrap().used());
                assert_eq!((decision.allowed(), used), (true, [600, 2]), "{i}");
            }
        }
    }
}

fn few_tokens(rng: &mut Rng) -> u64 {
    rng.u64(..12)
}

/// The arithmetic over counts that never expire.
#[derive(Default)]
struct Model(HashMap<(String, Key, String), State>);

impl Model {
    fn id(account: &Account<'_>, quota: &Quota) -> (String, Key, String) {
        let scope = account.scope().name().to_owned();
        (scope, account.key().clone(), quota.counter().to_string())
    }

    fn charge(&mut self, charge: Charge<'_>, now: u64) -> Decision {
        let load = |account: &Account<'_>, quota: &Quota| self.0.get(&Self::id(account, quota));
        let (decision, writes) = charge.decide(now, |account, quota| load(account, quota).copied());
        for (account, quota, state) in writes {
            self.0.insert(Self::id(&account, quota), state);
        }
        decision
    }

    fn adjust(&mut self, adjust: Adjust<'_>, now: u64) {
        let account = adjust.account();
        let writes = adjust.apply(now, |quota| self.0.get(&Self::id(&account, quota)).copied());
        for (quota, state) in writes {
            self.0.insert(Self::id(&account, quota), state);
        }
    }
}

/// Memory and Redis decide alike. After a large step back of the clock, memory may have reused the
/// slot of an ended count: then the arithmetic is compared instead.
async fn agree<S: Store>(with: impl Fn(RedisStore) -> S) {
    let Some(server) = Server::start() else { return };
    let connection = connect(&server.url()).await;
    let (first, rounds) = (env("SEED", 1), env("ROUNDS", 300));
    let (mut passed, mut refused, mut late) = (0, 0, 0);
    for seed in first..first + rounds {
        let mut rng = Rng::with_seed(seed);
        let mut now = start(&mut rng);
        let clock = ManualClock::at_ms(now);
        let redis = RedisStore::from(connection.clone()).deadline(Duration::from_secs(60));
        let redis = with(redis.prefix(&seed.to_string()).clock(clock.clone()));
        let memory = MemoryStore::with_max_keys(10_000).clock(clock.clone());
        let (mut model, steps_back) = (Model::default(), rng.bool());
        let group = Group::new(&mut rng);
        let keys = [Key::from(seed), Key::from("another")];
        let mut quotas = group.quotas(&mut rng);
        let mut taken: Vec<(usize, usize, Quotas, Decision)> = Vec::new();
        for step in 0..25 {
            let next = step_clock(&mut rng, now, 60_000);
            now = if steps_back { next } else { next.max(now) };
            clock.set_ms(now);
            let at = format!("SEED={seed} step {step} at {now}");
            if rng.u8(..8) == 0 {
                let new = group.quotas(&mut rng);
                let same =
                    |(old, new): (&Quotas, &Quotas)| old.as_ref().len() == new.as_ref().len();
                if quotas.iter().zip(&new).all(same) {
                    quotas = new;
                }
            }
            if !taken.is_empty() && rng.u8(..3) == 0 {
                let (i, key, quotas, decision) = taken.swap_remove(rng.usize(..taken.len()));
                let account = Account::new(&group.scopes[i], &quotas, &keys[key]);
                let adjust = match rng.bool() {
                    true => Adjust::refund(account, rng.u64(..=decision.granted()), &decision),
                    false => Adjust::take(account, few_tokens(&mut rng), &decision),
                };
                model.adjust(adjust, now);
                memory.adjust(adjust).await.expect("memory answers");
                redis.adjust(adjust).await.unwrap_or_else(|error| panic!("{at}: {error}"));
            }
            let reserves = rng.u8(..3) == 0;
            let peeks = rng.u8(..8) == 0;
            let mut of = Vec::new();
            let mut lines = Vec::new();
            for (scope, quotas) in group.scopes.iter().zip(&quotas) {
                let key = rng.usize(..2);
                let account = Account::new(scope, quotas, &keys[key]);
                let cost = if rng.u8(..10) == 0 { tokens(&mut rng) } else { few_tokens(&mut rng) };
                lines.push((account, cost));
                of.push(key);
            }
            let charge = Charge::together(&lines);
            let charge = if reserves { charge.reserving() } else { charge };
            let charge = if peeks { charge.peeking() } else { charge };
            let expected = model.charge(charge, now);
            if !steps_back {
                let memory = memory.charge(charge).await;
                assert_eq!(memory.expect("memory answers"), expected, "{at}: {charge:?}");
            }
            assert!(redis.charges_together());
            let decision = redis.charge(charge).await;
            let decision = decision.unwrap_or_else(|error| panic!("{at}: {error}: {charge:?}"));
            let each = |of: &Decision| of.limits().map(|(_, of)| of).collect::<Vec<_>>();
            assert_eq!(each(&decision), each(&expected), "{at}: {charge:?}");
            assert_eq!(decision, expected, "{at}: {charge:?}");
            if !decision.allowed() {
                refused += 1;
                // Each limit fits by itself.
                let fits = lines.iter().all(|&(account, cost)| {
                    let load = |_: &Account<'_>, quota: &Quota| {
                        model.0.get(&Model::id(&account, quota)).copied()
                    };
                    let line = Charge::new(account, cost).peeking();
                    let line = if reserves { line.reserving() } else { line };
                    line.decide(now, load).0.allowed()
                });
                late += u32::from(reserves && fits);
                continue;
            }
            passed += 1;
            for ((i, key), (_, decision)) in of.into_iter().enumerate().zip(decision.limits()) {
                if !peeks {
                    taken.push((i, key, quotas[i], decision));
                }
            }
        }
    }
    println!("{passed} passed, {refused} were refused, {late} of them late");
    assert!(
        rounds < 300 || passed > 500 && refused > 500 && late > 10,
        "{passed} {refused} {late}"
    );
}

#[tokio::test]
async fn memory_and_redis_agree_on_several_limits() {
    agree(|store| store).await;
}

#[tokio::test]
async fn memory_and_redis_agree_on_several_limits_in_shared_calls() {
    agree(|store| Crowd::new(store, Arc::default())).await;
}

/// Groups beside single charges, refunds and true costs, from several nodes.
#[tokio::test(flavor = "multi_thread")]
async fn never_more_than_a_limit_passes_beside_refunds() {
    let Some(server) = Server::start() else { return };
    let node = || {
        Limits::new([Quota::per_year(900).name("requests"), Quota::per_year(400).name("jobs")])
            .store(store(&server))
    };
    let nodes = [node(), node(), node()];
    let tasks: Vec<_> = (0..12_u64)
        .map(|task| {
            let limits = nodes[task as usize % nodes.len()].clone();
            tokio::spawn(async move {
                let mut rng = Rng::with_seed(task);
                let mut held = [0_i64; 2];
                for _ in 0..150 {
                    if rng.u8(..3) == 0 {
                        let decision = limits.of("requests").check("all").await.expect("well");
                        held[0] += i64::from(decision.allowed());
                        continue;
                    }
                    let (one, two) = (rng.u64(..3), rng.u64(1..3));
                    let lines = [Line::new("requests", "all", one), Line::new("jobs", "all", two)];
                    let Ok(receipts) = limits.charge(lines).await.expect("well") else { continue };
                    match rng.u8(..4) {
                        0 => limits.refund(receipts).await.expect("well"),
                        1 => {
                            let settled = limits.settle(receipts, [("jobs", two - 1)]).await;
                            settled.expect("well");
                            held[0] += one as i64;
                            held[1] += two as i64 - 1;
                        }
                        _ => {
                            held[0] += one as i64;
                            held[1] += two as i64;
                        }
                    }
                }
                held
            })
        })
        .collect();
    let mut held = [0; 2];
    for task in tasks {
        let of = task.await.expect("no panic");
        held = [held[0] + of[0], held[1] + of[1]];
    }
    assert!(held[0] <= 900 && held[1] <= 400, "{held:?}");
    for (name, held) in ["requests", "jobs"].into_iter().zip(held) {
        let used = nodes[0].of(name).peek("all").await.expect("it answers").used() as i64;
        assert_eq!(used, held, "nothing is kept of what was refused or refunded");
    }
}

#[tokio::test]
async fn a_group_stands_in_as_the_policy_says_while_redis_is_down() {
    let Some(mut server) = Server::start() else { return };
    let store = store(&server).deadline(Duration::from_millis(200));
    let local = gateway(store.clone().on_failure(OnStoreFailure::Local));
    let deny = gateway(store);
    assert!(local.check(lines("ann", 1)).await.expect("it answers").allowed());
    server.kill();
    for cents in [50, 1] {
        let decision = local.check(lines("ann", cents)).await.expect("memory answers");
        assert!(decision.is_local());
        assert_eq!(decision.allowed(), cents == 50);
        assert!(decision.of("requests").expect("it took part").is_local());
        let _ = deny.check(lines("ann", 1)).await.expect_err("there is none");
    }
    server.restart();
    let start = std::time::Instant::now();
    while local.check(lines("bob", 1)).await.expect("it answers").is_local() {
        assert!(start.elapsed().as_secs() < 20);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The same arguments are sent once for both keys.
#[tokio::test]
async fn limits_of_equal_quotas_are_charged_together() {
    let Some(server) = Server::start() else { return };
    let quotas = ["one", "other"].map(|name| Quota::per_year(3).name(name));
    let limits = Limits::new(quotas).store(store(&server));
    let lines = ["one", "other"].map(|name| Line::new(name, "ann", 2));
    assert!(limits.of("other").check_cost("ann", 2).await.expect("it answers").allowed());
    let decision = limits.check(&lines).await.expect("it answers");
    assert_eq!(decision.governing_limit(), "other");
    assert!(!decision.allowed());
    assert_eq!(limits.of("one").peek("ann").await.expect("it answers").used(), 0);
}

/// Keys are in several slots: in order, whether the store knows it from the start or finds out.
#[tokio::test(flavor = "multi_thread")]
async fn limits_on_a_cluster_are_charged_in_order() {
    let Some(nodes) = cluster() else { return };
    let known = RedisStore::cluster(ClusterClient::new(urls(&nodes)).expect("addresses"));
    let connection = ClusterClient::new(urls(&nodes)).expect("addresses");
    let connection = connection.get_async_connection().await.expect("it connects");
    for (name, store) in [("known", known), ("found out", RedisStore::from(connection))] {
        let store = store.deadline(DEADLINE).on_failure(OnStoreFailure::Deny).prefix(&name[..5]);
        let limits = gateway(store);
        assert!(limits.check(lines("ann", 50)).await.expect("it answers").allowed());
        let refused = limits.check(lines("ann", 1)).await.expect("it answers");
        assert_eq!(refused.governing_limit(), "cents", "{name}");
        assert_eq!(used(&limits, "ann").await, [1, 600, 50], "{name}: it was given back");
        let calls = || nodes.iter().map(scripts).sum::<u64>();
        let before = calls();
        for _ in 0..100 {
            let refused = limits.check(lines("ann", 1)).await.expect("it is known");
            assert!(!refused.allowed() && refused.of("requests").is_none());
        }
        // On a busy machine this takes longer than a second, and the store is asked again.
        let calls = calls() - before;
        assert!(calls < 20, "{name}: {calls} calls for 100 refusals");
    }
}

/// A single server of a cluster, called as a plain server.
#[tokio::test]
async fn a_group_that_crosses_slots_is_charged_in_order() {
    let Some(server) = Server::with(&["--save", "", "--cluster-enabled", "yes"]) else { return };
    server.ask::<()>(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    harness::wait_for("the cluster", || {
        server.ask::<String>(&["CLUSTER", "INFO"]).contains("cluster_state:ok")
    });
    // The store does not fail, so nothing stands in for it.
    let log = Log::default();
    let _guard = log.start();
    let limits = gateway(store(&server).on_failure(OnStoreFailure::Local));
    for allowed in [true, true, false] {
        let decision = limits.check(lines("ann", 20)).await.expect("it answers");
        assert_eq!((decision.allowed(), decision.is_local()), (allowed, false));
    }
    assert_eq!(used(&limits, "ann").await, [2, 1_200, 40]);
    assert!(!log.text().contains("the store fails"), "{}", log.text());
}
