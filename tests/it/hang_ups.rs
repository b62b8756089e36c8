//! A request that is dropped, or panics, costs what it is set to, also while a store that is far
//! away decides on it.

use std::convert::Infallible;
use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response};
use tokio::time::sleep;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_fixed_window::testing::block_on;
use tower_fixed_window::{
    Clock, EmptyBody, FixedWindowLayer, Key, Limiter, Limits, MemoryStore, Quota,
};

use crate::support::{CASES, FarStore, beside, everyone, get, layered, limiter_of, per_minute};

const LONG: Duration = Duration::from_secs(600);

/// A service that answers after a second.
async fn inner(_: Request<Body>) -> Result<Response<Body>, Infallible> {
    sleep(Duration::from_secs(1)).await;
    Ok(Response::new(Body::empty()))
}

/// A limit of two a minute, in a store that is 10 ms away. It charges several limits in order.
fn far(limits: usize) -> (FarStore, FixedWindowLayer) {
    let store = FarStore::new(|| 10);
    (store.clone(), FixedWindowLayer::new(beside(everyone(2), limits).store(store)))
}

/// The used tokens after all corrections.
async fn used(limiter: &Limiter) -> u64 {
    sleep(Duration::from_millis(100)).await;
    limiter.peek(Key::global()).await.expect("the store answers").used()
}

#[tokio::test(start_paused = true)]
async fn a_charge_that_was_not_sent_is_cancelled() {
    let settings: [fn(FixedWindowLayer) -> FixedWindowLayer; 3] =
        [|layer| layer, |layer| layer.refund_dropped(), |layer| layer.queue(9, LONG)];
    for (limits, set) in (1..=3).flat_map(|limits| settings.map(|set| (limits, set))) {
        let (store, layer) = far(limits);
        let layer = set(layer);
        let limiter = limiter_of(&layer);
        drop(layer.layer(service_fn(inner)).call(get("/")));
        assert_eq!(used(&limiter).await, 0);
        // The peek is the only call: the dropped request has sent none.
        assert_eq!(store.sent.load(Ordering::SeqCst), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_hang_up_while_the_store_decides_leaves_the_queue() {
    for (limits, after) in (1..=3).flat_map(|limits| [5, 15, 25].map(|after| (limits, after))) {
        let layer = far(limits).1.queue(1, LONG);
        let limiter = limiter_of(&layer);
        let service = layer.layer(service_fn(inner));
        for _ in 0..2 {
            let Ok(_) = service.clone().oneshot(get("/")).await;
        }
        let queued = tokio::spawn(service.clone().oneshot(get("/")));
        sleep(Duration::from_millis(after)).await;
        queued.abort();
        assert_eq!(used(&limiter).await, 2, "{limits} limits, dropped after {after} ms");
        // The queue's only place is free again.
        let Ok(response) = service.oneshot(get("/")).await;
        assert_eq!(response.status(), 200);
    }
}

#[tokio::test(start_paused = true)]
async fn with_a_queue_a_hang_up_while_the_store_decides_counts_nothing() {
    for limits in 1..=3 {
        let layer = far(limits).1.queue(1, LONG);
        let limiter = limiter_of(&layer);
        let request = tokio::spawn(layer.layer(service_fn(inner)).oneshot(get("/")));
        sleep(Duration::from_millis(20 * limits as u64 - 5)).await;
        request.abort();
        sleep(Duration::from_millis(50)).await;
        assert_eq!(used(&limiter).await, 0, "{limits} limits");
    }
}

fn panicking<T>() -> T {
    panic!("on purpose")
}

#[tokio::test]
async fn a_panic_in_a_closure_is_a_dropped_request() {
    for case in CASES {
        for (layer, left) in [
            (per_minute(9, case).refund_dropped().on_decision(|_, _| panicking()), 0),
            (per_minute(9, case).refund_dropped().count_if(|_| panicking()), 0),
            (per_minute(9, case).on_decision(|_, _| panicking()), 1),
            (per_minute(9, case).count_if(|_| panicking()), 1),
        ] {
            let limiter = limiter_of(&layer);
            let service = layer.layer(service_fn(async |_: Request<Body>| {
                Ok::<_, Infallible>(Response::new(Body::empty()))
            }));
            let outcome = tokio::spawn(async { service.oneshot(get("/")).await }).await;
            assert!(outcome.expect_err("it panics").is_panic());
            for _ in 0..20 {
                tokio::task::yield_now().await;
            }
            let standing = limiter.peek(Key::global()).await.expect("the store answers");
            assert_eq!(standing.used(), left);
        }
    }
}

/// A clock of the app that panics from its reading of this number on, so many times.
#[derive(Clone, Default)]
pub(crate) struct FailingClock {
    pub(crate) at: Arc<AtomicI64>,
    pub(crate) times: Arc<AtomicI64>,
}

impl Clock for FailingClock {
    fn now_ms(&self) -> u64 {
        let panics = self.at.fetch_sub(1, Ordering::SeqCst) <= 1
            && self.times.fetch_sub(1, Ordering::SeqCst) > 0;
        assert!(!panics, "on purpose");
        1_700_000_060_500
    }
}

/// Each limit is corrected by itself, and once: a second time would take what others have paid for.
#[test]
fn a_correction_that_panics_leaves_the_others_and_is_not_made_again() {
    for (at, times, left) in [(1, 1, [4, 3]), (2, 1, [3, 4]), (1, 9, [4, 4]), (2, 9, [3, 4])] {
        let clock = FailingClock::default();
        let limits = ["one", "two"].map(|name| Quota::per_minute(5).name(name));
        let limits = Limits::new(limits.map(|limit| limit.key(Key::global())));
        let limits = limits.store(MemoryStore::new().clock(clock.clone()));
        let layer = FixedWindowLayer::new(&limits).reject(EmptyBody);
        for _ in 0..3 {
            let service = service_fn(async |_| Ok::<_, Infallible>(Response::<Body>::default()));
            let Ok(_) = block_on(layer.clone().layer(service).oneshot(get("/")));
        }
        let fails = clock.clone();
        let inner = service_fn(move |_| {
            fails.times.store(times, Ordering::SeqCst);
            fails.at.store(at, Ordering::SeqCst);
            ready(Ok::<_, Infallible>(Response::<Body>::default()))
        });
        let layer = layer.refund_dropped().count_if(|_| false);
        let Ok(_) = block_on(layer.layer(inner).oneshot(get("/")));
        clock.times.store(0, Ordering::SeqCst);
        let used = ["one", "two"].map(|name| {
            let standing = block_on(limits.of(name).peek(Key::global()));
            standing.expect("memory answers").used()
        });
        assert_eq!(used, left, "{at}, {times} times");
    }
}

#[tokio::test]
async fn a_completed_request_is_not_refunded_when_its_future_is_dropped() {
    for case in CASES {
        for layer in [
            per_minute(9, case).refund_dropped(),
            per_minute(9, case).refund_dropped().count_if(|_| true),
            layered(everyone(9).shadow(), case).refund_dropped().count_if(|_| true),
        ] {
            let limiter = limiter_of(&layer);
            let service = layer.layer(service_fn(async |_: Request<Body>| {
                Ok::<_, Infallible>(Response::new(Body::empty()))
            }));
            let mut future = Box::pin(service.oneshot(get("/")));
            let Ok(_) = (&mut future).await;
            drop(future);
            for _ in 0..20 {
                tokio::task::yield_now().await;
            }
            let standing = limiter.peek(Key::global()).await.expect("the store answers");
            assert_eq!(standing.used(), 1);
        }
    }
}
