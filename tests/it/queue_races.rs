//! Hang-ups, late services and stores that fail at the worst moments of a queue.

use std::pin::Pin;
use std::task::Wake;

use tokio::time::{Instant, sleep_until};

use crate::prelude::*;
use crate::queue::{Served, answered, noting};
use crate::queue_faults::ends;

const LONG: Duration = secs(60);

fn one_a_second() -> FixedWindowLayer {
    FixedWindowLayer::new(Quota::per_second(1).key(Key::global()).store(paused_memory()))
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
    ends(|| async {
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
        sleep(ms(1_050)).await;
        assert!(poll().is_pending(), "the first one goes first");
        second.ended.store(true, Ordering::SeqCst);
        first.await.expect("infallible");
    });
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
async fn a_late_request_is_reported_once() {
    let start = Instant::now();
    let reports = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&reports);
    let layer = one_a_second()
        .on_decision(move |_, _| _ = counted.fetch_add(1, Ordering::SeqCst))
        .queue(5, LONG);
    let mut service = layer.layer(ready_at(start + ms(4_500)));
    let Ok(_) = service.call(get("/first")).await;
    let Ok(late) = service.call(get("/late")).await;
    assert_eq!((late.status(), start.elapsed().as_millis() / 100), (StatusCode::OK, 45));
    assert_eq!(reports.load(Ordering::SeqCst), 2);
}

#[tokio::test(start_paused = true)]
async fn new_requests_stop_queueing_once_the_late_ones_have_passed() {
    let start = Instant::now();
    let limit = Quota::per_second(400).name("far").key(Key::global());
    let layer = FixedWindowLayer::new(limit.store(far_store(|| 5))).queue(200, LONG);
    let mut ready = layer.layer(ready_at(start + ms(2_500)));
    let service = layer.layer(service_fn(inner));
    // The service is not ready for them.
    let late: Vec<_> = (0..105).map(|_| tokio::spawn(ready.call(get("/")))).collect();
    sleep_until(start + ms(2_400)).await;
    let mut last = Vec::new();
    for i in 0..1_000 {
        let request = service.clone().oneshot(get("/"));
        last.push(tokio::spawn(async move {
            let sent = Instant::now();
            let Ok(_) = request.await;
            (i, sent.elapsed())
        }));
        sleep(ms(3)).await;
    }
    answered(late).await;
    for request in last {
        let (i, took) = request.await.expect("no panic");
        // There and back behind another charge, and once more where a window ends on the way.
        assert!(i < 500 || took <= ms(30), "the {i}th took {took:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_fails_decides_by_its_policy_for_each_in_its_turn() {
    for (policy, status) in [(OnStoreFailure::Deny, 503), (OnStoreFailure::Allow, 200)] {
        let (notes, store) = (Served::default(), TestStore::new(Mood::Later));
        let limit = Quota::per_minute(1).key(Key::global());
        let limit = limit.store(store.clone().on_failure(policy));
        let layer = FixedWindowLayer::new(limit).queue(9, LONG * 10);
        let limiter = limiter_of(&layer);
        let service = noting(&layer, &notes);
        let Ok(_) = service.clone().oneshot(get("/0")).await;
        let waiting: Vec<_> =
            (1..6).map(|i| tokio::spawn(service.clone().oneshot(get(&format!("/{i}"))))).collect();
        sleep(secs(1)).await;
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
        Quota::new(5, ms(20)).name("far").key(Key::global()).store(far_store(|| 30)),
    )
    .queue(99, LONG);
    let service = noting(&layer, &notes);
    let requests: Vec<_> =
        (0..20).map(|i| tokio::spawn(service.clone().oneshot(get(&format!("/{i:02}"))))).collect();
    answered(requests).await;
    assert!(notes.lock().unwrap().is_sorted());
}
