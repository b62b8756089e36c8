//! Random traces, of which memory and Redis must make the same: anchors, several quotas, rollover,
//! reservations, returns, changed limits, a clock that jumps, numbers at the edge of what is exact.
//!
//! `SEED=7 ROUNDS=100000 cargo test -p tests --test redis differential` goes on from elsewhere.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use harness::Server;
use tower_fixed_window::store::Store;
use tower_fixed_window::{Decision, ManualClock, Quota, Quotas};
use tower_fixed_window_redis::RedisStore;

use crate::agreement::{Pair, Seen, Trace, assert_all_expire};
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
    let (first, rounds) = (env("SEED", 1), env("ROUNDS", 140));
    let [mut alone, mut together, mut changing, mut crossing] = [(); 4].map(|()| Seen::default());
    for seed in first..first + rounds {
        let mut rng = Rng::with_seed(seed);
        let clock = ManualClock::at_ms(start(&mut rng));
        let pair = Pair::new(&connection, seed, &clock, &with);
        match seed % 3 {
            0 => {
                change_limits(pair, &clock, &mut rng, &mut changing).await;
                continue;
            }
            1 => {
                cross_format(pair, &clock, &mut rng, &mut crossing).await;
                continue;
            }
            _ => {}
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
    println!("{alone:?} {together:?} {changing:?} {crossing:?}");
    let met = |seen: &Seen| seen.passed > 150 && seen.refused > 150;
    assert!(rounds < 140 || met(&alone) && met(&together) && together.late > 2, "{together:?}");
    let Seen { above, debts, at_zero, .. } = changing;
    assert!(rounds < 140 || [above, debts, at_zero].iter().all(|&n| n >= 25), "{changing:?}");
    assert!(rounds < 140 || crossing.crossings >= 150, "{crossing:?}");
    assert_all_expire(&server);
}

/// The limit of a quota goes up and down around the largest count that is a number in Redis, with
/// rollover and without, on a clock that crosses the ends of windows in both directions.
async fn cross_format<S: Store>(
    pair: Pair<S>,
    clock: &ManualClock,
    rng: &mut Rng,
    seen: &mut Seen,
) {
    /// The last instant whose microseconds are below 2^53: later counts are text.
    const LAST: u64 = 9_007_199_254_740;

    let length = length(rng);
    let (anchor, offset) = (rng.u8(..3), rng.u64(..length));
    let quotas = move |rng: &mut Rng| vec![quota_around(rng, length, anchor, offset).into()];
    let tokens = move |rng: &mut Rng| if rng.bool() { rng.u64(1..5) } else { around(rng, length) };
    let next = move |rng: &mut Rng, now: u64, last: Option<&Decision>| match rng.u8(..8) {
        0 if last.is_none() => rng.u64(..2 * length),
        1 if last.is_none() => LAST - rng.u64(..2 * length.min(LAST / 2)),
        _ if last.is_none() => 1_700_000_000_000,
        0 => now + rng.u64(..length),
        1 => now + length,
        2 => now.saturating_sub(rng.u64(..length)),
        3 if rng.bool() => now.saturating_sub(length * rng.u64(1..3)),
        _ => now,
    };
    Trace { quotas, tokens, next }.run(pair, clock, rng, STEPS, seen).await;
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
