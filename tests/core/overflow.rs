//! S30: a flood of keys can't buy tokens, and takes nothing from a key that is tracked.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use proptest::prelude::*;
use tower_fixed_window::{Limit, Limiter, Limits, Line, ManualClock, MemoryStore, Quota, Quotas};

use crate::reference::Grid;
use crate::trace::{Amounts, Spec, set};
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

/// S15, S30: there is no entry that could keep what they take.
#[test]
fn a_full_overflow_refuses_charges_reservations_and_true_costs_until_its_windows_have_ended() {
    let (store, clock) = small(1);
    let week = Quota::per_week(20).name("late").store(store.clone());
    assert!(answer(week.check("late")).is_allowed());
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
    let late = week.with_quotas(Quota::per_week(20).and(Quota::per_day(5)));
    let receipt = || answer(late.charge("late", 0)).expect("nothing is taken");
    let settle = |actual| late.settle(receipt(), actual).into_now().expect("memory");
    settle(0).expect("there is nothing to count");
    let error = settle(9).unwrap_err().to_string();
    assert_eq!(error, "the store is full, and can't count a true cost");
    assert_eq!(answer(week.peek("late")).used(), 1, "a part of it is not counted, either");
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

/// What happens in a store: by some of the plans, for some keys.
#[derive(Clone, Debug)]
enum Op {
    /// Again and again, until it is refused, if it insists.
    Charge {
        plan: usize,
        key: u64,
        cost: u64,
        reserve: bool,
        insists: bool,
    },
    /// Corrects one of the last charges: to what it has cost in the end, or by a refund.
    Settle(prop::sample::Index, u64),
    Reset {
        plan: usize,
        key: u64,
    },
    /// Charges new keys, each once.
    Flood(u64),
    Wait(u64),
}

/// A store of so many keys, and the window of the new keys that come.
#[derive(Clone, Debug)]
struct Course {
    max_keys: usize,
    crowd: u64,
    ops: Vec<Op>,
}

const PLANS: usize = 4;

fn op(keys: u64) -> impl Strategy<Value = Op> {
    let who = move || (0..PLANS, 0..keys);
    let actual = prop_oneof![3 => Just(0), 1 => 0..=40_u64];
    prop_oneof![
        12 => (who(), 0..=9_u64, any::<bool>()).prop_map(|((plan, key), cost, reserve)| {
            Op::Charge { plan, key, cost, reserve, insists: false }
        }),
        8 => who().prop_map(|(plan, key)| insist(plan, key)),
        5 => (any::<prop::sample::Index>(), actual).prop_map(|(of, to)| Op::Settle(of, to)),
        1 => who().prop_map(|(plan, key)| Op::Reset { plan, key }),
        3 => (1..=60_u64).prop_map(Op::Flood),
        5 => (1..=30_u64).prop_map(Op::Wait),
        1 => (1..=400_u64).prop_map(Op::Wait),
    ]
}

fn insist(plan: usize, key: u64) -> Op {
    Op::Charge { plan, key, cost: 1, reserve: false, insists: true }
}

/// A key shares an entry, gets one of its own, and returns its tokens, in this window or later.
fn episode() -> impl Strategy<Value = Vec<Op>> {
    let who = (1..PLANS, 0..2_u64, 1..=3_u64);
    let refunds = prop::collection::vec(any::<prop::sample::Index>(), 0..6);
    (who, 0..=10_u64, 0..=100_u64, refunds).prop_map(|((plan, key, cost), soon, later, refunds)| {
        let charge = |cost| Op::Charge { plan, key, cost, reserve: false, insists: false };
        let mut ops = vec![Op::Flood(40), charge(cost), Op::Wait(soon), charge(1)];
        ops.extend([Op::Wait(later), insist(plan, key)]);
        ops.extend(refunds.into_iter().map(|of| Op::Settle(of, 0)));
        ops.push(insist(plan, key));
        ops
    })
}

fn course() -> impl Strategy<Value = Course> {
    let small = (prop::sample::select(vec![1, 16]), 0..=200_u64, ops(6, 250));
    let small = small.prop_map(|(max_keys, first, ops)| (max_keys, 40, first, ops));
    // The crowd's windows are short, so keys get entries of their own and lose them, while receipts
    // from shared entries remain.
    let episodes = prop::collection::vec(episode(), 5..40);
    let episodes = episodes.prop_map(|episodes| (1, 4, 100, episodes.concat()));
    let large = (800..=1_600_u64, ops(60, 60)).prop_map(|(first, ops)| (1_000, 300, first, ops));
    prop_oneof![2 => small, 1 => episodes, 1 => large].prop_map(|(max_keys, crowd, first, ops)| {
        let ops = [Op::Flood(first)].into_iter().chain(ops).collect();
        Course { max_keys, crowd, ops }
    })
}

fn ops(keys: u64, most: usize) -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(op(keys), 1..most)
}

/// Limit, capacity above it, and tokens to reserve.
fn some_amounts() -> impl Strategy<Value = Amounts> {
    let more = || prop_oneof![2 => Just(0), 1 => 1..=9_u64];
    (1..=12_u64, more(), more())
}

/// Plans of one limit, which agree on whether a window grants reservations (S14): then each is one
/// quota, since one of several may refuse what comes too late for another (S13).
fn plans(grids: &'static [Grid]) -> impl Strategy<Value = Vec<Vec<Spec>>> {
    let windows = prop::sample::select(vec![20_u64, 21, 23, 50, 100, 300]);
    let spec = (some_amounts(), windows, prop::sample::select(grids));
    let spec = spec.prop_map(|(amounts, window_ms, grid)| Spec { amounts, window_ms, grid });
    let plans = prop::collection::vec(prop::collection::vec(spec, 1..=3), PLANS);
    (plans, any::<bool>()).prop_map(|(mut plans, reserves)| {
        for specs in &mut plans {
            match reserves {
                true => specs.truncate(1),
                false => specs.iter_mut().for_each(|spec| spec.amounts.2 = 0),
            }
            // Two of them may be one counter.
            while set(specs).is_none() {
                specs.pop();
            }
        }
        plans
    })
}

fn sets(plans: &[Vec<Spec>]) -> Vec<Quotas> {
    plans.iter().map(|specs| set(specs).expect("checked")).collect()
}

/// Windows from days and instants of choice, in zones.
fn plans_on_calendars() -> impl Strategy<Value = Vec<Quotas>> {
    let windows = prop::sample::select(vec![
        "day in Europe/Berlin",
        "day starting-at=1322719200s in Pacific/Apia",
        "week from friday in Asia/Tehran",
        "week starting-at=1767490200s in Europe/Berlin",
        "month starting-at=1780900200s in America/New_York",
    ]);
    let plans = prop::collection::vec((some_amounts(), windows), PLANS);
    (plans, any::<bool>()).prop_map(|(plans, reserves)| {
        let plan = |((limit, more, debt), window)| {
            let quota: Quota = format!("{limit}/{window}").parse().expect("a quota");
            let debt = if reserves { debt } else { 0 };
            quota.rollover_up_to(limit + more).reserve_up_to(debt).into()
        };
        plans.into_iter().map(plan).collect()
    })
}

/// When a charge has passed whose window began with a first request, and its tokens.
type Passed = BTreeMap<usize, (u64, u64)>;

/// Windows may begin at any time, but there must be a way to place them, none shorter than the
/// quota's, so that none holds more than the limit.
fn check_first_request(passed: &Passed, &Spec { amounts, window_ms: window, .. }: &Spec) {
    let most = amounts.0 + amounts.1 + amounts.2;
    let passed: Vec<_> = passed.values().copied().collect();
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
        let is_last = i == passed.len();
        assert!(!is_last || earliest.is_some(), "no windows of {window} with {most}: {passed:?}");
        begins.push(earliest.filter(|at| is_last || *at <= passed[i].0));
    }
}

/// A store that is full, and another that is not, which gets what has passed in the first. What the
/// first lets pass, the second would have let pass as well, since there each key has its counts alone:
/// too early is possible, too late is not.
///
/// Windows that begin with a first request may begin at other times in the two stores. Of those, the
/// first store's are looked at alone.
fn nothing_passes_too_late(
    plans: &[Quotas],
    from_first: Option<&[Vec<Spec>]>,
    course: &Course,
    unit_ms: u64,
) {
    let (store, clock) = small(course.max_keys);
    let roomy = MemoryStore::with_max_keys(10_000).clock(clock.clone());
    let name = |i: usize| ["late", "b", "c", "d"][if from_first.is_some() { i } else { 0 }];
    let [full, alone] = [store, roomy].map(|store| {
        let plans = plans.iter().enumerate();
        let limiter = |(i, plan): (usize, &Quotas)| Limit::new(*plan).name(name(i));
        plans.map(|plan| limiter(plan).store(store.clone())).collect::<Vec<_>>()
    });
    let crowd = Quota::new(1, Duration::from_millis(course.crowd * unit_ms));
    let (mut receipts, mut books) = (Vec::new(), HashMap::<(usize, u64, usize), Passed>::new());
    let (mut now, mut next, mut id) = (NOW_MS, 1_000_000_u64, 0);
    for op in &course.ops {
        match *op {
            Op::Charge { plan, key, cost, reserve, insists } => loop {
                let (decision, receipt) = charge(&full[plan], key, cost, reserve);
                let Some(receipt) = receipt else { break };
                id += 1;
                let own = match from_first {
                    None => charge(&alone[plan], key, cost, reserve),
                    Some(specs) => {
                        for (i, spec) in specs[plan].iter().enumerate() {
                            let passed = books.entry((plan, key, i)).or_default();
                            passed.insert(id, (now, cost));
                            check_first_request(passed, spec);
                        }
                        (decision.clone(), None)
                    }
                };
                let (own, owned) = own;
                assert!(
                    from_first.is_some() || owned.is_some(),
                    "{decision:?} passed, not {own:?}"
                );
                assert!(decision.ready_at() >= own.ready_at(), "{decision:?}, {own:?}");
                // A reservation's tokens come from several windows (S13).
                if decision.ready_at().is_none() {
                    receipts.push((id, plan, key, now, receipt, owned));
                }
                if !insists {
                    break;
                }
            },
            Op::Settle(of, actual) if !receipts.is_empty() => {
                // Tokens of older windows usually can't be returned any more.
                let recent = receipts.len().min(24);
                let place = receipts.len() - recent + of.index(recent);
                let (id, plan, key, at, receipt, owned) = receipts.remove(place);
                if let Some(owned) = owned {
                    // A full store may not be able to count a true cost.
                    let settled = full[plan].settle(receipt, actual).into_now().expect("at once");
                    if settled.is_ok() {
                        answer(alone[plan].settle(owned, actual));
                    }
                    continue;
                }
                answer(full[plan].refund(receipt));
                for (i, spec) in from_first.into_iter().flat_map(|specs| &specs[plan]).enumerate() {
                    if now < at + spec.window_ms {
                        books.get_mut(&(plan, key, i)).expect("it passed").remove(&id);
                    }
                }
            }
            Op::Settle(..) => {}
            Op::Reset { plan, key } => {
                // An error if the key shares an entry; the key's own entries are deleted all the same.
                let _ = full[plan].reset(key).into_now().expect("at once");
                answer(alone[plan].reset(key));
                receipts.retain(|(_, of, its, ..)| (name(*of), *its) != (name(plan), key));
                books.retain(|(of, its, _), _| (name(*of), *its) != (name(plan), key));
            }
            Op::Flood(keys) => {
                // By the crowd's own quota, and by the plans.
                for key in next..next + keys {
                    let plan = &full[key as usize % PLANS];
                    drop(answer(match key % 3 {
                        0 => plan.check(key),
                        _ => plan.with_quotas(crowd).check(key),
                    }));
                }
                next += keys;
            }
            Op::Wait(units) => {
                now += units * unit_ms;
                clock.set_ms(now);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: ProptestConfig::default().cases.max(sized(1_000, 20_000)),
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_full_store_passes_nothing_that_a_store_with_room_would_refuse(
        plans in plans(&[Grid::Aligned, Grid::Staggered, Grid::StartingAt(7)]), course in course(),
    ) {
        nothing_passes_too_late(&sets(&plans), None, &course, 1);
    }

    #[test]
    fn a_full_store_passes_nothing_in_chosen_windows_either(
        plans in plans_on_calendars(), course in course(),
    ) {
        nothing_passes_too_late(&plans, None, &course, 3_600_000);
    }

    #[test]
    fn a_full_store_passes_no_more_than_the_limit_in_windows_from_the_first_request(
        plans in plans(&[Grid::FirstRequest]), course in course(),
    ) {
        nothing_passes_too_late(&sets(&plans), Some(&plans), &course, 1);
    }
}
