//! Windows of a calendar (S35) in Redis: the same as in memory, readable, and bound by the end that is stored.
//!
//! `SEED=7 ROUNDS=40000 cargo test -p tests --test redis calendars` goes on from elsewhere.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fastrand::Rng;
use harness::Server;
use tower_fixed_window::store::{Account, Charge, Scope};
use tower_fixed_window::{
    Decision, Key, Limit, Limiter, ManualClock, OnStoreFailure, Quota, Quotas,
};
use tower_fixed_window_redis::RedisStore;

use crate::agreement::{Pair, Seen, Trace};
use crate::conformance::connect;
use crate::random::{env, some_quotas};

const STEPS: usize = 40;

const CALENDARS: [&str; 25] = [
    "month",
    "month from day 31",
    "month from day 15 in America/New_York",
    "month from day 29 in Europe/Berlin",
    "month in Australia/Lord_Howe",
    "year",
    "year from 02-29",
    "year from 04-06 in Europe/London",
    "year from 12-31 in Pacific/Kiritimati",
    "week from sunday",
    "week in America/Sao_Paulo",
    "week from friday in Pacific/Apia",
    "week from saturday in Asia/Tehran",
    "day in Europe/Berlin",
    "day in America/Sao_Paulo",
    "day in Pacific/Apia",
    "day in Pacific/Kwajalein",
    "day in Asia/Kathmandu",
    "day in Africa/Casablanca",
    "day in Etc/GMT+12",
    "month starting-at=1738332309s",
    "month starting-at=1780900200s in America/New_York",
    "week starting-at=1767490200s in Europe/Berlin",
    "day starting-at=1322719200s in Pacific/Apia",
    "year starting-at=1709161200250ms in Pacific/Auckland",
];

/// Where something happens, in seconds: clocks change, days are skipped, years end, time does.
const TURNS: [u64; 12] = [
    0,
    745_934_400,
    1_325_239_200,
    1_541_300_400,
    1_582_934_400,
    1_616_893_200,
    1_635_638_400,
    1_709_164_800,
    1_767_225_600,
    4_102_444_800,
    253_402_300_799,
    Quota::MAX_TOKENS / 1_000,
];

fn tokens(rng: &mut Rng) -> u64 {
    match rng.u8(..16) {
        0 => 0,
        1..=9 => rng.u64(1..6),
        10..=13 => rng.u64(1..100),
        14 => rng.u64(..=Quota::MAX_TOKENS),
        _ => Quota::MAX_TOKENS - rng.u64(..3),
    }
}

fn time_near_a_turn(rng: &mut Rng) -> u64 {
    let turn = rng.choice(&TURNS).expect("some") * 1_000;
    (turn + rng.u64(..172_800_000)).saturating_sub(86_400_000).min(Quota::MAX_TOKENS)
}

/// Often to where the last decision's window ends, and often some windows on or back.
fn step_clock(rng: &mut Rng, now: u64, last: Option<&Decision>) -> u64 {
    let Some(standing) = last.map(|last| last.usage()[0]) else { return time_near_a_turn(rng) };
    let length = standing.window().as_millis() as u64;
    let end =
        standing.reset_at().duration_since(UNIX_EPOCH).map_or(0, |end| end.as_millis() as u64);
    match rng.u8(..16) {
        0..=5 => now,
        6 => now.saturating_add(rng.u64(..3_600_000)),
        7 => end,
        8 => end.saturating_sub(1),
        9 => end.saturating_add(rng.u64(..=length.min(Quota::MAX_TOKENS))),
        10 => now.saturating_add(length.saturating_mul(rng.u64(1..5))),
        11 => end.saturating_sub(length),
        12 => end.saturating_sub(length.saturating_mul(2)).saturating_add(rng.u64(..2)),
        13 => now.saturating_sub(rng.u64(..=length.min(Quota::MAX_TOKENS))),
        14 => now.saturating_sub(length.saturating_mul(rng.u64(1..4))),
        _ => time_near_a_turn(rng),
    }
    .min(Quota::MAX_TOKENS)
}

#[tokio::test]
async fn memory_and_redis_agree_on_calendars() {
    let Some(server) = Server::start() else { return };
    let connection = connect(&server.url()).await;
    let (first, rounds) = (env("SEED", 1), env("ROUNDS", 120));
    for seed in first..first + rounds {
        let mut rng = Rng::with_seed(seed);
        let clock = ManualClock::default();
        let pair = Pair::new(&connection, seed, &clock, |store| store);
        let limits = if rng.bool() { 1 } else { rng.usize(2..=3) };
        let windows: Vec<_> = (0..limits)
            .map(|_| {
                let mut windows = vec![*rng.choice(&CALENDARS).expect("some")];
                match rng.u8(..3) {
                    0 => windows.push(rng.choice(&CALENDARS).expect("some")),
                    1 => windows.push("minute"),
                    _ => {}
                }
                windows
            })
            .collect();
        let quota = |limit, window: &&str| format!("{limit}/{window}").parse().expect("a quota");
        let quotas = |rng: &mut Rng| {
            let of = |windows: &Vec<&str>| some_quotas(rng, tokens, windows, quota);
            windows.iter().map(of).collect::<Vec<_>>()
        };
        let trace = Trace { quotas, tokens, next: step_clock };
        let steps = if limits == 1 { STEPS } else { STEPS / 2 };
        trace.run(pair, &clock, &mut rng, steps, &mut Seen::default()).await;
    }
}

/// 2026-03-20 12:00 UTC.
const MARCH_20: u64 = 1_774_008_000_000;

/// A reservation is compared with the windows of other quotas, also of another limit, over more of
/// its own windows than a count needs.
#[tokio::test]
async fn memory_and_redis_agree_on_a_reservation_of_a_hundred_days() {
    let Some(server) = Server::start() else { return };
    let clock = ManualClock::at_ms(MARCH_20);
    let mut pair = Pair::new(&connect(&server.url()).await, 1, &clock, |store| store);
    let days = Quota::per_day(1).in_zone("Europe/Berlin").reserve_up_to(200);
    let (years, key) = (Quota::per_year(1_000), Key::from("alice"));
    let charge = |(scope, quotas)| Charge::new(Account::new(scope, quotas, &key), 100).reserving();

    let (scope, quotas) = (Scope::named("both"), days.and(years));
    assert!(pair.charge(charge((&scope, &quotas)), "one limit").await.is_allowed());

    let scopes = [Scope::named("days"), Scope::named("years")];
    let quotas = [Quotas::from(days), Quotas::from(years)];
    let lines: Vec<_> =
        scopes.iter().zip(&quotas).map(|of| (Account::new(of.0, of.1, &key), 100)).collect();
    let charge = Charge::together(&lines).reserving();
    assert!(pair.charge(charge, "two limits").await.is_allowed());
}

async fn limiter(server: &Server, clock: &ManualClock, quota: &str) -> Limiter {
    let store = RedisStore::from(connect(&server.url()).await).clock(clock.clone());
    let quotas: Quotas = quota.parse().expect("quotas");
    let store = store.deadline(Duration::from_secs(20)).on_failure(OnStoreFailure::Deny);
    Limit::new(quotas).name("plan").store(store)
}

#[tokio::test]
async fn what_is_stored_can_be_read() {
    let Some(server) = Server::start() else { return };
    let clock = ManualClock::at_ms(MARCH_20);
    let plan = limiter(&server, &clock, "10/month from day 15 in America/New_York").await;
    let receipt = plan.charge("alice", 3).await.expect("it answers").expect("it passed");
    let hash = || server.ask::<[String; 2]>(&["HGETALL", "tfw1:{plan:talice}"]);
    let field = "month+15@America/New_York";
    assert_eq!(hash(), [field, "3@1773547200000-1776225600000#674"]);

    // A debt: it takes three windows to come down.
    plan.settle(receipt, 25).await.expect("it answers");
    assert_eq!(hash(), [field, "25@1773547200000-1776225600000#674*3"]);
    // The key lives as long, by the server's clock and an hour and a minute more.
    let lasts = 1_781_496_000_000 - MARCH_20 + 3_660_000;
    let left = server.ask::<u64>(&["PTTL", "tfw1:{plan:talice}"]);
    assert!((lasts - 60_000..=lasts).contains(&left), "{left}, not {lasts}");
    // By other zone data, a window has ended. The next one ends with the one after this.
    let (february, key) = (MARCH_20 - 28 * 86_400_000, "tfw1:{plan:tbob}");
    clock.set_ms(february);
    server.ask::<()>(&["HSET", key, field, "1@1771131600000-1771131600001#673"]);
    assert!(plan.check("bob").await.expect("it answers").is_allowed());
    assert!(server.ask::<u64>(&["PTTL", key]) >= 1_776_225_600_000 - february);
}

fn seconds(time: SystemTime) -> i64 {
    time.duration_since(UNIX_EPOCH).expect("after it").as_secs() as i64
}

/// A node whose clock is far off asks once more, and then knows the server's time.
#[tokio::test]
async fn boundaries_follow_the_servers_clock() {
    const YEAR: i64 = 366 * 86_400;

    for ahead in [YEAR, -YEAR, 40 * 86_400, -3_600] {
        let Some(server) = Server::ahead(ahead) else { return };
        let store = RedisStore::new(server.url()).expect("an address");
        let store = store.deadline(Duration::from_secs(20));
        let quotas = Quota::per_month(5).and(Quota::per_day(9).in_zone("Asia/Kathmandu"));
        let limiter = Limit::new(quotas).name("plan").store(store.on_failure(OnStoreFailure::Deny));
        let evaluated = || {
            let stats: String = server.ask(&["INFO", "commandstats"]);
            let calls = stats.split_once("cmdstat_evalsha:calls=").map_or("0", |(_, rest)| rest);
            let calls = calls.split_once(',').map_or(calls, |(calls, _)| calls);
            calls.parse::<u32>().expect("a number")
        };
        // The script is there.
        let mut first = limiter.charge("alice", 2).await.expect("it answers");
        let decision = first.as_ref().expect("it passed").decision();
        let there = seconds(decision.reset_at() - decision.reset_after());
        assert!((there - seconds(SystemTime::now()) - ahead).abs() < 60, "the clock is shifted");
        assert!(decision.reset_after() > Duration::ZERO);
        assert!(decision.usage()[0].window() >= Duration::from_secs(28 * 86_400));

        let before = evaluated();
        assert!(limiter.charge("alice", 3).await.expect("it answers").is_ok());
        assert!(!limiter.check("alice").await.expect("it answers").is_allowed());
        if let Ok(receipt) = first {
            limiter.refund(receipt).await.expect("it answers");
        }
        assert!(limiter.charge("alice", 2).await.expect("it answers").is_ok());
        assert_eq!(evaluated() - before, 4, "one call for each, {ahead} s ahead");

        // The same where the first that a node asks is to return tokens.
        first = limiter.charge("bob", 5).await.expect("it answers");
        let other = RedisStore::new(server.url()).expect("an address");
        let other = Limit::new(quotas).name("plan").store(other.deadline(Duration::from_secs(20)));
        let receipt = first.expect("it passed");
        other.refund(receipt).await.expect("it answers");
        assert!(other.charge("bob", 5).await.expect("it answers").is_ok());
    }
}

/// As the last answer has told it (S40).
#[tokio::test]
async fn a_change_ends_by_the_servers_clock() {
    for ahead in [3_600, -3_600] {
        let Some(server) = Server::ahead(ahead) else { return };
        let store = RedisStore::new(server.url()).expect("an address");
        let store = store.deadline(Duration::from_secs(20)).on_failure(OnStoreFailure::Deny);
        let limit = Limit::new(Quota::per_day(1)).name("plan").store(store);
        let _ = limit.check("first").await.expect("it answers");
        for (ends, tokens) in [(-60, 1), (60, 5)] {
            let ends = (seconds(SystemTime::now()) + ahead + ends) as u64;
            limit.set_quotas_until(Quota::per_day(5), UNIX_EPOCH + Duration::from_secs(ends));
            let decision = limit.check("alice").await.expect("it answers");
            assert_eq!(decision.limit(), tokens, "{ahead} s ahead");
        }
    }
}

/// Also where the refusal is remembered, whatever zone data this node has.
#[tokio::test]
async fn a_remembered_refusal_reports_the_end_that_is_stored() {
    let Some(server) = Server::start() else { return };
    let store = RedisStore::new(server.url()).expect("an address");
    let store = store.deadline(Duration::from_secs(20));
    let limit = Quota::per_month(2).name("plan");
    let limiter = limit.clone().store(store.on_failure(OnStoreFailure::Deny));
    assert!(limiter.charge("alice", 2).await.expect("it answers").is_ok());
    let key = "tfw1:{plan:talice}";
    let count: String = server.ask(&["HGET", key, "month+1@UTC"]);
    let (start, rest) = count.split_once('-').expect("an end");
    let (end, number) = rest.split_once('#').expect("a number");
    let end = end.parse::<u64>().expect("an instant");
    for end in [end + 3_600_000, end - 3_600_000] {
        server.ask::<u64>(&["HSET", key, "month+1@UTC", &format!("{start}-{end}#{number}")]);
        let store = RedisStore::new(server.url()).expect("an address");
        let limiter = limit.clone().store(store.deadline(Duration::from_secs(20)));
        let told = limiter.check("alice").await.expect("it answers");
        let remembered = limiter.check("alice").await.expect("it answers");
        let of = |decision: &Decision| (decision.reset_at(), decision.retry_at());
        assert_eq!(of(&remembered), of(&told));
    }
}

/// Redis shows a count as the plan that asks sees it: at least what that plan can carry over.
#[tokio::test]
async fn a_remembered_count_of_a_calendar_is_the_one_that_is_stored() {
    let Some(server) = Server::start() else { return };
    let store = RedisStore::new(server.url()).expect("an address").deadline(Duration::from_secs(5));
    let pro = Limit::new(Quota::per_month(1).rollover_up_to(8)).name("month").store(store);
    let free = pro.with_quotas(Quota::per_month(1));
    assert!(pro.charge("k", 1).await.expect("it answers").is_ok());
    assert!(free.charge("k", 2).await.expect("it answers").is_err());
    assert!(pro.charge("k", 2).await.expect("it answers").is_ok(), "7 are left");
}
