//! Changes of a limit that end by themselves: quotas, shadow mode, and the quotas of one key.

use std::thread;

use tower_fixed_window::testing::ask;

use crate::metrics_and_logs::recorder;
use crate::prelude::*;

const HOUR: Duration = secs(3_600);

fn at(ms: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(ms)
}

fn in_an_hour() -> SystemTime {
    at(NOW_MS) + HOUR
}

fn store() -> (MemoryStore, ManualClock) {
    let clock = ManualClock::at_ms(NOW_MS);
    (MemoryStore::new().clock(clock.clone()), clock)
}

fn per_day(limit: u64) -> Limit {
    Quota::per_day(limit).name("api").key(header("x-key"))
}

/// The limit that a request of a key has, and its status.
fn limit_of(layer: &FixedWindowLayer, key: &str) -> (String, u16) {
    let response = ask(layer, Request::get("/").header("x-key", key));
    let limit = response.headers().get("x-ratelimit-limit");
    let limit = limit.map_or_else(String::new, |limit| limit.to_str().expect("text").to_owned());
    (limit, response.status().as_u16())
}

#[test]
fn a_service_follows_the_quotas_for_good_when_others_end() {
    let (store, clock) = store();
    let api = per_day(5).store(store);
    let inner = service_fn(async |_: Request<()>| Ok::<_, Infallible>(Response::new(())));
    let service = FixedWindowLayer::new(&api).reject(EmptyBody).layer(inner);
    let limit = || {
        let request = Request::get("/").header("x-key", "a").body(()).expect("valid");
        let Ok(response) = block_on(service.clone().oneshot(request));
        response.headers()["x-ratelimit-limit"].clone()
    };
    api.set_quotas(Quota::per_day(7));
    api.set_quotas_until(Quota::per_day(50), in_an_hour());
    api.set_shadow_until(false, in_an_hour() + HOUR);
    // Each thread has settings of its own, of as many as can run at a time.
    let limits = || {
        let in_thread = |_| thread::scope(|scope| scope.spawn(limit).join().expect("no panic"));
        (0..thread::available_parallelism().map_or(2, usize::from) * 2).map(in_thread)
    };
    assert!(limits().all(|limit| limit == "50"));
    clock.advance(HOUR);
    assert!(limits().all(|limit| limit == "7"));
    for quota in [8, 9] {
        api.set_quotas(Quota::per_day(quota));
        assert!(limits().all(|limit| limit == quota.to_string()), "{quota}");
    }
}

fn secret(key: &str) -> Key {
    Key::secret(key)
}

#[test]
fn one_key_has_quotas_of_its_own_in_layers_limiters_and_the_endpoint() {
    let (store, clock) = store();
    let api = per_day(2).store(store);
    let layer = FixedWindowLayer::new(&api);
    let mut endpoint = RateLimitEndpoint::new([&api]);
    let mut shown = |key: &str| {
        let request = Request::get("/").header("x-key", key).body(()).expect("a request");
        let response = block_on(endpoint.call(request)).expect("infallible");
        let json: serde_json::Value = serde_json::from_str(response.body()).expect("JSON");
        json["rate"]["limit"].as_u64().expect("a number")
    };
    api.set_key_quotas_until(secret("ann"), Quota::per_day(4), in_an_hour());
    for expected in [200, 200, 200, 200, 429] {
        assert_eq!(limit_of(&layer, "ann"), ("4".into(), expected));
    }
    let refused = ask(&layer, Request::get("/").header("x-key", "ann"));
    let body = String::from_utf8_lossy(refused.body());
    assert!(body.contains("api:4/day") && !body.contains("2/day"), "{body}");
    assert_eq!(limit_of(&layer, "bob"), ("2".into(), 200));
    assert_eq!(block_on(api.peek(secret("ann"))).expect("memory").limit(), 4);
    assert_eq!((shown("ann"), shown("bob")), (4, 2));
    let named = api.with_quotas(Quota::per_day(3));
    assert_eq!(block_on(named.peek(secret("ann"))).expect("memory").limit(), 3);

    clock.advance(HOUR);
    assert_eq!(limit_of(&layer, "ann"), ("2".into(), 429));
    assert_eq!(block_on(api.peek(secret("ann"))).expect("memory").limit(), 2);
    assert_eq!(shown("ann"), 2);
}

/// What has ended stays ended, also if the clock then steps back.
#[test]
fn a_charge_that_names_its_quotas_ends_changes_that_are_due() {
    let pro = Quotas::from(Quota::per_day(9));
    type Charge<'a> = &'a dyn Fn(&Limiter);
    let by_line: Charge<'_> = &|api| {
        let line = Line::new("api", "ann", 1).with_quotas(&pro);
        assert!(block_on(Limits::from(api).check([line])).expect("memory").is_allowed());
    };
    let by_plan: Charge<'_> =
        &|api| assert!(block_on(api.with_quotas(pro).check("ann")).expect("memory").is_allowed());
    for charge in [by_line, by_plan] {
        let (store, clock) = store();
        let api = per_day(2).store(store);
        api.set_quotas_until(Quota::per_day(50), in_an_hour());
        clock.advance(HOUR);
        charge(&api);
        clock.set_ms(NOW_MS);
        assert_eq!(block_on(api.peek("ann")).expect("memory").limit(), 2);
    }
}

#[test]
fn the_keys_with_quotas_of_their_own_are_listed_and_end_by_hand() {
    let (store, clock) = store();
    let api = per_day(5).store(store);
    let layer = FixedWindowLayer::new(&api);
    let later = in_an_hour() + HOUR;
    api.set_key_quotas_until(secret("ann"), Quota::per_day(50), later);
    api.set_key_quotas_until(secret("bob"), Quota::per_day(7), in_an_hour());
    api.set_key_quotas_until(secret("eve"), Quota::per_day(0), later + HOUR);
    let bob = (secret("bob"), Quota::per_day(7).into(), in_an_hour());
    let ann = (secret("ann"), Quota::per_day(50).into(), later);
    let eve = (secret("eve"), Quota::per_day(0).into(), later + HOUR);
    assert_eq!(api.clone().key_quotas(), [bob, ann.clone(), eve.clone()]);

    clock.advance(HOUR);
    assert_eq!(api.key_quotas(), [ann, eve.clone()], "bob's have ended");
    assert_eq!(limit_of(&layer, "ann"), ("50".into(), 200));
    api.clear_key_quotas(secret("ann"));
    api.clear_key_quotas(secret("nobody"));
    assert_eq!(limit_of(&layer, "ann"), ("5".into(), 200));
    assert_eq!(api.key_quotas(), [eve]);
    assert_eq!(limit_of(&layer, "eve").1, 429);
    api.clear_key_quotas(secret("eve"));
    assert_eq!(limit_of(&layer, "eve"), ("5".into(), 200));
    assert!(api.key_quotas().is_empty());
}

/// Also reported, while the log shows refusals.
#[tokio::test(start_paused = true)]
async fn a_request_in_a_queue_may_be_refused_by_a_quota_that_came_later() {
    let log = Log::start();
    for others in [0, 1] {
        let store = paused_memory();
        let other = Quota::per_minute(9).name("other").key(Key::global());
        let mut all = vec![Quota::per_minute(1).name("api").key(Key::global())];
        all.extend((0..others).map(|_| other.clone()));
        let limits = Limits::new(all).store(store);
        let api = limits.limiter("api");
        let layer = FixedWindowLayer::new(&limits).queue(10, secs(600));
        let service = layer.layer(service_fn(inner));
        let first = service.clone().oneshot(get("/")).await.expect("infallible");
        assert_eq!(first.status(), 200);
        let waiting = tokio::spawn(service.oneshot(get("/")));
        sleep(ms(10)).await;
        // The day's tokens are used up.
        api.set_quotas(Quota::per_minute(1).and(Quota::per_day(1)));
        let earlier = block_on(api.with_quotas(Quota::per_day(1)).check(Key::global()));
        assert!(earlier.expect("memory").is_allowed());

        let refused = waiting.await.expect("no panic").expect("infallible");
        assert_eq!(refused.status(), 429);
        let body = text_of(refused).await;
        assert!(body.contains("api:1/day"), "{body}");
    }
    assert_eq!(log.text().matches("quota=1/day").count(), 2, "{}", log.text());
}

#[test]
fn a_change_that_ends_is_in_the_metrics_and_its_end_in_the_log() {
    let log = Log::start();
    let (handle, _guard) = recorder();
    let (store, clock) = store();
    let api = per_day(5).store(store);
    let gauge = |of: &str| {
        let name = format!(
            "tower_fixed_window_changed_until_timestamp_seconds{{scope=\"api\",of=\"{of}\"}} "
        );
        let text = handle.render();
        let line = text.lines().find_map(|line| line.strip_prefix(&name));
        line.map(|value| value.parse::<f64>().expect("a number"))
    };
    api.set_quotas_until(Quota::per_day(50), in_an_hour());
    api.set_shadow_until(true, in_an_hour() + HOUR);
    api.set_key_quotas_until("secret-key", Quota::per_day(50), in_an_hour());
    let end = NOW_MS as f64 / 1_000.0 + 3_600.0;
    assert_eq!(gauge("quotas"), Some(end));
    assert_eq!((gauge("shadow"), gauge("key")), (Some(end + 3_600.0), Some(end)));
    assert!(!log.text().contains("has ended"));
    clock.advance(HOUR);
    assert!(block_on(api.check("other")).expect("memory").is_allowed());
    assert_eq!((gauge("quotas"), gauge("key")), (Some(0.0), Some(0.0)));
    assert_eq!(gauge("shadow"), Some(end + 3_600.0));
    let text = log.text();
    assert_eq!(text.matches("a change has ended").count(), 2, "{text}");
    assert!(text.contains("of=\"quotas\"") && text.contains("of=\"key\""), "{text}");
    assert!(!text.contains("secret-key") && !handle.render().contains("secret-key"));
}

/// Quotas of one window share a count, so that no thread takes more than the larger limit.
#[test]
fn threads_that_charge_while_a_change_ends_pass_exactly_the_limits() {
    for _ in 0..50 {
        let (store, clock) = store();
        let api: Limiter = per_day(300).store(store);
        api.set_key_quotas_until("ann", Quota::per_day(500), in_an_hour());
        api.set_quotas_until(Quota::per_day(400), in_an_hour());
        let api = Arc::new(api);
        let threads = (0..4).map(|_| {
            let api = Arc::clone(&api);
            thread::spawn(move || {
                let passed = |key| block_on(api.check(key)).expect("memory").is_allowed();
                let count = |_| [u64::from(passed("ann")), u64::from(passed("bob"))];
                (0..200).map(count).fold([0, 0], |a, b| [a[0] + b[0], a[1] + b[1]])
            })
        });
        let threads: Vec<_> = threads.collect();
        clock.advance(HOUR);
        let passed = threads.into_iter().map(|thread| thread.join().expect("no panic"));
        let [ann, bob] = passed.fold([0, 0], |a, b| [a[0] + b[0], a[1] + b[1]]);
        assert!((300..=500).contains(&ann) && (300..=400).contains(&bob), "{ann} {bob}");
        let refused = block_on(api.check("ann")).expect("memory");
        assert_eq!((refused.is_allowed(), refused.limit()), (false, 300));
    }
}

#[tokio::test]
async fn a_remembered_refusal_does_not_outlive_a_raise() {
    let store = TestStore::new(Mood::Later).shared();
    let limiter = per_day(1).store(store.clone());
    let check = async || limiter.check("a").await.expect("an answer").is_allowed();
    assert!(check().await && !check().await && !check().await);
    limiter.set_key_quotas_until("a", Quota::per_day(3), in_an_hour());
    assert!(check().await && check().await && !check().await);
    store.clock.advance(HOUR);
    assert!(!check().await);
}

#[test]
fn what_is_in_another_store_keeps_no_change_that_ends() {
    let limits = Limits::new([Quota::per_day(5).name("api")]);
    limits.limiter("api").set_quotas_until(Quota::per_day(9), SystemTime::now() + secs(9));
    let moved = limits.clone().store(MemoryStore::new());
    assert_eq!(moved.limiter("api").quotas(), Some(Quota::per_day(5).into()));
    limits.limiter("api").set_quotas(Quota::per_day(7));
    limits.limiter("api").set_quotas_until(Quota::per_day(9), SystemTime::now() + secs(9));
    assert_eq!(
        limits.store(MemoryStore::new()).limiter("api").quotas(),
        Some(Quota::per_day(7).into())
    );
}

#[test]
fn shadow_mode_for_good_goes_to_another_store() {
    let limits = Limits::new([Quota::per_minute(0).name("api").key(Key::global())]);
    for (shadow, status) in [(true, 200), (false, 429)] {
        limits.limiter("api").set_shadow(shadow);
        let moved = limits.clone().store(MemoryStore::new());
        assert_eq!(ask(&FixedWindowLayer::new(&moved), Request::get("/")).status(), status);
    }
}

/// As many as an app may have: with a scan of all for each one, this test runs for minutes.
#[test]
fn tens_of_thousands_of_keys_have_quotas_of_their_own() {
    const MANY: u64 = 20_000;

    let (store, clock) = store();
    let api = Limit::new(Quota::per_day(1)).name("api").store(store);
    let layer = FixedWindowLayer::new(&api);
    let limit = |key: u64| block_on(api.peek(key)).expect("memory").limit();
    for key in 0..MANY {
        api.set_key_quotas_until(key, Quota::per_day(5), in_an_hour());
        api.set_key_quotas_until(MANY + key, Quota::per_day(7), in_an_hour() + HOUR);
        // The request holds the quotas in force.
        let _ = ask(&layer, Request::get("/"));
    }
    for key in (0..MANY).step_by(1_000) {
        assert_eq!((limit(key), limit(MANY + key)), (5, 7));
    }
    clock.advance(HOUR);
    // All have ended with the first look.
    for key in (0..MANY).rev().step_by(1_000) {
        assert_eq!((limit(key), limit(MANY + key)), (1, 7));
    }
    let listed = api.key_quotas();
    assert!(listed.iter().all(|(_, _, until)| *until == in_an_hour() + HOUR));
    assert_eq!(listed.len() as u64, MANY);
    // Nothing that has ended comes back with the clock.
    clock.set_ms(NOW_MS);
    assert_eq!((limit(MANY - 1), limit(0)), (1, 1));
    clock.advance(HOUR);
    (0..MANY).for_each(|key| assert_eq!(limit(key), 1));
    (0..MANY).for_each(|key| api.clear_key_quotas(MANY + key));
    assert!(api.key_quotas().is_empty());
    assert_eq!(limit(MANY), 1);
}

#[test]
fn plans_of_plans_end_the_changes_of_their_limit_and_keep_no_others_alive() {
    let (store, clock) = store();
    let api = per_day(5).store(store);
    let mut plan = api.with_quotas(Quota::per_day(9)).with_quotas(Quota::per_day(8));
    api.set_quotas_until(Quota::per_day(50), in_an_hour());
    clock.advance(HOUR);
    assert!(block_on(plan.check("a")).expect("memory").is_allowed());
    clock.set_ms(NOW_MS);
    assert_eq!(api.quotas(), Some(Quota::per_day(5).into()), "it has ended");
    for _ in 0..50_000 {
        plan = plan.with_quotas(Quota::per_day(7));
    }
    // One that holds the one before it, and so on, overflows the stack here.
    drop(plan);
}

/// A request that waits has tokens of the next window (S14).
#[test]
fn a_refund_frees_no_reserved_tokens_while_the_limit_is_lifted() {
    let (store, clock) = store();
    let quota = Quota::per_hour(5).reserve_up_to(5);
    let api = quota.name("api").store(store);
    let of_this_hour = block_on(api.charge("a", 5)).expect("memory").expect("it passes");
    let of_the_next = block_on(api.reserve("a", 5)).expect("memory").expect("it is granted");
    assert!(of_the_next.decision().ready_at().is_some());
    api.set_quotas(Plan::UNLIMITED);
    block_on(api.refund(of_this_hour)).expect("memory");
    api.set_quotas(quota);
    clock.advance(HOUR);
    assert!(!block_on(api.check("a")).expect("memory").is_allowed());
}

/// Without requests, they are counted and pass. In layers, the random programs lift limits.
#[test]
fn limits_are_lifted_and_set_again_at_run_time() {
    let (store, _) = store();
    let api = per_day(1).store(store);
    let layer = FixedWindowLayer::new(&api);
    let lifted = |quotas: &str| {
        api.set_quotas(quotas.parse::<Plan>().expect("a plan"));
        assert_eq!(api.quotas().expect("no plans").to_string(), quotas);
    };
    lifted("unlimited");
    let b = Key::secret("b");
    for _ in 0..2 {
        assert!(block_on(api.check(b.clone())).expect("memory").is_allowed());
    }
    let receipt = block_on(api.charge(b.clone(), 9)).expect("memory").expect("it passes");
    block_on(api.settle(receipt, 3)).expect("memory");
    assert_eq!(block_on(api.peek(b)).expect("memory").used(), 5);
    // A key's own quotas limit it nevertheless, and limits in another store are lifted, too.
    api.set_key_quotas_until(secret("a"), Quota::per_day(0), in_an_hour());
    assert_eq!(limit_of(&layer, "a"), ("0".to_owned(), 429));
    assert_eq!(limit_of(&layer, "c"), (String::new(), 200));
    let moved = Limits::from(&api).store(MemoryStore::new());
    assert_eq!(moved.limiter("api").quotas(), Some(Plan::UNLIMITED));
    // A request that meets the change has the limit of before or of after, not that of long ago.
    let changes = api.clone();
    let meets = layer.clone().skip(move |_| (changes.set_quotas(Quota::per_day(7)), false).1);
    assert_eq!(limit_of(&meets, "d"), ("7".to_owned(), 200));
    lifted("1/day");
    // One key until an instant.
    api.set_key_quotas_until(secret("a"), Plan::UNLIMITED, in_an_hour());
    assert_eq!(limit_of(&layer, "a"), (String::new(), 200));
    assert_eq!(limit_of(&layer, "c"), ("1".to_owned(), 200));
    assert_eq!(api.key_quotas()[0].1, Plan::UNLIMITED);
    let by_plan = Limiter::from(Limit::by_plan(|_, _| Plan::UNLIMITED));
    assert_eq!(by_plan.quotas(), None);
}
