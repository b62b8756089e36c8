//! Limits in shadow mode, alone and beside others that can refuse (S37): hooks and failures.
//! The random programs check what is counted and shown, and who waits for it.

use std::panic::AssertUnwindSafe;

use axum::routing::any;
use tower_fixed_window::Store;
use tower_fixed_window::store::{Adjust, Charge, OnStoreFailure, Remote, Reply, Scope};
use tower_fixed_window::testing::ask;

use crate::prelude::*;

const NAMES: [&str; 3] = ["one", "two", "three"];

/// A limit of each name, from one to three of them.
fn limits(count: usize) -> Vec<Limit> {
    let limit = |name: &&str| Quota::per_minute(9).name(name).key(Key::global());
    NAMES[..count].iter().map(limit).collect()
}

fn store() -> MemoryStore {
    MemoryStore::new().clock(ManualClock::at_ms(NOW_MS))
}

/// Each decision that the layer's hook is told: whether it passed, whether it is of shadow mode, and
/// the limits in it.
type Told = Arc<Mutex<Vec<(bool, bool, Vec<String>)>>>;

#[test]
fn a_hook_hears_of_each_request_once_and_of_shadow_mode_where_nothing_can_refuse() {
    for count in 1..=3 {
        for shadows in 1..=count {
            let shadow = |name: &str| Quota::per_minute(1).name(name).key(Key::global()).shadow();
            let mut all = limits(count);
            all.iter_mut().zip(NAMES).take(shadows).for_each(|(of, name)| *of = shadow(name));
            let heard = Told::default();
            let to = Arc::clone(&heard);
            let layer = FixedWindowLayer::new(Limits::new(all).store(store()));
            let layer = layer.on_decision(move |_, decision| {
                let names: Vec<_> = decision.limits().map(|(name, _)| name.to_owned()).collect();
                to.lock().unwrap().push((decision.is_allowed(), decision.is_shadow(), names));
            });
            for allowed in [true, false] {
                assert_eq!(ask(&layer, Request::get("/")).status(), 200);
                let heard: Vec<_> = heard.lock().unwrap().drain(..).collect();
                let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
                let expected = match &NAMES[shadows..count] {
                    [] => (allowed, true, names(&NAMES[..1])),
                    others => (true, false, names(others)),
                };
                assert_eq!(heard, [expected], "{shadows} of {count} in shadow mode");
            }
        }
    }
}

/// Wherever the hook is, each limit is charged, warned of and corrected as without it (S41).
#[tokio::test]
async fn a_hook_that_panics_keeps_nothing_from_another_limit() {
    // Of the layer, or of the limit at this place.
    let hooks = [None, Some(0), Some(1), Some(2)];
    for (mood, hook) in ANSWERS.into_iter().flat_map(|mood| hooks.map(|hook| (mood, hook))) {
        for (shadows, refund) in (0..=3).flat_map(|shadows| [(shadows, false), (shadows, true)]) {
            let warned = Arc::new(Mutex::new(Vec::new()));
            let all = limits(3).into_iter().enumerate().map(|(i, limit)| {
                let warned = Arc::clone(&warned);
                let limit = limit.warn_at(1, move |near| {
                    assert_ne!(hook, Some(i), "on purpose");
                    warned.lock().unwrap().push(near.name.to_owned());
                });
                // The last ones, then the first.
                if (i + 1) % 3 < shadows { limit.shadow() } else { limit }
            });
            let limits = Limits::new(all).store(TestStore::new(mood));
            let layer = FixedWindowLayer::new(&limits)
                .on_decision(move |_, _| assert!(hook.is_some(), "on purpose"));
            let layer = if refund { layer.refund_dropped() } else { layer };
            let app = layer.layer(any(async || "hello"));
            let request = app.oneshot(Request::new(Body::empty()));
            let panicked = AssertUnwindSafe(request).catch_unwind().await.is_err();
            corrected().await;
            let case = format!("{mood:?}, {hook:?}, {shadows} in shadow mode, refund {refund}");
            // A request passes though a warning of it panicked.
            assert_eq!(panicked, hook.is_none(), "{case}");
            let used = NAMES.map(|name| limits.limiter(name).peek(Key::global()));
            for used in used {
                let expected = u64::from(!(panicked && refund));
                assert_eq!(used.await.expect("an answer").used(), expected, "{case}");
            }
            let mut warned = warned.lock().unwrap().clone();
            warned.sort();
            let mut others: Vec<_> =
                (0..3).filter(|i| hook != Some(*i)).map(|i| NAMES[i]).collect();
            others.sort();
            assert_eq!(warned, others, "{case}");
        }
    }
}

/// A store that fails for the limit "one".
#[derive(Clone)]
struct FailsOne(MemoryStore);

impl Store for FailsOne {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        match charge.lines().next().expect("a line").0.scope.name() {
            "one" => Reply::from(Err(StoreError::new("failed on demand"))),
            _ => self.0.charge(charge),
        }
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        self.0.adjust(adjust)
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        self.0.reset(scope, key)
    }

    fn is_shared(&self) -> bool {
        false
    }
}

#[tokio::test]
async fn beside_a_limit_whose_store_fails_one_in_shadow_mode_is_corrected() {
    for (path, count) in [("/", 1), ("/cost", 5), ("/free", 0), ("/dropped", 0)] {
        let limit = |name| Quota::per_minute(9).name(name).key(Key::global()).settled();
        let store = FailsOne(store());
        let failing = Remote::around(store.clone()).on_failure(OnStoreFailure::Allow);
        let limits = Limits::new([limit("one"), limit("two").shadow()]).store(failing);
        let layer = FixedWindowLayer::new(&limits).refund_dropped();
        let layer = match path {
            "/free" => layer.count_if(|_| false),
            _ => layer,
        };
        let app = layer.layer(any(async |request: Request<Body>| {
            let mut response = Response::new(Body::empty());
            match request.uri().path() {
                "/cost" => _ = response.extensions_mut().insert(TrueCost::of("two", 5)),
                "/dropped" => std::future::pending().await,
                _ => {}
            }
            response
        }));
        let request = Request::get(path).body(Body::empty()).expect("a path");
        let asked = tokio::time::timeout(ms(50), app.oneshot(request)).await;
        assert_eq!(asked.is_err(), path == "/dropped");
        corrected().await;
        let used = limits.limiter("two").peek(Key::global()).await.expect("an answer").used();
        assert_eq!(used, count, "{path}");
    }
}
