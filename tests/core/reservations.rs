//! Reservations over several quotas: no window sees more starts than its limit (S13, S14).

use std::collections::HashMap;
use std::time::Duration;

use fastrand::Rng;
use tower_fixed_window::{Limit, Limiter, ManualClock, MemoryStore, Quota, Quotas, Receipt};

use crate::trace::ms;
use crate::{answer, charge};

/// The start of a minute.
const TURN: u64 = 1_700_000_040_000;

fn limiter(clock: &ManualClock, quotas: impl Into<Quotas>) -> Limiter {
    Limit::new(quotas).store(MemoryStore::new().clock(clock.clone()))
}

fn joined(mut quotas: impl Iterator<Item = Quota>) -> Quotas {
    let first = Quotas::from(quotas.next().expect("one"));
    quotas.fold(first, Quotas::and)
}

/// The time at which a charge that passed may start.
fn start(receipt: &Receipt) -> i128 {
    let decision = receipt.decision();
    ms(decision.ready_at().unwrap_or(decision.reset_at() - decision.reset_after()))
}

/// Random quotas and times. Returned tokens may pass again, in any window with room.
#[test]
fn no_window_sees_more_starts_than_its_limit() {
    let mut total = 0;
    for seed in 0..400 {
        let mut rng = Rng::with_seed(seed);
        let clock = ManualClock::at_ms(TURN + rng.u64(..60_000));
        let middle = *rng.choice(&[1_500, 7_000, 10_000]).expect("some");
        let mut windows = vec![];
        for (length, limits) in [(1_000, 1..4), (middle, 1..15), (60_000, 5..60)] {
            windows.push([length, rng.u64(limits), rng.u64(..length)]);
        }
        windows.truncate(rng.usize(1..=3));
        let quotas = windows.iter().map(|&[length, limit, offset]| {
            let quota = Quota::new(limit, Duration::from_millis(length));
            quota.starting_at(Duration::from_millis(offset)).reserve_up_to(100 - limit)
        });
        let limiter = limiter(&clock, joined(quotas));
        // A charge of several tokens may start in a window from which it takes only one.
        let most = if rng.bool() { 1 } else { 5 };
        let mut receipts = Vec::new();
        for _ in 0..rng.usize(50..400) {
            clock.advance(Duration::from_millis(match rng.u8(..8) {
                0 => rng.u64(..3_000),
                1 => rng.u64(..300),
                _ => 0,
            }));
            if most == 1 && rng.u8(..6) == 0 && !receipts.is_empty() {
                let receipt: Receipt = receipts.swap_remove(rng.usize(..receipts.len()));
                let quotas = *limiter.quotas().expect("some").quotas().expect("some");
                // It may be paused, or grant no reservations, while tokens come back.
                let [to, reserved] = [rng.bool(), rng.bool()].map(u64::from);
                let other = quotas
                    .into_iter()
                    .map(|quota| quota.with_limit(quota.limit() * to).reserve_up_to(reserved));
                limiter.set_quotas(joined(other));
                answer(limiter.refund(receipt));
                limiter.set_quotas(quotas);
            } else if let (_, Some(receipt)) =
                charge(&limiter, "alice", rng.u64(1..=most), rng.u8(..4) > 0)
            {
                receipts.push(receipt);
            }
        }
        for [length, limit, offset] in windows {
            let mut starts = HashMap::<i128, u64>::new();
            for receipt in &receipts {
                let window = (start(receipt) - i128::from(offset)) / i128::from(length);
                *starts.entry(window).or_default() += receipt.decision().granted();
            }
            let most_starts = starts.values().copied().max().unwrap_or(0);
            total += starts.values().sum::<u64>();
            assert!(
                most_starts < limit + most,
                "SEED={seed}: {most_starts} of {limit} in {length} ms"
            );
        }
    }
    assert!(total > 10_000, "{total}");
}
