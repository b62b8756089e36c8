//! Several limits over a store that can't charge them in one step (S37): nothing is kept of a charge
//! that is refused, dropped or late, and one deadline is for all of it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tower_fixed_window::{Limits, Line, OnStoreFailure, Quota, Store};

use crate::support::FarStore;

const DELAY: u64 = 10;

fn limits(store: impl Store) -> Limits {
    limiters().store(store)
}

fn limiters() -> Limits {
    Limits::new([
        Quota::per_hour(9).name("requests"),
        Quota::per_hour(5).name("tokens"),
        Quota::per_day(2).name("cents"),
    ])
}

fn lines(tokens: u64) -> [Line<'static>; 3] {
    [
        Line::new("requests", "acme", 1),
        Line::new("tokens", "acme", tokens),
        Line::new("cents", "ann", 1),
    ]
}

/// The tokens that the store has counted for each limit.
async fn used(store: &FarStore) -> [u64; 3] {
    let mut used = [0; 3];
    let counted = limits(store.memory.clone());
    for (used, (name, key)) in
        used.iter_mut().zip([("requests", "acme"), ("tokens", "acme"), ("cents", "ann")])
    {
        *used = counted.of(name).peek(key).await.expect("memory answers").used();
    }
    used
}

#[tokio::test(start_paused = true)]
async fn a_refusal_returns_what_was_taken_before_it_answers() {
    let store = FarStore::new(|| DELAY);
    let limits = limits(store.clone());
    for passed in 1..=2 {
        assert!(limits.check(lines(1)).await.unwrap().allowed());
        assert_eq!(used(&store).await, [passed; 3]);
    }
    let refused = limits.check(lines(1)).await.unwrap();
    assert_eq!(used(&store).await, [2; 3]);
    assert_eq!((refused.allowed(), refused.governing_limit()), (false, "cents"));
    let requests = refused.of("requests").unwrap();
    assert_eq!((requests.allowed(), requests.granted(), requests.used()), (true, 0, 2));
}

#[tokio::test(start_paused = true)]
async fn a_refusal_is_until_the_last_limit_that_refuses_has_room() {
    let store = FarStore::new(|| DELAY);
    let limits = limits(store.clone());
    assert!(limits.check([Line::new("cents", "ann", 2)]).await.unwrap().allowed());
    // The tokens refuse first, for an hour; the limit behind them for a day.
    let refused = limits.check(lines(6)).await.unwrap();
    assert_eq!(refused.governing_limit(), "tokens", "they can never pass");
    assert!(limits.check([Line::new("tokens", "acme", 5)]).await.unwrap().allowed());
    let refused = limits.check(lines(1)).await.unwrap();
    assert_eq!(refused.governing_limit(), "cents");
    assert_eq!(refused.retry_at(), refused.of("cents").unwrap().retry_at());
    assert!(refused.retry_at() > refused.of("tokens").unwrap().retry_at());
    assert_eq!(used(&store).await, [0, 5, 2]);
}

#[tokio::test(start_paused = true)]
async fn a_charge_that_is_dropped_at_any_moment_keeps_nothing() {
    // With its refusal: three charges, then returns and peeks.
    for ms in 0..9 * DELAY {
        for tokens in [1, 6] {
            let store = FarStore::new(|| DELAY);
            let limits = limits(store.clone());
            let asked = timeout(Duration::from_millis(ms), limits.check(lines(tokens))).await;
            sleep(Duration::from_secs(1)).await;
            let passed = asked.is_ok_and(|asked| asked.unwrap().allowed());
            let (expected, when) = (if passed { [1; 3] } else { [0; 3] }, (ms, tokens));
            assert_eq!(used(&store).await, expected, "dropped after {when:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_charge_that_is_never_polled_is_never_made() {
    let store = FarStore::new(|| DELAY);
    drop(limits(store.clone()).check(lines(1)));
    sleep(Duration::from_secs(1)).await;
    assert_eq!((used(&store).await, store.sent.load(Ordering::SeqCst)), ([0; 3], 0));
}

#[tokio::test(start_paused = true)]
async fn one_deadline_is_for_all_limits_and_what_comes_late_is_returned() {
    let deadline = Duration::from_millis(250);
    for (delay, local) in [(20, [false; 3]), (60, [false, false, true]), (100, [false, true, true])]
    {
        let store = FarStore::new(move || delay).deadline(deadline);
        let limits = limits(store.clone());
        let started = Instant::now();
        let decision = limits.check(lines(1)).await.unwrap();
        assert!(started.elapsed() <= deadline, "{:?} of {deadline:?}", started.elapsed());
        assert!(decision.allowed());
        let locals =
            ["requests", "tokens", "cents"].map(|name| decision.of(name).unwrap().is_local());
        assert_eq!((locals, decision.is_local()), (local, local.contains(&true)));
        sleep(Duration::from_secs(1)).await;
        assert_eq!(used(&store).await, local.map(|local| u64::from(!local)), "at {delay} ms");
    }
    // The limit that governs was decided by the store, and the other one in memory.
    let limits =
        Limits::new([Quota::per_day(2).name("cents"), Quota::per_hour(9).name("requests")]);
    let limits = limits.store(FarStore::new(|| 100).deadline(deadline));
    let lines = [Line::new("cents", "ann", 1), Line::new("requests", "acme", 1)];
    let decision = limits.check(lines).await.unwrap();
    assert_eq!(decision.governing_limit(), "cents");
    assert!(decision.is_local() && !decision.of("cents").unwrap().is_local());
}

#[tokio::test(start_paused = true)]
async fn an_error_of_the_store_keeps_nothing() {
    let store =
        FarStore::new(|| 100).deadline(Duration::from_millis(250)).on_failure(OnStoreFailure::Deny);
    let limits = ["requests", "tokens"].map(|name| Quota::per_hour(9).name(name));
    let limits = Limits::new(limits).store(store.clone());
    let both = [Line::new("requests", "acme", 1), Line::new("tokens", "acme", 1)];
    let error = limits.check(both).await.unwrap_err();
    assert_eq!(error.to_string(), "the store did not answer in time");
    sleep(Duration::from_secs(1)).await;
    assert_eq!(used(&store).await, [0; 3]);
}

#[tokio::test(start_paused = true)]
async fn a_refusal_by_tokens_that_others_held_for_a_moment_ends_within_a_second() {
    let store = FarStore::new(|| DELAY);
    let (limits, other) = (limits(store.clone()), limits(store.memory.clone()));
    // The tokens are held by another process, which returns them.
    let held = other.charge([Line::new("tokens", "acme", 5)]).await.unwrap().unwrap();
    assert!(!limits.check(lines(1)).await.unwrap().allowed());
    other.refund(held).await.unwrap();
    sleep(Duration::from_millis(1_001)).await;
    assert!(limits.check(lines(1)).await.unwrap().allowed());
}

#[tokio::test(start_paused = true)]
async fn a_reservation_that_would_be_due_too_late_is_returned() {
    let store = FarStore::new(|| DELAY);
    let limiters = || {
        Limits::new([
            Quota::per_second(1).reserve_up_to(9).name("fast"),
            Quota::per_minute(1).reserve_up_to(9).name("slow"),
        ])
    };
    let (limits, memory) =
        (limiters().store(store.clone()), limiters().store(store.memory.clone()));
    let both = [Line::new("fast", "k", 1), Line::new("slow", "k", 1)];
    assert!(limits.reserve(&both).await.unwrap().is_ok());
    let late = limits.reserve(&both).await.unwrap().unwrap_err();
    let expected = memory.reserve(&both).await.unwrap().unwrap_err();
    assert_eq!(late.decision().retry_at(), expected.decision().retry_at());
    assert_eq!(late.decision().governing_limit(), "slow");
    for name in ["fast", "slow"] {
        let standing = memory.of(name).peek("k").await.unwrap();
        assert_eq!(standing.used(), 1, "{name}");
        let told = late.decision().of(name).unwrap();
        assert_eq!(told.used(), 1, "{name}");
    }
}
