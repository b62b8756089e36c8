//! `.track_refused(..)`: which keys and routes a limit refused lately.

use std::collections::HashMap;
use std::thread;

use axum::routing::get;
use proptest::prelude::*;
use tower_fixed_window::{Refused, RefusedKey, RefusedRoute};

use crate::prelude::*;
use crate::warnings::ask;

const QUARTER: Duration = secs(15 * 60);

fn at(ms: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(ms)
}

fn limit(tokens: u64) -> Limit {
    Quota::per_hour(tokens).name("api").key(header("x-key")).track_refused(100)
}

fn refused(limiter: &Limiter) -> Refused {
    limiter.refused().expect("they are counted")
}

/// The counts by key.
fn counts(refused: &Refused) -> HashMap<Key, u64> {
    refused.keys.iter().map(|of| (of.key.clone(), of.count)).collect()
}

fn count(limiter: &Limiter, key: &str) -> u64 {
    let counts = counts(&refused(limiter));
    counts.get(&Key::secret(key)).or(counts.get(&Key::from(key))).copied().unwrap_or_default()
}

#[tokio::test]
async fn the_list_says_how_often_since_when_by_which_quota_and_until_when() {
    let clock = ManualClock::at_ms(NOW_MS);
    let store = MemoryStore::new().clock(clock.clone());
    let quotas = Quota::per_minute(2).and(Quota::per_hour(3));
    let api = Limit::new(quotas).name("api").track_refused(10).store(store);
    assert!(refused(&api).keys.is_empty());

    for _ in 0..4 {
        let _ = api.check("a").await.expect("memory answers");
    }
    for _ in 0..2 {
        let _ = api.charge("never", 5).await.expect("memory answers");
    }
    let list = refused(&api);
    let of = |key: &str| {
        let found = list.keys.iter().find(|of| of.key == Key::from(key));
        found.cloned().expect("it was refused")
    };
    let RefusedKey { count, error, share, first, last, quota, retry_at, .. } = of("a");
    assert_eq!((count, error, share), (2, 0, 0.5));
    assert_eq!((first, last), (at(NOW_MS), at(NOW_MS)));
    assert_eq!(quota, Quota::per_minute(2));
    assert_eq!(retry_at, Some(at(1_700_000_100_000)));
    // No window grants five.
    assert_eq!((of("never").count, of("never").retry_at), (2, None));
    assert_eq!((list.total, list.keys.len()), (4, 2));

    // The other quota refuses then.
    clock.advance(secs(60));
    for _ in 0..2 {
        let _ = api.check("a").await.expect("memory answers");
    }
    let a = &refused(&api).keys[0];
    assert_eq!((a.count, a.quota), (3, Quota::per_hour(3)));
    assert_eq!((a.first, a.last), (at(NOW_MS), at(NOW_MS + 60_000)));
    assert_eq!(a.retry_at, Some(at(1_700_002_800_000)));
}

#[tokio::test]
async fn refusals_are_counted_however_they_are_asked_for() {
    for mood in ANSWERS {
        // In a layer.
        let api = limit(1).store(TestStore::new(mood));
        let layer = FixedWindowLayer::new(&api);
        for status in [200, 429, 429] {
            assert_eq!(ask(&layer, "/", "a").await, status);
        }
        assert_eq!(count(&api, "a"), 2, "{mood:?}");

        // Without HTTP, with and without a receipt, under other quotas too.
        let api = limit(1).store(TestStore::new(mood));
        assert!(api.check("b").await.expect("an answer").is_allowed());
        assert!(!api.check("b").await.expect("an answer").is_allowed());
        assert!(api.charge("b", 1).await.expect("an answer").is_err());
        assert!(api.reserve("b", 2).await.expect("an answer").is_err());
        let plan = api.with_quotas(Quota::per_hour(0));
        assert!(!plan.check("b").await.expect("an answer").is_allowed());
        api.set_quotas(Quota::per_day(0));
        assert!(!api.check("b").await.expect("an answer").is_allowed());
        assert_eq!((count(&api, "b"), count(&plan, "b")), (5, 5), "{mood:?}");
        assert_eq!(refused(&api).keys[0].quota, Quota::per_day(0));

        // Remembered ones too: three of these are.
        let far = limit(1).store(TestStore::new(Mood::Later).shared());
        for _ in 0..5 {
            let _ = far.check("a").await.expect("an answer");
        }
        assert_eq!(count(&far, "a"), 4);

        // Peeks and passes are not refusals.
        let _ = api.peek("b").await.expect("an answer");
        let _ = Limits::from(&api).peek([Line::new("api", "c", 9)]).await.expect("an answer");
        assert_eq!(refused(&api).total, 5);

        // Several limits at once: only those that refuse, also under a plan of the line.
        let limits = Limits::new([limit(1), limit(9).name("tokens")]).store(TestStore::new(mood));
        let zero = Quotas::from(Quota::per_hour(0));
        for plan in [None, None, Some(&zero)] {
            let line = |name, key| Line::new(name, key, 1);
            let tokens = line("tokens", "t");
            let tokens = plan.map_or(tokens.clone(), |plan| tokens.with_quotas(plan));
            let _ = limits.check([line("api", "a"), tokens]).await.expect("an answer");
            let _ = limits.peek([line("api", "a")]).await.expect("an answer");
        }
        assert_eq!(
            (count(limits.limiter("api"), "a"), refused(limits.limiter("api")).total),
            (2, 2)
        );
        assert_eq!(
            (count(limits.limiter("tokens"), "t"), refused(limits.limiter("tokens")).total),
            (1, 1)
        );
    }
}

#[tokio::test]
async fn a_layer_of_several_limits_counts_each_by_its_own_key_and_shadows_too() {
    for mood in ANSWERS {
        let limits = Limits::new([
            limit(2),
            Quota::per_hour(1).name("all").key(Key::global()).shadow(),
            limit(9).name("never").track_refused(9),
        ]);
        let untracked = limits.limiter("all").refused();
        assert!(untracked.is_none(), "a list of none would say that nobody is limited");
        let watched = Quota::per_hour(1).name("all").key(Key::global());
        let watched = watched.shadow().track_refused(9);
        let limits = Limits::new([limit(2), watched, limit(9).name("never")]);
        let limits = limits.store(TestStore::new(mood));
        let layer = FixedWindowLayer::new(&limits);
        for (path, key, status) in
            [("/a", "x", 200), ("/b", "x", 200), ("/b", "x", 429), ("/b", "y", 200)]
        {
            assert_eq!(ask(&layer, path, key).await, status);
        }
        // Shadow charges in the background are done by now.
        corrected().await;
        assert_eq!(
            (count(limits.limiter("api"), "x"), refused(limits.limiter("api")).total),
            (1, 1)
        );
        assert_eq!(refused(limits.limiter("never")).total, 0);
        // Shadow mode let two requests pass. The limit took no part in the refused one.
        let shadow = refused(limits.limiter("all"));
        assert_eq!((shadow.total, shadow.keys[0].key == Key::global()), (2, true), "{mood:?}");
        assert_eq!((shadow.routes[0].route.as_str(), shadow.routes[0].count), ("b", 2));
    }
}

#[tokio::test]
async fn a_route_is_the_path_that_axum_matched_or_the_first_segment() {
    let api = Limiter::new(limit(0));
    let layer = FixedWindowLayer::new(&api);
    for path in ["/", "/static/a.js", "/static", "/static/b/c.js?d=/e"] {
        assert_eq!(ask(&layer, path, "a").await, 429);
    }
    let app = Router::new().route("/users/{id}", get(async || "a user")).layer(layer);
    for path in ["/users/1", "/users/2", "/users/3", "/users/4"] {
        let request = Request::get(path).header("x-key", "a").body(Body::empty()).expect("a path");
        let Ok(response) = app.clone().oneshot(request).await;
        assert_eq!(response.status(), 429);
    }
    let _ = api.check("a").await.expect("memory answers");
    let list = refused(&api);
    assert_eq!(list.total, 9, "without a request there is no route");
    let routes: Vec<_> = list.routes.iter().map(|of| (of.route.as_str(), of.count)).collect();
    assert_eq!(routes, [("/users/{id}", 4), ("static", 3), ("", 1)]);
}

/// What a client sends is kept, so that it has a bound.
#[tokio::test]
async fn a_route_that_a_client_has_invented_is_cut() {
    let layer = FixedWindowLayer::new(limit(0));
    for end in ["b", "c/d"] {
        assert_eq!(ask(&layer, &format!("/{}{end}", "a".repeat(10_000)), "alice").await, 429);
    }
    let list = Limits::from(&layer).limiter("api").refused().expect("tracked");
    assert_eq!(list.routes.len(), 1);
    assert_eq!((list.routes[0].route.as_str(), list.routes[0].count), (&*"a".repeat(64), 2));
}

/// All keys can be tracked, none, or so many; there are as many places for routes.
#[tokio::test]
async fn keys_and_routes_are_as_many_as_places_and_those_with_the_most_refusals() {
    for (places, tracked) in [(usize::MAX, 3), (2, 2), (0, 0)] {
        let api = Limiter::new(limit(0).track_refused(places));
        let layer = FixedWindowLayer::new(&api);
        for i in 0..60_u64 {
            let (path, key) = match i % 3 {
                0 => (format!("/invented-{i}"), ["b", "c"][i as usize % 2]),
                _ => ("/popular".to_owned(), "a"),
            };
            assert_eq!(ask(&layer, &path, key).await, 429);
            assert_eq!(refused(&api).total, i + 1);
        }
        let Refused { keys, routes, .. } = refused(&api);
        assert_eq!((keys.len(), routes.len()), (tracked, if places > 9 { 21 } else { tracked }));
        let popular = |of: &RefusedRoute| of.route == "popular" && of.count >= 40;
        assert_eq!(routes.iter().any(popular), places > 0);
    }
}

#[tokio::test]
async fn what_is_no_refusal_by_a_quota_is_not_counted() {
    let store = TestStore::new(Mood::FailsLater).on_failure(OnStoreFailure::Deny);
    let api = limit(1).store(store);
    let layer = FixedWindowLayer::new(&api);
    assert_eq!(ask(&layer, "/", "a").await, 503);
    let request = Request::get("/").body(Body::empty()).expect("a path");
    let inner = service_fn(async |_| Ok::<_, Infallible>(Response::new(Body::empty())));
    let Ok(response) = layer.layer(inner).oneshot(request).await;
    assert_eq!(response.status(), 400, "its key is missing");
    assert_eq!(refused(&api).total, 0);
}

#[tokio::test]
async fn a_plan_of_a_request_is_the_quota_of_its_refusal() {
    let plan = |parts: &Parts, _: &Key| match parts.uri.path() {
        "/unlimited" => Plan::UNLIMITED,
        "/banned" => Quota::per_minute(0).into(),
        _ => Quota::per_hour(1).into(),
    };
    let limit = Limit::by_plan(plan).name("api").key(header("x-key")).track_refused(10);
    let api = limit.store(TestStore::new(Mood::Now));
    let layer = FixedWindowLayer::new(&api);
    for (path, status) in [("/unlimited", 200), ("/unlimited", 200), ("/", 200), ("/", 429)] {
        assert_eq!(ask(&layer, path, "a").await, status);
    }
    assert_eq!(refused(&api).keys[0].quota, Quota::per_hour(1));
    assert_eq!(ask(&layer, "/banned", "a").await, 429);
    let list = refused(&api);
    assert_eq!((list.total, list.keys[0].count), (2, 2));
    assert_eq!(list.keys[0].quota, Quota::per_minute(0));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waited_in_vain_is_counted_once() {
    let store = paused_memory();
    let api = limit(1).store(store);
    let layer = FixedWindowLayer::new(&api).queue(1, secs(5_000));
    assert_eq!(ask(&layer, "/", "a").await, 200);
    let asking = async || ask(&layer, "/", "a").await;
    let mut waits = Box::pin(asking());
    assert!(waits.as_mut().now_or_never().is_none());
    // The line is full.
    assert_eq!(ask(&layer, "/", "a").await, 429);
    assert_eq!(count(&api, "a"), 1);
    // The quotas change while the request waits, and grant nothing.
    api.set_quotas(Quota::per_hour(0));
    assert_eq!(waits.await, 429);
    assert_eq!(count(&api, "a"), 2);
}

#[test]
fn entries_are_of_this_quarter_of_an_hour_and_the_one_before() {
    let clock = ManualClock::at_ms(0);
    let start = 1_700_000_000_000 / 900_000 * 900_000;
    clock.set_ms(start + 899_000);
    let api = limit(0).store(MemoryStore::new().clock(clock.clone()));
    let refuse =
        |key: &str| assert!(!block_on(api.check(key)).expect("memory answers").is_allowed());
    refuse("old");
    refuse("both");
    clock.advance(secs(1));
    refuse("both");
    refuse("new");
    refuse("new");
    let list = refused(&api);
    assert_eq!((list.total, list.keys.len()), (5, 3));
    let of = |key: &str| (Key::from(key), if key == "old" { 1 } else { 2 });
    assert_eq!(counts(&list), HashMap::from(["old", "both", "new"].map(of)));
    let both = list.keys.iter().find(|of| of.key == Key::from("both")).expect("in both");
    assert_eq!((both.first, both.last), (at(start + 899_000), at(start + 900_000)));

    // Old refusals leave the list also if no key is refused any more.
    clock.advance(QUARTER);
    assert_eq!(counts(&refused(&api)), HashMap::from([of("new"), (Key::from("both"), 1)]));
    clock.advance(QUARTER);
    assert_eq!((refused(&api).total, refused(&api).keys.len()), (0, 0));
    refuse("later");
    assert_eq!(counts(&refused(&api)), HashMap::from([(Key::from("later"), 1)]));
}

#[test]
fn a_clock_that_steps_neither_hides_nor_keeps_entries_for_ever() {
    let start = 1_700_000_000_000 / 900_000 * 900_000;
    let clock = ManualClock::at_ms(start);
    let api = limit(0).store(MemoryStore::new().clock(clock.clone()));
    let refuse =
        |key: &str| assert!(!block_on(api.check(key)).expect("memory answers").is_allowed());
    refuse("a");
    // The clock steps back over a boundary, by a second.
    clock.set_ms(start - 1_000);
    refuse("a");
    assert_eq!(count(&api, "a"), 2);
    clock.set_ms(start + 1_000);
    refuse("a");
    assert_eq!(count(&api, "a"), 3);
    // All three are of the later quarter, which goes on: the next one still lists them.
    clock.set_ms(start + 901_000);
    assert_eq!(count(&api, "a"), 3);
    // The clock goes a year ahead and back: refusals of then are not current.
    clock.set_ms(start + 365 * 86_400_000);
    refuse("b");
    assert_eq!((count(&api, "a"), count(&api, "b")), (0, 1));
    clock.set_ms(start + 2_000);
    refuse("c");
    assert_eq!((count(&api, "b"), count(&api, "c")), (0, 1));
    clock.advance(2 * QUARTER);
    assert_eq!(refused(&api).total, 0);
}

#[test]
fn limits_that_are_built_twice_have_lists_of_their_own() {
    let limit = limit(0);
    let (one, other) = (Limiter::new(limit.clone()), Limiter::new(limit));
    let _ = block_on(one.check("a")).expect("memory answers");
    assert_eq!((refused(&one).total, refused(&one.clone()).total), (1, 1));
    assert_eq!(refused(&other).total, 0);
    // On another store, the list starts empty.
    let moved = Limits::new([Quota::per_hour(0).name("api").track_refused(3)]);
    let moved = moved.store(MemoryStore::new());
    let _ = block_on(moved.limiter("api").check("a")).expect("memory answers");
    assert_eq!(refused(moved.limiter("api")).total, 1);
}

#[test]
fn threads_that_refuse_at_once_lose_some_counts_and_invent_none() {
    let api = Limiter::new(Quota::per_hour(0).name("api").track_refused(4));
    thread::scope(|scope| {
        for thread in 0..4_u64 {
            let api = &api;
            scope.spawn(move || {
                for i in 0..200 {
                    let key = if i % 2 == 0 { 0 } else { 1 + thread };
                    let _ = block_on(api.check(key)).expect("memory answers");
                    if i % 10 == 0 {
                        let _ = refused(api);
                    }
                }
            });
        }
    });
    let list = refused(&api);
    assert!(list.total > 0 && list.total <= 800, "{}", list.total);
    for of in &list.keys {
        let most = if of.key == Key::from(0) { 400 } else { 100 };
        assert!(of.count - of.error <= most, "{of:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Against exact counts: each count is right within its error, the error within the bound, and
    /// each key above the bound is there, over one quarter and over two.
    #[test]
    fn counts_are_within_the_bound_of_the_algorithm(
        most in 1_usize..20,
        skew in 1_u32..6,
        quarters in prop::collection::vec(prop::collection::vec(0.0_f64..1.0, 0..400), 1..3),
    ) {
        let clock = ManualClock::at_ms(1_700_000_000_000 / 900_000 * 900_000);
        let store = MemoryStore::new().clock(clock.clone());
        let api = Quota::per_hour(0).name("api").track_refused(most).store(store);
        let mut exact: HashMap<Key, u64> = HashMap::new();
        let mut bound = 0;
        for (i, quarter) in quarters.iter().enumerate() {
            if i > 0 {
                clock.advance(QUARTER);
            }
            for random in quarter {
                let key = (random.powi(skew as i32) * 60.0) as u64;
                let _ = block_on(api.check(key)).expect("memory answers");
                *exact.entry(Key::from(key)).or_default() += 1;
            }
            bound += quarter.len() as u64 / most as u64;
        }
        let list = refused(&api);
        prop_assert_eq!(list.total, exact.values().sum::<u64>());
        prop_assert!(list.keys.len() <= most * quarters.len());
        prop_assert!(list.keys.is_sorted_by(|a, b| a.count >= b.count));
        for of in &list.keys {
            let exact = exact.get(&of.key).copied().unwrap_or_default();
            prop_assert!(of.error <= bound, "{:?} above {}", of, bound);
            prop_assert!(of.count >= exact && of.count - of.error <= exact, "{:?}: {}", of, exact);
        }
        let listed = counts(&list);
        for (key, count) in exact {
            prop_assert!(count <= bound || listed.contains_key(&key), "{} of {}", count, bound);
        }
    }
}
