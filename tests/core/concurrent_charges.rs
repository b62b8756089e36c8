//! Random charges of several limits by eight threads at once (S37), with refunds, true costs, receipts
//! that are dropped, plans that change, a clock that steps, and in a store without room: never is
//! more taken than a limit, and what is counted is what passed and was not returned.
//!
//! A million operations with `FULL_SIZE=1`, from another seed each time.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use fastrand::Rng;
use tower_fixed_window::{Limit, Limits, Line, ManualClock, MemoryStore, Quota, Quotas, Receipt};

use crate::{answer, sized};

const THREADS: u64 = 8;
/// Operations of a thread in a round, over few keys.
const ROUND: u64 = 250;
const KEYS: u64 = 3;
const NOW_MS: u64 = 1_700_000_040_000;
const MINUTE_MS: u64 = 60_000;

const NAMES: [&str; 4] = ["requests", "tokens", "cents", "jobs"];

/// The quotas of each limit, and those of another plan.
fn plans() -> [[Quotas; 2]; 4] {
    let plan = |n: u64| {
        [
            Quota::per_minute(40 * n).into(),
            Quota::per_minute(90 * n).and(Quota::per_hour(400 * n)),
            Quota::per_hour(300 * n).rollover_up_to(350 * n).into(),
            Quota::per_minute(30 * n).starting_at(Duration::from_secs(30)).into(),
        ]
    };
    let [small, large] = [plan(1), plan(2)];
    std::array::from_fn(|i| [small[i], large[i]])
}

/// A limit, a key, a quota and the end of its window.
type Count = (usize, u64, usize, SystemTime);

/// Tokens that were taken and not returned, without those beyond a limit.
#[derive(Default)]
struct Ledger(Mutex<HashMap<Count, i64>>);

impl Ledger {
    /// After a charge, or before a refund: never more than is counted.
    fn change(&self, charged: &Charged, now: SystemTime, name: &str, by: i64) {
        let Some(decision) = charged.receipts.decision().of(name) else { return };
        let limit = NAMES.iter().position(|other| *other == name).expect("one of them");
        for (quota, usage) in decision.usage().iter().enumerate() {
            if by < 0 && usage.reset_at() <= now {
                continue;
            }
            let count = (limit, charged.keys[limit], quota, usage.reset_at());
            let mut ledger = self.0.lock().unwrap();
            let held = ledger.entry(count).or_default();
            *held += by;
            let most = plans()[limit][1].as_ref()[quota].limit() as i64;
            let most = if limit == 2 { most / 300 * 350 } else { most };
            assert!(*held <= most, "{held} of {most}: {count:?}");
        }
    }
}

struct Charged {
    receipts: Receipt,
    keys: [u64; 4],
}

/// A user has the key of its number; the organization's is one for all of some users.
fn lines<'a>(random: &mut Rng, keys: &[u64; 4], plans: &'a [[Quotas; 2]; 4]) -> Vec<Line<'a>> {
    let mut lines: Vec<_> = (0..4)
        .filter(|_| random.u8(..3) != 0)
        .collect::<Vec<_>>()
        .into_iter()
        .map(|i| {
            let line = Line::new(NAMES[i], keys[i], random.u64(..5));
            match random.u64(..6) {
                0 => line.with_quotas(&plans[i][1]),
                _ => line,
            }
        })
        .collect();
    if random.u8(..2) == 0 {
        lines.reverse();
    }
    lines
}

/// `exact`: the store has room, and the clock goes on from round to round.
fn rounds(seed: u64, rounds: u64, max_keys: usize, exact: bool) {
    let clock = ManualClock::at_ms(NOW_MS);
    let store = MemoryStore::with_max_keys(max_keys).clock(clock.clone());
    let plans = plans();
    let limiters = NAMES.iter().zip(&plans).map(|(name, [own, _])| Limit::new(*own).name(name));
    let limits = Limits::new(limiters).store(store);
    let ledger = Ledger::default();
    let mut time = Rng::with_seed(seed);
    let mut now_ms = NOW_MS;
    for round in 0..rounds {
        now_ms += MINUTE_MS;
        if !exact && time.u8(..3) == 0 {
            // By less than a window, by some, or far ahead for a round.
            now_ms = (now_ms + time.u64(..3) * 3_600_000).saturating_sub(time.u64(..5) * 1_000_000);
        }
        // In the second half of a minute, in which no window ends.
        now_ms = now_ms / MINUTE_MS * MINUTE_MS + 35_000;
        clock.set_ms(now_ms);
        let now = SystemTime::UNIX_EPOCH + Duration::from_millis(now_ms);
        let others = if exact { 0 } else { 2 * max_keys as u64 };
        for other in 0..others {
            let _ = answer(limits.check([Line::new("jobs", 1_000 + other, 1)]));
        }
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (limits, ledger, plans, clock) = (&limits, &ledger, &plans, &clock);
                scope.spawn(move || {
                    let mut random = Rng::with_seed(seed ^ (round << 8) ^ (thread << 40));
                    let mut held: Vec<Charged> = Vec::new();
                    for _ in 0..ROUND {
                        clock.set_ms(now_ms + random.u64(..9));
                        step(&mut random, limits, ledger, plans, &mut held, now);
                    }
                });
            }
        });
        if exact {
            for ((limit, key, quota, _), held) in
                ledger.0.lock().unwrap().iter().filter(|(count, _)| count.3 > now)
            {
                let standing =
                    answer(limits.limiter(NAMES[*limit]).with_quotas(plans[*limit][0]).peek(*key));
                let usage = &standing.usage()[*quota];
                // Peeks don't show the rollover of earlier windows.
                let shown = if *limit == 2 { continue } else { usage.used() as i64 };
                assert_eq!(shown, *held, "{} of {key}, round {round}, seed {seed}", NAMES[*limit]);
            }
        }
    }
}

fn step(
    random: &mut Rng,
    limits: &Limits,
    ledger: &Ledger,
    plans: &[[Quotas; 2]; 4],
    held: &mut Vec<Charged>,
    now: SystemTime,
) {
    let own = random.u64(..KEYS);
    let keys = [0, own % 2, own, 7];
    let lines = lines(random, &keys, plans);
    if lines.is_empty() {
        return;
    }
    match random.u64(..10) {
        0 => {
            let _ = answer(limits.peek(&lines));
        }
        1 | 2 if !held.is_empty() => {
            let of = random.u64(..held.len() as u64) as usize;
            let charged = held.swap_remove(of);
            for (name, decision) in decisions(&charged) {
                ledger.change(&charged, now, name, -decision);
            }
            answer(limits.refund(charged.receipts));
        }
        3 if !held.is_empty() => {
            // Less than was taken.
            let of = random.u64(..held.len() as u64) as usize;
            let charged = held.swap_remove(of);
            let costs: Vec<_> = decisions(&charged)
                .into_iter()
                .map(|(name, granted)| (name, random.u64(..granted as u64 + 1)))
                .collect();
            for ((name, granted), (_, actual)) in decisions(&charged).into_iter().zip(&costs) {
                ledger.change(&charged, now, name, *actual as i64 - granted);
            }
            answer(limits.settle(charged.receipts, costs));
        }
        // The receipts are dropped: what was taken stays counted.
        4 if held.len() > 20 => held.truncate(10),
        _ => {
            let Ok(receipts) = answer(limits.charge(&lines)) else { return };
            let charged = Charged { receipts, keys };
            for (name, granted) in decisions(&charged) {
                ledger.change(&charged, now, name, granted);
            }
            held.push(charged);
        }
    }
}

fn decisions(charged: &Charged) -> Vec<(&'static str, i64)> {
    let decision = charged.receipts.decision();
    let granted = |name| decision.of(name).map(|of| (name, of.granted() as i64));
    NAMES.into_iter().filter_map(granted).collect()
}

fn seed() -> u64 {
    let seed = RandomState::new().hash_one(0);
    println!("seed {seed}");
    seed
}

fn full_size(rounds: u64) -> u64 {
    (sized(60_000, 500_000) / (THREADS * ROUND)).max(rounds)
}

#[test]
fn what_is_counted_is_what_passed_and_was_not_returned() {
    rounds(seed(), full_size(1), 100_000, true);
}

#[test]
fn a_full_store_whose_clock_steps_admits_no_more_than_a_limit() {
    rounds(seed(), full_size(1), 64, false);
}
