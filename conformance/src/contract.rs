//! Checks of a store beyond the arithmetic: the key of a counter, how long a counter lives, and
//! that each call changes only what it should.

use std::sync::Arc;
use std::time::Duration;

use tower_fixed_window::store::{Account, Adjust, Charge, Scope};
use tower_fixed_window::{Decision, Key, Limit, Limiter, ManualClock, Quota, Quotas, Store};

const NOW_MS: u64 = 1_700_000_040_000;
const MINUTE: Duration = Duration::from_secs(60);

pub(super) async fn check<S: Store>(new: impl Fn(ManualClock) -> S) {
    let subject = || {
        let clock = ManualClock::at_ms(NOW_MS);
        (Arc::new(new(clock.clone())), clock)
    };
    identity(subject().0).await;
    let (store, clock) = subject();
    life(store, clock).await;
    let (store, clock) = subject();
    peeks(store, clock).await;
    resets(subject().0).await;
    let (store, clock) = subject();
    refunds(store, clock).await;
    #[cfg(feature = "time-zones")]
    {
        let (store, clock) = subject();
        // Counters of one process have one edition of the zone data.
        if store.is_shared() {
            stored_ends(store, clock).await;
        }
    }
}

fn limiter<S: Store>(store: &Arc<S>, scope: &str, quotas: impl Into<Quotas>) -> Limiter {
    Limit::new(quotas).name(scope).store(Arc::clone(store))
}

async fn used(limiter: &Limiter, key: impl Into<Key>) -> Vec<u64> {
    let decision = limiter.peek(key).await.expect("the store answers");
    decision.usage().iter().map(|standing| standing.used()).collect()
}

async fn allowed(limiter: &Limiter, key: impl Into<Key>, cost: u64) -> bool {
    limiter.charge(key, cost).await.expect("the store answers").is_ok()
}

async fn identity<S: Store>(store: Arc<S>) {
    let five = Quota::per_minute(5);
    let hour = Quota::per_hour(100);
    let limit = limiter(&store, "ab", five.and(hour));
    // Longer than many a column.
    let part = &*"x".repeat(64);
    let long = |end: u64| Key::from(((part, part, part, part), end));
    assert!(allowed(&limit, "cd", 1).await && allowed(&limit, long(1), 1).await);

    for (what, quotas) in [
        ("another limit", Quota::per_minute(9).and(Quota::per_hour(3))),
        ("another capacity", five.rollover_up_to(7).reserve_up_to(9).and(hour)),
        ("another order", hour.and(five)),
    ] {
        let same = limiter(&store, "ab", quotas);
        assert_eq!(used(&same, "cd").await, [1, 1], "{what} is still the same counter");
    }
    assert_eq!(used(&limiter(&store, "ab", five), "cd").await, [1], "so it is alone");

    for (what, scope, key, quota) in [
        ("another scope", "x", Key::from("cd"), five),
        ("another key", "ab", Key::from("ce"), five),
        ("a key in capitals", "ab", Key::from("CD"), five),
        ("a long key with another end", "ab", long(2), five),
        ("an empty key", "ab", Key::global(), five),
        ("a number", "ab", Key::from(5_u64), five),
        ("a scope and a key that read the same together", "abc", Key::from("d"), five),
        ("parts that read the same together", "ab", Key::from(("c", "d")), five),
        ("another window", "ab", Key::from("cd"), Quota::new(5, 2 * MINUTE)),
        ("another grid", "ab", Key::from("cd"), five.starting_at(Duration::from_secs(7))),
        ("a staggered grid", "ab", Key::from("cd"), five.staggered()),
        ("a grid from the first request", "ab", Key::from("cd"), five.from_first_request()),
        ("a month", "ab", Key::from("cd"), Quota::per_month(5)),
        ("a month from another day", "ab", Key::from("cd"), Quota::per_month(5).from_day(2)),
        ("a year", "ab", Key::from("cd"), Quota::per_year(5)),
        #[cfg(feature = "time-zones")]
        ("a month of a zone", "ab", Key::from("cd"), Quota::per_month(5).in_zone("Asia/Tokyo")),
        #[cfg(feature = "time-zones")]
        ("an alias", "ab", Key::from("cd"), Quota::per_month(5).in_zone("Japan")),
    ] {
        let other = limiter(&store, scope, quota);
        assert_eq!(used(&other, key.clone()).await, [0], "{what} is another counter");
        assert!(allowed(&other, key, 1).await);
        assert_eq!(used(&limit, "cd").await, [1, 1], "{what} is another counter");
    }
}

async fn life<S: Store>(store: Arc<S>, clock: ManualClock) {
    // A counter lives to the last millisecond of its window.
    let limit = limiter(&store, "window", Quota::per_hour(1));
    clock.set_ms(NOW_MS / 3_600_000 * 3_600_000);
    assert!(allowed(&limit, "one", 1).await);
    clock.advance(Duration::from_millis(3_599_999));
    assert!(!allowed(&limit, "one", 1).await, "a counter is kept until its window ends");
    clock.advance(Duration::from_millis(1));
    assert!(allowed(&limit, "one", 1).await, "and is no hindrance afterwards");

    // A counter outlives its window while tokens may roll over.
    let limit = limiter(&store, "rollover", Quota::per_minute(1).rollover_up_to(3));
    assert!(allowed(&limit, "one", 3).await);
    for (too_much, cost) in [(2, 0), (3, 2)] {
        clock.advance(MINUTE);
        assert!(!allowed(&limit, "one", too_much).await, "tokens come back one limit at a time");
        assert!(allowed(&limit, "one", cost).await, "and they do come back");
    }
    // The first charge sets an end that the second one moves.
    let limit = limiter(&store, "debt", Quota::per_minute(1).reserve_up_to(3));
    for cost in [1, 3] {
        let reserved = limit.reserve("one", cost).await.expect("the store answers");
        drop(reserved);
    }
    for _ in 0..3 {
        clock.advance(MINUTE);
        assert!(!allowed(&limit, "one", 1).await, "a debt is kept until it is paid");
    }
    clock.advance(MINUTE);
    assert!(allowed(&limit, "one", 1).await, "a debt ends");
}

/// By an edition of the zone data that some nodes have, the zone's day begins an hour earlier (S35).
#[cfg(feature = "time-zones")]
async fn stored_ends<S: Store>(store: Arc<S>, clock: ManualClock) {
    const NOON_MS: u64 = NOW_MS / 86_400_000 * 86_400_000 + 43_200_000;

    let day = |zone| limiter(&store, "editions", Quota::per_day(1).in_zone(zone));
    let from_noon = day("Etc/GMT+12");
    let from_eleven = day("Etc/GMT+12=Etc/GMT+11");
    clock.set_ms(NOON_MS - 90 * 60_000);
    assert!(allowed(&from_noon, "late", 1).await && allowed(&from_eleven, "early", 1).await);
    clock.set_ms(NOON_MS - 30 * 60_000);
    for day in [&from_eleven, &from_noon] {
        assert!(
            !allowed(day, "late", 1).await,
            "a calendar's window lasts to the end that is stored with it"
        );
    }
    let passed = allowed(&from_noon, "early", 1).await;
    assert!(passed, "a calendar's window lasts no longer than to the end that is stored with it");
    clock.set_ms(NOON_MS);
    assert!(allowed(&from_eleven, "late", 1).await, "and then the next one begins");
    assert!(!allowed(&from_noon, "late", 1).await, "for all nodes");
}

async fn peeks<S: Store>(store: Arc<S>, clock: ManualClock) {
    let limit = limiter(&store, "peek", Quota::per_minute(2).from_first_request());
    let end = |decision: &Decision| {
        decision.reset_at().duration_since(std::time::UNIX_EPOCH).expect("later").as_millis() as u64
    };
    for _ in 0..3 {
        assert_eq!(used(&limit, "one").await, [0], "a peek takes nothing");
    }
    // A charge above the limit and a charge of 0 take nothing.
    for cost in [3, 0] {
        let _ = allowed(&limit, "one", cost).await;
    }
    clock.advance(MINUTE / 2);
    let decision = limit.check("one").await.expect("the store answers");
    assert_eq!(
        end(&decision),
        NOW_MS + 90_000,
        "the first charge that passes opens a window, and nothing else"
    );
}

async fn resets<S: Store>(store: Arc<S>) {
    let quotas = Quota::per_minute(1).and(Quota::per_hour(5));
    let here = limiter(&store, "here", quotas);
    let there = limiter(&store, "there", quotas);
    // Counters of plans with other windows, and of quotas before a change.
    let hour = Quota::per_hour(5);
    let beside = [
        limiter(&store, "here", Quota::per_day(5)),
        limiter(&store, "here", hour.staggered().and(hour.from_first_request())),
        limiter(&store, "here", Quota::per_minute(5).and(hour.starting_at(MINUTE))),
    ];
    // Its bytes begin with those of "one".
    let longer = Key::from(("one", 7_u64));
    let keys = ["one", "two", "*", "tw_", "on"].map(Key::from).into_iter().chain([longer.clone()]);
    for key in keys.clone() {
        assert!(allowed(&here, key.clone(), 1).await && allowed(&there, key.clone(), 1).await);
        for limit in &beside {
            assert!(allowed(limit, key.clone(), 1).await);
        }
    }
    for key in ["*", "tw_", "one"] {
        here.reset(key).await.expect("the store answers");
        assert_eq!(used(&here, key).await, [0, 0], "a reset forgets all quotas of the key");
        for limit in &beside {
            let used = used(limit, key).await;
            assert!(used.iter().all(|used| *used == 0), "a reset is of all quotas: {used:?}");
        }
    }
    for key in [Key::from("two"), Key::from("on"), longer] {
        let only = "a reset is of one key only, found by all of its bytes";
        assert_eq!(used(&here, key.clone()).await, [2, 1], "{only}");
        assert_eq!(used(&beside[0], key).await, [1], "{only}");
    }
    for key in keys {
        assert_eq!(used(&there, key).await, [1, 1], "a reset is of one scope only");
    }
    assert!(allowed(&here, "one", 1).await, "after a reset a key is new");
    assert!(!allowed(&here, "one", 1).await, "and counted");
    here.reset("unknown").await.expect("a key that was never charged is forgotten");
}

async fn refunds<S: Store>(store: Arc<S>, clock: ManualClock) {
    let scope = Scope::named("refunds");
    let quotas = Quotas::from(Quota::per_minute(5));
    let key = Key::from("one");
    let account = Account::new(&scope, &quotas, &key);
    let limit = limiter(&store, "refunds", quotas);

    let first = store.charge(Charge::new(account, 5)).await.expect("the store answers");
    store.adjust(Adjust::refund(account, 2, &first)).await.expect("the store answers");
    assert_eq!(used(&limit, "one").await, [3], "what is returned, and no more");
    store.adjust(Adjust::refund(account, 5, &first)).await.expect("the store answers");
    assert_eq!(used(&limit, "one").await, [0], "never above the capacity");
    assert!(allowed(&limit, "one", 5).await);

    // The clock moves into the next window, and a little back: the next window's tokens are not the
    // last one's (S4).
    clock.advance(MINUTE);
    assert!(allowed(&limit, "one", 5).await);
    clock.set_ms(NOW_MS + 59_999);
    store.adjust(Adjust::refund(account, 5, &first)).await.expect("the store answers");
    assert_eq!(used(&limit, "one").await, [5], "a window that has ended takes nothing back");

    // The clock is a day ahead for a while, and back. The count that moves along is of the window that
    // was charged last (S4).
    let ahead = Key::from("ahead");
    let account = Account::new(&scope, &quotas, &ahead);
    let charge = Charge::new(account, 5);
    let refund = |decision| Adjust::refund(account, 5, decision);
    clock.set_ms(NOW_MS + 86_400_000);
    let ended = store.charge(charge).await.expect("the store answers");
    clock.advance(2 * MINUTE);
    let moved = store.charge(charge).await.expect("the store answers");
    assert!(ended.is_allowed() && moved.is_allowed());
    clock.set_ms(NOW_MS + 60_000);
    store.adjust(refund(&ended)).await.expect("the store answers");
    assert_eq!(used(&limit, "ahead").await, [5], "a step back revives no window that has ended");
    assert!(!allowed(&limit, "ahead", 1).await, "the count has moved along");
    clock.advance(MINUTE);
    assert!(allowed(&limit, "ahead", 5).await, "and ends with this window");
    store.adjust(refund(&moved)).await.expect("the store answers");
    assert_eq!(used(&limit, "ahead").await, [5], "what has moved is not returned for later tokens");

    // So are tokens of a later window that were reserved.
    for quota in [Quota::per_minute(5), Quota::per_minute(5).from_first_request()] {
        let quotas = Quotas::from(quota.reserve_up_to(5));
        let key = Key::from(("reserved", quota.counter()));
        let limit = limiter(&store, "refunds", quotas);
        let account = Account::new(&scope, &quotas, &key);
        let charge = Charge::new(account, 5);
        clock.set_ms(NOW_MS + 86_400_000);
        let first = store.charge(charge).await.expect("the store answers");
        let reserved = store.charge(charge.reserving()).await.expect("the store answers");
        assert!(first.is_allowed() && reserved.is_allowed());
        clock.set_ms(NOW_MS + 120_000);
        store.adjust(Adjust::refund(account, 5, &first)).await.expect("the store answers");
        clock.advance(MINUTE);
        assert!(!allowed(&limit, key.clone(), 1).await, "what is reserved has moved along");
        clock.advance(2 * MINUTE);
        assert!(allowed(&limit, key, 5).await, "and ends after as many windows as it had");
    }

    // A correction creates no counter, and revives none.
    clock.set_ms(NOW_MS + 180_000);
    let rollover = Quotas::from(Quota::per_minute(5).rollover_up_to(9));
    let other = Key::from("other");
    let account = Account::new(&scope, &rollover, &other);
    store.adjust(Adjust::refund(account, 3, &first)).await.expect("the store answers");
    let decision = store.charge(Charge::new(account, 9)).await.expect("the store answers");
    assert!(decision.is_allowed() && decision.remaining() == 0, "a refund creates nothing");
    store.adjust(Adjust::take(account, 2, &decision)).await.expect("the store answers");
    let decision = store.charge(Charge::new(account, 0)).await.expect("the store answers");
    assert_eq!(decision.used(), 7, "what was used is counted past the limit");

    // What stands above a limit that was lowered is no debt, so that no later window is reserved
    // (S5).
    let reserving = |limit| Quotas::from(Quota::per_minute(limit).reserve_up_to(77));
    let (high, low, key) = (reserving(60), reserving(2), Key::from("lowered"));
    let charge = Charge::new(Account::new(&scope, &high, &key), 2);
    let first = store.charge(charge).await.expect("the store answers");
    assert!(store.charge(charge).await.expect("the store answers").is_allowed());
    let account = Account::new(&scope, &low, &key);
    store.adjust(Adjust::refund(account, 2, &first)).await.expect("the store answers");
    assert_eq!(used(&limit, "lowered").await, [2], "a lowered limit takes tokens back");
}
