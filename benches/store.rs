//! A decision of the memory store, compared with the two things that it needs: reading the clock,
//! and a lock around a hash map.

use std::collections::HashMap;
use std::hint::black_box;
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

#[path = "timing.rs"]
mod timing;

use timing::{calls, print, timed};
use tower_fixed_window::store::{Account, Charge, Scope};
use tower_fixed_window::{Clock, Key, ManualClock, MemoryStore, Quota, Quotas, Store, SystemClock};

fn main() {
    let scope = Scope::named("bench");
    let map = Mutex::new((0..100_000_u64).map(|i| (i, 0_u64)).collect::<HashMap<_, _>>());
    let mut next = numbers(100_000);
    let mut functions = vec![
        timed("floor: read the clock", calls(|| SystemClock.now_ms())),
        timed(
            "floor: std HashMap in a Mutex, 100k keys",
            calls(|| *map.lock().unwrap().get_mut(&next()).unwrap() += 1),
        ),
    ];

    let one = Quotas::from(Quota::per_hour(1 << 40));
    let two = Quota::per_hour(1 << 40).and(Quota::per_day(1 << 40));
    let manual = || MemoryStore::new().clock(ManualClock::at_ms(1_700_000_040_000));
    for (name, store, quotas, keys) in [
        ("one quota, hot key", MemoryStore::new(), one, 1),
        ("one quota, 100k keys", MemoryStore::new(), one, 100_000),
        ("one quota, 100k keys, without the clock", manual(), one, 100_000),
        ("one quota, 1M keys", MemoryStore::with_max_keys(1_200_000), one, 1_000_000),
        ("two quotas, 100k keys", MemoryStore::new(), two, 100_000),
    ] {
        let (mut next, scope) = (numbers(keys), &scope);
        let charge = move || {
            let key = Key::from(next());
            let account = Account::new(scope, &quotas, &key);
            store.charge(Charge::new(account, 1)).into_now()
        };
        functions.push(timed(name, calls(charge)));
    }
    // From the first charge on without a pause, in which the clock could catch up.
    for (name, limit, threads) in [
        ("hot key without a pause, allowed", 1 << 40, 1),
        ("hot key without a pause, refused", 1, 1),
        ("hot key without a pause, allowed, two threads", 1 << 40, 2),
        ("hot key without a pause, refused, two threads", 1, 2),
    ] {
        let quotas = Quotas::from(Quota::per_hour(limit));
        functions.push(timed(name, move |times| {
            let store = MemoryStore::new();
            let start = Instant::now();
            thread::scope(|scope| {
                (0..threads).for_each(|_| _ = scope.spawn(|| charge(&store, &quotas, times)));
            });
            start.elapsed()
        }));
    }
    print(functions);
}

fn charge(store: &MemoryStore, quotas: &Quotas, times: u64) {
    let (scope, key) = (Scope::named("bench"), Key::from(1_u64));
    for _ in 0..times {
        let account = Account::new(&scope, quotas, black_box(&key));
        let _ = black_box(store.charge(Charge::new(account, 1)).into_now());
    }
}

/// Numbers below `n` in an order that no cache predicts.
fn numbers(n: u64) -> impl FnMut() -> u64 {
    let mut state = 1_u64;
    move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % n
    }
}
