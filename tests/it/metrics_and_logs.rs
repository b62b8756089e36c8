//! The operator's view: the events of the log, the metrics as Prometheus reads them, and the
//! arguments of `.on_decision(..)`.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::future::join_all;
use metrics::LocalRecorderGuard;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use tower_fixed_window::testing;
use tower_fixed_window_redis::RedisStore;

use crate::prelude::*;

async fn ask(service: &Limited) -> u16 {
    service.clone().oneshot(get("/")).await.expect("infallible").status().as_u16()
}

/// Collects the metrics of this thread while the guard lives.
pub(crate) fn recorder() -> (PrometheusHandle, LocalRecorderGuard<'static>) {
    let recorder = PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    // The guard borrows the recorder; a test may leak one.
    (handle, metrics::set_default_local_recorder(Box::leak(Box::new(recorder))))
}

/// The value of each series, as Prometheus would read it, without comments.
pub(crate) fn scraped(handle: &PrometheusHandle) -> BTreeMap<String, f64> {
    let text = handle.render();
    let series = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    let pairs = series.map(|line| line.rsplit_once(' ').expect("a name and a value"));
    pairs
        .map(|(name, value)| {
            let name = name.strip_prefix("tower_fixed_window_").expect("ours");
            (name.to_owned(), value.parse().expect("a number"))
        })
        .collect()
}

/// Counters, gauges and the number of samples of each histogram. `token_metrics` has the tokens.
fn counts(handle: &PrometheusHandle) -> Vec<(String, u64)> {
    let is_count = |name: &String| {
        !name.starts_with("tokens_")
            && (!name.contains("_seconds") || name.starts_with("store_seconds_count"))
    };
    let scraped = scraped(handle).into_iter().filter(|(name, n)| is_count(name) && *n > 0.0);
    scraped.map(|(name, value)| (name, value as u64)).collect()
}

fn expected(series: &[(&str, u64)]) -> Vec<(String, u64)> {
    let mut series: Vec<_> = series.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect();
    series.sort();
    series
}

/// Three requests in a window so long that a test never sees its end: what stands in for a store
/// runs on the system's clock.
const THREE: Quota = Quota::new(3, Quota::MAX_WINDOW);

#[tokio::test(start_paused = true)]
async fn a_correction_is_one_call_where_no_warning_is_wanted() {
    let (handle, _guard) = recorder();
    let limiter = Quota::per_minute(9).name("api").store(TestStore::new(Mood::Later));
    let calls = || scraped(&handle)[r#"store_seconds_count{scope="api"}"#];
    for (actual, expected) in [(3, 2.0), (2, 3.0), (0, 5.0)] {
        let receipt = limiter.charge("ann", 2).await.expect("it answers").expect("it passed");
        limiter.settle(receipt, actual).await.expect("it answers");
        assert_eq!(calls(), expected, "a charge, and a correction if there is one");
    }
}

#[tokio::test(start_paused = true)]
async fn metrics_count_allowed_refused_failed_and_overflowed_requests() {
    let (handle, _guard) = recorder();

    let store = TestStore::new(Mood::Later);
    let layer = FixedWindowLayer::new(
        Limit::new(THREE).name("login").key(Key::global()).store(store.clone()),
    );
    let login = limited(layer);
    for status in [200, 200, 200, 429, 429] {
        assert_eq!(ask(&login).await, status);
    }

    // After five failures the breaker is open: the other two requests cause no call.
    store.set(Mood::FailsLater);
    for status in [200, 200, 200, 429, 429, 429, 429] {
        assert_eq!(ask(&login).await, status);
    }
    store.set(Mood::Later);
    tokio::time::advance(secs(1)).await;
    assert_eq!(ask(&login).await, 429);

    let flooded = MemoryStore::with_max_keys(100).clock(ManualClock::at_ms(NOW_MS));
    let limiter = Quota::per_minute(1).name("flood").store(flooded.clone());
    for key in 0..1_000 {
        let _ = limiter.check(key).await.expect("memory answers");
    }
    flooded.record_metrics("flood");
    let overflowed = flooded.overflowed();
    assert_eq!(overflowed, 1_000 - flooded.live_entries() as u64);
    let flood = |outcome| format!(r#"decisions_total{{scope="flood",outcome="{outcome}"}}"#);
    let all = counts(&handle);
    let of = |name: &str| all.iter().find(|(n, _)| n == name).map_or(0, |(_, value)| *value);
    let (passed, refused) = (of(&flood("passed")), of(&flood("refused")));
    assert_eq!(passed + refused, 1_000);
    assert!(passed >= 100 && refused > 0);
    assert_eq!(
        all,
        expected(&[
            (&flood("passed"), passed),
            (&flood("refused"), refused),
            (r#"decisions_total{scope="login",outcome="passed"}"#, 3 + 3),
            (r#"decisions_total{scope="login",outcome="refused"}"#, 2 + 4 + 1),
            (r#"max_keys{store="flood"}"#, 100),
            (r#"overflow_total{scope="flood"}"#, overflowed),
            (r#"store_failures_total{scope="login"}"#, 5),
            (r#"store_seconds_count{scope="login"}"#, 5 + 5 + 1),
            (r#"tracked_keys{store="flood"}"#, flooded.live_entries() as u64),
            (r#"without_store_total{scope="login",policy="local"}"#, 7),
        ])
    );
}

#[tokio::test(start_paused = true)]
async fn metrics_count_decisions_without_a_call() {
    let (handle, _guard) = recorder();
    let store = TestStore::new(Mood::Later).shared();
    let login = Quota::per_hour(1).name("login").key(Key::global());
    let login = limited(FixedWindowLayer::new(login.store(store)));
    for status in [200, 429, 429, 429] {
        assert_eq!(ask(&login).await, status);
    }
    assert_eq!(
        counts(&handle),
        expected(&[
            (r#"decisions_total{scope="login",outcome="passed"}"#, 1),
            (r#"decisions_total{scope="login",outcome="refused"}"#, 3),
            (r#"remembered_refusals_total{scope="login"}"#, 2),
            (r#"store_seconds_count{scope="login"}"#, 2),
        ])
    );
}

#[tokio::test(start_paused = true)]
async fn each_outcome_has_its_series_and_its_event() {
    /// A set-up, with the outcome of a request.
    type Case = (&'static str, fn(Limit) -> Limit, u64, &'static str, u16);
    let cases: &[Case] = &[
        ("passed", |limit| limit, 9, "", 200),
        ("refused", |limit| limit, 0, "a request is refused", 429),
        ("shadow_refused", |limit| limit.shadow(), 0, "a request would be refused", 200),
        ("missing_key", |limit| limit.key(header("x-key")), 9, "a request is refused", 400),
        ("shadow_missing_key", |limit| limit.key(header("x-key")).shadow(), 9, "", 200),
    ];
    for mood in ANSWERS {
        for &(outcome, set, tokens, event, status) in cases {
            let (handle, _guard) = recorder();
            let log = Log::start();
            let limit = set(everyone(tokens).name("api"));
            assert_eq!(ask(&limited(layered(limit, mood))).await, status);
            let series = format!(r#"decisions_total{{scope="api",outcome="{outcome}"}}"#);
            assert_eq!(scraped(&handle).get(&series), Some(&1.0), "{outcome}, {mood:?}");
            let text = log.text();
            // The warning about a limit of 0 is left out, since a process logs it once.
            let events = text.lines().filter(|line| line.contains(" DEBUG "));
            assert_eq!(events.count(), usize::from(!event.is_empty()), "{text}");
            if !event.is_empty() {
                let line = format!("DEBUG tower_fixed_window: {event} scope=\"api\"");
                assert!(text.contains(&line), "{text}");
                assert!(text.contains(&format!("outcome=\"{outcome}\"")), "{text}");
            }
        }
    }
}

/// Each request counts once, when it passes or is refused.
#[tokio::test(start_paused = true)]
async fn requests_that_wait_are_counted_with_how_long_they_did() {
    for limits in 1..=3 {
        let (handle, _guard) = recorder();
        let limits = beside(Quota::per_second(1).key(Key::global()), limits);
        let limits = limits.store(paused_memory());
        let service = limited(FixedWindowLayer::new(&limits).queue(2, secs(60)));
        let requests = join_all((0..4).map(|_| ask(&service)));
        // Each of a request's limits counts it.
        let look = |name: &str, label: &str, expected: f64| {
            let scraped = scraped(&handle);
            for limiter in &limits {
                let series = format!("{name}{{scope=\"{}\"{label}}}", limiter.name());
                assert_eq!(
                    scraped.get(&series).copied().map(f64::round),
                    Some(expected),
                    "{series}"
                );
            }
        };
        let (statuses, ()) = tokio::join!(requests, async {
            sleep(ms(500)).await;
            look("waiting", "", 2.0);
            look("decisions_total", r#",outcome="passed""#, 1.0);
        });
        assert_eq!(statuses, [200, 200, 200, 429]);
        look("waiting", "", 0.0);
        look("wait_seconds_count", "", 2.0);
        look("wait_seconds_sum", "", 3.0);
        look("decisions_total", r#",outcome="passed""#, 3.0);
        let counts = scraped(&handle);
        for (outcome, count) in [("refused", 1.0), ("reserved", 0.0)] {
            let series = format!(r#"decisions_total{{scope="tested",outcome="{outcome}"}}"#);
            assert_eq!(counts.get(&series), Some(&count), "{outcome}");
        }
    }
}

#[tokio::test]
async fn a_store_failure_is_an_outcome_without_a_fallback() {
    use OnStoreFailure::{Allow, Deny, Local};
    for failure in [Mood::FailsNow, Mood::FailsLater] {
        for (policy, label, shadow, outcome, status) in [
            (Local, "local", false, "passed", 200),
            (Allow, "allow", false, "failed_open", 200),
            (Deny, "deny", false, "failed_closed", 503),
            (Deny, "deny", true, "failed_open", 200),
        ] {
            let (handle, _guard) = recorder();
            let log = Log::start();
            let store = TestStore::new(failure).on_failure(policy);
            let limit = THREE.name("api").key(Key::global());
            let limit = if shadow { limit.shadow() } else { limit };
            // Without a decision, the hook is not called.
            let told = Arc::new(AtomicUsize::new(0));
            let of_hook = Arc::clone(&told);
            let layer =
                FixedWindowLayer::new(limit.store(store)).on_decision(move |_, decision| {
                    of_hook.fetch_add(usize::from(decision.is_local()), Ordering::SeqCst);
                });
            assert_eq!(ask(&limited(layer)).await, status);
            assert_eq!(told.load(Ordering::SeqCst), usize::from(policy == Local));
            let event = "a request is refused scope=\"api\" outcome=\"failed_closed\"";
            assert_eq!(log.text().contains(event), status == 503, "{}", log.text());
            let series = vec![
                (format!(r#"decisions_total{{scope="api",outcome="{outcome}"}}"#), 1),
                (r#"store_failures_total{scope="api"}"#.to_owned(), 1),
                (r#"store_seconds_count{scope="api"}"#.to_owned(), 1),
                (format!(r#"without_store_total{{scope="api",policy="{label}"}}"#), 1),
            ];
            assert_eq!(counts(&handle), series, "{failure:?}, {policy:?}");
        }
    }
}

#[tokio::test]
async fn each_of_several_limits_counts_a_request_without_a_decision() {
    use OnStoreFailure::{Allow, Deny};
    for (policy, key, status, counted) in [
        (Allow, "x-key", 200, [("requests", "failed_open"), ("tokens", "failed_open")]),
        (Deny, "x-key", 503, [("requests", "failed_closed"), ("tokens", "failed_closed")]),
        // By the limit whose key it is alone.
        (Deny, "x-missing", 400, [("tokens", "missing_key"); 2]),
    ] {
        let (handle, _guard) = recorder();
        let store = TestStore::new(Mood::FailsLater).on_failure(policy);
        let limits =
            [THREE.name("requests").key(Key::global()), THREE.name("tokens").key(header(key))];
        let layer = FixedWindowLayer::new(Limits::new(limits).store(store));
        let service = limited(layer.on_decision(|_, _| panic!("there is no decision")));
        let request = Request::get("/").header("x-key", "a").body(Body::empty()).expect("valid");
        let response = service.clone().oneshot(request).await.expect("infallible");
        assert_eq!(response.status(), status);
        let mut decisions = counts(&handle);
        decisions.retain(|(name, _)| name.starts_with("decisions_total"));
        let series =
            |(name, outcome)| format!(r#"decisions_total{{scope="{name}",outcome="{outcome}"}}"#);
        let counted = BTreeSet::from(counted.map(series));
        assert_eq!(decisions, counted.into_iter().map(|name| (name, 1)).collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn a_limiter_counts_decisions_but_not_peeks() {
    for mood in ANSWERS {
        let (handle, _guard) = recorder();
        let log = Log::start();
        let quota = Quota::per_minute(1).reserve_up_to(1);
        let jobs = Limit::new(quota).name("jobs").store(TestStore::new(mood));
        let _ = jobs.peek("secret").await.expect("it answers");
        let _ = jobs.check("secret").await.expect("it answers");
        let _ = jobs.reserve("secret", 1).await.expect("it answers").expect("it is reserved");
        let _ = jobs.check("secret").await.expect("it answers");
        let _ = jobs.peek("secret").await.expect("it answers");
        let decisions: Vec<_> =
            counts(&handle).into_iter().filter(|(name, _)| name.starts_with("decisions")).collect();
        assert_eq!(
            decisions,
            expected(&[
                (r#"decisions_total{scope="jobs",outcome="passed"}"#, 1),
                (r#"decisions_total{scope="jobs",outcome="refused"}"#, 1),
                (r#"decisions_total{scope="jobs",outcome="reserved"}"#, 1),
            ]),
            "{mood:?}"
        );
        let text = log.text();
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.contains(r#"quota=1/minute reserve-up-to=1 outcome="refused""#), "{text}");
        assert!(!text.contains("secret"), "{text}");
    }
}

#[test]
fn counters_of_rare_events_start_at_zero() {
    let (handle, _guard) = recorder();
    // Prometheus sees no increase from nothing to 1, and an alert would miss the first outage.
    let service = limited(named("api", 9, Mood::Now));
    assert_eq!(scraped(&handle).len(), 0, "a scope that nobody asks is not told of");
    assert_eq!(block_on(ask(&service)), 200);
    let all = scraped(&handle);
    for rare in ["store_failures_total", "overflow_total", "warnings_total"] {
        assert_eq!(all.get(&format!(r#"{rare}{{scope="api"}}"#)), Some(&0.0), "{rare}");
    }
    for policy in ["local", "allow", "deny"] {
        let rare = format!(r#"without_store_total{{scope="api",policy="{policy}"}}"#);
        assert_eq!(all.get(&rare), Some(&0.0), "{policy}");
    }
    let outcomes = all.keys().filter(|name| name.starts_with("decisions_total"));
    assert_eq!(outcomes.count(), 8);
}

/// The table of metrics in the guide, and what there is.
#[tokio::test]
async fn the_guide_names_every_metric_and_no_other() {
    let guide = include_str!("../../docs/observing.md");
    let (_, table) = guide.split_once("| metric |").expect("a table");
    let (table, rest) = table.split_once("\n\n").expect("its end");
    let quoted = |line: &str| line.split('`').nth(1).map(str::to_owned);
    let told: BTreeSet<_> = table.lines().filter_map(quoted).collect();

    let (handle, _guard) = recorder();
    let layer = per_minute(9, Mood::Later);
    limiter_of(&layer).set_shadow_until(true, SystemTime::now());
    assert_eq!(ask(&limited(layer)).await, 200);
    let queue = limited(per_minute(1, Mood::Now).queue(1, secs(3_600)));
    assert_eq!(ask(&queue).await, 200);
    assert!(ask(&queue).now_or_never().is_none());
    // The metrics of connections are those of its crate.
    let redis = RedisStore::new("redis://127.0.0.1:1/").expect("an address");
    let redis = Quota::per_minute(9).name("redis").store(redis);
    assert!(redis.check("a").await.expect("memory answers").is_allowed());
    let folder = tempfile::tempdir().expect("a folder");
    let store = MemoryStore::open(folder.path().join("counts"), Duration::MAX).expect("opens");
    store.save().expect("saves");
    store.record_metrics("memory");
    let text = handle.render();
    let typed = |line: &str| line.strip_prefix("# TYPE ")?.split(' ').next().map(str::to_owned);
    let found: BTreeSet<_> = text.lines().filter_map(typed).collect();
    assert_eq!(told, found);
    for name in &found {
        assert!(text.contains(&format!("# HELP {name} ")), "{name} is not described");
    }

    let (_, outcomes) = rest.split_once("| `outcome` |").expect("a table");
    let (outcomes, _) = outcomes.split_once("\n\n").expect("its end");
    let told: BTreeSet<_> = outcomes.lines().filter_map(quoted).collect();
    let outcome = |line: &str| Some(line.split_once("outcome=\"")?.1.split_once('"')?.0.to_owned());
    assert_eq!(told, text.lines().filter_map(outcome).collect());

    // The guide's queries use no other metrics.
    let names = found
        .iter()
        .flat_map(|name| ["", "_bucket", "_count"].map(|suffix| format!("{name}{suffix}")));
    let names: BTreeSet<_> = names.collect();
    for query in guide.split("```promql").skip(1).map(|rest| rest.split("```").next().unwrap()) {
        for name in query.split(|c: char| !c.is_alphanumeric() && c != '_') {
            assert!(!name.starts_with("tower_") || names.contains(name), "{name} in {query}");
        }
    }
}

#[tokio::test]
async fn a_recorder_may_be_installed_after_the_first_request() {
    let service = limited(named("early", 9, Mood::Later));
    assert_eq!(ask(&service).await, 200);
    let (handle, _guard) = recorder();
    assert_eq!(ask(&service).await, 200);
    assert_eq!(
        counts(&handle),
        expected(&[
            (r#"decisions_total{scope="early",outcome="passed"}"#, 1),
            (r#"store_seconds_count{scope="early"}"#, 1),
        ]),
        "what was before is lost, what comes after is not"
    );
    assert!(handle.render().contains("# HELP tower_fixed_window_decisions_total Requests, by "));
}

#[tokio::test]
async fn a_refusal_is_logged_with_its_quota_and_retry_after() {
    for mood in ANSWERS {
        let log = Log::start();
        let limit = Limit::by_plan(|_, _| Quota::per_minute(1).and(Quota::per_hour(1)))
            .name("login")
            .key(header("x-key"))
            .cost_fn(|parts| if parts.uri.path() == "/huge" { 9 } else { 1 });
        let service = limited(layered(limit, mood));
        let ask = async |path: &str| {
            let request = Request::get(path).header("x-key", "hunter2").body(Body::empty());
            service.clone().oneshot(request.expect("a request")).await.expect("infallible");
        };
        ask("/").await;
        assert!(!log.text().contains("DEBUG"), "one that passes is not told");
        ask("/").await;
        let text = log.text();
        // The next hour begins at 23:00; it is 22:14:20.5.
        let line = "DEBUG tower_fixed_window: a request is refused scope=\"login\" quota=1/hour \
            outcome=\"refused\" retry_after=2740\n";
        assert!(text.ends_with(line), "{text}");
        ask("/huge").await;
        let text = log.text();
        assert!(text.ends_with("outcome=\"refused\"\n"), "it can never fit: {text}");
        assert!(!text.contains("hunter2"), "{text}");
    }
}

/// Refusals in a layer and without HTTP.
#[tokio::test]
async fn a_refusal_by_several_limits_is_one_line_and_counts_for_each_of_them() {
    let minute = Quota::per_minute(1);
    let day = || Quota::per_day(1).name("day").key(Key::global());
    let all = [
        minute.name("minute").key(Key::global()),
        day(),
        Quota::per_hour(9).name("much").key(Key::global()),
    ];
    let limits = Limits::new(all).store(MemoryStore::new().clock(ManualClock::at_ms(NOW_MS)));
    let (metrics, _guard) = recorder();
    let log = Log::start();
    let lines = ["minute", "day"].map(|name| Line::new(name, Key::global(), 1));
    assert!(limits.check(&lines).await.expect("memory").is_allowed());
    assert_eq!(log.text(), "");

    let line =
        "a request is refused scope=\"day\" quota=1/day outcome=\"refused\" retry_after=6340";
    let service = limited(FixedWindowLayer::new(&limits));
    for refusals in [1, 2] {
        match refusals {
            1 => assert!(!limits.check(&lines).await.expect("memory").is_allowed()),
            _ => assert_eq!(ask(&service).await, 429),
        }
        let text = log.text();
        assert_eq!(
            (text.lines().count(), text.matches(line).count()),
            (refusals, refusals),
            "{text}"
        );
        let counts = scraped(&metrics);
        let refused = |name| {
            counts.get(&format!("decisions_total{{scope=\"{name}\",outcome=\"refused\"}}")).copied()
        };
        let each = Some(refusals as f64);
        assert_eq!([refused("minute"), refused("day")], [each, each]);
        assert_eq!(refused("much").unwrap_or(0.0), 0.0, "it would have passed");
    }
}

#[tokio::test(start_paused = true)]
async fn the_start_and_the_end_of_an_outage_are_logged() {
    for policy in [OnStoreFailure::Local, OnStoreFailure::Allow, OnStoreFailure::Deny] {
        for failure in [Mood::FailsNow, Mood::FailsLater, Mood::Hangs] {
            let log = Log::start();
            let store = TestStore::new(Mood::Later).in_time();
            let limit = Quota::new(1_000, Quota::MAX_WINDOW).name("api").key(Key::global());
            let counted = store.clone().on_failure(policy);
            let service = limited(FixedWindowLayer::new(limit.store(counted)));
            ask(&service).await;
            assert_eq!(log.warnings(), "");

            store.set(failure);
            for _ in 0..20 {
                ask(&service).await;
                tokio::time::advance(ms(100)).await;
            }
            let warned = || log.warnings().lines().map(str::to_owned).collect::<Vec<String>>();
            let lines = warned();
            assert_eq!(lines.len(), 1, "{lines:?}");
            let meanwhile = match policy {
                OnStoreFailure::Allow => "requests pass uncounted",
                OnStoreFailure::Deny => "requests are refused with 503",
                _ => "requests are counted in this process",
            };
            let fails = format!(
                "tower_fixed_window: the store fails scope=\"api\" meanwhile=\"{meanwhile}\" error="
            );
            assert!(lines[0].contains(&fails), "{lines:?}");

            // A single success does not end the outage, since it may be one among failures.
            store.set(Mood::Later);
            tokio::time::advance(ms(300)).await;
            ask(&service).await;
            store.set(failure);
            ask(&service).await;
            store.set(Mood::Later);
            tokio::time::advance(ms(900)).await;
            ask(&service).await;
            tokio::time::advance(ms(999)).await;
            ask(&service).await;
            assert_eq!(warned().len(), 1, "{:?}", warned());

            tokio::time::advance(ms(1)).await;
            ask(&service).await;
            ask(&service).await;
            let lines = warned();
            assert_eq!(lines.len(), 2, "{lines:?}");
            let back = "tower_fixed_window: the store is back scope=\"api\" requests=21 seconds=";
            assert!(lines[1].contains(back), "{lines:?}");
            let (_, seconds) = lines[1].rsplit_once('=').expect("a number");
            let seconds: f64 = seconds.parse().expect("a number");
            assert!((3.0..6.0).contains(&seconds), "{lines:?}");

            // The next outage is logged again, with its own count.
            store.set(failure);
            ask(&service).await;
            assert_eq!(warned().len(), 3);
        }
    }
}

/// Its limits are charged one after the other.
#[tokio::test(start_paused = true)]
async fn a_request_of_several_limits_is_counted_once_while_the_store_fails() {
    for policy in [OnStoreFailure::Local, OnStoreFailure::Allow, OnStoreFailure::Deny] {
        let (log, names) = (Log::start(), ["one", "two", "three"]);
        let store = TestStore::new(Mood::Later);
        let limits = names.map(|name| Quota::new(1_000, Quota::MAX_WINDOW).name(name));
        let limits = Limits::new(limits).store(store.clone().on_failure(policy));
        let ask = || limits.check(names.map(|name| Line::new(name, "ann", 1)));
        store.set(Mood::FailsNow);
        for _ in 0..7 {
            let _ = ask().await;
        }
        store.set(Mood::Later);
        for _ in 0..3 {
            tokio::time::advance(secs(1)).await;
            assert!(ask().await.is_ok_and(|decision| !decision.is_local()));
        }
        assert!(log.warnings().contains(" requests=7 "), "{}", log.warnings());
    }
}

#[test]
fn the_log_has_one_line_for_each_limit_at_its_first_request() {
    let log = Log::start();
    let line = |layer: FixedWindowLayer| {
        let before = log.text().len();
        for _ in 0..3 {
            let _ = testing::ask(&layer, http::Request::get("/").header("x-user", "b4d5ecret"));
        }
        let text = log.text();
        let lines: Vec<_> = text[before..].lines().filter(|line| line.contains("INFO")).collect();
        let told = |line: &&str| line.split_once("first request ").map(|(_, of)| of.to_owned());
        lines.iter().map(told).collect::<Option<Vec<_>>>().expect("the line").join("; ")
    };
    let quotas = Quota::per_minute(60).and(Quota::new(15, secs(10)));
    let api = quotas.name("api").key(header("x-user")).shadow();
    assert_eq!(
        line(FixedWindowLayer::new(api)),
        r#"scope="api" quotas="60/minute, 15/10s" cost=1 key="header" store="memory" shadow=true"#
    );
    let free = quotas.key(Key::global()).cost_fn(|_| 0).store(TestStore::new(Mood::Now));
    assert_eq!(
        line(FixedWindowLayer::new(free)),
        r#"scope="unnamed" quotas="60/minute, 15/10s" cost=0 key="Key" store="other" shadow=false"#
    );
    let unlimited = Limit::by_plan(|_, _| Plan::UNLIMITED).key_fn(|_| Some(Key::global()));
    let told = line(FixedWindowLayer::new(unlimited));
    assert!(told.starts_with(r#"scope="unnamed" quotas="none" key="key_fn<"#), "{told}");
    assert!(!log.text().contains("b4d5ecret"));
}
