//! Metrics and logs of the store in memory: how full it is, and whether it was too small.

use crate::metrics_and_logs::{recorder, scraped};
use crate::prelude::*;

fn store(max_keys: usize) -> (MemoryStore, ManualClock) {
    let clock = ManualClock::at_ms(NOW_MS);
    (MemoryStore::with_max_keys(max_keys).clock(clock.clone()), clock)
}

fn flood(store: &MemoryStore, quota: Quota, keys: std::ops::Range<u64>) {
    let limiter = Limit::new(quota).name("flood").store(store.clone());
    for key in keys {
        let _ = block_on(limiter.check(("secret", key))).expect("memory answers");
    }
}

#[test]
fn len_counts_entries_of_current_windows() {
    let (store, clock) = store(10_000);
    assert_eq!(store.live_entries(), 0);
    flood(&store, Quota::per_minute(5), 0..100);
    flood(&store, Quota::per_minute(5), 50..150);
    assert_eq!(store.live_entries(), 150);
    flood(&store, Quota::per_hour(5), 0..10);
    assert_eq!(store.live_entries(), 160, "each quota has an entry of its own");
    clock.advance(secs(60));
    assert_eq!(store.live_entries(), 10, "the minute is over");
    clock.advance(secs(3_600));
    assert_eq!(store.live_entries(), 0);
    // Looking is free: a peek takes no entry.
    let limiter = Limit::new(Quota::per_minute(5)).store(store.clone());
    let _ = block_on(limiter.peek("alice")).expect("memory answers");
    assert_eq!(store.live_entries(), 0);
}

#[test]
fn each_of_several_limits_without_an_entry_is_an_overflow() {
    let (handle, _guard) = recorder();
    let (store, _) = store(1);
    let limits = Limits::new(["requests", "tokens"].map(|name| Quota::per_week(5).name(name)));
    let limits = limits.store(store.clone());
    flood(&store, Quota::per_week(1), 0..1_000);
    let lines = ["requests", "tokens"].map(|name| Line::new(name, ("secret", 1), 2));
    let before = store.overflowed();
    for overflowed in [2, 4, 6] {
        assert_eq!(
            block_on(limits.check(&lines)).expect("memory answers").is_allowed(),
            overflowed < 6
        );
        assert_eq!(store.overflowed() - before, overflowed);
        let _ = block_on(limits.peek(&lines)).expect("memory answers");
        assert_eq!(store.overflowed() - before, overflowed, "a peek takes no place");
    }
    for name in ["requests", "tokens"] {
        let series = format!(r#"overflow_total{{scope="{name}"}}"#);
        assert_eq!(scraped(&handle).get(&series), Some(&3.0), "{name}");
    }
}

#[test]
fn refusals_in_a_store_with_room_are_not_overflow() {
    let (store, clock) = store(100);
    // The shared entries last for a week, the others for a minute.
    flood(&store, Quota::per_minute(5), 0..100);
    flood(&store, Quota::per_week(5), 0..1_000);
    clock.advance(secs(8 * 86_400));
    flood(&store, Quota::per_minute(5), 0..1_000);
    flood(&store, Quota::per_week(5), 0..1);
    clock.advance(secs(60));
    let overflowed = store.overflowed();
    let limiter = Limit::new(Quota::per_minute(1)).store(store.clone());
    for key in 0..10 {
        assert!(block_on(limiter.charge(key, 2)).expect("memory answers").is_err());
        assert!(block_on(limiter.charge(key, 0)).expect("memory answers").is_ok());
        assert!(block_on(limiter.check(key)).expect("memory answers").is_allowed());
        assert!(!block_on(limiter.check(key)).expect("memory answers").is_allowed());
    }
    assert_eq!(store.overflowed(), overflowed);
}

#[test]
fn an_overflow_is_logged_once_per_window_with_numbers_and_without_keys() {
    let log = Log::start();
    let (store, clock) = store(1_000);
    flood(&store, Quota::per_hour(5), 0..800);
    assert_eq!(log.warnings(), "", "there is room for these");

    flood(&store, Quota::per_hour(5), 0..3_000);
    let text = log.warnings();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("WARN tower_fixed_window: the memory store is full"), "{text}");
    assert!(text.contains("max_keys=1000 overflowed=1"), "{text}");

    // The overflow goes on, and the log has the warning already.
    clock.advance(secs(600));
    flood(&store, Quota::per_hour(5), 0..3_000);
    assert_eq!(log.warnings().lines().count(), 1);

    // In the next window the entries are free. When the store is full again, the log has another
    // warning.
    clock.advance(secs(2 * 3_600));
    flood(&store, Quota::per_hour(5), 0..800);
    assert_eq!(log.warnings().lines().count(), 1);
    flood(&store, Quota::per_hour(5), 0..3_000);
    let text = log.warnings();
    assert_eq!(text.lines().count(), 2, "{text}");
    let last: u64 = text.trim_end().rsplit_once('=').expect("numbers").1.parse().expect("a number");
    assert!(last > 2_000, "all so far: {text}");
    assert!(!text.contains("secret"), "{text}");
}

#[test]
fn overflows_of_short_windows_are_logged_once_a_minute() {
    let log = Log::start();
    let (store, clock) = store(100);
    for _ in 0..600 {
        flood(&store, Quota::per_second(1), 0..200);
        clock.advance(ms(500));
    }
    assert_eq!(log.warnings().lines().count(), 5, "{}", log.warnings());
}
