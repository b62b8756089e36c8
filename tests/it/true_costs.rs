//! True costs (S15): a report is a value, and each limit is settled once, by itself.

use std::panic::{AssertUnwindSafe, catch_unwind};

use axum::response::Response;

use crate::hang_ups::FailingClock;
use crate::prelude::*;

const NAMES: [&str; 2] = ["tokens", "cents"];

/// A thousand an hour of each, all settled.
fn limits() -> Limits {
    let limit = |name| Quota::per_hour(1_000).name(name).key(Key::global()).settled();
    Limits::new(NAMES.map(limit))
}

/// Sends a request whose response has this report.
async fn ask(layer: &FixedWindowLayer, cost: TrueCost) {
    let Ok(_) = layer.layer(answering(cost)).oneshot(get("/")).await;
}

/// The used tokens and cents, after all corrections.
async fn used(limits: &Limits) -> [u64; 2] {
    corrected().await;
    let mut used = [0; 2];
    for (used, name) in used.iter_mut().zip(NAMES) {
        *used = limits.limiter(name).peek(Key::global()).await.expect("it answers").used();
    }
    used
}

/// Asks a layer around a service with this report, whose answer panics: the inner layer's numbers are
/// looser, so that the outer one stamps the response, by a clock that fails. Others have used 99.
async fn used_after_a_panic(
    set: fn(FixedWindowLayer) -> FixedWindowLayer,
    cost: TrueCost,
    (at, times): (i64, i64),
    then: impl FnOnce(),
) -> [u64; 2] {
    let clock = FailingClock::default();
    let limits = limits().store(MemoryStore::new().clock(clock.clone()));
    let lines = NAMES.map(|name| Line::new(name, Key::global(), 99));
    assert!(limits.check(lines).await.expect("memory answers").is_allowed());
    let inner = FixedWindowLayer::new(Quota::per_hour(9_000).name("inner").key(Key::global()));
    let fails = clock.clone();
    let work = service_fn(move |_: Request<Body>| {
        let mut response = Response::new(Body::empty());
        response.extensions_mut().insert(cost.clone());
        fails.fail(at, times);
        async { Ok::<_, Infallible>(response) }
    });
    let service = set(FixedWindowLayer::new(&limits)).layer(inner.layer(work));
    let answer = AssertUnwindSafe(move || block_on(service.oneshot(get("/"))));
    assert!(catch_unwind(answer).is_err(), "the response is stamped by this clock");
    then();
    used(&limits).await
}

/// Otherwise both the body's end and the drop would settle the charge.
#[tokio::test]
async fn a_panic_while_a_response_is_stamped_settles_a_metered_charge_once() {
    type Set = fn(FixedWindowLayer) -> FixedWindowLayer;
    let sets: [(Set, u64); 2] = [(|layer| layer, 100), (|layer| layer.refund_dropped(), 99)];
    for (set, expected) in sets {
        let (cost, mut meter) = TrueCost::metered();
        NAMES.into_iter().for_each(|name| meter.set(name, 0));
        let used = used_after_a_panic(set, cost, (1, 1), || drop(meter)).await;
        assert_eq!(used, [expected; 2]);
    }
}

/// Otherwise the drop would refund a cost that the first panic kept from being taken.
#[tokio::test]
async fn a_panic_after_a_true_cost_was_settled_gives_nothing_back() {
    for (at, times, expected) in [(1, 3, [100, 100]), (2, 2, [119, 100]), (3, 1, [119, 119])] {
        let cost = TrueCost::of("tokens", 20).and("cents", 20);
        let used = used_after_a_panic(|layer| layer.refund_dropped(), cost, (at, times), || {});
        assert_eq!(used.await, expected, "{times} panics");
    }
}

/// In the response, at the end of its body, and without HTTP.
#[tokio::test]
async fn a_clock_that_panics_for_one_limit_leaves_the_others_settled() {
    for (way, at, expected) in
        (0..4).flat_map(|way| [(1, [1, 500]), (2, [500, 1])].map(|(at, left)| (way, at, left)))
    {
        let clock = FailingClock::default();
        let limits = limits().store(MemoryStore::new().clock(clock.clone()));
        let fails = || clock.fail(at, 1);
        let layer = FixedWindowLayer::new(&limits);
        match way {
            0 => {
                let fails = clock.clone();
                let work = service_fn(move |_: Request<Body>| {
                    fails.fail(at, 1);
                    let mut response = Response::new(Body::empty());
                    let cost = TrueCost::of("tokens", 500).and("cents", 500);
                    response.extensions_mut().insert(cost);
                    async { Ok::<_, Infallible>(response) }
                });
                let Ok(_) = layer.layer(work).oneshot(get("/")).await;
            }
            1 | 2 => {
                let (cost, mut meter) = TrueCost::metered();
                ask(&layer, cost).await;
                NAMES.into_iter().for_each(|name| meter.set(name, 500));
                fails();
                let drops = AssertUnwindSafe(move || {
                    let _meter = meter;
                    assert!(way == 1, "the body is dropped while this unwinds");
                });
                assert_eq!(catch_unwind(drops).is_ok(), way == 1);
            }
            _ => {
                let lines = NAMES.map(|name| Line::new(name, Key::global(), 1));
                let receipt = limits.charge(lines).await.expect("memory answers").expect("passes");
                fails();
                let settled = limits.settle(receipt, NAMES.map(|name| (name, 500))).await;
                assert!(settled.expect_err("a clock panics").to_string().contains("panicked"));
            }
        }
        clock.fail(0, 0);
        assert_eq!(used(&limits).await, expected, "way {way}, reading {at}");
    }
}

/// A store of the app that panics while a correction is awaited.
#[tokio::test(start_paused = true)]
async fn a_store_that_panics_later_leaves_the_others_settled() {
    for (at, expected) in [(1, [1, 500]), (2, [500, 1])] {
        let clock = FailingClock::default();
        let memory = MemoryStore::new().clock(clock.clone());
        let limits = limits().store(far_from(memory, || 10));
        let (cost, mut meter) = TrueCost::metered();
        ask(&FixedWindowLayer::new(&limits), cost).await;
        NAMES.into_iter().for_each(|name| meter.set(name, 500));
        clock.fail(at, 1);
        drop(meter);
        sleep(secs(1)).await;
        clock.fail(0, 0);
        assert_eq!(used(&limits).await, expected, "reading {at}");
    }
}
