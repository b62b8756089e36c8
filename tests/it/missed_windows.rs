//! Requests that have waited for their window, and find the service busy until it is over.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::body::Body;
use futures_util::FutureExt;
use http::{Request, Response};
use tokio::time::{Instant, sleep, sleep_until};
use tower::limit::ConcurrencyLimitLayer;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_fixed_window::key::header;
use tower_fixed_window::{FixedWindowLayer, Key, Limit, Limiter, MemoryStore, Quota};

use crate::queue::answered;
use crate::support::{FarStore, get, limiter_of, paused_clock};

const LONG: Duration = Duration::from_secs(60);

fn a_second(limit: u64) -> FixedWindowLayer {
    in_memory(Quota::per_second(limit).key(Key::global()))
}

fn in_memory(limit: Limit) -> FixedWindowLayer {
    FixedWindowLayer::new(limit.store(MemoryStore::new().clock(paused_clock())))
}

/// A service that is ready while it is open, and notes the millisecond of each call. Callers that
/// wait for it are woken in the order of their arrival, or in reverse.
#[derive(Clone)]
struct Gate {
    state: Arc<Mutex<State>>,
    start: Instant,
}

#[derive(Default)]
struct State {
    closed: bool,
    wakers: Vec<Waker>,
    served: Vec<(String, u128)>,
}

impl Gate {
    fn new() -> Self {
        Self { state: Arc::default(), start: Instant::now() }
    }

    fn close(&self) {
        self.state.lock().unwrap().closed = true;
    }

    fn open(&self, reversed: bool) {
        let mut state = self.state.lock().unwrap();
        state.closed = false;
        let mut wakers = std::mem::take(&mut state.wakers);
        if reversed {
            wakers.reverse();
        }
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }

    fn served(&self) -> Vec<(String, u128)> {
        self.state.lock().unwrap().served.clone()
    }

    async fn until(&self, ms: u64) {
        sleep_until(self.start + Duration::from_millis(ms)).await;
    }
}

impl Service<Request<Body>> for Gate {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        let mut state = self.state.lock().unwrap();
        if state.closed {
            state.wakers.push(cx.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let path = request.uri().path().to_owned();
        let at = self.start.elapsed().as_millis();
        self.state.lock().unwrap().served.push((path, at));
        std::future::ready(Ok(Response::new(Body::empty())))
    }
}

/// Has one request served at once while `queued` others wait, 1 ms apart, under a service that is
/// closed until `open_at`. Returns the statuses of those that waited.
async fn served_late(
    layer: &FixedWindowLayer,
    gate: &Gate,
    queued: u64,
    open_at: u64,
    reversed: bool,
) -> Vec<u16> {
    let service = layer.layer(gate.clone());
    let Ok(_) = service.clone().oneshot(get("/first")).await;
    let mut requests = Vec::new();
    for i in 0..queued {
        requests.push(tokio::spawn(service.clone().oneshot(get(&format!("/{i:02}")))));
        sleep(Duration::from_millis(1)).await;
    }
    gate.until(500).await;
    gate.close();
    gate.until(open_at).await;
    gate.open(reversed);
    let mut statuses = Vec::new();
    for request in requests {
        let Ok(response) = request.await.expect("no panic");
        statuses.push(response.status().as_u16());
    }
    statuses
}

#[tokio::test(start_paused = true)]
async fn three_late_requests_pass_one_per_window_in_order_of_arrival() {
    for (open_at, times) in [(4_500, [4_500, 5_000, 6_000]), (7_300, [7_300, 8_000, 9_000])] {
        for reversed in [false, true] {
            let gate = Gate::new();
            let statuses =
                served_late(&a_second(1).queue(3, LONG), &gate, 3, open_at, reversed).await;
            assert_eq!(statuses, [200; 3]);
            let expected = ["/00", "/01", "/02"].map(str::to_owned).into_iter().zip(times);
            assert_eq!(gate.served()[1..], expected.collect::<Vec<_>>());
        }
    }
}

/// The number of requests served in each window of a second.
fn windows(served: &[(String, u128)]) -> Vec<usize> {
    let mut windows = vec![0; 200];
    served.iter().for_each(|(_, at)| windows[*at as usize / 1_000] += 1);
    windows
}

async fn used(limiter: &Limiter) -> u64 {
    limiter.peek(Key::global()).await.expect("memory").used()
}

#[tokio::test(start_paused = true)]
async fn new_requests_pass_after_late_ones() {
    let gate = Gate::new();
    let layer = a_second(1).queue(5, LONG);
    let service = layer.layer(gate.clone());
    // This service was ready before the others were late.
    let mut ready = service.clone();
    let Ok(_) = ready.ready().await;
    let Ok(_) = service.clone().oneshot(get("/first")).await;
    let a = tokio::spawn(service.clone().oneshot(get("/a")));
    gate.until(500).await;
    gate.close();
    gate.until(4_500).await;
    let b = tokio::spawn(ready.call(get("/b")));
    sleep(Duration::from_millis(1)).await;
    gate.open(true);
    answered([a, b]).await;
    let expected = [("/first", 0), ("/a", 4_501), ("/b", 5_000)];
    assert_eq!(gate.served(), expected.map(|(path, at)| (path.to_owned(), at)));
}

#[tokio::test(start_paused = true)]
async fn late_requests_do_not_delay_other_keys() {
    let gate = Gate::new();
    let layer = in_memory(Quota::per_second(1).key(header("x-user"))).queue(3, LONG);
    let service = layer.layer(gate.clone());
    let request = |user: &str, path: &str| {
        Request::get(path).header("x-user", user).body(Body::empty()).expect("a request")
    };
    let mut requests = Vec::new();
    for path in ["/1", "/2", "/3"] {
        for user in ["alice", "bob"] {
            let request = request(user, &format!("{path}/{user}"));
            requests.push(tokio::spawn(service.clone().oneshot(request)));
            sleep(Duration::from_millis(1)).await;
        }
    }
    gate.close();
    gate.until(5_500).await;
    gate.open(true);
    answered(requests).await;
    for user in ["alice", "bob"] {
        let served = gate.served();
        let times = served.iter().filter(|(path, _)| path.ends_with(user)).map(|(_, at)| *at / 500);
        assert_eq!(times.collect::<Vec<_>>(), [0, 11, 12]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_late_request_that_is_not_polled_does_not_block_the_next() {
    let gate = Gate::new();
    let service = a_second(1).queue(5, LONG).layer(gate.clone());
    let Ok(_) = service.clone().oneshot(get("/first")).await;
    let mut forgotten = Box::pin(service.clone().oneshot(get("/forgotten")));
    assert!((&mut forgotten).now_or_never().is_none());
    let b = tokio::spawn(service.clone().oneshot(get("/b")));
    gate.until(500).await;
    gate.close();
    gate.until(4_500).await;
    gate.open(false);
    let Ok(response) = b.await.expect("no panic");
    assert_eq!(response.status(), 200);
    // The second request's turn began a tenth of a second after the first one's.
    assert_eq!(gate.served()[1], ("/b".to_owned(), 4_500));
}

#[tokio::test(start_paused = true)]
async fn under_a_concurrency_limit_all_are_served_within_the_limit_of_each_window() {
    for reserved_by_others in [0, 3] {
        let served = Arc::new(Mutex::new(Vec::new()));
        let (notes, start) = (Arc::clone(&served), Instant::now());
        let layer = a_second(1).queue(30, LONG);
        let limiter = limiter_of(&layer);
        let service = ServiceBuilder::new()
            .layer(layer)
            .layer(ConcurrencyLimitLayer::new(2))
            .service(service_fn(move |request: Request<Body>| {
                let path = request.uri().path().to_owned();
                notes.lock().unwrap().push((path, start.elapsed().as_millis()));
                async {
                    sleep(Duration::from_millis(3_300)).await;
                    Ok::<_, Infallible>(Response::new(Body::empty()))
                }
            }));
        let requests: Vec<_> =
            (0..12).map(|_| tokio::spawn(service.clone().oneshot(get("/")))).collect();
        sleep(Duration::from_millis(reserved_by_others)).await;
        answered(requests).await;
        let served = served.lock().unwrap().clone();
        assert_eq!(served.len(), 12);
        assert!(windows(&served).iter().all(|&passed| passed <= 1), "{served:?}");
        assert!(used(&limiter).await <= 1);
    }
}

#[tokio::test(start_paused = true)]
async fn late_requests_pass_in_order_with_a_remote_store() {
    for reversed in [false, true] {
        let gate = Gate::new();
        let limiter =
            Quota::per_second(2).name("far").key(Key::global()).store(FarStore::new(|| 3));
        let layer = FixedWindowLayer::new(&limiter).queue(9, LONG);
        let statuses = served_late(&layer, &gate, 7, 6_400, reversed).await;
        assert_eq!(statuses, [200; 7]);
        let served = gate.served();
        assert!(windows(&served).iter().all(|&passed| passed <= 2), "{served:?}");
        assert!(used(&limiter).await <= 2);
        let late: Vec<_> = served.iter().skip(2).map(|(path, _)| path.clone()).collect();
        assert!(late.is_sorted(), "{served:?}");
    }
}
