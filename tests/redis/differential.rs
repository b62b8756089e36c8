//! Random traces, of which memory and Redis must make the same: anchors, several quotas, rollover,
//! reservations, returns, changed limits, a clock that jumps, numbers at the edge of what is exact.
//!
//! `SEED=7 ROUNDS=100000 cargo test -p tests --test redis differential` goes on from elsewhere.

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use fastrand::Rng;
use harness::Server;
use redis::aio::MultiplexedConnection;
use redis::cmd;
use tower_fixed_window::store::{Account, Adjust, Charge, Scope, Store};
use tower_fixed_window::{Decision, Key, ManualClock, Quota, Quotas};
use tower_fixed_window_redis::RedisStore;

use crate::agreement::{Pair, Seen, Trace};
use crate::conformance::connect;
use crate::gathered_calls::Crowd;
use crate::random::{env, length, start, step_clock, tokens, with_limits};

const STEPS: usize = 50;

#[tokio::test]
async fn memory_and_redis_agree() {
    agree(|store| store).await;
}

#[tokio::test]
async fn memory_and_redis_agree_on_gathered_calls() {
    agree(|store| Crowd::new(store, Arc::default())).await;
}

async fn agree<S: Store>(with: impl Fn(RedisStore) -> S) {
    let Some(server) = Server::start() else { return };
    let connection = connect(&server.url()).await;
    let (first, rounds) = (env("SEED", 1), env("ROUNDS", 80));
    let [mut alone, mut together, mut changing] = [(); 3].map(|()| Seen::default());
    for seed in first..first + rounds {
        let mut rng = Rng::with_seed(seed);
        let clock = ManualClock::at_ms(start(&mut rng));
        let pair = Pair::new(&connection, seed, &clock, &with);
        if seed % 3 == 0 {
            change_limits(pair, &clock, &mut rng, &mut changing).await;
            continue;
        }
        // Every other one is of one limit, and of these every other one has a single quota, which
        // mostly goes another way through the script.
        let limits = if rng.bool() { 1 } else { rng.usize(2..=4) };
        let most = if limits > 1 { 2 } else { *rng.choice(&[1, 4]).expect("some") };
        let windows: Vec<Vec<_>> = (0..limits)
            .map(|_| {
                let window = |rng: &mut Rng| {
                    let length = length(rng);
                    (length, rng.u8(..6), rng.u64(..length))
                };
                (0..rng.usize(1..=most)).map(|_| window(&mut rng)).collect()
            })
            .collect();
        let quotas = |rng: &mut Rng| {
            windows.iter().map(|windows| with_limits(rng, windows)).collect::<Vec<_>>()
        };
        let next = |rng: &mut Rng, now, last: Option<&Decision>| match last {
            Some(_) => step_clock(rng, now, windows[0][0].0),
            None => start(rng),
        };
        let (tokens, seen): (fn(&mut Rng) -> u64, _) = match limits {
            1 => (tokens, &mut alone),
            _ => (mostly_few, &mut together),
        };
        let steps = if limits == 1 { STEPS } else { STEPS / 2 };
        Trace { quotas, tokens, next }.run(pair, &clock, &mut rng, steps, seen).await;
    }
    println!("{alone:?} {together:?} {changing:?}");
    let met = |seen: &Seen| seen.passed > 150 && seen.refused > 150;
    assert!(rounds < 80 || met(&alone) && met(&together) && together.late > 2, "{together:?}");
    let Seen { above, debts, at_zero, .. } = changing;
    assert!(rounds < 80 || [above, debts, at_zero].iter().all(|&n| n >= 25), "{changing:?}");
}

/// Limits that go down and up under all that a caller may do (S5, S10), over a few windows.
async fn change_limits<S: Store>(
    pair: Pair<S>,
    clock: &ManualClock,
    rng: &mut Rng,
    seen: &mut Seen,
) {
    const LIMITS: [u64; 8] = [0, 1, 3, 10, 60, 60, 5_000, Quota::MAX_TOKENS - 100_000];

    let length = *rng.choice(&[10, 60_000, 3_600_000]).expect("some");
    let shapes: Vec<_> = (0..rng.u64(1..4))
        .map(|i| (length * [1, 3, 24][i as usize], rng.bool(), rng.u8(..3), rng.u8(..3)))
        .collect();
    let quota = |rng: &mut Rng, &(length, floating, more, reserved): &(u64, bool, u8, u8)| {
        let limit = *rng.choice(&LIMITS).expect("some");
        let quota = Quota::new(limit, Duration::from_millis(length));
        let quota = if floating { quota.from_first_request() } else { quota };
        let quota = match more {
            0 => quota.rollover_up_to(limit + rng.u64(..2 * limit.min(20_000) + 1)),
            _ => quota,
        };
        quota.reserve_up_to([0, 5, 10_000][usize::from(reserved)])
    };
    let quotas = move |rng: &mut Rng| {
        let first = Quotas::from(quota(rng, &shapes[0]));
        vec![shapes[1..].iter().fold(first, |quotas, shape| quotas.and(quota(rng, shape)))]
    };
    let tokens = |rng: &mut Rng| match rng.u8(..6) {
        0..=3 => rng.u64(1..10),
        4 => rng.u64(1..100),
        _ => rng.u64(1..6_000),
    };
    let next = move |rng: &mut Rng, now, last: Option<&Decision>| match rng.u8(..8) {
        _ if last.is_none() => 1_700_000_040_000 + rng.u64(..length),
        0..=4 => now,
        5 => now + rng.u64(..length),
        6 => now + length,
        _ => now - now % length + length * rng.u64(1..4),
    };
    Trace { quotas, tokens, next }.run(pair, clock, rng, STEPS, seen).await;
}

/// Otherwise nearly all charges of several limits would be refused.
fn mostly_few(rng: &mut Rng) -> u64 {
    if rng.u8(..10) == 0 { tokens(rng) } else { rng.u64(..4) }
}

/// H24, where it would be a leak.
#[tokio::test]
async fn a_cost_settled_under_a_limit_of_0_expires_with_its_window() {
    let Some(server) = Server::start() else { return };
    let mut connection = connect(&server.url()).await;
    let store = RedisStore::from(connection.clone()).deadline(Duration::from_secs(60));
    let (scope, key) = (Scope::named("zero"), Key::from(1_u64));
    let quotas = Quota::per_minute(0).into();
    let account = Account::new(&scope, &quotas, &key);
    let decision = store.charge(Charge::new(account, 0)).await.expect("it answers");
    store.adjust(Adjust::take(account, 7, &decision)).await.expect("it answers");
    let left = cmd("PTTL").arg("tfw1:{zero:u1}").query_async::<i64>(&mut connection).await;
    let left = left.expect("it answers");
    assert!((-2..=120_000).contains(&left) && left != -1, "it lives for {left} ms");
}

/// The last instant whose microseconds are below 2^53: later counts are text.
const LAST: u64 = 9_007_199_254_740;

/// How often a charge that should go the short way through the script met what it can't do there,
/// and how often the format of a count changed.
#[derive(Default, Debug)]
struct Crossings {
    to_text: u32,
    to_number: u32,
    short_on_text: u32,
    short_on_later: u32,
    short_refused: u32,
    /// Written by a refusal, as the clock had stepped back.
    moved: u32,
}

/// Tokens that are few, or about as many as a number can count in such a window.
pub(crate) fn around(rng: &mut Rng, length: u64) -> u64 {
    let least = length * 1_000;
    match rng.u8(..8) {
        0..=3 => rng.u64(1..10),
        4 => rng.u64(1..least),
        5 => least * 2,
        _ => least - 3 + rng.u64(..6),
    }
}

/// A quota of such limits, plain or not.
pub(crate) fn quota_around(rng: &mut Rng, length: u64, anchor: u8, offset: u64) -> Quota {
    let limit = around(rng, length);
    let quota = Quota::new(limit, Duration::from_millis(length));
    let quota = match anchor {
        0 => quota,
        1 => quota.starting_at(Duration::from_millis(offset)),
        _ => quota.staggered(),
    };
    match rng.u8(..6) {
        0 => quota.rollover_up_to(limit + around(rng, length)),
        1 => quota.reserve_up_to(around(rng, length)),
        _ => quota,
    }
}

/// The stored count of a quota in a key, as it is written, and its expiry.
async fn written(
    connection: &mut MultiplexedConnection,
    key: &str,
    field: &str,
) -> (Option<String>, i64) {
    let mut pipeline = redis::pipe();
    pipeline.add_command(cmd("HGET").arg(key).arg(field).clone());
    pipeline.add_command(cmd("PEXPIRETIME").arg(key).clone());
    pipeline.query_async(connection).await.expect("it answers")
}

#[tokio::test]
async fn a_counter_may_alternate_between_number_and_text() {
    cross_format(|store| store).await;
}

#[tokio::test]
async fn a_counter_may_alternate_between_number_and_text_in_gathered_calls() {
    cross_format(|store| Crowd::new(store, Arc::default())).await;
}

/// The limit of a quota goes up and down around the largest count that is a number, with rollover
/// and without, on a clock that crosses the ends of windows in both directions.
async fn cross_format<S: Store>(with: impl Fn(RedisStore) -> S) {
    let Some(server) = Server::start() else { return };
    let mut connection = connect(&server.url()).await;
    let scope = Scope::named("cross");
    let mut seen = Crossings::default();
    let (first, rounds) = (env("SEED", 1), env("ROUNDS", 40));
    for seed in first..first + rounds {
        let mut rng = Rng::with_seed(seed);
        let length = length(&mut rng);
        let (anchor, offset) = (rng.u8(..3), rng.u64(..length));
        let some = |rng: &mut Rng| around(rng, length);
        let some_quota = |rng: &mut Rng| quota_around(rng, length, anchor, offset);
        let mut now = match rng.u8(..6) {
            0 => rng.u64(..2 * length),
            1 => LAST - rng.u64(..2 * length.min(LAST / 2)),
            _ => 1_700_000_000_000,
        };
        let clock = ManualClock::at_ms(now);
        let (mut pair, key) = (Pair::new(&connection, seed, &clock, &with), Key::from(seed));
        let mut quota = some_quota(&mut rng);
        let (name, field) = (format!("{seed}:tfw1:{{cross:u{seed}}}"), quota.counter());
        for step in 0..STEPS {
            now = match rng.u8(..8) {
                0 => now + rng.u64(..length),
                1 => now + length,
                2 => now.saturating_sub(rng.u64(..length)),
                3 if rng.bool() => now.saturating_sub(length * rng.u64(1..3)),
                _ => now,
            };
            clock.set_ms(now);
            if rng.u8(..3) == 0 {
                quota = some_quota(&mut rng);
            }
            let quotas = quota.into();
            let account = Account::new(&scope, &quotas, &key);
            let at = format!("SEED={seed} step {step} at {now}: {quotas}");
            let (before, _) = written(&mut connection, &name, &field).await;
            if rng.u8(..4) == 0 {
                pair.adjust(&mut rng, account, some, &at).await;
            }
            let (found, expiry) = written(&mut connection, &name, &field).await;
            let cost = if rng.bool() { rng.u64(1..5) } else { some(&mut rng) };
            let charge = Charge::new(account, cost);
            let charge = match rng.u8(..8) {
                0 => charge.reserving(),
                2 => charge.peeking(),
                _ => charge,
            };
            let decision = pair.charge(charge, &format!("{at} on {found:?}")).await;
            let (after, new_expiry) = written(&mut connection, &name, &field).await;
            // A window that lies ahead by its length moves when it is found (S4).
            let start = |value: &String| match value.split_once('@') {
                Some((_, start)) => start.split('*').next().unwrap_or_default().parse::<i64>(),
                None => value.parse::<i64>().map(|micros| micros / 1_000),
            };
            let start = found.as_ref().map_or(0, |value| start(value).expect("a count"));
            let ahead = start >= (now + length) as i64 && !charge.is_peek();
            if !decision.is_allowed() && !ahead {
                assert_eq!((&after, new_expiry), (&found, expiry), "{at}: refused");
            }
            seen.moved += u32::from(!decision.is_allowed() && after != found);
            assert_ne!(new_expiry, -1, "{at}: it never expires");
            let is_text = |value: &Option<String>| value.as_ref().map(|value| value.contains('@'));
            seen.to_text +=
                u32::from((is_text(&before), is_text(&after)) == (Some(false), Some(true)));
            seen.to_number +=
                u32::from((is_text(&before), is_text(&after)) == (Some(true), Some(false)));
            let short = format!("{:?}", charge) == format!("{:?}", Charge::new(account, cost))
                && quota.capacity() == quota.limit()
                && quota.limit() < length * 1_000
                && cost <= quota.limit();
            if short {
                let reset = decision.reset_at().duration_since(UNIX_EPOCH).expect("after it");
                let later = reset.as_millis() as u64 > now + length;
                seen.short_on_text += u32::from(is_text(&found) == Some(true));
                seen.short_on_later += u32::from(is_text(&found) == Some(false) && later);
                seen.short_refused += u32::from(!decision.is_allowed());
            }
        }
    }
    println!("{seen:?}");
    let Crossings { to_text, to_number, short_on_text, short_on_later, short_refused, moved } =
        seen;
    let all = [to_text, to_number, short_on_text, short_on_later, short_refused, moved];
    assert!(rounds < 40 || all.iter().all(|&n| n >= 25), "{seen:?}");
}
