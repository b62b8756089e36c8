//! Limits in shadow mode, alone and beside others that can refuse (S37).

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::routing::any;
use futures_util::FutureExt;
use http::{Request, Response, StatusCode};
use tokio::time::{Instant, sleep};
use tower::{Layer, ServiceExt};
use tower_fixed_window::store::{Adjust, Charge, OnStoreFailure, Remote, Reply, Scope};
use tower_fixed_window::testing::{ask, ask_around, block_on};
use tower_fixed_window::{
    Decision, FixedWindowLayer, Key, Limit, Limits, ManualClock, MemoryStore, Quota, Store,
    StoreError, TrueCost,
};

use crate::support::{ANSWERS, NOW_MS, TestStore, limit_headers};

const NAMES: [&str; 3] = ["one", "two", "three"];

/// A limit of each name, from one to three of them.
fn limits(count: usize) -> Vec<Limit> {
    let limit = |name: &&str| Quota::per_minute(9).name(name).key(Key::global());
    NAMES[..count].iter().map(limit).collect()
}

fn store() -> MemoryStore {
    MemoryStore::new().clock(ManualClock::at_ms(NOW_MS))
}

fn used_of(limits: &Limits, name: &str) -> u64 {
    block_on(limits.of(name).peek(Key::global())).expect("it answers").used()
}

#[test]
fn a_limit_in_shadow_never_refuses_is_charged_behind_the_others_and_is_in_no_field() {
    // It may be the first.
    for place in [0, 1] {
        let mut all = vec![Quota::per_minute(2).name("requests").key(Key::global())];
        all.insert(place, Quota::per_minute(1).name("tokens").key(Key::global()).shadow());
        let limits = Limits::new(all).store(store());
        let layer = FixedWindowLayer::new(&limits).count_if(|response| response.status != 204);
        let used = || ["requests", "tokens"].map(|name| used_of(&limits, name));
        let shown = |response: &Response<_>| {
            let fields = limit_headers(response);
            let of = |field| fields.get(field).copied().unwrap_or_default().to_owned();
            (response.status().as_u16(), of("remaining"), of("resource"))
        };
        let is = |status, remaining: &str, name: &str| (status, remaining.into(), name.into());
        let no_content = any(async || StatusCode::NO_CONTENT);
        assert_eq!(ask_around(&layer, no_content, Request::get("/")).status(), 204);
        assert_eq!(used(), [0, 0], "both are given back");
        for remaining in ["1", "0"] {
            let response = ask(&layer, Request::get("/"));
            assert_eq!(shown(&response), is(200, remaining, "requests"));
        }
        assert_eq!(used(), [2, 1]);
        assert_eq!(shown(&ask(&layer, Request::get("/"))), is(429, "0", "requests"));
        limits.of("tokens").set_shadow(false);
        limits.of("requests").set_quotas(Quota::per_minute(9));
        assert_eq!(shown(&ask(&layer, Request::get("/"))), is(429, "0", "tokens"));
        assert_eq!(used(), [2, 1]);

        limits.into_iter().for_each(|limiter| limiter.set_shadow(true));
        assert_eq!(shown(&ask(&layer, Request::get("/"))), is(200, "", ""));
        assert_eq!(used(), [3, 1]);
    }
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
                to.lock().unwrap().push((decision.allowed(), decision.is_shadow(), names));
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
            for _ in 0..50 {
                tokio::task::yield_now().await;
            }
            let case = format!("{mood:?}, {hook:?}, {shadows} in shadow mode, refund {refund}");
            // A request passes though a warning of it panicked.
            assert_eq!(panicked, hook.is_none(), "{case}");
            let used = NAMES.map(|name| limits.of(name).peek(Key::global()));
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
        let asked = tokio::time::timeout(Duration::from_millis(50), app.oneshot(request)).await;
        assert_eq!(asked.is_err(), path == "/dropped");
        for _ in 0..50 {
            tokio::task::yield_now().await;
        }
        let used = limits.of("two").peek(Key::global()).await.expect("an answer").used();
        assert_eq!(used, count, "{path}");
    }
}

/// A store that answers after a second.
struct Late(MemoryStore);

impl Store for Late {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        let (store, charge) = (self.0.clone(), charge.to_owned());
        Reply::later(async move {
            sleep(Duration::from_secs(1)).await;
            store.charge(charge.as_charge()).await
        })
    }

    fn charges_together(&self) -> bool {
        true
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

/// A limit in shadow mode is awaited where no other one can refuse. Beside those that can, it is
/// charged when they have passed, and the request waits for them only.
#[tokio::test(start_paused = true)]
async fn a_request_waits_once_whatever_is_in_shadow_mode() {
    for count in 1..=3 {
        for shadows in 1..=count {
            let of = |(i, limit): (usize, Limit)| if i < shadows { limit.shadow() } else { limit };
            let all = limits(count).into_iter().enumerate().map(of);
            let memory = store();
            let limits = Limits::new(all).store(Late(memory.clone()));
            let app = FixedWindowLayer::new(&limits).layer(any(async || "hello"));
            let began = Instant::now();
            app.oneshot(Request::new(Body::empty())).await.expect("infallible");
            assert_eq!(began.elapsed().as_secs(), 1, "{shadows} of {count} in shadow mode");
            sleep(Duration::from_secs(2)).await;
            assert_eq!(memory.live_entries(), count, "all were charged");
        }
    }
}
