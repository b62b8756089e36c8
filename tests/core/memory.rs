//! The store in memory: exact under concurrency, bounded by construction, without allocations.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, UNIX_EPOCH};

use allocation_counter::measure;
use axum::response::IntoResponse;
use tower_fixed_window::store::{Account, Adjust, Charge, Scope, Store};
use tower_fixed_window::{
    Clock, Decision, Key, Limit, Limiter, Limits, Line, ManualClock, MemoryStore, Quota, Quotas,
};

use crate::{answer, sized};

const NOW_MS: u64 = 1_700_000_040_000;

/// 20 million keys through a store of a million, in full size with `FULL_SIZE=1` (some seconds
/// when optimised), a twentieth of it else.
#[test]
fn a_flood_of_keys_keeps_memory_within_its_bound_and_every_tracked_count() {
    let full = sized(false, true);
    let max_keys = if full { 1_000_000 } else { 25_000 };
    let flood = 20 * max_keys as u64;
    let tracked = 1_000_u64;
    let from_first = Quota::new(300, Duration::from_secs(3_600)).from_first_request();
    let quotas = Quota::per_hour(100).and(Quota::per_day(500)).and(from_first);
    let crowd = || Quota::per_minute(5).name("crowd");
    // With its first refusal, a limit enters a list that the process keeps, and that may grow.
    let limiter = Limiter::new(crowd());
    while answer(limiter.check("key")).is_allowed() {}

    let mut bound = 0;
    let started = std::time::Instant::now();
    let used = measure(|| {
        let clock = ManualClock::at_ms(NOW_MS);
        let store = MemoryStore::with_max_keys(max_keys).clock(clock.clone());
        bound = store.max_bytes();
        let regular = Limit::new(quotas).name("regular").store(store.clone());
        let crowd = crowd().store(store);
        for key in 0..tracked {
            assert!(answer(regular.check(key)).is_allowed());
        }
        for key in 0..flood {
            let _ = answer(crowd.check(key));
            // The flood's own windows turn five times.
            if key % (flood / 5) == 0 {
                clock.advance(Duration::from_secs(60));
            }
        }
        for key in 0..tracked {
            let decision = answer(regular.check(key));
            let standings = decision.usage().iter().map(|of| (of.used(), of.limit()));
            assert!(standings.eq([(2, 100), (2, 500), (2, 300)]), "{key} has lost its count");
        }
    });
    let bytes = used.bytes_max as usize;
    #[expect(clippy::print_stdout, reason = "a measurement, shown with --nocapture")]
    {
        println!(
            "{flood} keys through a store of {max_keys}: {bytes} bytes at most, max_bytes {bound}, {:?}",
            started.elapsed()
        );
    }
    // The allowance is for all but counters: limiters, clock, the store's header.
    assert!(bytes <= bound + 16_384, "{bytes} bytes, of {bound}");
    if full {
        assert!(bound <= 36_600_000, "{bound} bytes for a million");
    }
}

#[test]
fn limits_that_are_built_all_the_time_keep_a_bounded_memory() {
    const LIMITS: usize = 5_000;
    let used = measure(|| {
        for i in 0..LIMITS {
            let limiter = Limiter::new(Quota::per_day(0).name(&format!("of-{i}")));
            let refused = answer(limiter.check("key")).into_result().expect_err("refused");
            let response = refused.into_response();
            assert_eq!(response.headers()["x-ratelimit-resource"], format!("of-{i}"));
        }
    });
    // Names are kept, 65,535 of them, and what the log needs to know of the first 1,024.
    let most = 110_000 + 60 * LIMITS as i64;
    assert!(used.bytes_current < most, "{} bytes are kept", used.bytes_current);
}

fn sets() -> [Quotas; 3] {
    let one = Quota::per_minute(3);
    let two = one.and(Quota::per_hour(3).staggered());
    let four =
        two.and(Quota::per_day(3).from_first_request()).and(Quota::per_week(3).rollover_up_to(4));
    [one.into(), two, four]
}

#[test]
fn the_store_allocates_nothing_for_a_charge() {
    for quotas in sets() {
        let clock = ManualClock::at_ms(NOW_MS);
        let store = MemoryStore::with_max_keys(16).clock(clock.clone());
        let scope = Scope::named("frugal");
        let keys: Vec<Key> = (0..200_u64).map(Key::from).collect();
        let account = |key| Account::new(&scope, &quotas, key);
        let ask = |key| answer(store.charge(Charge::new(account(key), 1)));
        // The first key to overflow has the scope's counters named (feature `metrics`), once.
        let full = MemoryStore::with_max_keys(1).clock(ManualClock::at_ms(NOW_MS));
        for key in &keys {
            let _ = answer(full.charge(Charge::new(account(key), 1)));
        }
        assert!(full.overflowed() > 0);
        // The shard has grown. Decisions over more than two quotas allocate a box and a list for them.
        for key in &keys {
            let _ = ask(key);
        }
        assert!(store.live_entries() > 0);
        clock.advance(Duration::from_secs(60 * 86_400));
        assert_eq!(store.live_entries(), 0);
        let _ = ask(&keys[0]);
        let lists = 2 * u64::from(quotas.as_ref().len() > 2);

        let mut refused = 0;
        for (what, from, to) in [("hit", 0, 1), ("miss", 1, 4), ("overflow", 4, 200)] {
            for key in &keys[from..to] {
                for _ in 0..5 {
                    let mut allowed = true;
                    let counted = measure(|| allowed = ask(key).is_allowed());
                    refused += u64::from(!allowed);
                    assert!(counted.count_total <= lists, "{what}: {counted:?}");
                }
            }
        }
        assert!(refused > 100, "the overflow was full, and so were the keys' own entries");

        let decision = ask(&keys[0]);
        let counted = measure(|| {
            answer(store.adjust(Adjust::take(account(&keys[0]), 1, &decision)));
            answer(store.adjust(Adjust::refund(account(&keys[0]), 1, &decision)));
            answer(store.reset(&scope, &keys[0]));
        });
        assert_eq!(counted.count_total, 0, "refund, settle, reset");
    }
}

#[test]
fn a_growing_store_keeps_every_count_and_memory_follows_the_number_of_keys() {
    let clock = ManualClock::at_ms(NOW_MS);
    let quotas = Quota::per_hour(1_000).and(Quota::per_day(1_000));
    for keys in [10, 100, 1_000, 10_000, 30_000_u64] {
        let used = measure(|| {
            let store = MemoryStore::with_max_keys(100_000).clock(clock.clone());
            let limiter = Limit::new(quotas).store(store.clone());
            for key in 0..keys {
                // Earlier keys are charged again in between.
                for key in [key, key / 2] {
                    assert!(answer(limiter.check(key)).is_allowed());
                }
            }
            for key in 0..keys {
                // Each key was charged once as itself, and once for each key that it is the half
                // of.
                let halved = (2 * key..2 * key + 2).filter(|twice| *twice < keys).count() as u64;
                let decision = answer(limiter.peek(key));
                let used = decision.usage().iter().map(|standing| standing.used());
                assert!(used.eq([1 + halved; 2]), "{key} of {keys}: {decision:?}");
            }
            assert_eq!((store.live_entries() as u64, store.overflowed()), (2 * keys, 0));
        });
        // A bucket for each shard, and the entries' own needs.
        let most = 64 * 1_024 + 2 * keys * 100;
        assert!(used.bytes_max <= most, "{} bytes for {keys} keys", used.bytes_max);
    }
}

/// In one of some ten thousand tables of three buckets, entries that fit into two don't fit into
/// three.
#[test]
fn in_small_stores_no_key_exceeds_its_limit_when_a_table_cannot_grow() {
    let clock = ManualClock::at_ms(NOW_MS);
    for i in 0..sized(8_000, 20_000) {
        let store = MemoryStore::with_max_keys(32 + i % 13).clock(clock.clone());
        let one = Quota::per_week(1);
        // Also if only the second of a key's entries finds no slot.
        let quotas = if i % 2 == 0 { one.into() } else { one.and(Quota::per_day(1)) };
        let limiter = Limit::new(quotas).store(store);
        for key in 0..46_u64 / quotas.as_ref().len() as u64 {
            let _ = answer(limiter.check(key));
            assert!(!answer(limiter.check(key)).is_allowed(), "{key} in store {i}");
        }
    }
}

#[test]
fn a_key_is_counted_until_its_window_ends() {
    let clock = ManualClock::at_ms(NOW_MS);
    let store = MemoryStore::new().clock(clock.clone());
    let _ = answer(Limit::new(Quota::per_minute(5)).store(store.clone()).check("alice"));
    clock.advance(Duration::from_millis(59_999));
    assert_eq!(store.live_entries(), 1);
    clock.advance(Duration::from_millis(1));
    assert_eq!(store.live_entries(), 0);
}

#[test]
fn a_million_keys_take_37_mb() {
    assert!((36_000_000..37_000_000).contains(&MemoryStore::new().max_bytes()));
}

#[test]
fn the_debug_text_of_a_store_has_its_size_and_no_key() {
    let store = MemoryStore::with_max_keys(100);
    let _ = answer(Limit::new(Quota::per_minute(5)).store(store.clone()).check("alice"));
    let text = format!("{store:?}");
    assert!(text.contains(&format!("max_bytes: {}", store.max_bytes())), "{text}");
    assert!(!text.contains("alice"));
}

#[test]
fn a_limiter_takes_little_memory_before_its_first_charge() {
    const LIMITERS: usize = 1_000;
    let shared = MemoryStore::new();
    let limit = |n| Quota::per_minute(1).name(&format!("tenant-{n}"));
    let bytes = |limiter: &dyn Fn(usize) -> Limiter| {
        let used = measure(|| drop((0..LIMITERS).map(limiter).collect::<Vec<_>>()));
        used.bytes_max as usize / LIMITERS
    };
    let [own, shared] =
        [bytes(&|n| Limiter::new(limit(n))), bytes(&|n| limit(n).store(shared.clone()))];
    assert!(own < 3_800 && shared < 3_200, "{own} bytes, and {shared} on a shared store");
}

#[test]
fn a_store_keeps_its_counters_when_it_gets_a_clock() {
    let store = MemoryStore::new().clock(ManualClock::at_ms(1_700_000_040_000));
    let charge = |store: &MemoryStore| {
        let (scope, key) = (Scope::named("api"), Key::from("alice"));
        let quotas = Quota::per_minute(5).into();
        answer(Store::charge(store, Charge::new(Account::new(&scope, &quotas, &key), 1))).used()
    };
    assert_eq!(charge(&store), 1);
    let store = store.clock(ManualClock::at_ms(1_700_000_050_000));
    assert_eq!(charge(&store), 2);
    let clone = store.clone();
    let cloned = AssertUnwindSafe(store);
    let panic = catch_unwind(|| { cloned }.0.clock(ManualClock::default()));
    assert!(panic.is_err(), "the clone would have another time");
    assert_eq!(charge(&clone), 3);
}

/// Shows a time for so many readings, then a second later.
#[derive(Clone)]
struct Turns(Arc<AtomicI64>);

impl Clock for Turns {
    fn now_ms(&self) -> u64 {
        NOW_MS + if self.0.fetch_sub(1, Ordering::SeqCst) > 0 { 0 } else { 1_000 }
    }
}

/// Quotas may change at any instant, also within a charge.
#[test]
fn a_receipt_is_of_the_quotas_that_decided() {
    let clock = Turns(Arc::new(AtomicI64::new(i64::MAX)));
    let limits = Limits::new([Quota::per_minute(10).name("a")]);
    let limits = limits.store(MemoryStore::new().clock(clock.clone()));
    let hour = Quotas::from(Quota::per_hour(5));
    let of_hour = |cost| [Line::new("a", "k", cost).with_quotas(&hour)];
    assert!(answer(limits.check(of_hour(5))).is_allowed());
    let until = UNIX_EPOCH + Duration::from_millis(NOW_MS + 500);
    limits.limiter("a").set_quotas_until(Quota::per_hour(9), until);
    // That time is over at the second reading.
    clock.0.store(1, Ordering::SeqCst);
    match answer(limits.charge([Line::new("a", "k", 3)])) {
        Ok(receipt) => answer(limits.refund(receipt)),
        Err(refused) => assert_eq!(refused.decision().limit(), 9),
    }
    let minute = answer(limits.limiter("a").peek("k")).used();
    assert_eq!((answer(limits.peek(of_hour(0))).used(), minute), (5, 0));
}

/// A clock of the app that panics once. A charge of several limits holds their locks then.
#[derive(Clone, Default)]
struct Failing(Arc<AtomicBool>);

impl Clock for Failing {
    fn now_ms(&self) -> u64 {
        assert!(!self.0.swap(false, Ordering::Relaxed), "no time");
        NOW_MS
    }
}

#[test]
fn a_clock_that_panics_blocks_no_later_charge() {
    fn lines() -> [Line<'static>; 2] {
        ["a", "b"].map(|name| Line::new(name, "alice", 1))
    }
    type Call = fn(&Limits);
    let calls: [(Call, [u64; 2]); 5] = [
        (|limits| _ = answer(limits.check(lines())), [2, 2]),
        (|limits| _ = answer(limits.limiter("a").check("alice")), [2, 1]),
        (|limits| _ = answer(limits.limiter("b").reserve("alice", 1)).expect("room"), [1, 2]),
        (|limits| _ = answer(limits.limiter("b").peek("alice")), [1, 1]),
        (|limits| answer(limits.limiter("a").reset("alice")), [0, 1]),
    ];
    for (call, expected) in calls {
        let (clock, daily) = (Failing::default(), Quota::per_day(9));
        let limits = Limits::new([daily.name("a"), daily.reserve_up_to(9).name("b")]);
        let limits = limits.store(MemoryStore::new().clock(clock.clone()));
        assert!(answer(limits.check(lines())).is_allowed());

        clock.0.store(true, Ordering::Relaxed);
        catch_unwind(AssertUnwindSafe(|| call(&limits))).expect_err("it panics");
        let (sender, used) = mpsc::channel();
        thread::spawn(move || {
            call(&limits);
            let used = |decision: Decision| decision.limits().map(|(_, of)| of.used()).collect();
            sender.send(used(answer(limits.peek(lines()))))
        });
        let used: Vec<_> = used.recv_timeout(Duration::from_secs(20)).expect("in time");
        assert_eq!(used, expected);
    }
}
