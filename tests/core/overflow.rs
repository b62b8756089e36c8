//! S30: a flood of keys can't buy tokens, and takes nothing from a key that is tracked.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use proptest::prelude::*;
use tower_fixed_window::{
    Limit, Limiter, Limits, Line, ManualClock, MemoryStore, Quota, Quotas, Receipt,
};

use crate::reference::{Grid, stagger};
use crate::trace::{Spec, set};
use crate::{answer, charge, sized};

const NOW_MS: u64 = 1_700_000_040_000;

fn small(max_keys: usize) -> (MemoryStore, ManualClock) {
    let clock = ManualClock::at_ms(NOW_MS);
    (MemoryStore::with_max_keys(max_keys).clock(clock.clone()), clock)
}

/// Fills every entry with keys of a long window.
fn flood(store: &MemoryStore, keys: u64) {
    flood_with(Quota::per_week(1), store, keys);
}

fn flood_with(quota: Quota, store: &MemoryStore, keys: u64) -> Limiter {
    let flood = quota.name("flood").store(store.clone());
    (0..keys).for_each(|key| drop(answer(flood.check(key))));
    flood
}

#[test]
fn a_tracked_key_keeps_its_count_and_is_not_refused_before_its_limit() {
    for (max_keys, tracked) in [(1, 2_u64), (16, 5), (1_000, 200)] {
        let (store, clock) = small(max_keys);
        let quotas = Quota::per_minute(20)
            .and(Quota::per_hour(30))
            .and(Quota::new(25, Duration::from_secs(600)).from_first_request());
        let regular = Limit::new(quotas).name("regular").store(store.clone());
        for key in 0..tracked {
            assert!(answer(regular.check(key)).is_allowed());
        }
        for round in 2..=20 {
            flood(&store, max_keys as u64 * 3 + 100);
            for key in 0..tracked {
                let decision = answer(regular.check(key));
                assert!(decision.is_allowed(), "{max_keys}: {key} in round {round}");
                let used: Vec<_> = decision.usage().iter().map(|s| s.used()).collect();
                assert_eq!(used, [round; 3], "{max_keys}: {key}");
            }
        }
        for key in 0..tracked {
            assert!(!answer(regular.check(key)).is_allowed());
        }
        // In the next minute, the first quota's entry may have been reused, those of the others
        // not.
        clock.advance(Duration::from_secs(60));
        flood(&store, max_keys as u64 * 3 + 100);
        for key in 0..tracked {
            let decision = answer(regular.peek(key));
            assert_eq!(decision.usage()[1].used(), 20);
            assert_eq!(decision.usage()[2].used(), 20);
        }
    }
}

/// The seed keeps clients from finding keys that share an entry in a store that runs elsewhere.
#[test]
fn which_keys_share_an_overflow_entry_differs_between_stores() {
    let refused = || {
        let (store, _) = small(1_000);
        flood(&store, 3_000);
        let late = Quota::per_hour(1).name("late").store(store);
        (0..500_u64).filter(|key| !answer(late.check(*key)).is_allowed()).collect::<Vec<_>>()
    };
    let (one, other) = (refused(), refused());
    assert!(!one.is_empty() && !other.is_empty());
    assert_ne!(one, other);
}

/// The larger the store, the fewer clients are refused because of others: a quota has a shared
/// count for every 128 keys.
#[test]
fn keys_of_a_full_store_share_many_counts() {
    let (store, _) = small(20_000);
    // All requests pass, and fill the store to its last entry.
    let flood = Quota::per_week(60_000).name("flood").store(store.clone());
    (0..60_000_u64).for_each(|key| assert!(answer(flood.check(key)).is_allowed()));
    let late = Quota::per_hour(1).name("late").store(store);
    // Nearly all shared counts are used, so their number is known.
    let counts = (0..2_000_u64).filter(|key| answer(late.check(*key)).is_allowed()).count();
    assert!((150..300).contains(&counts), "{counts} counts");
}

#[test]
fn an_overflow_entry_empties_one_window_after_its_last_allowed_charge() {
    for quota in [
        Quota::per_minute(2),
        Quota::per_minute(2).staggered(),
        Quota::per_minute(2).from_first_request(),
    ] {
        let (store, clock) = small(1);
        flood(&store, 1_000);
        let late = Limit::new(quota).name("late").store(store);
        assert!(answer(late.check("late")).is_allowed());
        clock.advance(Duration::from_secs(40));
        assert!(answer(late.check("late")).is_allowed());
        // Refused requests do not keep the overflow from becoming empty.
        for _ in 0..59 {
            clock.advance(Duration::from_secs(1));
            assert!(!answer(late.check("late")).is_allowed());
        }
        clock.advance(Duration::from_secs(1));
        let decision = answer(late.check("late"));
        assert_eq!((decision.is_allowed(), decision.used()), (true, 1));
    }
}

#[test]
fn a_key_that_leaves_overflow_keeps_its_count() {
    let (store, clock) = small(1);
    clock.set_ms(NOW_MS - 1_000);
    let _ = flood_with(Quota::per_minute(1), &store, 1_000);
    let (hour, december) = (1_700_002_800, 1_701_388_800);
    for (quota, end) in [(Quota::per_hour(5), hour), (Quota::per_month(5), december)] {
        clock.set_ms(NOW_MS - 1_000);
        let late = Limit::new(quota).name("late").store(store.clone());
        let before = store.overflowed();
        for _ in 0..3 {
            assert!(answer(late.check("late")).is_allowed());
        }
        assert_eq!(store.overflowed(), before + 3, "{quota}");
        // In the next minute, the entries of the flood are free.
        clock.set_ms(NOW_MS);
        for used in [4, 5] {
            let decision = answer(late.check("late"));
            assert_eq!(decision.used(), used);
            assert_eq!(decision.reset_at(), UNIX_EPOCH + Duration::from_secs(end));
        }
        assert_eq!(store.overflowed(), before + 3, "{quota}: its entry is its own now");
        assert!(!answer(late.check("late")).is_allowed());
    }
}

#[test]
fn a_refusal_by_several_limits_takes_no_free_entry() {
    let (store, clock) = small(1);
    clock.set_ms(NOW_MS - 1_000);
    let _ = flood_with(Quota::per_minute(1), &store, 1_000);
    let limits = Limits::new([
        // The count moves along with the minutes.
        Quota::per_minute(5).rollover_up_to(50).name("tokens"),
        Quota::per_hour(1).name("requests"),
        Quota::per_hour(9).name("bytes"),
    ]);
    let limits = limits.store(store.clone());
    let check =
        |names: [&str; 2]| answer(limits.check(names.map(|name| Line::new(name, "late", 1))));
    assert!(check(["tokens", "requests"]).is_allowed());
    // In the next minute, the entries of the flood are free.
    clock.set_ms(NOW_MS);
    let (entries, overflowed) = (store.live_entries(), store.overflowed());
    assert!(!check(["tokens", "requests"]).is_allowed());
    assert_eq!(store.live_entries(), entries);
    assert_eq!(store.overflowed(), overflowed + 2);
    let decision = check(["tokens", "bytes"]);
    assert_eq!(decision.of("tokens").expect("it was charged").remaining(), 48);
    assert_eq!(store.live_entries(), entries + 2);
    assert_eq!(store.overflowed(), overflowed + 2);
}

/// Charges daily quotas of different lengths, until each entry of the overflow belongs to one.
fn fill_overflow(store: &MemoryStore) {
    for i in 1..100 {
        let quota = Quota::new(1, Duration::from_secs(86_400 + i));
        let other = Limit::new(quota).name("other").store(store.clone());
        for key in 0..10_u64 {
            let _ = answer(other.check(key));
        }
    }
}

#[test]
fn a_full_overflow_refuses_charges_and_reservations() {
    let (store, _) = small(1);
    flood(&store, 1_000);
    fill_overflow(&store);
    let hour = Quota::per_hour(5);
    let quotas = [(hour, 5, 1), (hour.reserve_up_to(5), 10, 2), (hour.rollover_up_to(15), 15, 1)];
    for (quota, most, windows) in quotas {
        let late = Limit::new(quota).name("late").store(store.clone());
        let passed = (0..100).filter(|_| charge(&late, "late", 1, true).1.is_some()).count();
        assert!(passed <= most, "{passed} of {most}");
        let refused = charge(&late, "late", 5, false).0;
        let end = UNIX_EPOCH + Duration::from_secs(1_699_999_200 + windows * 3_600);
        assert_eq!(refused.retry_at(), Some(end), "{quota}");
    }
}

/// S15, S30: there is no entry that could keep it.
#[test]
fn a_true_cost_that_a_full_store_cannot_count_is_an_error() {
    let (store, _) = small(1);
    let late = Quota::per_hour(5).name("late").store(store.clone());
    flood(&store, 1_000);
    fill_overflow(&store);
    let settle = |actual| {
        let receipt = answer(late.charge("late", 0)).expect("nothing is taken");
        late.settle(receipt, actual).into_now().expect("memory")
    };
    settle(0).expect("there is nothing to count");
    assert_eq!(
        settle(9).unwrap_err().to_string(),
        "the store is full, and can't count a true cost"
    );
}

#[test]
fn a_full_overflow_has_room_again_when_its_windows_have_ended() {
    let (store, clock) = small(1);
    let _ = flood_with(Quota::per_week(1_000), &store, 1_000);
    fill_overflow(&store);
    let late = Quota::per_hour(5).name("late").store(store);
    assert!(!answer(late.check("late")).is_allowed());
    clock.advance(Duration::from_secs(2 * 86_400));
    assert!(answer(late.check("late")).is_allowed());
}

/// A quota that has no entry, beside one whose entry has expired, must not take that entry: both
/// would be written to it. The same where keys share counts.
#[test]
fn quotas_of_one_key_never_share_an_entry() {
    let (minute, hour) = (Quota::per_minute(3), Quota::per_hour(1_000));
    let sets = [minute.and(hour), hour.and(minute)];
    for (both, others) in sets.into_iter().flat_map(|both| [(both, 0), (both, 1_000)]) {
        let (store, clock) = small(if others > 0 { 1 } else { 16 });
        flood(&store, others);
        let before = Limit::new(minute).name("x").store(store.clone());
        let after = Limit::new(both).name("x").store(store);
        let _ = answer(before.check("alice"));
        clock.advance(Duration::from_secs(120));
        let passed = (0..10).filter(|_| answer(after.check("alice")).is_allowed()).count();
        assert_eq!(passed, 3, "{both} beside {others}");
        let usage = answer(after.peek("alice")).usage().to_vec();
        assert!(others > 0 || usage.iter().all(|usage| usage.used() == 3), "{usage:?}");
    }
}

#[test]
fn in_a_flood_a_reset_or_refund_affects_only_its_own_key() {
    let (store, _) = small(1);
    let quotas = Quota::per_hour(5).and(Quota::per_day(8));
    let limiter = Limit::new(quotas).name("x").store(store.clone());
    assert!(answer(limiter.check("tracked")).is_allowed());
    flood(&store, 1_000);
    let (_, receipt) = charge(&limiter, "late", 3, false);
    let receipt = receipt.expect("the overflow was empty");
    let reset = limiter.reset("late").into_now().expect("memory answers at once");
    assert!(reset.is_err(), "its count is not its own: {reset:?}");
    answer(limiter.refund(receipt));
    let passed = (0..10).filter(|_| answer(limiter.check("late")).is_allowed()).count();
    assert!(passed <= 5, "{passed} after a reset");
    answer(limiter.reset("tracked"));
    let passed = (0..10).filter(|_| answer(limiter.check("tracked")).is_allowed()).count();
    assert_eq!(passed, 5);
}

#[test]
fn a_reset_takes_a_key_out_of_a_shared_count_once_an_entry_is_free() {
    let (store, clock) = small(1);
    let flood = flood_with(Quota::per_minute(1), &store, 1_000);
    let late = Quota::per_hour(5).name("late").store(store.clone());
    assert!(answer(late.charge("late", 5)).is_ok());
    // All windows of the flood have ended.
    clock.advance(Duration::from_secs(120));
    answer(late.reset("late"));
    assert_eq!(answer(late.peek("late")).used(), 0);
    let entries = store.live_entries();
    for key in 1_000..2_000_u64 {
        answer(flood.reset(key));
    }
    assert_eq!(store.live_entries(), entries, "a key that was never charged takes no entry");
}

/// S4, S7: keys that look for room find windows of a clock that was an hour ahead, and move them by
/// whole windows: a key that is charged later still has one count in each of its windows.
#[test]
fn windows_that_other_keys_have_moved_stay_on_their_grid() {
    let grids = [
        Quota::per_minute(5),
        Quota::per_minute(5).starting_at(Duration::from_secs(17)),
        Quota::per_minute(5).staggered(),
    ];
    for quota in grids {
        let (store, clock) = small(1);
        let api = Limit::new(quota).name("api").store(store.clone());
        clock.advance(Duration::from_secs(3_600));
        assert!((0..3).all(|_| answer(api.check("a")).is_allowed()));
        for i in 0..16_u64 {
            let _ = answer(api.check(i));
        }
        let start = NOW_MS - 20_000;
        clock.set_ms(start);
        for i in 100..120_u64 {
            let _ = answer(api.check(i));
        }
        let mut windows: BTreeMap<_, u64> = BTreeMap::new();
        for second in 0..300 {
            clock.set_ms(start + 1_000 * second);
            for _ in 0..10 {
                let decision = answer(api.check("a"));
                let in_minute = decision.reset_after() <= Duration::from_secs(60);
                if decision.is_allowed() && in_minute {
                    *windows.entry(decision.reset_at()).or_default() += 1;
                }
            }
        }
        let ends: Vec<_> = windows.keys().copied().collect();
        let apart = |ends: &[SystemTime]| ends[1].duration_since(ends[0]).expect("sorted");
        assert!(ends.windows(2).all(|ends| apart(ends) >= Duration::from_secs(60)), "{windows:?}");
        assert!(windows.values().all(|passed| *passed <= 5), "{windows:?}");
    }
}

#[test]
fn a_clock_that_steps_back_within_a_window_leaves_a_shared_count_as_it_is() {
    let (store, clock) = small(1);
    flood(&store, 1_000);
    let late = Quota::per_minute(2).name("late").store(store);
    clock.advance(Duration::from_secs(40));
    assert!(answer(late.charge("late", 2)).is_ok());
    let before = answer(late.check("late"));
    clock.set_ms(NOW_MS + 30_000);
    let after = answer(late.check("late"));
    assert_eq!((after.is_allowed(), after.retry_at()), (false, before.retry_at()));
}

/// S14: to what the key took along from a shared entry, until the end of its own window. Those that
/// begin with a key's first request end where the shared entry does not know.
#[test]
fn tokens_of_a_shared_entry_come_back_to_the_entry_of_the_key() {
    let (aligned, day) = (Quota::per_minute(5), Quota::per_day(1_000));
    let first = aligned.from_first_request();
    for (quotas, left) in
        [(Quotas::from(aligned), 3), (day.and(aligned), 3), (first.into(), 0), (day.and(first), 0)]
    {
        for others in 0..3 {
            let (store, clock) = small(1);
            clock.set_ms(NOW_MS + 30_000);
            let _ = flood_with(Quota::per_second(1), &store, 1_000);
            let mut limits: Vec<_> =
                ["other", "another"][..others].iter().map(|name| day.name(name)).collect();
            limits.insert(limits.len() / 2, Limit::new(quotas).name("limited"));
            let limits = Limits::new(limits).store(store.clone());
            let lines = |cost| -> Vec<_> {
                limits.into_iter().map(|limiter| Line::new(limiter.name(), "k", cost)).collect()
            };
            assert!(answer(limits.check(lines(1))).is_allowed());
            clock.advance(Duration::from_millis(500));
            let receipt = answer(limits.charge(lines(3))).expect("four of five");
            assert!(store.overflowed() > 0);
            // The flood's entries are free.
            clock.advance(Duration::from_secs(2));
            let decision = answer(limits.check(lines(1)));
            assert_eq!(decision.of("limited").expect("it took part").used(), 5);
            answer(limits.refund(receipt));
            assert_eq!(answer(limits.limiter("limited").peek("k")).remaining(), left, "{quotas}");
        }
    }
}

/// A receipt from before a reset would take tokens from other keys' counts.
#[test]
fn a_refund_is_never_written_to_a_shared_entry() {
    let (store, _) = small(1);
    let limiter = Quota::per_week(50).name("limited").store(store.clone());
    let (_, receipt) = charge(&limiter, "early", 20, false);
    let receipt = receipt.expect("it has an entry of its own");
    assert_eq!(store.overflowed(), 0);
    answer(limiter.reset("early"));
    flood(&store, 1_000);
    // The keys that share an entry fill it.
    let crowd = |limiter: &Limiter| {
        let keys = 0..200_u64;
        keys.filter(|key| answer(limiter.check(*key)).is_allowed()).count()
    };
    while crowd(&limiter) > 0 {}
    assert!(!answer(limiter.check("early")).is_allowed(), "it shares an entry, which is full");
    answer(limiter.refund(receipt));
    assert!(!answer(limiter.check("early")).is_allowed(), "others' tokens came back");
    assert_eq!(crowd(&limiter), 0, "others' tokens came back");
}

/// S4, S30: counts written under the wrong clock lie a year ahead.
#[test]
fn a_clock_that_was_a_year_ahead_for_a_moment_refuses_new_keys_for_a_window_at_most() {
    const YEAR: Duration = Duration::from_secs(365 * 86_400);
    for max_keys in [1, 1_000] {
        for quota in [
            Quota::per_minute(5),
            Quota::per_minute(5).staggered(),
            Quota::per_minute(5).from_first_request(),
        ] {
            let (store, clock) = small(max_keys);
            let limiter = Limit::new(quota).name("limited").store(store.clone());
            let passed =
                |key: u64| (0..10).filter(|_| answer(limiter.check(key)).is_allowed()).count();
            let crowd = max_keys as u64 * 3 + 1_000;
            (0..crowd).for_each(|key| _ = passed(key));
            clock.advance(YEAR);
            (crowd..2 * crowd).for_each(|key| _ = passed(key));
            clock.set_ms(NOW_MS + 1_000);
            // A crowd that returns after a step back gets no token twice.
            for key in crowd..3 * crowd {
                assert_eq!(passed(key), 0, "{max_keys}, {quota}: {key}");
            }
            clock.advance(Duration::from_secs(60));
            for key in 3 * crowd..3 * crowd + 10 {
                assert_eq!(passed(key), 5, "{max_keys}, {quota}: {key}");
            }
        }
    }
}

/// The store is full of windows that begin in a year. Each of its parts was charged then, and only one
/// of them after the clock was set right.
#[test]
fn a_clock_that_was_a_year_ahead_is_forgotten_an_hour_after_one_charge() {
    const MAX_KEYS: u64 = 20_000;
    for quota in [Quota::per_minute(1), Quota::per_minute(1).from_first_request()] {
        let (store, clock) = small(MAX_KEYS as usize);
        let limiter = Limit::new(quota).name("limited").store(store);
        let passed = |keys: std::ops::Range<u64>| {
            keys.filter(|key| answer(limiter.check(*key)).is_allowed()).count() as u64
        };
        clock.advance(Duration::from_secs(365 * 86_400));
        assert!(passed(0..3 * MAX_KEYS) >= MAX_KEYS);
        clock.set_ms(NOW_MS);
        assert_eq!(passed(0..1), 0, "a step back grants nothing");
        clock.advance(Duration::from_secs(3_600));
        let new = 9 * MAX_KEYS;
        assert_eq!(passed(new..new + 1_000), 1_000, "{quota}");
    }
}

/// S4, S30: an overflow that has ended is no longer read, so a reset frees entries.
#[test]
fn a_clock_that_was_a_year_ahead_leaves_no_overflow_behind() {
    let (store, clock) = small(16);
    let limiter = Quota::per_minute(5).name("limited").store(store.clone());
    clock.advance(Duration::from_secs(365 * 86_400));
    (0..1_000_u64).for_each(|key| _ = answer(limiter.check(key)));
    assert!(store.overflowed() > 0);
    clock.set_ms(NOW_MS);
    // Under each of the locks.
    (0..1_000_u64).for_each(|key| _ = answer(limiter.check(key)));
    clock.advance(Duration::from_secs(120));
    let before = store.overflowed();
    for key in 2_000..2_005_u64 {
        assert!(answer(limiter.check(key)).is_allowed());
        let live = store.live_entries();
        answer(limiter.reset(key));
        assert_eq!(store.live_entries(), live - 1, "{key}");
    }
    assert_eq!(store.overflowed(), before);
}

#[test]
fn windows_of_nearly_one_length_share_no_count() {
    for (low, high) in [(1_000, 1_003), (60_000, 60_001), (3_600_000, 3_600_064)] {
        for _ in 0..40 {
            let (store, _) = small(1_000);
            flood(&store, 3_000);
            let quota = |limit, ms| Quota::new(limit, Duration::from_millis(ms));
            let few = quota(5, high).name("late").store(store);
            let many = few.with_quotas(quota(1_000, low));
            let late = 10_000_u64;
            (0..8).for_each(|key| drop(answer(many.charge(late + 1 + key, 1_000))));
            let passed = (0..20).filter(|_| answer(few.check(late)).is_allowed()).count();
            assert_eq!(passed, 5, "{low} and {high}");
        }
    }
}

#[derive(Clone, Debug)]
enum Shared {
    Charge {
        key: u64,
        plan: usize,
        cost: u64,
        reserve: bool,
        /// What it costs in the end.
        actual: Option<u64>,
    },
    Flood(u64),
    Wait(u64),
}

fn shared() -> impl Strategy<Value = Shared> {
    let actual = prop_oneof![6 => Just(None), 1 => (0..=40_u64).prop_map(Some)];
    prop_oneof![
        24 => (0..6_u64, 0..4_usize, 1..=9_u64, any::<bool>(), actual).prop_map(
            |(key, plan, cost, reserve, actual)| Shared::Charge { key, plan, cost, reserve, actual }
        ),
        2 => (1..60_u64).prop_map(Shared::Flood),
        6 => (1..=30_u64).prop_map(Shared::Wait),
        1 => (1..=300_u64).prop_map(Shared::Wait),
    ]
}

/// Plans of one scope agree on whether a window grants reservations (S14). Their windows are on grids:
/// others may begin at other times in the two stores.
fn plans() -> impl Strategy<Value = Vec<Quotas>> {
    let grid = prop::sample::select(vec![Grid::Aligned, Grid::Staggered, Grid::StartingAt(7)]);
    let amounts = (1..=12_u64, prop_oneof![2 => Just(0), 1 => 1..=9_u64], 1..=9_u64);
    let windows = prop::sample::select(vec![20_u64, 21, 23, 50]);
    (prop::collection::vec((amounts, windows, grid), 4), any::<bool>()).prop_map(
        |(plans, reserves)| {
            let plan = |((limit, more, debt), window_ms, grid)| {
                let amounts = (limit, more, if reserves { debt } else { 0 });
                set(&[Spec { amounts, window_ms, grid }]).expect("one quota")
            };
            plans.into_iter().map(plan).collect()
        },
    )
}

/// The same with windows from days and instants of choice, in zones.
fn plans_on_calendars() -> impl Strategy<Value = Vec<Quotas>> {
    let windows = prop::sample::select(vec![
        "day in Europe/Berlin",
        "day starting-at=1322719200s in Pacific/Apia",
        "week from friday in Asia/Tehran",
        "week starting-at=1767490200s in Europe/Berlin",
        "month starting-at=1780900200s in America/New_York",
    ]);
    let amounts = (1..=12_u64, prop_oneof![2 => Just(0), 1 => 1..=9_u64], 1..=9_u64);
    (prop::collection::vec((amounts, windows), 4), any::<bool>()).prop_map(|(plans, reserves)| {
        let plan = |((limit, more, debt), window)| {
            let quota: Quota = format!("{limit}/{window}").parse().expect("a quota");
            let debt = if reserves { debt } else { 0 };
            quota.rollover_up_to(limit + more).reserve_up_to(debt).into()
        };
        plans.into_iter().map(plan).collect()
    })
}

/// A store that is full, and another that is not, which gets what has passed in the first. What the
/// first lets pass, the second would have let pass as well, since there each key has its counts alone:
/// too early is possible, too late is not.
fn never_later_than_alone(plans: &[Quotas], ops: &[Shared], unit_ms: u64) {
    let (store, clock) = small(1);
    let alone = MemoryStore::with_max_keys(10_000).clock(clock.clone());
    let [full, alone] = [store, alone].map(|store| {
        let limit = Limit::new(plans[0]).name("late").store(store);
        plans.iter().map(|plan| limit.with_quotas(*plan)).collect::<Vec<_>>()
    });
    let flood = Quota::new(1, Duration::from_millis(40 * unit_ms));
    let (mut now, mut next) = (NOW_MS, 1_000_u64);
    for op in std::iter::once(&Shared::Flood(1_000)).chain(ops) {
        match *op {
            Shared::Charge { key, plan, cost, reserve, actual } => {
                let (decision, receipt) = charge(&full[plan], key, cost, reserve);
                let Some(receipt) = receipt else { continue };
                let (own, owned) = charge(&alone[plan], key, cost, reserve);
                let owned = owned.unwrap_or_else(|| panic!("{decision:?} passed, not {own:?}"));
                assert!(decision.ready_at() >= own.ready_at(), "{decision:?}, {own:?}");
                if let Some(actual) = actual {
                    answer(full[plan].settle(receipt, actual));
                    answer(alone[plan].settle(owned, actual));
                }
            }
            Shared::Flood(keys) => {
                let flood = full[0].with_quotas(flood);
                (0..keys).for_each(|key| drop(answer(flood.check(next + key))));
                next += keys;
            }
            Shared::Wait(units) => {
                now += units * unit_ms;
                clock.set_ms(now);
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Op {
    Charge {
        scope: usize,
        key: u64,
        cost: u64,
        reserve: bool,
    },
    /// Charges the same key again and again.
    Insist {
        scope: usize,
        key: u64,
    },
    Refund(prop::sample::Index),
    Reset {
        scope: usize,
        key: u64,
    },
    /// Charges new keys, each once.
    Flood(u64),
    Wait(u64),
}

fn op(keys: u64) -> impl Strategy<Value = Op> {
    let who = move || (0..3_usize, 0..keys);
    prop_oneof![
        8 => (who(), 0..=3_u64, prop::bool::weighted(0.2))
            .prop_map(|((scope, key), cost, reserve)| Op::Charge { scope, key, cost, reserve }),
        8 => who().prop_map(|(scope, key)| Op::Insist { scope, key }),
        6 => any::<prop::sample::Index>().prop_map(Op::Refund),
        1 => who().prop_map(|(scope, key)| Op::Reset { scope, key }),
        3 => (1..=60_u64).prop_map(Op::Flood),
        4 => (0..=30_u64).prop_map(Op::Wait),
        1 => (0..=400_u64).prop_map(Op::Wait),
    ]
}

/// A key shares an entry, gets one of its own, and returns its tokens, in this window or later.
fn episode() -> impl Strategy<Value = Vec<Op>> {
    let who = (1..3_usize, 0..2_u64, 1..=3_u64);
    let refunds = prop::collection::vec(any::<prop::sample::Index>(), 0..6);
    (who, 0..=10_u64, 0..=100_u64, refunds).prop_map(
        |((scope, key, cost), soon, later, refunds)| {
            let charge = |cost| Op::Charge { scope, key, cost, reserve: false };
            let mut ops = vec![Op::Flood(40), charge(cost), Op::Wait(soon), charge(1)];
            ops.extend([Op::Wait(later), Op::Insist { scope, key }]);
            ops.extend(refunds.into_iter().map(Op::Refund));
            ops.push(Op::Insist { scope, key });
            ops
        },
    )
}

fn specs() -> impl Strategy<Value = Vec<Spec>> {
    let grid = prop::sample::select(vec![
        Grid::Aligned,
        Grid::Staggered,
        Grid::FirstRequest,
        Grid::StartingAt(7),
    ]);
    let amounts = (
        1..=6_u64,
        prop_oneof![3 => Just(0), 1 => 1..=6_u64],
        prop_oneof![2 => Just(0), 1 => 1..=6_u64],
    );
    let spec = (amounts, prop::sample::select(vec![20, 50, 100, 300]), grid)
        .prop_map(|(amounts, window_ms, grid)| Spec { amounts, window_ms, grid });
    prop::collection::vec(spec, 1..=3).prop_filter_map("two quotas are one counter", |specs| {
        set(&specs).is_some().then_some(specs)
    })
}

/// The tokens that a key got from one quota, by the test's own accounts.
#[derive(Default)]
struct Books {
    /// The most that passes in a window of the grid.
    through: u64,
    /// Window of the grid, charge that passed -> tokens.
    by_window: HashMap<i128, BTreeMap<usize, u64>>,
    /// Charge that passed -> when, tokens; since the last reset.
    passed: BTreeMap<usize, (u64, u64)>,
}

impl Books {
    fn enter(&mut self, spec: &Spec, shift: u64, id: usize, now: u64, cost: u64) {
        self.passed.insert(id, (now, cost));
        let most = spec.amounts.0 + spec.amounts.1 + spec.amounts.2;
        let window = i128::from(spec.window_ms);
        self.through = match spec.grid {
            Grid::Aligned => 0,
            Grid::StartingAt(at) => at as u64,
            Grid::Staggered => shift,
            Grid::FirstRequest => return self.check_first_request(spec.window_ms, most),
        };
        let start = (i128::from(now) - i128::from(self.through)).div_euclid(window);
        let in_window = self.by_window.entry(start).or_default();
        in_window.insert(id, cost);
        let sum: u64 = in_window.values().sum();
        assert!(sum <= most, "{sum} of {most} passed in a window: {spec:?} at {now}");
    }

    /// Windows may begin at any time, but there must be a way to place them, none shorter than the
    /// quota's, so that none holds more than the limit.
    fn check_first_request(&self, window: u64, most: u64) {
        let passed: Vec<_> = self.passed.values().copied().collect();
        // For each number of charges: the earliest start of a window after them.
        let mut begins = vec![Some(0)];
        for i in 1..=passed.len() {
            let last = passed[i - 1].0;
            let mut sum = 0;
            let mut earliest = None::<u64>;
            for j in (0..i).rev() {
                sum += passed[j].1;
                if sum > most {
                    break;
                }
                if let Some(begin) = begins[j] {
                    let next = if j == 0 { last + 1 } else { (begin + window).max(last + 1) };
                    earliest = Some(earliest.map_or(next, |e| e.min(next)));
                }
            }
            let possible = i == passed.len() || earliest.is_some_and(|at| at <= passed[i].0);
            if i == passed.len() {
                assert!(
                    earliest.is_some(),
                    "no windows of {window} with at most {most}: {passed:?}"
                );
            }
            begins.push(earliest.filter(|_| possible));
        }
    }

    /// The latest end of the windows that the tokens were taken from.
    fn ends(&self, spec: &Spec, at: u64) -> u64 {
        let through = match spec.grid {
            Grid::FirstRequest => at,
            _ => self.through,
        };
        let into = (i128::from(at) - i128::from(through)).rem_euclid(spec.window_ms.into());
        at + spec.window_ms - into as u64
    }

    fn remove_charge(&mut self, id: usize) {
        self.passed.remove(&id);
        for window in self.by_window.values_mut() {
            window.remove(&id);
        }
    }
}

struct Entry {
    scope: usize,
    key: u64,
    receipt: Receipt,
    at: u64,
    reserved: bool,
    id: usize,
}

/// New keys arrive under the quotas of the first `crowds` scopes.
fn never_above_the_limit(
    max_keys: usize,
    crowds: usize,
    first: u64,
    specs: &[Vec<Spec>],
    ops: &[Op],
) {
    const NAMES: [&str; 3] = ["a", "b", "c"];
    let (store, clock) = small(max_keys);
    let limiters: Vec<Limiter> = specs
        .iter()
        .zip(NAMES)
        .map(|(specs, name)| {
            Limit::new(set(specs).expect("checked")).name(name).store(store.clone())
        })
        .collect();
    let crowd: Vec<Quotas> = specs.iter().map(|specs| set(specs).expect("checked")).collect();
    let mut books = HashMap::<(usize, u64, usize), Books>::new();
    let mut receipts = Vec::<Entry>::new();
    let (mut now, mut next_key, mut id) = (NOW_MS, 1_000_000_u64, 0);
    let mut charge = |scope: usize,
                      key: u64,
                      cost,
                      reserve,
                      now,
                      receipts: &mut Vec<Entry>,
                      books: &mut HashMap<_, Books>| {
        let (decision, receipt) = crate::charge(&limiters[scope], key, cost, reserve);
        let Some(receipt) = receipt else { return false };
        id += 1;
        for (i, spec) in specs[scope].iter().enumerate() {
            let shift = stagger(NAMES[scope], tower_fixed_window::Key::from(key).as_bytes());
            books.entry((scope, key, i)).or_default().enter(spec, shift, id, now, cost);
        }
        let reserved = decision.ready_at().is_some();
        receipts.push(Entry { scope, key, receipt, at: now, reserved, id });
        true
    };
    for op in std::iter::once(&Op::Flood(first)).chain(ops) {
        match op {
            Op::Charge { scope, key, cost, reserve } => {
                charge(*scope, *key, *cost, *reserve, now, &mut receipts, &mut books);
            }
            Op::Insist { scope, key } => {
                while charge(*scope, *key, 1, false, now, &mut receipts, &mut books) {}
            }
            Op::Flood(keys) => {
                for _ in 0..*keys {
                    next_key += 1;
                    let _ = answer(
                        limiters[0].with_quotas(crowd[next_key as usize % crowds]).check(next_key),
                    );
                }
            }
            Op::Wait(ms) => {
                now += ms;
                clock.set_ms(now);
            }
            Op::Refund(of) if !receipts.is_empty() => {
                // Tokens of older windows usually can't be returned any more.
                let recent = receipts.len().min(24);
                let entry = receipts.remove(receipts.len() - recent + of.index(recent));
                // A reservation's tokens come from several windows (S13).
                if entry.reserved {
                    continue;
                }
                answer(limiters[entry.scope].refund(entry.receipt));
                for (i, spec) in specs[entry.scope].iter().enumerate() {
                    let books = books.get_mut(&(entry.scope, entry.key, i)).expect("it passed");
                    if now < books.ends(spec, entry.at) {
                        books.remove_charge(entry.id);
                    }
                }
            }
            Op::Refund(_) => {}
            Op::Reset { scope, key } => {
                // A reset is an error if the key shares an entry; the key's own entries are deleted
                // all the same.
                let _ = limiters[*scope].reset(*key).into_now().expect("at once");
                receipts.retain(|entry| (entry.scope, entry.key) != (*scope, *key));
                books.retain(|(s, k, _), _| (s, k) != (scope, key));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: ProptestConfig::default().cases.max(sized(256, 20_000)),
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_key_in_overflow_never_exceeds_its_limit_in_any_window(
        max_keys in prop::sample::select(vec![1_usize, 16]), first in 0..=100_u64,
        specs in prop::collection::vec(specs(), 3),
        ops in prop::collection::vec(op(4), 1..250),
    ) {
        never_above_the_limit(max_keys, 3, first, &specs, &ops);
    }

    #[test]
    fn a_full_store_passes_nothing_that_a_store_with_room_would_refuse(
        plans in plans(), ops in prop::collection::vec(shared(), 1..250),
    ) {
        never_later_than_alone(&plans, &ops, 1);
    }

    #[test]
    fn a_full_store_passes_nothing_in_chosen_windows_either(
        plans in plans_on_calendars(), ops in prop::collection::vec(shared(), 1..250),
    ) {
        never_later_than_alone(&plans, &ops, 3_600_000);
    }

    /// The crowd's windows are short, so keys get entries of their own and lose them, while
    /// receipts from shared entries remain.
    #[test]
    fn a_refunding_key_in_overflow_never_exceeds_its_limit_after_it_gets_its_own_entry(
        specs in prop::collection::vec(specs(), 3).prop_map(|mut specs| {
            specs[0] = vec![Spec { amounts: (1, 0, 0), window_ms: 4, grid: Grid::Aligned }];
            specs
        }),
        episodes in prop::collection::vec(episode(), 5..40),
    ) {
        let ops = episodes.concat();
        never_above_the_limit(1, 1, 100, &specs, &ops);
    }

    #[test]
    fn a_key_in_the_overflow_of_a_store_of_1000_keys_never_exceeds_its_limit(
        first in 800..=1_600_u64, specs in prop::collection::vec(specs(), 3),
        ops in prop::collection::vec(op(60), 1..60),
    ) {
        never_above_the_limit(1_000, 3, first, &specs, &ops);
    }
}
