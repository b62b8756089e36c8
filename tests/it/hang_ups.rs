//! A request that is dropped before its charge is sent, or panics, costs what it is set to, and a
//! correction takes place if the runtime lives long enough. At other moments, requests are dropped by the
//! random programs, and by those of `queue_random`.

use std::future::ready;
use std::sync::atomic::AtomicI64;

use tokio::runtime::{Builder, Runtime};
use tower_fixed_window::Clock;

use crate::prelude::*;

const LONG: Duration = secs(600);

#[tokio::test(start_paused = true)]
async fn a_charge_that_was_not_sent_is_cancelled() {
    let settings: [fn(FixedWindowLayer) -> FixedWindowLayer; 3] =
        [|layer| layer, |layer| layer.refund_dropped(), |layer| layer.queue(9, LONG)];
    for (limits, set) in (1..=3).flat_map(|limits| settings.map(|set| (limits, set))) {
        let (sent, memory) = (Arc::new(AtomicUsize::new(0)), paused_memory());
        let sends = Arc::clone(&sent);
        let limits = beside(everyone(2), limits).store(far_from(memory.clone(), move || {
            sends.fetch_add(1, Ordering::SeqCst);
            10
        }));
        drop(set(FixedWindowLayer::new(limits)).layer(service_fn(inner)).call(get("/")));
        sleep(ms(100)).await;
        assert_eq!(sent.load(Ordering::SeqCst), 0);
        assert_eq!(memory.live_entries(), 0);
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

/// A runtime under which one request has been answered whose charge is to be given back.
fn answered(store: &TestStore) -> Runtime {
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.expect("a runtime");
    let limit = Quota::per_minute(5).name("login").key(Key::global()).store(store.clone());
    let layer = FixedWindowLayer::new(limit).count_if(|_| false);
    let Ok(response) = runtime.block_on(limited(layer).oneshot(get("/")));
    assert_eq!(response.status(), StatusCode::OK);
    runtime
}

/// In memory it is complete with the response, and elsewhere if the runtime lives for the store's
/// deadline. If it is lost, the charge stays.
#[test]
fn a_refund_is_complete_if_the_runtime_lives_for_as_long_as_it_takes() {
    for (mood, lives_for, left) in [(Mood::Now, 0, 0), (Mood::Later, 0, 1), (Mood::Later, 250, 0)] {
        let store = TestStore::new(mood);
        let runtime = answered(&store);
        if lives_for > 0 {
            runtime.block_on(async { sleep(ms(lives_for)).await });
        }
        drop(runtime);
        store.set(Mood::Now);
        let limiter = Quota::per_minute(5).name("login").store(store);
        let used = block_on(limiter.peek(Key::global())).expect("an answer").used();
        assert_eq!(used, left, "{mood:?} for {lives_for} ms");
    }
}
