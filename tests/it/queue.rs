//! Waiting for a window instead of being refused, on tokio's paused clock.

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response};
use tokio::time::{Instant, sleep};
use tower::limit::ConcurrencyLimitLayer;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_fixed_window::key::global;
use tower_fixed_window::{FixedWindowLayer, Key, MemoryStore, Quota};

use crate::support::{get, paused_clock};

fn ten_a_second(queue: u64, max_wait: Duration) -> FixedWindowLayer {
    FixedWindowLayer::new(Quota::per_second(10))
        .key(global())
        .store(MemoryStore::with_clock(paused_clock()))
        .queue(queue, max_wait)
}

const LONG: Duration = Duration::from_secs(60);

/// Notes which request is served when.
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
    // All of the fourth window is reserved: the fifth begins in 4 s (S16).
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
    let control = layer.control();
    let service = noting(&layer, &served);
    let mut requests: Vec<_> =
        (0..20).map(|_| tokio::spawn(service.clone().oneshot(get("/")))).collect();
    sleep(Duration::from_millis(1)).await;
    let Ok(refused) = service.clone().oneshot(get("/")).await;
    assert_eq!(refused.status(), 429);
    let one = requests.pop().expect("twenty");
    one.abort();
    assert!(one.await.expect_err("dropped").is_cancelled());
    assert_eq!(control.peek(Key::global()).await.expect("memory").used(), 19);
    requests.push(tokio::spawn(service.clone().oneshot(get("/"))));
    for request in requests {
        let Ok(response) = request.await.expect("no panic");
        assert_eq!(response.status(), 200);
    }
    assert_eq!(served.lock().unwrap().len(), 20);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_would_wait_longer_than_max_wait_is_refused_and_takes_nothing() {
    let served = Served::default();
    let layer = ten_a_second(30, Duration::from_millis(1_500));
    let control = layer.control();
    let service = noting(&layer, &served);
    let requests: Vec<_> =
        (0..20).map(|_| tokio::spawn(service.clone().oneshot(get("/")))).collect();
    sleep(Duration::from_millis(1)).await;
    // The third window begins in 2 s.
    let Ok(refused) = service.clone().oneshot(get("/")).await;
    assert_eq!(refused.status(), 429);
    assert_eq!(refused.headers()["retry-after"], "2");
    assert_eq!(refused.headers()["x-ratelimit-used"], "20");
    assert_eq!(control.peek(Key::global()).await.expect("memory").used(), 20);
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

#[tokio::test(start_paused = true)]
async fn requests_wait_for_windows_of_quotas_of_their_own() {
    let layer = ten_a_second(30, LONG).quota_fn(|_, _| Quota::per_second(5));
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
        let layer = FixedWindowLayer::new(quotas)
            .key(global())
            .store(MemoryStore::with_clock(paused_clock()))
            .queue(30, Duration::from_millis(1_500));
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
        // Readied before it is called, as a server does.
        waiting.push(tokio::spawn(async move {
            let mut service = service;
            service.ready().await.expect("infallible").call(get("/")).await
        }));
    }
    sleep(Duration::from_millis(1)).await;
    assert_eq!(in_service.load(Ordering::SeqCst), 10);
    // Five wait, and the only place is free.
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
    let control = layer.control();
    let service = noting(&layer, &served);
    let requests: Vec<_> =
        (0..12).map(|_| tokio::spawn(service.clone().oneshot(get("/")))).collect();
    sleep(Duration::from_millis(1)).await;
    let start = Instant::now();
    control.close_queue();
    let mut statuses = Vec::new();
    for request in requests {
        let Ok(response) = request.await.expect("no panic");
        statuses.push(response.status().as_u16());
    }
    assert_eq!(statuses, [vec![200; 10], vec![503; 2]].concat());
    assert_eq!(start.elapsed(), Duration::ZERO, "at once");
    assert_eq!(control.peek(Key::global()).await.expect("memory").used(), 10, "given back");
    // Nor does any other wait.
    let Ok(response) = service.oneshot(get("/")).await;
    assert_eq!(response.status(), 503);
}

#[tokio::test(start_paused = true)]
async fn no_request_waits_in_shadow_mode() {
    let served = Served::default();
    let service = noting(&ten_a_second(30, LONG).shadow(), &served);
    for _ in 0..15 {
        let Ok(response) = service.clone().oneshot(get("/")).await;
        assert_eq!(response.status(), 200);
    }
    assert!(served.lock().unwrap().iter().all(|(_, at)| *at == 0));
}
