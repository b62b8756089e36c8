//! `.warn_at(..)`: a hook and a metric when a key has used a share of its limit.

use std::panic::catch_unwind;

use proptest::prelude::*;
use tower_fixed_window::NearLimit;

use crate::prelude::*;

/// The warnings: name, key, quota, used, percent.
type Warned = Arc<Mutex<Vec<(String, Key, String, u64, u8)>>>;

fn warning(limit: impl Into<Limit>, percent: u8, warned: &Warned) -> Limit {
    let warned = Arc::clone(warned);
    limit.into().warn_at(percent, move |near: &NearLimit<'_>| {
        let NearLimit { name, key, quota, usage, percent, .. } = *near;
        let of = (name.to_owned(), key.clone(), quota.to_string(), usage.used(), percent);
        warned.lock().expect("no panic").push(of);
    })
}

/// A limit of ten per hour that warns at 80%.
fn limit_of_ten(warned: &Warned) -> Limit {
    warning(Quota::per_hour(10).name("api").key(header("x-key")), 80, warned)
}

/// The counts at which warnings came.
fn used(warned: &Warned) -> Vec<u64> {
    warned.lock().expect("no panic").iter().map(|(_, _, _, used, _)| *used).collect()
}

fn keys(warned: &Warned) -> Vec<Key> {
    warned.lock().expect("no panic").iter().map(|(_, key, ..)| key.clone()).collect()
}

pub(crate) async fn ask(layer: &FixedWindowLayer, path: &str, key: &str) -> u16 {
    let inner = service_fn(async |request: Request<()>| {
        let mut response = Response::new(());
        if let Some(cost) = request.uri().path().strip_prefix("/cost/") {
            response.extensions_mut().insert(TrueCost::of("api", cost.parse().expect("a number")));
        } else if request.uri().path() == "/free" {
            *response.status_mut() = http::StatusCode::NOT_MODIFIED;
        }
        Ok::<_, Infallible>(response)
    });
    let layer = layer.clone().reject(EmptyBody);
    let request = Request::get(path).header("x-key", key).body(()).expect("a path");
    let Ok(response) = layer.layer(inner).oneshot(request).await;
    // Corrections and shadow charges are made in the background.
    corrected().await;
    response.status().as_u16()
}

#[tokio::test]
async fn each_key_is_warned_of_once_in_a_window_however_it_is_charged() {
    for mood in ANSWERS {
        // In a layer.
        let warned = Warned::default();
        let api = limit_of_ten(&warned).store(TestStore::new(mood));
        let layer = FixedWindowLayer::new(&api);
        for i in 0..24 {
            let status = ask(&layer, "/", if i % 2 == 0 { "a" } else { "b" }).await;
            assert_eq!(status, if i < 20 { 200 } else { 429 });
        }
        assert_eq!(used(&warned), [8, 8], "{mood:?}");
        assert_eq!(keys(&warned), [Key::secret("a"), Key::secret("b")]);

        // Without HTTP.
        let warned = Warned::default();
        let api = limit_of_ten(&warned).store(TestStore::new(mood));
        for _ in 0..12 {
            let _ = api.check("c").await.expect("an answer");
            let _ = api.peek("c").await.expect("an answer");
        }
        let of = ("api".to_owned(), Key::from("c"), "10/hour".to_owned(), 8, 80);
        assert_eq!(*warned.lock().expect("no panic"), [of], "{mood:?}");
        assert!(api.charge("d", 7).await.expect("an answer").is_ok());
        assert!(api.charge("d", 9).await.expect("an answer").is_err(), "it takes nothing");
        assert!(api.charge("d", 0).await.expect("an answer").is_ok());
        assert_eq!(used(&warned).len(), 1);
        assert!(api.charge("d", 3).await.expect("an answer").is_ok());
        assert_eq!(used(&warned), [8, 10], "a charge that jumps over the share");

        // Several limits at once: each by its own key, and only if all have passed.
        let warned = Warned::default();
        let tokens = warning(Quota::per_hour(100).name("tokens"), 50, &warned);
        let limits = Limits::new([limit_of_ten(&warned), tokens]).store(TestStore::new(mood));
        let lines = |cost| [Line::new("api", "a", 1), Line::new("tokens", "t", cost)];
        for cost in [40, 70, 20] {
            let _ = limits.check(lines(cost)).await.expect("an answer");
        }
        assert_eq!((used(&warned), keys(&warned)), (vec![60], vec![Key::from("t")]), "{mood:?}");
        for _ in 0..9 {
            let _ = limits.charge(lines(1)).await.expect("an answer");
        }
        assert_eq!(used(&warned), [60, 8], "{mood:?}");
    }
}

#[tokio::test]
async fn the_next_window_warns_again_and_several_shares_and_quotas_each_warn() {
    let warned = Warned::default();
    let clock = ManualClock::at_ms(NOW_MS);
    let quotas = Quota::per_minute(4).and(Quota::per_hour(8));
    let limit = warning(warning(quotas.name("api"), 50, &warned), 100, &warned);
    let api = limit.store(MemoryStore::new().clock(clock.clone()));
    let ask = async || (0..5).map(|_| api.check("a")).collect::<Vec<_>>();
    let seen = || {
        let mut warned = warned.lock().expect("no panic");
        let all: Vec<_> =
            warned.drain(..).map(|(_, _, quota, used, of)| (quota, used, of)).collect();
        all
    };
    let of = |quota: &str, used, percent| (quota.to_owned(), used, percent);
    drop(ask().await);
    assert_eq!(seen(), [of("4/minute", 2, 50), of("8/hour", 4, 50), of("4/minute", 4, 100)]);
    clock.advance(secs(60));
    drop(ask().await);
    assert_eq!(seen(), [of("4/minute", 2, 50), of("4/minute", 4, 100), of("8/hour", 8, 100)]);
    clock.advance(secs(3_600));
    drop(ask().await);
    assert_eq!(seen(), [of("4/minute", 2, 50), of("8/hour", 4, 50), of("4/minute", 4, 100)]);
}

#[tokio::test]
async fn refunds_and_charges_reach_a_share_twice_and_true_costs_reach_it_later() {
    for mood in ANSWERS {
        let warned = Warned::default();
        let api = limit_of_ten(&warned).store(TestStore::new(mood));
        let receipt = api.charge("a", 8).await.expect("an answer").expect("it passes");
        api.refund(receipt).await.expect("an answer");
        let receipt = api.charge("a", 9).await.expect("an answer").expect("it passes");
        assert_eq!(used(&warned), [8, 9], "{mood:?}");
        // The count is above the share already.
        api.settle(receipt, 20).await.expect("an answer");
        assert_eq!(used(&warned), [8, 9]);
        // The true cost reaches the share. The next charge starts above it.
        let receipt = api.charge("b", 2).await.expect("an answer").expect("it passes");
        api.settle(receipt, 9).await.expect("an answer");
        assert!(api.check("b").await.expect("an answer").is_allowed());
        assert_eq!(used(&warned), [8, 9, 9], "{mood:?}");

        // In a layer, the same.
        let warned = Warned::default();
        let api = limit_of_ten(&warned).settled().store(TestStore::new(mood));
        let layer = FixedWindowLayer::new(&api).count_if(|response| response.status != 304);
        assert_eq!(ask(&layer, "/cost/9", "a").await, 200);
        assert_eq!(ask(&layer, "/", "a").await, 200);
        for _ in 0..10 {
            assert_eq!(ask(&layer, "/free", "b").await, 304);
        }
        assert_eq!(used(&warned), [9], "{mood:?}");
    }
}

#[tokio::test]
async fn a_limit_that_changes_warns_by_the_limit_in_force() {
    for mood in ANSWERS {
        let warned = Warned::default();
        let api = limit_of_ten(&warned).store(TestStore::new(mood));
        let layer = FixedWindowLayer::new(&api);
        let ask = async |times: u64| {
            for _ in 0..times {
                let _ = ask(&layer, "/", "a").await;
            }
        };
        ask(8).await;
        api.set_quotas(Quota::per_hour(20));
        ask(8).await;
        // The lowered limit is below the count, so no charge reaches its share.
        api.set_quotas(Quota::per_hour(18));
        ask(9).await;
        assert_eq!(used(&warned), [8, 16], "{mood:?}");
        // A temporary limit of one key.
        let later = UNIX_EPOCH + ms(NOW_MS + 60_000);
        api.set_key_quotas_until(Key::secret("a"), Quota::per_hour(100), later);
        ask(70).await;
        assert_eq!(used(&warned), [8, 16, 80], "{mood:?}");
        let plan = api.with_quotas(Quota::per_hour(1_000));
        let key = Key::secret("b");
        let _ = plan.charge(key.clone(), 800).await.expect("an answer");
        assert_eq!(used(&warned), [8, 16, 80, 800]);
        api.set_quotas(Quota::per_hour(0));
        let _ = api.check(key).await.expect("an answer");
        assert_eq!(used(&warned).len(), 4, "a limit of 0 has no share");
    }
}

/// A plan of requests, and the quotas of a line.
#[tokio::test]
async fn a_plan_warns_at_its_own_share_and_an_unlimited_one_never() {
    let warned = Warned::default();
    let plan = |parts: &Parts, _: &Key| match parts.uri.path() {
        "/free" => Plan::UNLIMITED,
        "/pro" => Quota::per_hour(20).into(),
        _ => Quota::per_hour(10).into(),
    };
    let limit = Limit::by_plan(plan).name("api").key(header("x-key"));
    let limit = warning(limit, 80, &warned);
    let layer = FixedWindowLayer::new(limit.store(TestStore::new(Mood::Now)));
    for _ in 0..30 {
        let _ = ask(&layer, "/free", "a").await;
        let _ = ask(&layer, "/pro", "a").await;
    }
    assert_eq!(used(&warned), [16]);

    let warned = Warned::default();
    let limits = Limits::new([limit_of_ten(&warned)]);
    let pro: Quotas = "100/hour".parse().expect("quotas");
    for _ in 0..11 {
        let _ = limits.check([Line::new("api", "a", 8).with_quotas(&pro)]).await.expect("memory");
    }
    assert_eq!(used(&warned), [80]);
}

#[tokio::test]
async fn limits_in_shadow_mode_and_in_layers_of_several_warn() {
    for mood in ANSWERS {
        let warned = Warned::default();
        let all = warning(Quota::per_hour(5).name("all").key(Key::global()).shadow(), 80, &warned);
        let limits = Limits::new([limit_of_ten(&warned), all]).store(TestStore::new(mood));
        let layer = FixedWindowLayer::new(&limits);
        for _ in 0..9 {
            assert_eq!(ask(&layer, "/", "a").await, 200);
        }
        assert_eq!(
            (used(&warned), keys(&warned)),
            (vec![4, 8], vec![Key::global(), Key::secret("a")])
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_warns_in_its_turn() {
    let warned = Warned::default();
    let limit = warning(Quota::per_second(2).name("api").key(header("x-key")), 100, &warned);
    let api = limit.store(paused_memory());
    let layer = FixedWindowLayer::new(&api).queue(9, secs(60));
    let five = (0..5).map(|_| ask(&layer, "/", "a"));
    let statuses = futures_util::future::join_all(five).await;
    assert_eq!(statuses, [200; 5]);
    // Two windows are full, and the third is not.
    assert_eq!(used(&warned), [2, 2]);
}

#[tokio::test]
async fn saved_tokens_are_spent_first_and_reserved_ones_begin_a_window_above_the_share() {
    let (warned, clock) = (Warned::default(), ManualClock::at_ms(NOW_MS));
    let quota = Quota::per_minute(10).rollover_up_to(15);
    let api = warning(quota.name("api"), 80, &warned);
    let api = api.store(MemoryStore::new().clock(clock.clone()));
    let _ = api.check("a").await.expect("memory answers");
    clock.advance(secs(60));
    for _ in 0..15 {
        assert!(api.check("a").await.expect("memory answers").is_allowed());
    }
    // 13 tokens belong to this window, five of them saved earlier.
    assert_eq!(used(&warned), [8]);

    let (warned, clock) = (Warned::default(), ManualClock::at_ms(NOW_MS));
    let api = warning(Quota::per_minute(10).reserve_up_to(10).name("mail"), 80, &warned);
    let api = api.store(MemoryStore::new().clock(clock.clone()));
    for _ in 0..2 {
        assert!(api.reserve("a", 9).await.expect("memory answers").is_ok());
    }
    clock.advance(secs(60));
    // Eight of the window's ten tokens are reserved.
    assert!(api.check("a").await.expect("memory answers").is_allowed());
    assert_eq!(used(&warned), [9]);
}

#[tokio::test]
async fn while_a_store_fails_each_process_warns_by_its_own_counts() {
    let warned = Warned::default();
    let store = TestStore::new(Mood::Later);
    let quota = Quota::new(10, Quota::MAX_WINDOW).name("api");
    let api = warning(quota, 80, &warned).store(store.clone());
    for mood in [Mood::Later, Mood::FailsLater] {
        store.set(mood);
        for _ in 0..9 {
            assert!(api.check("a").await.expect("an answer").is_allowed());
        }
    }
    assert_eq!(used(&warned), [8, 8]);

    // Without a decision, there is no warning.
    for policy in [OnStoreFailure::Allow, OnStoreFailure::Deny] {
        let store = TestStore::new(Mood::FailsLater).on_failure(policy);
        let layer = FixedWindowLayer::new(limit_of_ten(&warned).store(store));
        for _ in 0..12 {
            let _ = ask(&layer, "/", "a").await;
        }
    }
    assert_eq!(used(&warned).len(), 2);
}

/// In a layer, too: see `shadow_mode`.
#[test]
fn a_hook_that_panics_loses_no_count_and_no_other_warning() {
    let warned = Warned::default();
    let quotas = Quota::per_hour(10).and(Quota::per_day(10));
    let api = warning(quotas.name("api").warn_at(10, |_| panic!("on purpose")), 10, &warned);
    let api = Limiter::new(api);
    assert!(block_on(api.check("a")).expect("memory answers").is_allowed());
    assert_eq!(block_on(api.peek("a")).expect("memory answers").used(), 1);
    assert_eq!(used(&warned), [1, 1]);
}

/// However the true costs are told, of limits that are enforced or in shadow mode.
#[tokio::test]
async fn a_hook_that_panics_at_a_true_cost_loses_no_other_one() {
    for mood in ANSWERS {
        for shadow in [false, true] {
            let names = ["one", "two", "three"];
            let limit = |name| Quota::per_hour(10).name(name).key(Key::global()).settled();
            let panicking = limit("one").warn_at(50, |_| panic!("on purpose"));
            let panicking = if shadow { panicking.shadow() } else { panicking };
            let limits = Limits::new([panicking, limit("two"), limit("three")]);
            let limits = limits.store(TestStore::new(mood));
            let used = async || {
                corrected().await;
                let mut used = [0; 3];
                for (used, name) in used.iter_mut().zip(names) {
                    let decision = limits.limiter(name).peek(Key::global()).await;
                    *used = decision.expect("an answer").used();
                }
                used
            };
            let answer = async |cost: TrueCost| {
                let layer = FixedWindowLayer::new(&limits);
                let Ok(response) = layer.layer(answering(cost)).oneshot(get("/")).await;
                assert_eq!(response.status(), 200);
            };
            for way in 0..3 {
                for name in names {
                    limits.limiter(name).reset(Key::global()).await.expect("an answer");
                }
                match way {
                    0 => answer(TrueCost::of("one", 9).and("two", 9).and("three", 9)).await,
                    1 => {
                        let (cost, mut meter) = TrueCost::metered();
                        answer(cost).await;
                        names.iter().for_each(|name| meter.set(name, 9));
                    }
                    _ => {
                        let lines = names.map(|name| Line::new(name, Key::global(), 1));
                        let receipts = limits.charge(lines).await.expect("an answer");
                        let costs = names.map(|name| (name, 9));
                        limits
                            .settle(receipts.expect("it passes"), costs)
                            .await
                            .expect("an answer");
                    }
                }
                assert_eq!(used().await, [9; 3], "{mood:?}, {shadow}, {way}");
            }
        }
    }
}

#[test]
fn a_share_is_one_to_a_hundred_percent() {
    for percent in [0, 101] {
        let limit = || Quota::per_hour(10).name("api").warn_at(percent, |_| {});
        assert!(catch_unwind(limit).is_err(), "{percent}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Against counts of its own: a charge warns exactly where it takes the count from below the
    /// share to the share or above.
    #[test]
    fn charges_warn_where_the_count_reaches_the_share(
        limit in 0_u64..40,
        percent in 1_u8..=100,
        charges in prop::collection::vec((0_u64..3, 0_u64..9, 0_u64..40), 0..60),
    ) {
        let clock = ManualClock::at_ms(NOW_MS);
        let warned = Warned::default();
        let api = warning(Quota::per_minute(limit).name("api"), percent, &warned);
        let api = api.store(MemoryStore::new().clock(clock.clone()));
        let (mut counts, mut expected) = (std::collections::HashMap::new(), Vec::new());
        for (key, cost, seconds) in charges {
            clock.advance(secs(seconds));
            let window = tower_fixed_window::Clock::now_ms(&clock) / 60_000;
            let allowed = block_on(api.charge(key, cost)).expect("memory answers").is_ok();
            let count: &mut u64 = counts.entry((key, window)).or_default();
            if allowed {
                let before = *count;
                *count += cost;
                let share = |used: u64| 100 * used >= limit * u64::from(percent) && limit > 0;
                if !share(before) && share(*count) {
                    expected.push((Key::from(key), *count));
                }
            }
        }
        let warned = warned.lock().expect("no panic");
        let warned: Vec<_> = warned.iter().map(|(_, key, _, used, _)| (key.clone(), *used)).collect();
        prop_assert_eq!(warned, expected);
    }
}
