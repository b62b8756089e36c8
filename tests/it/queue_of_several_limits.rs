//! Waiting where a layer has several limits: in one line for each combination of keys, and the head
//! is charged for all limits or for none (S13, S37).

use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use futures_util::future::join_all;
use http::{Request, Response};
use tokio::time::{Instant, sleep};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_fixed_window::key::header;
use tower_fixed_window::{
    FixedWindowLayer, Key, KeyExtractor, Limit, Limits, Line, MemoryStore, Plan, Quota,
};

use crate::metrics_and_logs::{recorder, scraped};
use crate::support::{FarStore, paused_clock};

const LONG: Duration = Duration::from_secs(60);

/// The requests that were served, each with its second.
type Served = Arc<Mutex<Vec<(String, u128)>>>;

fn layer_of<const N: usize>(limits: [Limit; N]) -> FixedWindowLayer {
    FixedWindowLayer::new(Limits::new(limits).store(MemoryStore::new().clock(paused_clock())))
}

/// Ten a second for an organization, four for each of its users.
fn of_org_and_user() -> FixedWindowLayer {
    layer_of([
        Quota::per_second(10).name("org").key(header("x-org")),
        Quota::per_second(4).name("user").key(header("x-user")),
    ])
}

fn noting(
    layer: &FixedWindowLayer,
    served: &Served,
) -> impl Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send>
+ Clone
+ use<> {
    let (served, start) = (served.clone(), Instant::now());
    layer.layer(service_fn(move |request: Request<Body>| {
        let path = request.uri().path().to_owned();
        served.lock().unwrap().push((path, start.elapsed().as_millis() / 1_000));
        async { Ok(Response::new(Body::empty())) }
    }))
}

fn request(path: &str, user: &str) -> Request<Body> {
    let request = Request::get(path).header("x-org", "acme").header("x-user", user);
    request.body(Body::empty()).expect("valid")
}

fn key_of(name: &'static str, value: &'static str) -> Key {
    let request = Request::get("/").header(name, value).body(()).expect("valid");
    let mut key = Key::default();
    header(name).extract(&request.into_parts().0, &mut key).expect("it is there");
    key
}

async fn used(layer: &FixedWindowLayer, limit: &str, key: Key) -> u64 {
    layer.limits().of(limit).peek(key).await.expect("memory").used()
}

#[tokio::test(start_paused = true)]
async fn a_user_waits_in_order_for_the_limit_of_the_user() {
    let (layer, served) = (of_org_and_user(), Served::default());
    let service = noting(&layer.clone().queue(30, LONG), &served);
    let mut waiting = Vec::new();
    for i in 0..10 {
        let call = service.clone().oneshot(request(&format!("/{i}"), "ann"));
        waiting.push(tokio::spawn(call));
        tokio::task::yield_now().await;
    }
    sleep(Duration::from_millis(10)).await;
    // Waiting requests take no tokens.
    assert_eq!(used(&layer, "org", key_of("x-org", "acme")).await, 4);
    for response in waiting {
        let Ok(response) = response.await.expect("no panic");
        assert_eq!(response.status(), 200);
        assert!(response.headers().contains_key("x-ratelimit-resource"));
    }
    let expected: Vec<_> = (0..10).map(|i| (format!("/{i}"), i / 4)).collect();
    assert_eq!(*served.lock().unwrap(), expected);
}

#[tokio::test(start_paused = true)]
async fn users_wait_in_lines_of_their_own_for_the_limit_that_they_share() {
    let (layer, served) = (of_org_and_user(), Served::default());
    let service = noting(&layer.queue(30, LONG), &served);
    let mut waiting = Vec::new();
    for i in 0..8 {
        for user in ["ann", "bob", "eve"] {
            let call = service.clone().oneshot(request(&format!("/{user}/{i}"), user));
            waiting.push(tokio::spawn(call));
            tokio::task::yield_now().await;
        }
    }
    for response in waiting {
        let Ok(response) = response.await.expect("no panic");
        assert_eq!(response.status(), 200);
    }
    let served = served.lock().unwrap();
    let in_second = |second| served.iter().filter(move |(_, at)| *at == second);
    assert_eq!((0..3).map(|second| in_second(second).count()).collect::<Vec<_>>(), [10, 10, 4]);
    for user in ["/ann", "/bob", "/eve"] {
        let of_user = || served.iter().filter(|(path, _)| path.starts_with(user));
        assert!(of_user().is_sorted(), "{served:?}");
        assert!((0..3).all(|second| of_user().filter(|(_, at)| *at == second).count() <= 4));
    }
}

/// The refusal of a request that would wait too long names every limit that it would wait for, and
/// its headers are those of the longest wait.
#[tokio::test(start_paused = true)]
async fn a_refusal_behind_others_tells_when_it_could_pass_by_all_limits() {
    let layer = layer_of([
        Quota::per_second(4).name("seconds").key(Key::global()),
        Quota::per_minute(6).name("minutes").key(Key::global()),
        Quota::per_minute(100).name("many").key(Key::global()),
    ]);
    let service = noting(&layer.queue(30, Duration::from_millis(1_500)), &Served::default());
    let requests: Vec<_> =
        (0..6).map(|_| tokio::spawn(service.clone().oneshot(request("/", "ann")))).collect();
    sleep(Duration::from_millis(1)).await;
    let Ok(refused) = service.clone().oneshot(request("/", "ann")).await;
    assert_eq!(refused.status(), 429);
    assert_eq!(refused.headers()["retry-after"], "60");
    assert_eq!(refused.headers()["x-ratelimit-resource"], "minutes");
    assert_eq!(refused.headers()["x-ratelimit-limit"], "6");
    let body = axum::body::to_bytes(refused.into_body(), 10_000).await.expect("a body");
    let body = String::from_utf8_lossy(&body);
    assert!(
        body.contains(r#""violated-policies":["seconds:4/second","minutes:6/minute"]"#),
        "{body}"
    );
    for response in requests {
        let Ok(response) = response.await.expect("no panic");
        assert_eq!(response.status(), 200);
    }
}

#[tokio::test(start_paused = true)]
async fn a_line_is_as_long_as_the_queue_allows() {
    let layer = of_org_and_user();
    let service = noting(&layer.queue(2, LONG), &Served::default());
    let mut statuses = Vec::new();
    let requests: Vec<_> =
        (0..8).map(|_| tokio::spawn(service.clone().oneshot(request("/", "ann")))).collect();
    for response in requests {
        let Ok(response) = response.await.expect("no panic");
        statuses.push(response.status().as_u16());
    }
    statuses.sort_unstable();
    assert_eq!(statuses, [vec![200; 6], vec![429; 2]].concat());
}

#[tokio::test(start_paused = true)]
async fn a_line_before_a_store_far_away_is_as_long_as_the_queue_allows() {
    let limits = Limits::new([
        Quota::per_second(4).name("seconds").key(Key::global()),
        Quota::per_minute(50).name("minutes").key(Key::global()),
    ]);
    let several = FixedWindowLayer::new(limits.store(FarStore::new(|| 20)));
    let one = Quota::per_second(4).name("seconds").key(Key::global()).store(FarStore::new(|| 20));
    for layer in [several, FixedWindowLayer::new(one)] {
        let service = noting(&layer.queue(2, LONG), &Served::default());
        let ask = |_| tokio::spawn(service.clone().oneshot(request("/", "ann")));
        let mut statuses = Vec::new();
        for response in (0..9).map(ask).collect::<Vec<_>>() {
            let Ok(response) = response.await.expect("no panic");
            statuses.push(response.status().as_u16());
        }
        statuses.sort_unstable();
        assert_eq!(statuses, [vec![200; 6], vec![429; 3]].concat());
    }
}

/// The limit in tokens has 10 a second. 4 of them are left when "b" asks for 8.
#[tokio::test(start_paused = true)]
async fn costs_of_several_units_pass_in_order_and_those_of_none_at_once() {
    let cost = |parts: &http::request::Parts| -> u64 {
        parts.uri.path().rsplit('-').next().and_then(|cost| cost.parse().ok()).expect("a cost")
    };
    let layer = layer_of([
        Quota::per_second(5)
            .name("requests")
            .key(Key::global())
            .cost_fn(move |parts| cost(parts).min(1)),
        Quota::per_second(10).name("tokens").key(Key::global()).cost_fn(cost),
    ]);
    let (limits, served) = (layer.limits().clone(), Served::default());
    let service = noting(&layer.queue(30, LONG), &served);
    let mut waiting = Vec::new();
    for path in ["/a-6", "/b-8", "/c-1", "/d-1", "/e-0", "/f-1"] {
        waiting.push(tokio::spawn(service.clone().oneshot(request(path, "ann"))));
        tokio::task::yield_now().await;
    }
    // A request that can never pass is refused at once.
    let Ok(never) = service.clone().oneshot(request("/never-11", "ann")).await;
    assert_eq!((never.status().as_u16(), never.headers().get("retry-after")), (429, None));
    assert_eq!(limits.of("requests").peek(Key::global()).await.expect("memory").used(), 1);
    for response in waiting {
        let Ok(response) = response.await.expect("no panic");
        assert_eq!(response.status(), 200);
    }
    let expected = [("/a-6", 0), ("/e-0", 0), ("/b-8", 1), ("/c-1", 1), ("/d-1", 1), ("/f-1", 2)];
    let expected: Vec<_> = expected.iter().map(|(path, at)| ((*path).to_owned(), *at)).collect();
    assert_eq!(*served.lock().unwrap(), expected);
}

#[tokio::test(start_paused = true)]
async fn a_refund_of_any_limit_is_noticed_when_the_first_asks_again() {
    for (limit, key) in [("org", key_of("x-org", "acme")), ("user", key_of("x-user", "ann"))] {
        let layer = layer_of([
            Quota::per_day(2).name("org").key(header("x-org")),
            Quota::per_day(2).name("user").key(header("x-user")),
        ]);
        let (limits, served) = (layer.limits().clone(), Served::default());
        let taken = limits.of(limit).charge(key, 1).await.expect("memory");
        let service = noting(&layer.queue(30, Duration::from_secs(100_000)), &served);
        let waiting: Vec<_> =
            (0..2).map(|_| tokio::spawn(service.clone().oneshot(request("/", "ann")))).collect();
        sleep(Duration::from_secs(5)).await;
        assert_eq!(served.lock().unwrap().len(), 1);
        limits.of(limit).refund(taken.expect("it passes")).await.expect("memory");
        for response in waiting {
            let Ok(response) = response.await.expect("no panic");
            assert_eq!(response.status(), 200);
        }
        // After one, three and seven seconds.
        assert_eq!(served.lock().unwrap().last().expect("two").1, 7, "{limit}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_changed_limit_is_noticed_when_the_first_asks_again_and_decides() {
    let layer = layer_of([
        Quota::per_day(1).name("org").key(header("x-org")),
        Quota::per_day(5).name("user").key(header("x-user")),
    ]);
    let (limits, served) = (layer.limits().clone(), Served::default());
    let service = noting(&layer.queue(30, Duration::from_secs(100_000)), &served);
    let waiting: Vec<_> =
        (0..3).map(|_| tokio::spawn(service.clone().oneshot(request("/", "ann")))).collect();
    sleep(Duration::from_secs(5)).await;
    limits.of("org").set_quotas(Quota::per_day(2));
    sleep(Duration::from_secs(5)).await;
    assert_eq!(served.lock().unwrap().len(), 2);
    limits.of("org").reset(key_of("x-org", "acme")).await.expect("memory");
    for response in waiting {
        let Ok(response) = response.await.expect("no panic");
        assert_eq!(response.status(), 200);
    }
    let seconds: Vec<_> = served.lock().unwrap().iter().map(|(_, at)| *at).collect();
    assert_eq!(seconds, [0, 7, 11]);
}

/// Requests don't wait for a limit in shadow mode, nor for a limit that their plan leaves out.
#[tokio::test(start_paused = true)]
async fn only_limits_that_can_refuse_are_waited_for() {
    let plan = |parts: &http::request::Parts, _: &Key| match parts.uri.path() {
        "/free" => Plan::from(Quota::per_second(1)),
        _ => Plan::UNLIMITED,
    };
    let layer = layer_of([
        Quota::per_second(1).name("shadow").key(Key::global()).shadow(),
        Limit::by_plan(plan).name("plan").key(Key::global()),
        Quota::per_second(3).name("all").key(Key::global()),
    ]);
    let (limits, served) = (layer.limits().clone(), Served::default());
    let service = noting(&layer.queue(30, LONG), &served);
    let mut waiting = Vec::new();
    for path in ["/free", "/free", "/paid", "/paid", "/paid"] {
        waiting.push(tokio::spawn(service.clone().oneshot(request(path, "ann"))));
        tokio::task::yield_now().await;
    }
    for response in waiting {
        let Ok(response) = response.await.expect("no panic");
        assert_eq!(response.status(), 200);
    }
    let mut served = served.lock().unwrap().clone();
    served.sort();
    let expected = [("/free", 0), ("/free", 1), ("/paid", 0), ("/paid", 0), ("/paid", 1)];
    let expected: Vec<_> = expected.iter().map(|(path, at)| ((*path).to_owned(), *at)).collect();
    assert_eq!(served, expected);
    assert_eq!(limits.of("shadow").peek(Key::global()).await.expect("memory").used(), 1);
}

#[tokio::test(start_paused = true)]
async fn closing_the_queue_of_several_limits_answers_with_503_and_takes_nothing() {
    let layer = of_org_and_user().queue(30, LONG);
    let service = noting(&layer, &Served::default());
    let requests: Vec<_> =
        (0..6).map(|_| tokio::spawn(service.clone().oneshot(request("/", "ann")))).collect();
    sleep(Duration::from_millis(1)).await;
    layer.close_queue();
    let mut statuses = Vec::new();
    for response in requests {
        let Ok(response) = response.await.expect("no panic");
        statuses.push(response.status().as_u16());
    }
    assert_eq!(statuses, [200, 200, 200, 200, 503, 503]);
    assert_eq!(used(&layer, "org", key_of("x-org", "acme")).await, 4);
}

/// A request that is dropped with its tokens before its service is ready returns them to every
/// limit, and requests that wait elsewhere get them.
#[tokio::test(start_paused = true)]
async fn a_request_that_is_dropped_in_its_turn_has_taken_nothing() {
    let layer = of_org_and_user();
    let limits = layer.limits().clone();
    let service = noting(&layer.queue(30, LONG), &Served::default());
    let mut requests: Vec<_> =
        (0..9).map(|_| tokio::spawn(service.clone().oneshot(request("/", "ann")))).collect();
    sleep(Duration::from_millis(1_500)).await;
    let last = requests.pop().expect("nine");
    assert!(!last.is_finished());
    last.abort();
    sleep(Duration::from_millis(1_500)).await;
    assert!(requests.iter().all(tokio::task::JoinHandle::is_finished));
    for (limit, key) in [("org", key_of("x-org", "acme")), ("user", key_of("x-user", "ann"))] {
        assert_eq!(limits.of(limit).peek(key).await.expect("memory").used(), 0, "{limit}");
    }
}

/// As many ask at the same time as all limits have room for.
#[tokio::test(start_paused = true)]
async fn a_line_before_a_store_far_away_asks_for_many_at_the_same_time() {
    let store = FarStore::new(|| 20);
    let limits = Limits::new([
        Quota::per_second(200).name("seconds").key(Key::global()),
        Quota::per_minute(500).name("minutes").key(Key::global()),
    ]);
    let served = Served::default();
    let layer = FixedWindowLayer::new(limits.store(store));
    let service = noting(&layer.queue(1_000, Duration::from_secs(100)), &served);
    let waiting: Vec<_> = (0..700)
        .map(|i| tokio::spawn(service.clone().oneshot(request(&format!("/{i:03}"), "ann"))))
        .collect();
    for response in waiting {
        let Ok(response) = response.await.expect("no panic");
        assert_eq!(response.status(), 200);
    }
    let served = served.lock().unwrap();
    assert!(served.is_sorted_by_key(|(path, _)| path), "{served:?}");
    let in_second = |second| served.iter().filter(|(_, at)| *at == second).count();
    assert_eq!([0, 1, 2, 3, 60].map(in_second), [200, 200, 100, 0, 200]);
}

/// A request that waits for two limits counts for each of them.
#[tokio::test(start_paused = true)]
async fn requests_that_wait_are_counted_under_each_of_their_limits() {
    let (recorder, handle) = recorder();
    let _guard = metrics::set_default_local_recorder(recorder);
    let layer = of_org_and_user().queue(30, LONG);
    let service = noting(&layer, &Served::default());
    let calls = (0..6).map(|_| service.clone().oneshot(request("/", "ann")));
    let look = |name: &str| scraped(&handle).get(name).copied();
    let (_, ()) = tokio::join!(join_all(calls), async {
        sleep(Duration::from_millis(500)).await;
        for limit in ["org", "user"] {
            assert_eq!(look(&format!("waiting{{scope=\"{limit}\"}}")), Some(2.0), "{limit}");
        }
    });
    for limit in ["org", "user"] {
        assert_eq!(look(&format!("waiting{{scope=\"{limit}\"}}")), Some(0.0), "{limit}");
        assert_eq!(look(&format!("wait_seconds_count{{scope=\"{limit}\"}}")), Some(2.0), "{limit}");
        let passed = format!("decisions_total{{scope=\"{limit}\",outcome=\"passed\"}}");
        assert_eq!(look(&passed), Some(6.0), "{limit}");
    }
}

/// Two of the requests that are charged are gone when the reply comes. Their tokens are returned,
/// and a request that waits elsewhere for that limit notices.
#[tokio::test(start_paused = true)]
async fn tokens_of_those_that_are_gone_are_for_another_line() {
    let limits = Limits::new([
        Quota::per_day(3).name("org").key(header("x-org")),
        Quota::per_day(9).name("user").key(header("x-user")),
    ]);
    let (limits, served) = (limits.store(FarStore::new(|| 20)), Served::default());
    let layer = FixedWindowLayer::new(&limits);
    let service = noting(&layer.queue(30, Duration::from_secs(100_000)), &served);
    let call = |user| tokio::spawn(service.clone().oneshot(request("/", user)));
    let anns: Vec<_> = (0..3).map(|_| call("ann")).collect();
    sleep(Duration::from_millis(5)).await;
    let bob = call("bob");
    sleep(Duration::from_millis(5)).await;
    anns[1..].iter().for_each(tokio::task::JoinHandle::abort);
    let Ok(response) = bob.await.expect("no panic");
    assert_eq!(response.status(), 200);
    assert!(served.lock().unwrap().iter().all(|(_, at)| *at <= 1), "{served:?}");
    assert_eq!(used(&FixedWindowLayer::new(&limits), "org", key_of("x-org", "acme")).await, 2);
}

/// Other nodes may have taken what the line knew to be left: then fewer pass.
#[tokio::test(start_paused = true)]
async fn a_line_goes_on_by_the_store_where_others_have_taken_what_was_left() {
    let delay = Arc::new(AtomicU64::new(20));
    let of_store = Arc::clone(&delay);
    let store = FarStore::new(move || of_store.load(Ordering::SeqCst));
    let quotas = [Quota::per_second(10).name("seconds"), Quota::per_minute(600).name("minutes")];
    let other = Limits::new(quotas.clone()).store(store.memory.clone());
    let served = Served::default();
    let layer = FixedWindowLayer::new(
        Limits::new(quotas.map(|quota| quota.key(Key::global()))).store(store),
    );
    let service = noting(&layer.queue(30, LONG), &served);
    let of_other = |cost| {
        let lines = ["seconds", "minutes"].map(|name| Line::new(name, Key::global(), cost));
        other.check(lines)
    };
    assert!(of_other(10).await.expect("memory").allowed());
    let waiting: Vec<_> =
        (0..14).map(|_| tokio::spawn(service.clone().oneshot(request("/", "ann")))).collect();
    // The next charge is sent so as to come with the window, and comes after the other node's.
    sleep(Duration::from_millis(500)).await;
    delay.store(60, Ordering::SeqCst);
    sleep(Duration::from_millis(505)).await;
    assert!(of_other(8).await.expect("memory").allowed());
    for response in waiting {
        let Ok(response) = response.await.expect("no panic");
        assert_eq!(response.status(), 200);
    }
    let served = served.lock().unwrap();
    let in_second = |second| served.iter().filter(|(_, at)| *at == second).count();
    assert_eq!([0, 1, 2, 3].map(in_second), [0, 2, 10, 2]);
}

#[tokio::test(start_paused = true)]
async fn each_request_in_a_line_is_charged_by_its_own_plan() {
    let plan = |parts: &http::request::Parts, _: &Key| match parts.uri.path() {
        "/small" => Quota::per_second(1),
        _ => Quota::per_second(10),
    };
    let limits = Limits::new([
        Limit::by_plan(plan).name("plan").key(Key::global()),
        Quota::per_minute(600).name("minutes").key(Key::global()),
    ]);
    let (layer, served) =
        (FixedWindowLayer::new(limits.store(FarStore::new(|| 20))), Served::default());
    let service = noting(&layer.queue(30, LONG), &served);
    let waiting: Vec<_> = ["/big", "/big", "/small", "/big", "/small"]
        .map(|path| tokio::spawn(service.clone().oneshot(request(path, "ann"))))
        .into();
    for response in waiting {
        let Ok(response) = response.await.expect("no panic");
        assert_eq!(response.status(), 200);
    }
    let seconds: Vec<_> = served.lock().unwrap().iter().map(|(_, at)| *at).collect();
    assert_eq!(seconds, [0, 0, 1, 1, 2]);
}

/// Requests that are charged at the same time take their tokens one after the other.
#[tokio::test(start_paused = true)]
async fn each_of_those_that_are_charged_at_the_same_time_shows_its_own_count() {
    let layer_over_store = |limits: Vec<Limit>| {
        let layer = FixedWindowLayer::new(Limits::new(limits).store(FarStore::new(|| 20)));
        noting(&layer.queue(30, LONG), &Served::default())
    };
    let wide = Quota::per_minute(100).name("wide").key(Key::global()).cost_fn(|_| 2);
    let tight = Quota::per_minute(30).name("tight").key(Key::global());
    for (limits, shown, cost) in [(vec![wide.clone()], 100, 2), (vec![wide, tight], 30, 1)] {
        let service = layer_over_store(limits);
        let waiting: Vec<_> =
            (0..5).map(|_| tokio::spawn(service.clone().oneshot(request("/", "ann")))).collect();
        for (i, response) in (1..).zip(waiting) {
            let Ok(response) = response.await.expect("no panic");
            let number = |name: &str| response.headers()[name].to_str().expect("text").parse().ok();
            assert_eq!(number("x-ratelimit-limit"), Some(shown));
            assert_eq!(number("x-ratelimit-used"), Some(i * cost), "{i} of {shown}");
        }
    }
}

/// A service that is ready for one call only.
#[derive(Clone, Default)]
struct ReadyOnce(Arc<AtomicU64>);

impl Service<Request<Body>> for ReadyOnce {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        if self.0.load(Ordering::SeqCst) == 0 { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        self.0.fetch_add(1, Ordering::SeqCst);
        std::future::ready(Ok(Response::new(Body::empty())))
    }
}

/// The limits have room, but the service is not ready: the refusal has a time to come back all the
/// same.
#[tokio::test(start_paused = true)]
async fn a_request_whose_service_is_not_ready_in_time_is_refused_for_the_limit_that_governs() {
    let limits = Limits::new([
        Quota::per_minute(10).name("org").key(header("x-org")),
        Limit::new(Quota::per_hour(100).and(Quota::per_second(1)))
            .name("user")
            .key(header("x-user")),
    ]);
    let limits = limits.store(FarStore::new(|| 20));
    let layer = FixedWindowLayer::new(limits).queue(30, Duration::from_secs(2));
    let service = layer.layer(ReadyOnce::default());
    let mut calls = Vec::new();
    for _ in 0..2 {
        // The request is made ready before the other one is called.
        let mut service = service.clone();
        let Ok(service) = service.ready().await;
        calls.push(tokio::spawn(service.call(request("/", "ann"))));
    }
    let mut responses = Vec::new();
    for call in calls {
        let Ok(response) = call.await.expect("no panic");
        responses.push(response);
    }
    assert_eq!(responses[0].status(), 200);
    assert_eq!(responses[1].status(), 429);
    assert_eq!(responses[1].headers()["x-ratelimit-resource"], "user");
    assert!(responses[1].headers().contains_key("retry-after"));
    let refused = responses.pop().expect("two").into_body();
    let body = axum::body::to_bytes(refused, 10_000).await.expect("a body");
    let body = String::from_utf8_lossy(&body);
    assert!(body.contains(r#""violated-policies":["user:1/second"]"#), "{body}");
}
