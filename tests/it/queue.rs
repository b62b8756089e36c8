//! Waiting for a window instead of being refused, on tokio's paused clock.

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use allocation_counter::measure;
use axum::body::Body;
use futures_util::FutureExt;
use http::{Request, Response};
use tokio::time::{Instant, sleep};
use tower::limit::ConcurrencyLimitLayer;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_fixed_window::key::header;
use tower_fixed_window::{
    FixedWindowLayer, Key, KeyExtractor, Limit, Limiter, Limits, MemoryStore, Quota, Quotas, Store,
};

use crate::support::{FarStore, get, limiter_of, paused_clock};

fn ten_a_second(queue: u64, max_wait: Duration) -> FixedWindowLayer {
    in_memory(Quota::per_second(10).key(Key::global())).queue(queue, max_wait)
}

fn in_memory(limit: Limit) -> FixedWindowLayer {
    FixedWindowLayer::new(limit.store(MemoryStore::new().clock(paused_clock())))
}

const LONG: Duration = Duration::from_secs(60);

/// Notes the time of each served request.
type Served = Arc<Mutex<Vec<(String, u128)>>>;

fn noting(
    layer: &FixedWindowLayer,
    served: &Served,
) -> impl Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send>
+ Clone
+ use<> {
    let (served, start) = (served.clone(), Instant::now());
    layer.layer(service_fn(move |request: Request<Body>| {
        let path = request.uri().path().to_owned();
        served.lock().unwrap().push((path, start.elapsed().as_millis()));
        async { Ok(Response::new(Body::empty())) }
    }))
}

#[tokio::test(start_paused = true)]
async fn forty_concurrent_requests_are_served_in_order_in_four_windows_and_the_next_is_refused() {
    let served = Served::default();
    let service = noting(&ten_a_second(30, LONG), &served);
    let mut waiting = Vec::new();
    for i in 0..40 {
        waiting.push(tokio::spawn(service.clone().oneshot(get(&format!("/{i:02}")))));
        tokio::task::yield_now().await;
    }
    let Ok(refused) = service.oneshot(get("/refused")).await;
    assert_eq!(refused.status(), 429);
    // The waiting requests fill the fourth window: the fifth begins in 4 s (S13).
    assert_eq!(refused.headers()["retry-after"], "4");
    for response in waiting {
        let Ok(response) = response.await.expect("no panic");
        assert_eq!(response.status(), 200);
    }
    let served = served.lock().unwrap();
    let order: Vec<_> = served.iter().map(|(path, _)| path.clone()).collect();
    assert_eq!(order, (0..40).map(|i| format!("/{i:02}")).collect::<Vec<_>>());
    for (i, (path, at)) in served.iter().enumerate() {
        let due = i as u128 / 10 * 1_000;
        assert!((due..due + 10).contains(at), "{path} at {at} ms, due at {due}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_dropped_waiter_frees_its_place() {
    let served = Served::default();
    let layer = ten_a_second(10, LONG);
    let limiter = limiter_of(&layer);
    let service = noting(&layer, &served);
    let mut requests: Vec<_> =
        (0..20).map(|_| tokio::spawn(service.clone().oneshot(get("/")))).collect();
    sleep(Duration::from_millis(1)).await;
    let Ok(refused) = service.clone().oneshot(get("/")).await;
    assert_eq!(refused.status(), 429);
    let one = requests.pop().expect("twenty");
    one.abort();
    assert!(one.await.expect_err("dropped").is_cancelled());
    assert_eq!(limiter.peek(Key::global()).await.expect("memory").used(), 10);
    requests.push(tokio::spawn(service.clone().oneshot(get("/"))));
    for request in requests {
        let Ok(response) = request.await.expect("no panic");
        assert_eq!(response.status(), 200);
    }
    assert_eq!(served.lock().unwrap().len(), 20);
}

/// One a second: the first passes, and two wait.
#[tokio::test(start_paused = true)]
async fn a_dropped_waiter_leaves_its_turn_and_its_tokens_to_others() {
    let layer =
        in_memory(Quota::per_second(1).key(Key::global())).queue(10, Duration::from_secs(3));
    for dropped in [0, 1] {
        let served = Served::default();
        let service = noting(&layer, &served);
        let ask = |path| tokio::spawn(service.clone().oneshot(get(path)));
        assert_eq!(ask("/first").await.expect("no panic").expect("infallible").status(), 200);
        let mut waiting = vec![ask("/a"), ask("/b")];
        sleep(Duration::from_millis(500)).await;
        waiting.remove(dropped).abort();
        waiting.extend([ask("/c"), ask("/d")]);
        for response in waiting {
            let Ok(response) = response.await.expect("no panic");
            assert_eq!(response.status(), 200);
        }
        let times: Vec<_> = served.lock().unwrap().iter().map(|(_, at)| at / 20 * 20).collect();
        assert_eq!(times, [0, 1_000, 2_000, 3_000], "without {dropped}");
        sleep(Duration::from_millis(990)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_would_wait_longer_than_max_wait_is_refused_and_takes_nothing() {
    let served = Served::default();
    let layer = ten_a_second(30, Duration::from_millis(1_500));
    let limiter = limiter_of(&layer);
    let service = noting(&layer, &served);
    let requests: Vec<_> =
        (0..20).map(|_| tokio::spawn(service.clone().oneshot(get("/")))).collect();
    sleep(Duration::from_millis(1)).await;
    // The third window begins in 2 s.
    let Ok(refused) = service.clone().oneshot(get("/")).await;
    assert_eq!(refused.status(), 429);
    assert_eq!(refused.headers()["retry-after"], "2");
    assert_eq!(refused.headers()["x-ratelimit-used"], "10");
    assert_eq!(limiter.peek(Key::global()).await.expect("memory").used(), 10);
    for request in requests {
        let Ok(response) = request.await.expect("no panic");
        assert_eq!(response.status(), 200);
    }
}

/// In which second each of so many concurrent requests is served. None may be refused.
async fn seconds_of(layer: &FixedWindowLayer, requests: usize) -> Vec<u128> {
    let served = Served::default();
    let service = noting(layer, &served);
    let requests: Vec<_> =
        (0..requests).map(|_| tokio::spawn(service.clone().oneshot(get("/")))).collect();
    for request in requests {
        let Ok(response) = request.await.expect("no panic");
        assert_eq!(response.status(), 200);
    }
    let served = served.lock().unwrap();
    served.iter().map(|(_, at)| at / 1_000).collect()
}

/// The second window begins in a second.
#[tokio::test(start_paused = true)]
async fn a_request_may_wait_for_exactly_as_long_as_max_wait() {
    let layer = ten_a_second(30, Duration::from_secs(1));
    assert_eq!(seconds_of(&layer, 20).await, [[0; 10], [1; 10]].concat());
}

/// The timer of a request behind the first one may fire earlier.
#[tokio::test(start_paused = true)]
async fn a_request_at_its_deadline_lets_the_first_one_go_before() {
    let layer = in_memory(Quota::per_second(2).key(Key::global())).queue(5, Duration::from_secs(1));
    let service = noting(&layer, &Served::default());
    let ask = || Box::pin(service.clone().oneshot(get("/")));
    let passes = |response: Option<Result<Response<Body>, Infallible>>| {
        response.is_some_and(|response| response.expect("infallible").status() == 200)
    };
    assert!(passes(ask().now_or_never()) && passes(ask().now_or_never()));
    let (mut first, mut second) = (ask(), ask());
    assert!((&mut first).now_or_never().is_none() && (&mut second).now_or_never().is_none());
    tokio::time::advance(Duration::from_secs(1)).await;
    assert!((&mut second).now_or_never().is_none());
    assert!(passes(first.now_or_never()) && passes(second.now_or_never()));
}

/// Others take the tokens that three requests wait for.
#[tokio::test(start_paused = true)]
async fn those_who_waited_in_vain_are_told_to_come_after_all_that_are_before_them() {
    let layer =
        in_memory(Quota::per_second(2).key(Key::global())).queue(5, Duration::from_millis(2_500));
    let (limiter, service) = (limiter_of(&layer), noting(&layer, &Served::default()));
    let take_all = || limiter.check_cost(Key::global(), 2).now_or_never().expect("memory");
    assert!(take_all().expect("memory").allowed());
    let mut waiting = [(); 3].map(|()| Box::pin(service.clone().oneshot(get("/"))));
    for second in 1..=2 {
        assert!(waiting.iter_mut().all(|request| request.now_or_never().is_none()));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(take_all().expect("memory").allowed(), "in second {second}");
    }
    assert!(waiting.iter_mut().all(|request| request.now_or_never().is_none()));
    tokio::time::advance(Duration::from_millis(500)).await;
    // The next window is for the two before the last one.
    for (request, retry_after) in waiting.iter_mut().zip(["1", "1", "2"]).rev() {
        let Some(Ok(refused)) = request.now_or_never() else { panic!("its time is over") };
        assert_eq!(refused.status(), 429);
        assert_eq!(refused.headers()["retry-after"], retry_after);
    }
}

#[tokio::test(start_paused = true)]
async fn requests_wait_for_windows_of_quotas_of_their_own() {
    let limit = Limit::by_plan(|_, _| Quota::per_second(5)).key(Key::global());
    let layer = in_memory(limit).queue(30, LONG);
    assert_eq!(seconds_of(&layer, 10).await, [[0; 5], [1; 5]].concat());
}

/// The headers are about the quota with the longest wait; the body names all that are exceeded.
#[tokio::test(start_paused = true)]
async fn requests_that_would_wait_too_long_are_told_which_quotas_are_exceeded() {
    let second = Quota::per_second(10);
    let (few, many) = (Quota::per_minute(15), Quota::per_minute(100));
    for (quotas, limit, retry_after, exceeded) in [
        (second.and(few), "15", "60", r#""10/second","15/minute""#),
        (few.and(second), "15", "60", r#""15/minute","10/second""#),
        (second.and(many), "10", "2", r#""10/second""#),
        (many.and(second), "10", "2", r#""10/second""#),
    ] {
        let layer = in_memory(quotas.key(Key::global())).queue(30, Duration::from_millis(1_500));
        let service = noting(&layer, &Served::default());
        let requests: Vec<_> =
            (0..20).map(|_| tokio::spawn(service.clone().oneshot(get("/")))).collect();
        sleep(Duration::from_millis(1)).await;
        let Ok(refused) = service.clone().oneshot(get("/")).await;
        assert_eq!(refused.headers()["x-ratelimit-limit"], limit, "{quotas}");
        assert_eq!(refused.headers()["retry-after"], retry_after, "{quotas}");
        let body = axum::body::to_bytes(refused.into_body(), 10_000).await.expect("a body");
        let body = String::from_utf8_lossy(&body);
        assert!(body.contains(&format!(r#""violated-policies":[{exceeded}]"#)), "{quotas}: {body}");
        drop(requests);
    }
}

#[tokio::test(start_paused = true)]
async fn waiting_requests_hold_no_place_in_the_inner_service() {
    let in_service = Arc::new(AtomicUsize::new(0));
    let counter = in_service.clone();
    let service = ServiceBuilder::new()
        .layer(ten_a_second(30, LONG))
        .layer(ConcurrencyLimitLayer::new(1))
        .service(service_fn(move |_: Request<Body>| {
            let counter = counter.clone();
            async move {
                counter.fetch_add(1, Ordering::SeqCst);
                Ok::<_, Infallible>(Response::new(Body::empty()))
            }
        }));
    let mut waiting = Vec::new();
    for _ in 0..15 {
        let service = service.clone();
        // Servers make a service ready before they call it.
        waiting.push(tokio::spawn(async move {
            let mut service = service;
            service.ready().await.expect("infallible").call(get("/")).await
        }));
    }
    sleep(Duration::from_millis(1)).await;
    assert_eq!(in_service.load(Ordering::SeqCst), 10);
    // Five requests wait for the service, and the queue's only place is free.
    let mut other = service.clone();
    let ready = tokio::time::timeout(Duration::from_millis(1), other.ready()).await;
    assert!(ready.is_ok(), "the place is held by one that waits");
    drop(other);
    for response in waiting {
        let Ok(response) = response.await.expect("no panic");
        assert_eq!(response.status(), 200);
    }
}

#[tokio::test(start_paused = true)]
async fn closing_the_queue_answers_all_waiters_with_503() {
    let served = Served::default();
    let layer = ten_a_second(30, LONG);
    let limiter = limiter_of(&layer);
    let service = noting(&layer, &served);
    let requests: Vec<_> =
        (0..12).map(|_| tokio::spawn(service.clone().oneshot(get("/")))).collect();
    sleep(Duration::from_millis(1)).await;
    let start = Instant::now();
    layer.close_queue();
    let mut statuses = Vec::new();
    for request in requests {
        let Ok(response) = request.await.expect("no panic");
        statuses.push(response.status().as_u16());
    }
    assert_eq!(statuses, [vec![200; 10], vec![503; 2]].concat());
    assert_eq!(start.elapsed(), Duration::ZERO, "at once");
    assert_eq!(limiter.peek(Key::global()).await.expect("memory").used(), 10, "given back");
    // Other requests don't wait, either.
    let Ok(response) = service.oneshot(get("/")).await;
    assert_eq!(response.status(), 503);
}

#[tokio::test(start_paused = true)]
async fn no_request_waits_in_shadow_mode() {
    let served = Served::default();
    let layer = in_memory(Quota::per_second(10).key(Key::global()).shadow()).queue(30, LONG);
    let service = noting(&layer, &served);
    for _ in 0..15 {
        let Ok(response) = service.clone().oneshot(get("/")).await;
        assert_eq!(response.status(), 200);
    }
    assert!(served.lock().unwrap().iter().all(|(_, at)| *at == 0));
}

/// Returns the second in which each request is served. All come `at` a millisecond of a minute whose
/// start has used `taken` tokens, and are served in order of arrival.
async fn seconds_after(
    quotas: impl Into<Quotas>,
    taken: u64,
    at: u64,
    requests: usize,
) -> Vec<u64> {
    let (quotas, store) = (quotas.into(), MemoryStore::new().clock(paused_clock()));
    let minute = *quotas.into_iter().max_by_key(|quota| quota.window()).expect("at least one");
    let earlier = Limit::new(minute).name("of-queue").store(store.clone());
    assert!(
        taken == 0 || earlier.check_cost(Key::global(), taken).await.expect("memory").allowed()
    );
    let layer =
        FixedWindowLayer::new(Limit::new(quotas).name("of-queue").key(Key::global()).store(store));
    let served = Served::default();
    let service = noting(&layer.queue(1_000, Duration::from_secs(120)), &served);
    sleep(Duration::from_millis(at)).await;
    let requests: Vec<_> = (0..requests)
        .map(|i| tokio::spawn(service.clone().oneshot(get(&format!("/{i:04}")))))
        .collect();
    for request in requests {
        let Ok(response) = request.await.expect("no panic");
        assert_eq!(response.status(), 200);
    }
    let served = served.lock().unwrap();
    assert!(served.is_sorted_by_key(|(path, _)| path), "{served:?}");
    served.iter().map(|(_, at)| *at as u64 / 1_000).collect()
}

#[tokio::test(start_paused = true)]
async fn waiting_requests_fill_each_second_and_never_burst_when_a_minute_ends() {
    let quotas = Quota::per_second(20).and(Quota::per_minute(1_000));
    let seconds = seconds_after(quotas, 940, 57_000, 400).await;
    let expected: Vec<_> = (57..77).flat_map(|second| [second; 20]).collect();
    assert_eq!(seconds, expected);
    // The minute's tokens are used up. In the next minute, requests pass second by second.
    let seconds = seconds_after(quotas, 1_000, 45_000, 60).await;
    assert_eq!(seconds, [[60; 20], [61; 20], [62; 20]].concat());
}

#[tokio::test(start_paused = true)]
async fn eight_requests_of_one_a_second_are_served_in_eight_consecutive_seconds() {
    let quotas = Quota::per_second(1).and(Quota::per_minute(60));
    assert_eq!(seconds_after(quotas, 58, 58_500, 8).await, Vec::from_iter(58..66));
    assert_eq!(seconds_after(quotas, 60, 58_500, 8).await, Vec::from_iter(60..68));
}

/// README's limit.
#[tokio::test(start_paused = true)]
async fn sixty_a_minute_with_fifteen_in_ten_seconds_are_never_thirty_in_ten_seconds() {
    let quotas = Quota::per_minute(60).and(Quota::new(15, Duration::from_secs(10)));
    let seconds = seconds_after(quotas, 50, 45_000, 60).await;
    let expected = [vec![45; 10], vec![60; 15], vec![70; 15], vec![80; 15], vec![90; 5]].concat();
    assert_eq!(seconds, expected);
}

#[tokio::test(start_paused = true)]
async fn costs_pass_in_order_of_arrival_and_a_cost_of_zero_at_once() {
    let served = Served::default();
    let cost = |parts: &http::request::Parts| {
        parts.uri.path().rsplit('-').next().and_then(|cost| cost.parse().ok()).unwrap_or(1)
    };
    let limit = Quota::per_second(10).key(Key::global()).cost_fn(cost);
    let service = noting(&in_memory(limit).queue(30, LONG), &served);
    let mut requests = Vec::new();
    for path in ["/a-6", "/b-6", "/c-1", "/d-10", "/e-0", "/f-4", "/g-4", "/h-4"] {
        requests.push(tokio::spawn(service.clone().oneshot(get(path))));
        tokio::task::yield_now().await;
    }
    // A request that can never pass is refused at once.
    let Ok(never) = service.clone().oneshot(get("/never-11")).await;
    assert_eq!((never.status().as_u16(), never.headers().get("retry-after")), (429, None));
    for request in requests {
        let Ok(response) = request.await.expect("no panic");
        assert_eq!(response.status(), 200);
    }
    let expected = [
        ("/a-6", 0),
        ("/e-0", 0),
        ("/b-6", 1),
        ("/c-1", 1),
        ("/d-10", 2),
        ("/f-4", 3),
        ("/g-4", 3),
        ("/h-4", 4),
    ];
    let served = served.lock().unwrap().clone();
    let served: Vec<_> = served.iter().map(|(path, at)| (path.as_str(), *at / 1_000)).collect();
    assert_eq!(served, expected);
}

#[tokio::test(start_paused = true)]
async fn resets_refunds_and_new_quotas_are_noticed_when_the_first_asks_again() {
    let change: [fn(&Limiter); 3] = [
        |limiter| _ = limiter.reset(Key::global()),
        |limiter| limiter.set_quotas(Quota::per_minute(12)),
        |_| {},
    ];
    for (i, change) in change.into_iter().enumerate() {
        let served = Served::default();
        let layer = in_memory(Quota::per_minute(10).key(Key::global()))
            .count_if(|response| response.status != 204)
            .queue(30, LONG);
        let limiter = limiter_of(&layer);
        let (notes, start) = (served.clone(), Instant::now());
        let service = layer.layer(service_fn(move |request: Request<Body>| {
            let (path, notes) = (request.uri().path().to_owned(), notes.clone());
            async move {
                notes.lock().unwrap().push((path.clone(), start.elapsed().as_millis()));
                // Two of the requests end after two seconds, and do not count.
                let uncounted = path == "/0" || path == "/1";
                sleep(Duration::from_secs(if uncounted { 2 } else { 0 })).await;
                let status = if uncounted { 204 } else { 200 };
                Ok::<_, Infallible>(Response::builder().status(status).body(Body::empty()).unwrap())
            }
        }));
        let mut requests = Vec::new();
        for n in 0..12 {
            requests.push(tokio::spawn(service.clone().oneshot(get(&format!("/{n}")))));
        }
        sleep(Duration::from_millis(1_500)).await;
        change(&limiter);
        for request in requests {
            request.await.expect("no panic").expect("infallible");
        }
        // It has asked after a second, and then waits for two.
        let at = 3_000;
        assert_eq!(served.lock().unwrap()[10..], [("/10".into(), at), ("/11".into(), at)], "{i}");
    }
}

/// In memory and far away, alone and beside another limit.
#[tokio::test(start_paused = true)]
async fn requests_that_wait_are_let_go_when_their_limit_goes_into_shadow_mode() {
    let memory = MemoryStore::new().clock(paused_clock());
    for (i, beside) in [false, true, false, true].into_iter().enumerate() {
        let strict = Quota::per_day(1).name("strict").key(Key::global());
        let wide = Quota::per_day(100).name("wide").key(Key::global());
        let limits = Limits::new([strict].into_iter().chain(beside.then_some(wide)));
        let limits = match i {
            0 | 1 => limits.store(memory.clone()),
            _ => limits.store(FarStore::new(|| 20)),
        };
        limits.of("strict").reset(Key::global()).await.expect("it answers");
        let layer = FixedWindowLayer::new(&limits).queue(30, Duration::from_secs(1_000_000));
        let service = noting(&layer, &Served::default());
        let requests: Vec<_> =
            (0..5).map(|_| tokio::spawn(service.clone().oneshot(get("/")))).collect();
        sleep(Duration::from_millis(1_500)).await;
        let passed = requests.iter().filter(|request| request.is_finished()).count();
        assert_eq!(passed, 1, "case {i}");
        limits.of("strict").set_shadow(true);
        sleep(Duration::from_millis(2_000)).await;
        for request in requests {
            assert!(request.is_finished(), "case {i}");
            let Ok(response) = request.await.expect("no panic");
            assert_eq!(response.status(), 200);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_others_return_is_noticed_when_the_first_asks_again() {
    returned_elsewhere(MemoryStore::new().clock(paused_clock())).await;
    returned_elsewhere(FarStore::new(|| 1)).await;
}

/// By other limiters of the name, by other layers, and by a charge of several limits.
async fn returned_elsewhere(store: impl Store + Clone) {
    let limiter = || Quota::per_minute(2).name("of-queue").store(store.clone());
    let layer = || {
        let limit = Quota::per_minute(2).name("of-queue").key(Key::global());
        FixedWindowLayer::new(limit.store(store.clone()))
    };
    let limits = || {
        let limits = Limits::new([Quota::per_minute(2).name("of-queue")]);
        limits.store(store.clone())
    };
    for way in 0..5 {
        limiter().reset(Key::global()).await.expect("it answers");
        let charged = limiter().charge(Key::global(), 2).await.expect("it answers");
        let receipt = charged.expect("there is room");
        let service = noting(&layer().queue(9, LONG), &Served::default());
        let waiting = tokio::spawn(service.oneshot(get("/")));
        sleep(Duration::from_secs(1)).await;
        let start = Instant::now();
        let returned = match way {
            0 => limiter().refund(receipt),
            1 => limiter().settle(receipt, 1),
            2 => limiter().reset(Key::global()),
            3 => layer().limits().of("of-queue").reset(Key::global()),
            _ => limits().of("of-queue").reset(Key::global()),
        };
        returned.await.expect("it answers");
        let Ok(response) = waiting.await.expect("no panic");
        assert_eq!(response.status(), 200);
        assert!(start.elapsed() <= Duration::from_millis(2_010), "{way}: {:?}", start.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn closing_the_queue_ends_the_wait_for_the_service() {
    let layer = ten_a_second(30, LONG);
    let limiter = limiter_of(&layer);
    let service = layer.layer(NeverReady);
    let mut requests: Vec<_> = (0..12)
        .map(|_| {
            let mut service = service.clone();
            tokio::spawn(service.call(get("/")))
        })
        .collect();
    sleep(Duration::from_millis(2_500)).await;
    assert_eq!(limiter.peek(Key::global()).await.expect("memory").used(), 0, "nothing is taken");
    layer.close_queue();
    for request in requests.drain(10..) {
        let Ok(response) = request.await.expect("no panic");
        assert_eq!(response.status(), 503);
    }
}

/// A service that is never ready. It serves calls that come all the same.
#[derive(Clone)]
struct NeverReady;

impl Service<Request<Body>> for NeverReady {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Pending
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        std::future::ready(Ok(Response::new(Body::empty())))
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_in_the_last_millisecond_of_a_window_is_charged_once() {
    for window in [1, 2, 1_000] {
        let quota = Quota::new(2, Duration::from_millis(window));
        let layer = in_memory(quota.key(Key::global())).queue(9, LONG);
        let served = Served::default();
        let service = noting(&layer, &served);
        sleep(Duration::from_millis(window - 1)).await;
        let start = Instant::now();
        for _ in 0..5 {
            let Ok(response) = service.clone().oneshot(get("/")).await;
            assert_eq!(response.status(), 200);
        }
        assert!(start.elapsed() <= Duration::from_millis(2 * window + 2), "of {window} ms");
    }
}

#[test]
fn queues_that_are_dropped_keep_no_memory() {
    let limit = Quota::per_second(1).name("of-queue").store(MemoryStore::new());
    let layer = || FixedWindowLayer::new(&limit).queue(2, LONG);
    let build = || drop(noting(&layer(), &Served::default()));
    build();
    let used = measure(|| (0..1_000).for_each(|_| build()));
    assert!(used.bytes_current < 10_000, "{} bytes are kept", used.bytes_current);
}

#[tokio::test(start_paused = true)]
async fn lines_that_all_have_left_keep_no_memory() {
    const KEYS: u64 = 1_000;
    let by_user = Quota::per_second(1).key(header("x-user"));
    let layer = in_memory(by_user).queue(2, LONG);
    let (limiter, served) = (limiter_of(&layer), Served::default());
    let service = noting(&layer, &served);
    let get =
        |user: u64| Request::get("/").header("x-user", user).body(Body::empty()).expect("valid");
    for user in 0..KEYS {
        let mut key = Key::default();
        header("x-user").extract(&get(user).into_parts().0, &mut key).expect("it is there");
        assert!(limiter.check(key).await.expect("memory").allowed());
    }
    let used = measure(|| {
        for user in 0..KEYS {
            // It waits for the next second, and is dropped.
            assert!(service.clone().oneshot(get(user)).now_or_never().is_none());
        }
    });
    assert!(used.bytes_current < 20 * KEYS as i64, "{} bytes are kept", used.bytes_current);
}
