//! A request that is dropped before its charge is sent, or panics, costs what it is set to. At other
//! moments, requests are dropped by the random programs, and by those of `queue_random`.

use std::convert::Infallible;
use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use axum::body::Body;
use http::Response;
use tokio::time::sleep;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_fixed_window::testing::block_on;
use tower_fixed_window::{Clock, EmptyBody, FixedWindowLayer, Key, Limits, MemoryStore, Quota};

use crate::support::{
    CASES, FarStore, beside, corrected, everyone, get, inner, limiter_of, per_minute,
};

const LONG: Duration = Duration::from_secs(600);

#[tokio::test(start_paused = true)]
async fn a_charge_that_was_not_sent_is_cancelled() {
    let settings: [fn(FixedWindowLayer) -> FixedWindowLayer; 3] =
        [|layer| layer, |layer| layer.refund_dropped(), |layer| layer.queue(9, LONG)];
    for (limits, set) in (1..=3).flat_map(|limits| settings.map(|set| (limits, set))) {
        let store = FarStore::new(|| 10);
        let limits = beside(everyone(2), limits).store(store.clone());
        drop(set(FixedWindowLayer::new(limits)).layer(service_fn(inner)).call(get("/")));
        sleep(Duration::from_millis(100)).await;
        assert_eq!(store.sent.load(Ordering::SeqCst), 0);
        assert_eq!(store.memory.live_entries(), 0);
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
            let service = layer.layer(service_fn(inner));
            let outcome = tokio::spawn(async { service.oneshot(get("/")).await }).await;
            assert!(outcome.expect_err("it panics").is_panic());
            corrected().await;
            let standing = limiter.peek(Key::global()).await.expect("the store answers");
            assert_eq!(standing.used(), left);
        }
    }
}

/// A clock of the app that panics from its reading of this number on, so many times.
#[derive(Clone, Default)]
pub(crate) struct FailingClock {
    at: Arc<AtomicI64>,
    times: Arc<AtomicI64>,
}

impl FailingClock {
    pub(crate) fn fail(&self, at: i64, times: i64) {
        self.times.store(times, Ordering::SeqCst);
        self.at.store(at, Ordering::SeqCst);
    }
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
            let Ok(_) = block_on(layer.layer(service_fn(inner)).oneshot(get("/")));
        }
        let fails = clock.clone();
        let inner = service_fn(move |_| {
            fails.fail(at, times);
            ready(Ok::<_, Infallible>(Response::<Body>::default()))
        });
        let layer = layer.refund_dropped().count_if(|_| false);
        let Ok(_) = block_on(layer.layer(inner).oneshot(get("/")));
        clock.fail(0, 0);
        let used = ["one", "two"].map(|name| {
            let standing = block_on(limits.limiter(name).peek(Key::global()));
            standing.expect("memory answers").used()
        });
        assert_eq!(used, left, "{at}, {times} times");
    }
}
