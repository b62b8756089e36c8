//! Random times, costs and quotas, mostly ordinary and now and then at the edge of what is exact. The
//! tests of the simulated network use them, too.

use std::time::Duration;

use fastrand::Rng;
use tower_fixed_window::{Quota, Quotas};

/// A number from the environment.
pub(crate) fn env(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect("a number"))
}

pub(crate) fn tokens(rng: &mut Rng) -> u64 {
    match rng.u8(..10) {
        0 => 0,
        1..=5 => rng.u64(1..10),
        6 | 7 => rng.u64(1..1_000),
        8 => rng.u64(..=Quota::MAX_TOKENS),
        _ => Quota::MAX_TOKENS - rng.u64(..3),
    }
}

pub(crate) fn length(rng: &mut Rng) -> u64 {
    let year = 365 * 86_400_000;
    *rng.choice(&[1, 2, 7, 1_000, 60_000, 3_600_000, 7 * 86_400_000, 10 * year]).expect("some")
}

/// The same windows, with limits as they may be now.
pub(crate) fn with_limits(rng: &mut Rng, windows: &[(u64, u8, u64)]) -> Quotas {
    some_quotas(rng, tokens, windows, |limit, &(length, anchor, offset)| {
        let quota = Quota::new(limit, Duration::from_millis(length));
        match anchor {
            0 => quota,
            1 => quota.starting_at(Duration::from_millis(offset)),
            2 => quota.staggered(),
            _ => quota.from_first_request(),
        }
    })
}

/// A quota for each window, with rollover and reservations now and then.
pub(crate) fn some_quotas<W>(
    rng: &mut Rng,
    tokens: fn(&mut Rng) -> u64,
    windows: &[W],
    plain: impl Fn(u64, &W) -> Quota,
) -> Quotas {
    let quota = |rng: &mut Rng, window| {
        let limit = tokens(rng);
        let mut quota = plain(limit, window);
        if rng.u8(..3) == 0 {
            quota = quota.rollover_up_to(limit + tokens(rng).min(Quota::MAX_TOKENS - limit));
        }
        if rng.u8(..3) == 0 {
            quota = quota.reserve_up_to(tokens(rng).min(Quota::MAX_TOKENS - quota.capacity()));
        }
        quota
    };
    let first = Quotas::from(quota(rng, &windows[0]));
    windows[1..].iter().fold(first, |quotas, window| {
        let next = quota(rng, window);
        format!("{quotas}, {next}").parse().unwrap_or(quotas)
    })
}

pub(crate) fn step_clock(rng: &mut Rng, now: u64, length: u64) -> u64 {
    let any = rng.u64(..length);
    match rng.u8(..12) {
        0..=4 => now,
        5 | 6 => now.saturating_add(any),
        7 => now.saturating_add(length),
        8 => now.saturating_add(length.saturating_mul(rng.u64(1..6)) + any),
        9 => now.saturating_sub(any),
        10 => now.saturating_sub(length.saturating_mul(rng.u64(1..4))),
        _ => start(rng),
    }
    .min(Quota::MAX_TOKENS)
}

pub(crate) fn start(rng: &mut Rng) -> u64 {
    match rng.u8(..8) {
        0 => rng.u64(..3),
        1 => Quota::MAX_TOKENS - rng.u64(..1_000),
        2 => rng.u64(..=Quota::MAX_TOKENS),
        _ => 1_700_000_000_000 + rng.u64(..100_000_000),
    }
}
