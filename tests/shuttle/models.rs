//! Models of the memory store: what it promises holds in every order in which shuttle lets threads
//! take its locks and read its clock. A store of one shard, so that all meet; of two for several limits.
//!
//! `cargo test --manifest-path tests/shuttle/Cargo.toml`

use std::time::Duration;

use shuttle::sync::Arc;
use shuttle::sync::atomic::{AtomicU64, Ordering};
use shuttle::thread;
use tower_fixed_window::store::Reply;
use tower_fixed_window::{Clock, Limit, Limiter, Limits, Line, MemoryStore, Quota, Quotas};

const WINDOW: Duration = Duration::from_millis(100);
/// An instant with a tick of the clock: the store reads the same as the exact time.
const TICK: u64 = 60;
/// The entries of the smallest store.
const ENTRIES: u64 = 16;

/// Reading it is a step that others may come before and after.
#[derive(Clone)]
struct Time(Arc<AtomicU64>);

impl Time {
    fn at(ms: u64) -> Self {
        Self(Arc::new(AtomicU64::new(ms)))
    }

    fn set(&self, ms: u64) {
        self.0.store(ms, Ordering::SeqCst);
    }
}

impl Clock for Time {
    fn now_ms(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

/// Counts how often it is read.
struct Counting(Time, Arc<AtomicU64>);

impl Clock for Counting {
    fn now_ms(&self) -> u64 {
        self.1.fetch_add(1, Ordering::SeqCst);
        self.0.now_ms()
    }
}

fn now<T>(reply: Reply<T>) -> T {
    reply.into_now().expect("memory answers at once").expect("and does not fail")
}

fn limiter(quotas: impl Into<Quotas>, time: &Time) -> (Limiter, MemoryStore) {
    let store = MemoryStore::with_max_keys(1).clock(time.clone());
    (Limit::new(quotas).name("model").store(store.clone()), store)
}

/// Takes entries for a long time.
fn fill(store: &MemoryStore, entries: u64) {
    let others = Quota::per_week(1).name("others").store(store.clone());
    for key in 0..entries {
        assert!(now(others.check(key)).is_allowed());
    }
}

/// How many of `charges` pass in each of `threads` at once.
fn at_once(limiter: &Limiter, threads: usize, charges: usize) -> usize {
    let threads: Vec<_> = (0..threads)
        .map(|_| {
            let limiter = limiter.clone();
            thread::spawn(move || {
                (0..charges).filter(|_| now(limiter.check("one")).is_allowed()).count()
            })
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().expect("no panic")).sum()
}

fn charges_and_charges() {
    let (limiter, _) = limiter(Quota::new(2, WINDOW).and(Quota::new(3, 4 * WINDOW)), &Time::at(50));
    assert_eq!(at_once(&limiter, 3, 1), 2);
    let decision = now(limiter.peek("one"));
    assert!(decision.usage().iter().all(|standing| standing.used() == 2));
}

fn charges_and_refunds() {
    let (limiter, _) = limiter(Quota::new(2, WINDOW), &Time::at(50));
    let held = Arc::new(AtomicU64::new(0));
    let threads: Vec<_> = [true, true, false]
        .map(|gives_back| {
            let (limiter, held) = (limiter.clone(), Arc::clone(&held));
            thread::spawn(move || {
                let Ok(receipt) = now(limiter.charge("one", 1)) else { return 0 };
                assert!(held.fetch_add(1, Ordering::SeqCst) < 2, "more than the limit at once");
                if gives_back {
                    held.fetch_sub(1, Ordering::SeqCst);
                    now(limiter.refund(receipt));
                    return 0;
                }
                1
            })
        })
        .into_iter()
        .collect();
    let kept: u64 = threads.into_iter().map(|thread| thread.join().expect("no panic")).sum();
    assert_eq!(now(limiter.peek("one")).used(), kept);
}

fn charges_and_a_reset() {
    let (limiter, _) = limiter(Quota::new(1, WINDOW), &Time::at(50));
    let reset = thread::spawn({
        let limiter = limiter.clone();
        move || now(limiter.reset("one"))
    });
    let passed = at_once(&limiter, 2, 1);
    reset.join().expect("no panic");
    let used = now(limiter.peek("one")).used();
    // Each charge came before the reset or after it: at most one passes on either side.
    assert!((1..=2).contains(&passed), "{passed}");
    assert!(used <= 1 && (passed == 1 || used == 1), "{passed} passed, {used} used");
}

/// A thread reads the clock before another thread's charge, whose key takes over an entry that has
/// expired by then.
fn a_charge_at_the_edge_of_a_window() {
    let time = Time::at(50);
    let (limiter, store) = limiter(Quota::new(1, WINDOW), &time);
    assert!(now(limiter.check("one")).is_allowed());
    fill(&store, ENTRIES - 1);
    let other = thread::spawn({
        let (limiter, time) = (limiter.clone(), time.clone());
        move || {
            time.set(100);
            let _ = now(limiter.check("two"));
        }
    });
    let decision = now(limiter.check("one"));
    other.join().expect("no panic");
    let start = decision.reset_at() - WINDOW;
    let first = std::time::UNIX_EPOCH;
    assert!(!(decision.is_allowed() && start == first), "a second one in the first window");
}

/// Two charges: the first reads the clock before a window ends, the second after.
fn charges_on_both_sides_of_an_edge() {
    let time = Time::at(55);
    let (limiter, _) = limiter(Quota::new(2, WINDOW).from_first_request(), &time);
    assert!(now(limiter.check("one")).is_allowed());
    time.set(154);
    let ticks = thread::spawn({
        let time = time.clone();
        move || time.set(156)
    });
    // The limit is 2: up to one charge passes in the first window, and up to two in the next.
    let passed = at_once(&limiter, 2, 2);
    ticks.join().expect("no panic");
    assert!((1..=3).contains(&passed), "{passed}");
    let standing = now(limiter.peek("one"));
    assert!(standing.used() <= 2 && passed as u64 >= standing.used(), "{standing:?}");
}

fn keys_that_share_an_overflow_entry() {
    let (limiter, store) = limiter(Quota::new(2, WINDOW), &Time::at(50));
    fill(&store, ENTRIES);
    let other = thread::spawn({
        let limiter = limiter.clone();
        move || now(limiter.check("two")).is_allowed()
    });
    let passed = at_once(&limiter, 3, 1);
    // Less if they share: too early, never too late.
    let shared = usize::from(other.join().expect("no panic"));
    assert!((2 - shared..=2).contains(&passed), "{passed} and {shared}");
}

/// A key leaves the overflow while others still charge there.
fn a_key_that_moves_to_an_entry_of_its_own() {
    let time = Time::at(50);
    let (limiter, store) = limiter(Quota::new(2, 4 * WINDOW), &time);
    let short = Quota::new(1, WINDOW).name("short").store(store.clone());
    assert!(now(short.check("gone at 100")).is_allowed());
    fill(&store, ENTRIES - 1);
    let ticks = thread::spawn({
        let time = time.clone();
        move || time.set(100)
    });
    assert_eq!(at_once(&limiter, 3, 1), 2);
    ticks.join().expect("no panic");
    assert!(!now(limiter.check("one")).is_allowed());
}

/// The table doubles while a key of it is charged.
fn a_table_that_grows() {
    let time = Time::at(50);
    let store = MemoryStore::with_max_keys(2 * ENTRIES as usize).clock(time);
    let limiter = Quota::new(3, WINDOW).name("model").store(store.clone());
    assert!(now(limiter.check("one")).is_allowed());
    fill(&store, ENTRIES - 2);
    let growth = thread::spawn({
        let others = Quota::per_week(1).name("later").store(store.clone());
        move || (0..3_u64).for_each(|key| assert!(now(others.check(key)).is_allowed()))
    });
    assert_eq!(at_once(&limiter, 2, 2), 2);
    growth.join().expect("no panic");
    assert_eq!(now(limiter.peek("one")).used(), 3);
    assert_eq!((store.live_entries(), store.overflowed()), (ENTRIES as usize + 2, 0));
}

/// A charge by an older reading of the clock finds that another key has the entry, with the same
/// count.
fn an_entry_that_another_key_is_given() {
    let time = Time::at(50);
    let (limiter, store) = limiter(Quota::new(2, WINDOW), &time);
    assert!(now(limiter.check("one")).is_allowed());
    fill(&store, ENTRIES - 1);
    let other = thread::spawn({
        let (limiter, time) = (limiter.clone(), time.clone());
        move || {
            time.set(100);
            assert!(now(limiter.check("two")).is_allowed());
        }
    });
    assert!(now(limiter.check("one")).is_allowed());
    other.join().expect("no panic");
    assert_eq!(now(limiter.peek("two")).used(), 1);
}

/// Limits in a store of two shards, which both have some of their keys.
fn several_limits() -> Limits {
    let store = MemoryStore::with_max_keys(2_048).clock(Time::at(50));
    let limits = [("one", 2), ("two", 3)];
    let limits = limits.map(|(name, n)| Quota::new(n, WINDOW).name(name));
    Limits::new(limits).store(store)
}

/// Each thread names the limits in an order of its own. For some of the keys this is in two shards.
fn limits_in_opposite_orders() {
    let limits = several_limits();
    let threads: Vec<_> = (0..2_u64)
        .map(|thread| {
            let limits = limits.clone();
            thread::spawn(move || {
                let mut passed = 0;
                for key in 0..3_u64 {
                    let mut lines = [Line::new("one", key, 1), Line::new("two", key + 10, 2)];
                    if thread == 1 {
                        lines.reverse();
                    }
                    passed += u64::from(now(limits.check(lines)).is_allowed());
                }
                passed
            })
        })
        .collect();
    let passed: u64 = threads.into_iter().map(|thread| thread.join().expect("no panic")).sum();
    assert_eq!(passed, 3, "of each key, two tokens don't fit twice into three");
    for key in 0..3_u64 {
        let used = (now(limits.limiter("one").peek(key)), now(limits.limiter("two").peek(key + 10)));
        assert_eq!((used.0.used(), used.1.used()), (1, 2));
    }
}

/// A charge that is refused in the end takes nothing that another thread could miss.
fn a_refusal_that_nobody_sees() {
    let limits = several_limits();
    let refused = thread::spawn({
        let limits = limits.clone();
        move || {
            let lines = [Line::new("one", 1_u64, 2), Line::new("two", 11_u64, 4)];
            assert!(!now(limits.check(lines)).is_allowed());
        }
    });
    let alone = thread::spawn({
        let limits = limits.clone();
        move || assert!(now(limits.limiter("one").charge(1_u64, 2)).is_ok())
    });
    let lines = [Line::new("two", 11_u64, 3), Line::new("one", 2_u64, 2)];
    assert!(now(limits.check(lines)).is_allowed());
    refused.join().expect("no panic");
    alone.join().expect("no panic");
}

/// Windows run already: one thread charges both limits, the other one of them alone.
fn several_limits_and_one_of_them() {
    let limits = several_limits();
    let lines = || [Line::new("one", 1_u64, 1), Line::new("two", 11_u64, 1)];
    assert!(now(limits.check(lines())).is_allowed());
    let alone = thread::spawn({
        let limits = limits.clone();
        move || (0..2).filter(|_| now(limits.limiter("two").check(11_u64)).is_allowed()).count()
    });
    let both = (0..2).filter(|_| now(limits.check(lines())).is_allowed()).count();
    let alone = alone.join().expect("no panic");
    assert!(both <= 1 && both + alone == 2, "{both} and {alone}");
    assert_eq!(now(limits.limiter("two").peek(11_u64)).used(), 3);
    assert_eq!(now(limits.limiter("one").peek(1_u64)).used(), 1 + both as u64);
}

/// A client that was refused tries again, while its token is refunded.
fn a_refusal_again_and_a_refund() {
    let (limiter, _) = limiter(Quota::new(1, WINDOW), &Time::at(TICK));
    let receipt = now(limiter.charge("one", 1)).expect("it passes");
    assert!(!now(limiter.check("one")).is_allowed());
    let refunded = Arc::new(AtomicU64::new(0));
    let refund = thread::spawn({
        let (limiter, refunded) = (limiter.clone(), Arc::clone(&refunded));
        move || {
            now(limiter.refund(receipt));
            refunded.store(1, Ordering::SeqCst);
        }
    });
    let was_refunded = refunded.load(Ordering::SeqCst) == 1;
    let passed = now(limiter.check("one")).is_allowed();
    assert!(passed || !was_refunded, "refused by a count of before");
    refund.join().expect("no panic");
    assert_ne!(passed, now(limiter.check("one")).is_allowed());
}

/// A charge that does not fit is followed by a smaller one that does.
fn a_refusal_and_smaller_charges() {
    let (limiter, _) = limiter(Quota::new(3, WINDOW), &Time::at(TICK));
    assert!(now(limiter.charge("one", 2)).is_ok());
    let threads = [(); 2].map(|()| {
        let limiter = limiter.clone();
        thread::spawn(move || {
            assert!(now(limiter.charge("one", 2)).is_err());
            let passed = now(limiter.check("one")).is_allowed();
            assert_eq!(now(limiter.charge("one", 2)).unwrap_err().decision().used(), 3);
            passed
        })
    });
    let passed = threads.map(|thread| thread.join().expect("no panic"));
    assert_eq!(passed.into_iter().filter(|passed| *passed).count(), 1);
}

/// Each key's refusals have its own count, although the copy of the last one is of either key.
fn keys_that_are_refused_in_turns() {
    refuse_in_turns(3 * TICK);
}

/// The first answers were of the exact time. Later ones are not of a time before that.
fn keys_that_are_refused_in_turns_between_ticks() {
    refuse_in_turns(3 * TICK - 10);
}

fn refuse_in_turns(at: u64) {
    let (limiter, store) = limiter(Quota::new(2, WINDOW), &Time::at(at));
    let others = Quota::new(3, 2 * WINDOW).name("others").store(store);
    assert!(now(limiter.charge("one", 2)).is_ok());
    assert!(now(others.charge("two", 3)).is_ok());
    let (one, two) = (now(limiter.check("one")), now(others.check("two")));
    assert_ne!((one.used(), one.reset_at()), (two.used(), two.reset_at()));
    let turns = thread::spawn({
        let (limiter, one) = (limiter.clone(), one.clone());
        move || {
            assert_eq!(now(limiter.check("one")), one);
            assert_eq!(now(others.check("two")), two);
        }
    });
    (0..2).for_each(|_| assert_eq!(now(limiter.check("one")), one));
    turns.join().expect("no panic");
}

/// The first refusal is of the exact time. The clock ticks while the next two are decided: none is
/// of the tick before.
fn refusals_while_the_clock_ticks() {
    let time = Time::at(TICK + 10);
    let (limiter, _) = limiter(Quota::new(1, 4 * WINDOW), &time);
    assert!(now(limiter.check("one")).is_allowed());
    let first = now(limiter.check("one")).retry_after();
    let other = thread::spawn({
        let (limiter, time) = (limiter.clone(), time.clone());
        move || {
            time.set(2 * TICK);
            assert!(!now(limiter.check("one")).is_allowed());
        }
    });
    let second = now(limiter.check("one")).retry_after();
    assert!(second <= first, "{second:?} after {first:?}");
    other.join().expect("no panic");
}

macro_rules! models {
    ($($model:ident),* $(,)?) => {
        mod at_random {
            $(#[test] fn $model() { shuttle::check_random(super::$model, 5_000) })*
        }
        mod by_priority {
            $(#[test] fn $model() { shuttle::check_pct(super::$model, 5_000, 3) })*
        }
        mod one_after_the_other {
            $(#[test] fn $model() { shuttle::check_dfs(super::$model, Some(20_000)) })*
        }
    };
}

models!(
    charges_and_charges,
    charges_and_refunds,
    charges_and_a_reset,
    a_charge_at_the_edge_of_a_window,
    charges_on_both_sides_of_an_edge,
    keys_that_share_an_overflow_entry,
    a_key_that_moves_to_an_entry_of_its_own,
    a_table_that_grows,
    an_entry_that_another_key_is_given,
    limits_in_opposite_orders,
    a_refusal_that_nobody_sees,
    several_limits_and_one_of_them,
    a_refusal_again_and_a_refund,
    a_refusal_and_smaller_charges,
    keys_that_are_refused_in_turns,
    keys_that_are_refused_in_turns_between_ticks,
    refusals_while_the_clock_ticks,
);

/// What the first charge of a key, or a correction, decides by the exact time does not have to be
/// read again by those that come before the next tick.
#[test]
fn the_exact_time_is_read_no_more_often_than_the_clock_ticks() {
    shuttle::check_dfs(steady_charges, None);
}

fn steady_charges() {
    let time = Time::at(10 * TICK + 1);
    let readings = Arc::new(AtomicU64::new(0));
    let clock = Counting(time.clone(), Arc::clone(&readings));
    let store = MemoryStore::with_max_keys(1).clock(clock);
    let limit = |n, name| Quota::new(n, 100 * WINDOW).name(name);
    let limits = Limits::new([limit(30, "one"), limit(1_000, "two")]).store(store);
    let read = |charge: &dyn Fn()| {
        let before = readings.load(Ordering::SeqCst);
        charge();
        readings.load(Ordering::SeqCst) - before
    };
    let lines = [Line::new("one", 1_u64, 1), Line::new("two", 2_u64, 1)];
    for tick in 10..20 {
        time.set(tick * TICK + 7);
        // Given back: at an exact time.
        let receipt = now(limits.charge(&lines)).ok();
        receipt.into_iter().for_each(|receipt| now(limits.refund(receipt)));
        for later in 7..20 {
            time.set(tick * TICK + later);
            assert_eq!(read(&|| _ = now(limits.limiter("one").check(1_u64))), 1, "{later} in {tick}");
            assert_eq!(read(&|| _ = now(limits.check(&lines))), 1, "{later} in {tick}, of both");
        }
    }
    assert!(!now(limits.limiter("one").check(1_u64)).is_allowed(), "some of these were refused");
}

/// The store reads a clock that shows the last tick only, unless a window is about to end.
#[test]
fn windows_end_on_time_by_a_clock_with_ticks() {
    shuttle::check_dfs(charges_in_one_window_after_the_other, None);
}

fn charges_in_one_window_after_the_other() {
    let plain = Quota::new(1, WINDOW);
    let longer = Quota::new(1, 3 * WINDOW);
    for quotas in [
        plain.into(),
        plain.from_first_request().into(),
        plain.staggered().into(),
        plain.rollover_up_to(2).into(),
        plain.and(longer),
        longer.and(plain.from_first_request()),
    ] {
        let time = Time::at(1_255);
        let (limiter, _) = limiter(quotas, &time);
        for _ in 0..4 {
            let mut passed = now(limiter.check("one"));
            assert!(passed.is_allowed(), "{quotas}");
            while passed.is_allowed() {
                passed = now(limiter.check("one"));
            }
            let end = passed.retry_at().expect("it fits later");
            let end = end.duration_since(std::time::UNIX_EPOCH).expect("later").as_millis() as u64;
            time.set(end - 1);
            assert!(!now(limiter.check("one")).is_allowed(), "{quotas} before {end}");
            time.set(end);
        }
    }
}
