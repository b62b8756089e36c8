//! Random traces with deploys between their steps: the answers are those of the reference, and those of
//! a store that went on.

use std::fs;
use std::path::Path;
use std::time::Duration;

use fastrand::Rng;
use proptest::prelude::*;
use tower_fixed_window::{
    Clock, KeptReceipt, Limit, Limiter, ManualClock, MemoryStore, Quota, Quotas, Receipt,
};

use super::{MINUTE_MS, NOW_MS, folder};
use crate::arithmetic::op_together;
use crate::trace::*;
use crate::{answer, charge, sized};

/// A receipt belongs to its store, so the next process reads it from text.
fn deployed(receipt: Receipt) -> Receipt {
    let decision = receipt.decision().clone();
    let text = serde_json::to_string(&receipt.keep().expect("it has a name")).expect("text");
    let read: Receipt = serde_json::from_str::<KeptReceipt>(&text).expect("a receipt").into();
    assert_eq!(read.decision(), &decision);
    read
}

fn open(path: &Path, max_keys: usize, clock: &ManualClock) -> MemoryStore {
    let store = MemoryStore::with_max_keys(max_keys).clock(clock.clone());
    store.saved_to(path, Duration::MAX).expect("the file opens")
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: if std::env::var_os("FULL_SIZE").is_some() { 5_000 } else { 150 },
        ..ProptestConfig::default()
    })]

    /// Of one limit, or of two that are charged together.
    #[test]
    fn deploys_change_no_answer(
        specs in prop::collection::vec(specs(amounts()), 1..=2), now in start(),
        trace in prop::collection::vec(
            (forward(), prop_oneof![op(), op_together()], any::<bool>()), 1..40,
        ),
    ) {
        let folder = folder();
        let mut rig = Rig::new(specs, now);
        let deploy = |rig: &mut Rig| {
            // The previous store saves when its last handle is dropped.
            rig.limits = limits_of(&rig.specs);
            let store = open(&folder.path().join("counts"), 200, &rig.clock);
            rig.limits = limits_of(&rig.specs).store(store);
            let receipts = rig.receipts.drain(..).map(|(receipt, took)| (deployed(receipt), took));
            rig.receipts = receipts.collect::<Vec<_>>();
        };
        deploy(&mut rig);
        for (step, op, deploys) in &trace {
            // Entries that end before the file is loaded are gone, also after a step back.
            if rig.after(step) >= rig.now {
                rig.take(step, op);
            }
            if *deploys {
                deploy(&mut rig);
            }
        }
    }
}

const PLANS: usize = 4;

/// Quotas of every kind, in a store so small that keys share counts.
fn plans() -> [Quotas; PLANS] {
    [
        Quota::per_minute(4).into(),
        Quota::per_minute(6).reserve_up_to(3).and(Quota::per_month(20).in_zone("Europe/Berlin")),
        Quota::per_hour(8).rollover_up_to(12).staggered().into(),
        Quota::new(3, Duration::from_secs(90)).from_first_request().into(),
    ]
}

/// Two stores of the same counts, with the limiters of each, and the receipts of equal charges.
struct Twins {
    stores: [MemoryStore; 2],
    receipts: Vec<[Receipt; 2]>,
}

impl Twins {
    fn limiters(&self, plan: usize) -> [Limiter; 2] {
        let limiter =
            |store: &MemoryStore| Limit::new(plans()[plan]).name("twin").store(store.clone());
        [&self.stores[0], &self.stores[1]].map(limiter)
    }

    fn step(&mut self, rng: &mut Rng) {
        let (plan, key) = (rng.usize(..PLANS), rng.u64(..60));
        let limiters = self.limiters(plan);
        match rng.u8(..20) {
            0..=12 => {
                let (cost, reserve) = (rng.u64(..4), rng.bool());
                let [a, b] = limiters.map(|limiter| charge(&limiter, key, cost, reserve));
                assert_eq!(a.0, b.0, "{plan}: {cost} for {key}, reserving: {reserve}");
                self.receipts.extend(a.1.zip(b.1).map(|(a, b)| [a, b].map(deployed)));
            }
            13..=15 if !self.receipts.is_empty() => {
                let [a, b] = self.receipts.swap_remove(rng.usize(..self.receipts.len()));
                let actual = rng.u64(..6);
                answer(limiters[0].settle(a, actual));
                answer(limiters[1].settle(b, actual));
            }
            16 => {
                let [a, b] =
                    limiters.map(|limiter| limiter.reset(key).into_now().expect("at once").is_ok());
                assert_eq!(a, b, "a reset of {key}");
            }
            _ => {
                let [a, b] = limiters.map(|limiter| answer(limiter.peek(key)));
                assert_eq!(a, b, "{plan}: a look at {key}");
            }
        }
    }
}

/// Two stores have the same counts. One is saved and loaded again, the other goes on, and no
/// operation tells them apart.
#[test]
fn a_store_that_was_loaded_is_the_one_that_was_saved() {
    let rounds = if std::env::var_os("FULL_SIZE").is_some() { 2_000 } else { 60 };
    let seed =
        std::env::var("SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
    println!("SEED={seed}");
    let mut rng = Rng::with_seed(seed);
    for _ in 0..rounds {
        let folder = folder();
        let [one, other] = ["one", "other"].map(|name| folder.path().join(name));
        let clock = ManualClock::at_ms(NOW_MS);
        let max_keys = [1, 40, 1_000][rng.usize(..3)];
        let first = open(&one, max_keys, &clock);
        first.save().expect("saves");
        fs::copy(&one, &other).expect("copied");
        let mut twins =
            Twins { stores: [first, open(&other, max_keys, &clock)], receipts: Vec::new() };
        for _ in 0..6 {
            (0..rng.u64(..120)).for_each(|_| twins.step(&mut rng));
            let [first, second] = twins.stores;
            drop(second);
            twins.stores = [first, open(&other, max_keys, &clock)];
            (0..rng.u64(..120)).for_each(|_| twins.step(&mut rng));
            // Ended entries are not loaded, so both stores are compared again at a later time.
            clock.advance(Duration::from_millis(rng.u64(..2 * MINUTE_MS)));
            let [first, second] = twins.stores;
            drop(second);
            first.save().expect("saves");
            fs::copy(&one, &other).expect("copied");
            drop(first);
            twins.stores = [open(&one, max_keys, &clock), open(&other, max_keys, &clock)];
        }
    }
}

/// S35: a window that runs ends as it began, by whichever edition of the zone data, and whatever the
/// clock has shown before; and the one behind it is no part of a window.
#[test]
fn another_edition_changes_no_window_that_runs() {
    const HOUR_MS: u64 = 3_600_000;
    const DAY_MS: u64 = 24 * HOUR_MS;
    // The last one subscribes on 28 February by one edition, and on 1 March by the other.
    for seed in (0..sized(60, 20_000)).chain([5_292]) {
        let mut rng = Rng::with_seed(seed);
        let folder = folder();
        let now = NOW_MS + rng.u64(..40 * DAY_MS);
        let clock = ManualClock::at_ms(now);
        let moved = rng.i64(-5..=5);
        let periods = [(Quota::per_day(5), 1), (Quota::per_week(5), 7), (Quota::per_month(5), 28)];
        let (period, days) = *rng.choice(&periods).expect("some");
        let since = Duration::from_millis(now - rng.u64(..900 * DAY_MS));
        let (period, days) = match rng.u8(..8) {
            0 | 1 => (period.starting_at(since), days),
            2 => (Quota::per_month(5).from_day(31), 28),
            3 => (Quota::per_year(5).from_date(2, 29), 365),
            _ => (period, days),
        };
        let quota = match rng.u8(..4) {
            0 => period.rollover_up_to(9),
            1 => period.reserve_up_to(7),
            _ => period,
        };
        // The clock of one zone, and a name whose counters are those of the next edition's.
        let before = format!("Etc/GMT+3=Etc/GMT{:+}", 3 + moved);
        let limiter = |zone: &str| {
            let store = MemoryStore::with_max_keys(100).clock(clock.clone());
            let store = store.saved_to(folder.path().join("counts"), Duration::MAX);
            quota.in_zone(zone).name("api").store(store.expect("it opens"))
        };
        let first = limiter(&before);
        let at = format!("seed {seed}: {quota} in {before}, at {now}");
        for _ in 0..rng.u64(1..9) {
            match rng.u8(..4) {
                // For a moment, the clock is far ahead, or behind.
                0 => {
                    let years = [1, 25, 41, 100][rng.usize(..4)] * 366 * DAY_MS;
                    let behind = years < now && rng.bool();
                    clock.set_ms(if behind { now - years } else { now + years });
                    let _ = charge(&first, "bob", rng.u64(1..12), true);
                    clock.set_ms(now);
                }
                _ => drop(charge(&first, "alice", rng.u64(..4), rng.bool())),
            }
        }
        let left = |limiter: &Limiter| {
            let peek = answer(limiter.peek("alice"));
            (peek.used(), peek.remaining(), peek.reset_at())
        };
        let _ = charge(&first, "alice", 1, false);
        let known = left(&first);
        drop(first);
        let end = ms(known.2) as u64;
        clock.set_ms(rng.u64(now..end));
        let second = limiter("Etc/GMT+3");
        assert_eq!(left(&second), known, "{at}, then {}", clock.now_ms());
        let mut passed = 0;
        while charge(&second, "alice", 1, false).0.is_allowed() {
            passed += 1;
        }
        assert_eq!(passed, known.1, "{at}");
        clock.set_ms(end + rng.u64(..5 * HOUR_MS));
        let next = ms(charge(&second, "alice", 1, false).0.reset_at()) as u64;
        assert!(next - end >= days * DAY_MS - 6 * HOUR_MS, "{at}: a window of {} ms", next - end);
    }
}

/// Of some calendars, the file has no list of windows: as many as there are subscriptions.
#[test]
fn another_edition_binds_every_calendar() {
    const HOUR_MS: u64 = 3_600_000;
    let months = (1..=31).map(|day| Quota::per_month(5).from_day(day));
    let years = (0..96).map(|i| Quota::per_year(5).from_date(1 + i % 12, 1 + i / 4));
    let quotas: Vec<_> = months.chain(years).collect();
    for clock_before in ["Etc/GMT-2", "Etc/GMT+1", "Etc/GMT+8"] {
        let (folder, clock) = (folder(), ManualClock::at_ms(NOW_MS));
        let limiters = |zone: &str| {
            let any = Quota::per_second(1).name("api");
            let any = any.store(open(&folder.path().join("counts"), 1_000, &clock));
            let limiter = |quota: &Quota| any.with_quotas(quota.in_zone(zone));
            quotas.iter().map(limiter).collect::<Vec<_>>()
        };
        let first = limiters(&format!("Etc/GMT+3={clock_before}"));
        let ends: Vec<_> =
            first.iter().map(|of| charge(of, "alice", 5, false).0.reset_at()).collect();
        drop(first);
        let second = limiters("Etc/GMT+3");
        let mut order: Vec<_> = (0..quotas.len()).collect();
        order.sort_by_key(|i| ends[*i]);
        for i in order {
            let (at, end) = (format!("{}, {clock_before}", quotas[i]), ms(ends[i]) as u64);
            clock.set_ms(end - 1);
            let refused = charge(&second[i], "alice", 1, false).0;
            assert!(!refused.is_allowed() && refused.reset_at() == ends[i], "{at}: {refused:?}");
            clock.set_ms(end);
            let next = charge(&second[i], "alice", 1, false).0;
            let length = ms(next.reset_at()) as u64 - end;
            assert!(next.used() == 1 && length > 27 * 24 * HOUR_MS, "{at}: {next:?}");
            clock.set_ms(end + 7 * HOUR_MS);
            let next = charge(&second[i], "alice", 1, false).0;
            assert_eq!(next.used(), 2, "{at}: {next:?}");
            clock.set_ms(end);
        }
    }
}

/// By one edition the first window ended, by the next one another has begun there, which ends by none
/// of the third.
#[test]
fn editions_one_after_the_other_bind_each_window_once() {
    const HOUR_MS: u64 = 3_600_000;
    let quotas = [
        Quota::per_day(5),
        Quota::per_week(5),
        Quota::per_month(5),
        Quota::per_month(5).from_day(31),
        Quota::per_year(5).from_date(2, 29),
    ];
    let clocks = ["Etc/GMT+1", "Etc/GMT+3", "Etc/GMT+4", "Etc/GMT+6"];
    for (quota, i) in quotas.into_iter().flat_map(|quota| (0..16).map(move |i| (quota, i))) {
        let (folder, clock) = (folder(), ManualClock::at_ms(NOW_MS));
        let limiter = |clock_of: &str| {
            let store = open(&folder.path().join("counts"), 100, &clock);
            quota.in_zone(&format!("Etc/GMT+3={clock_of}")).name("api").store(store)
        };
        let (one, other) = (clocks[i / 4], clocks[i % 4]);
        let first = charge(&limiter(one), "alice", 5, false).0;
        let at = format!("{quota}: {one}, {other}");
        let end = ms(first.reset_at()) as u64;
        clock.set_ms(end - 1);
        let second = limiter(other);
        assert!(!charge(&second, "alice", 1, false).0.is_allowed(), "{at}");
        clock.set_ms(end);
        let next = charge(&second, "alice", 2, false).0;
        drop(second);
        let known = (2, next.reset_at());
        for before in [6 * HOUR_MS, 1] {
            clock.set_ms(ms(next.reset_at()) as u64 - before);
            let found = answer(limiter("Etc/GMT+3").peek("alice"));
            assert_eq!((found.used(), found.reset_at()), known, "{at}, {before}");
        }
    }
}
