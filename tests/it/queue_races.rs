//! Hang-ups, panics and newcomers at the worst moments of a queue.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};
use std::thread;
use std::time::Duration;

use axum::body::Body;
use futures_util::FutureExt;
use http::{Request, StatusCode};
use tokio::time::{Instant, sleep, sleep_until};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_fixed_window::{FixedWindowLayer, Key, MemoryStore, OnStoreFailure, Quota};

use crate::queue::{Served, answered, noting, send};
use crate::support::{FarStore, Mood, ReadyIf, TestStore, get, inner, limiter_of, paused_clock};

const LONG: Duration = Duration::from_secs(60);

fn one_a_second() -> FixedWindowLayer {
    let store = MemoryStore::new().clock(paused_clock());
    FixedWindowLayer::new(Quota::per_second(1).key(Key::global()).store(store))
}

type Task = Mutex<Option<Pin<Box<dyn Future<Output = ()> + Send>>>>;

/// An executor that ends: what is woken from then on is dropped.
struct Ending {
    task: Task,
    ended: AtomicBool,
}

impl Wake for Ending {
    fn wake(self: Arc<Self>) {
        if self.ended.load(Ordering::SeqCst) {
            self.task.lock().unwrap().take();
        }
    }
}

#[test]
fn a_waiter_may_be_dropped_by_its_own_waker() {
    let (done, is_done) = channel();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let service = one_a_second().queue(5, LONG).layer(service_fn(inner));
            let Ok(_) = service.clone().oneshot(get("/")).await;
            let mut first = Box::pin(service.clone().oneshot(get("/")));
            assert!((&mut first).now_or_never().is_none());
            let second = service.oneshot(get("/")).map(|_| ());
            let task: Task = Mutex::new(Some(Box::pin(second)));
            let second = Arc::new(Ending { task, ended: AtomicBool::new(false) });
            let waker = Waker::from(Arc::clone(&second));
            let poll = || {
                let mut task = second.task.lock().unwrap();
                task.as_mut().unwrap().as_mut().poll(&mut Context::from_waker(&waker))
            };
            assert!(poll().is_pending(), "it waits for its window");
            sleep(Duration::from_millis(1_050)).await;
            assert!(poll().is_pending(), "the first one goes first");
            second.ended.store(true, Ordering::SeqCst);
            first.await.expect("infallible");
        });
        done.send(()).expect("somebody waits");
    });
    is_done.recv_timeout(Duration::from_secs(20)).expect("it does not wait for itself");
}

/// A service that is ready from a time on.
fn ready_at(at: Instant) -> ReadyIf {
    ReadyIf::new(move |cx, _| {
        let waker = cx.waker().clone();
        tokio::spawn(async move {
            sleep_until(at).await;
            waker.wake();
        });
        Instant::now() >= at
    })
}

#[tokio::test(start_paused = true)]
async fn a_late_request_that_is_served_holds_up_no_other() {
    let start = Instant::now();
    let service =
        one_a_second().queue(5, LONG).layer(service_fn(async |request: Request<Body>| {
            if request.uri().path() == "/late" {
                sleep(LONG).await;
            }
            inner(request).await
        }));
    let Ok(_) = service.clone().oneshot(get("/first")).await;
    let mut late = Box::pin(service.clone().oneshot(get("/late")));
    assert!((&mut late).now_or_never().is_none());
    sleep_until(start + Duration::from_millis(4_500)).await;
    let late = tokio::spawn(late);
    sleep_until(start + Duration::from_millis(6_500)).await;
    let Ok(_) = service.oneshot(get("/next")).await;
    assert_eq!(start.elapsed().as_millis(), 6_500);
    let Ok(_) = late.await.expect("no panic");
}

#[tokio::test(start_paused = true)]
async fn a_late_request_is_reported_once() {
    let start = Instant::now();
    let reports = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&reports);
    let layer = one_a_second()
        .on_decision(move |_, _| _ = counted.fetch_add(1, Ordering::SeqCst))
        .queue(5, LONG);
    let mut service = layer.layer(ready_at(start + Duration::from_millis(4_500)));
    let Ok(_) = service.call(get("/first")).await;
    let Ok(late) = service.call(get("/late")).await;
    assert_eq!((late.status(), start.elapsed().as_millis() / 100), (StatusCode::OK, 45));
    assert_eq!(reports.load(Ordering::SeqCst), 2);
}

#[tokio::test(start_paused = true)]
async fn a_newcomer_goes_before_a_request_that_was_not_polled_in_its_turn() {
    let (start, served) = (Instant::now(), Served::default());
    let service = noting(&one_a_second().queue(2, LONG), &served);
    let Ok(_) = service.clone().oneshot(get("/first")).await;
    let mut late = Box::pin(service.clone().oneshot(get("/late")));
    assert!((&mut late).now_or_never().is_none());
    sleep_until(start + Duration::from_millis(4_500)).await;
    let mut requests = Vec::new();
    for path in ["/a", "/b"] {
        requests.push(tokio::spawn(service.clone().oneshot(get(path))));
        tokio::task::yield_now().await;
    }
    let Ok(_) = late.await;
    answered(requests).await;
    let order: Vec<_> = served.lock().unwrap().iter().map(|(path, _)| path.clone()).collect();
    assert_eq!(order, ["/first", "/a", "/late", "/b"]);
}

#[tokio::test(start_paused = true)]
async fn new_requests_stop_queueing_once_the_late_ones_have_passed() {
    let start = Instant::now();
    let layer = FixedWindowLayer::new(
        Quota::per_second(400).name("far").key(Key::global()).store(FarStore::new(|| 5)),
    )
    .queue(200, LONG);
    let mut ready = layer.layer(ready_at(start + Duration::from_millis(2_500)));
    let service = layer.layer(service_fn(inner));
    // The service is not ready for them.
    let late: Vec<_> = (0..105).map(|_| tokio::spawn(ready.call(get("/")))).collect();
    sleep_until(start + Duration::from_millis(2_400)).await;
    let mut last = Vec::new();
    for i in 0..1_000 {
        let request = service.clone().oneshot(get("/"));
        last.push(tokio::spawn(async move {
            let sent = Instant::now();
            let Ok(_) = request.await;
            (i, sent.elapsed())
        }));
        sleep(Duration::from_millis(3)).await;
    }
    answered(late).await;
    for request in last {
        let (i, took) = request.await.expect("no panic");
        // There and back behind another charge, and once more where a window ends on the way.
        assert!(i < 500 || took <= Duration::from_millis(30), "the {i}th took {took:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn leaving_the_queue_frees_a_place_in_that_window_only() {
    let served = Served::default();
    let service = noting(&one_a_second().queue(5, LONG), &served);
    let mut requests = Vec::new();
    for _ in 0..4 {
        requests.extend(send(&service, 1));
        sleep(Duration::from_millis(10)).await;
    }
    requests.remove(1).abort();
    sleep(Duration::from_millis(10)).await;
    requests.extend(send(&service, 1));
    answered(requests).await;
    let seconds: Vec<_> = served.lock().unwrap().iter().map(|(_, at)| at / 1_000).collect();
    assert!(seconds.windows(2).all(|two| two[0] < two[1]), "two in one second: {seconds:?}");
}

#[tokio::test(start_paused = true)]
async fn a_panic_in_a_closure_ends_only_its_own_request() {
    let notes = Served::default();
    let layer = one_a_second()
        .on_decision(|parts, _| assert_ne!(parts.uri.path(), "/panics", "on purpose"))
        .queue(5, LONG);
    let service = noting(&layer, &notes);
    let mut requests = Vec::new();
    for path in ["/first", "/panics", "/next"] {
        requests.push(tokio::spawn(service.clone().oneshot(get(path))));
        tokio::task::yield_now().await;
    }
    let ends: Vec<_> = futures_util::future::join_all(requests).await;
    assert_eq!(ends.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, false, true]);
    let expected = [("/first", 0), ("/next", 2_000)];
    assert_eq!(*notes.lock().unwrap(), expected.map(|(path, at)| (path.to_owned(), at)));
}

/// Each delays those behind it by a tenth of a second, once.
#[tokio::test(start_paused = true)]
async fn three_requests_that_are_not_polled_delay_the_fourth_by_three_tenths() {
    let notes = Served::default();
    let layer = one_a_second().queue(9, LONG);
    let service = noting(&layer, &notes);
    let Ok(_) = service.clone().oneshot(get("/first")).await;
    let mut forgotten = Vec::new();
    for _ in 0..3 {
        let mut request = Box::pin(service.clone().oneshot(get("/forgotten")));
        assert!((&mut request).now_or_never().is_none());
        forgotten.push(request);
    }
    let live = ["/a", "/b"].map(|path| tokio::spawn(service.clone().oneshot(get(path))));
    answered(live).await;
    let expected = [("/first", 0), ("/a", 1_300), ("/b", 2_000)];
    assert_eq!(*notes.lock().unwrap(), expected.map(|(path, at)| (path.to_owned(), at)));
}

#[tokio::test(start_paused = true)]
async fn a_store_that_fails_decides_by_its_policy_for_each_in_its_turn() {
    for (policy, status) in [(OnStoreFailure::Deny, 503), (OnStoreFailure::Allow, 200)] {
        let (notes, store) = (Served::default(), TestStore::new(Mood::Later));
        let layer = FixedWindowLayer::new(
            Quota::per_minute(1).key(Key::global()).store(store.clone().on_failure(policy)),
        )
        .queue(9, LONG * 10);
        let limiter = limiter_of(&layer);
        let service = noting(&layer, &notes);
        let Ok(_) = service.clone().oneshot(get("/0")).await;
        let waiting: Vec<_> =
            (1..6).map(|i| tokio::spawn(service.clone().oneshot(get(&format!("/{i}"))))).collect();
        sleep(Duration::from_secs(1)).await;
        store.set(Mood::FailsLater);
        limiter.set_quotas(Quota::per_minute(2));
        for request in waiting {
            let Ok(response) = request.await.expect("no panic");
            assert_eq!(response.status(), status);
        }
        let notes = notes.lock().unwrap();
        assert_eq!(notes.len(), if status == 200 { 6 } else { 1 });
        assert!(notes.iter().skip(1).all(|(_, at)| at / 10 == 100), "{notes:?}");
    }
}

/// No answer comes before its window is over, and requests pass all the same.
#[tokio::test(start_paused = true)]
async fn requests_pass_over_a_way_that_is_longer_than_the_window() {
    let notes = Served::default();
    let layer = FixedWindowLayer::new(
        Quota::new(5, Duration::from_millis(20))
            .name("far")
            .key(Key::global())
            .store(FarStore::new(|| 30)),
    )
    .queue(99, LONG);
    let service = noting(&layer, &notes);
    let requests: Vec<_> =
        (0..20).map(|i| tokio::spawn(service.clone().oneshot(get(&format!("/{i:02}"))))).collect();
    answered(requests).await;
    assert!(notes.lock().unwrap().is_sorted());
}
