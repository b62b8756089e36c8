//! Faults of queues that attacks have found: requests refused though there is room, delayed by others
//! that left, and lines longer than allowed.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::mpsc::channel;
use std::thread;

use futures_util::future::{join, join_all};
use tokio::runtime::Builder;
use tokio::task::{JoinHandle, yield_now};
use tokio::time::{Instant, sleep_until, timeout};
use tower::limit::ConcurrencyLimitLayer;
use tower::util::BoxCloneService;

use crate::prelude::*;

const LONG: Duration = secs(48 * 3_600);

type Boxed = BoxCloneService<Request<Body>, Response<Body>, Infallible>;
type Pending = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

fn boxed(layer: &FixedWindowLayer) -> Boxed {
    BoxCloneService::new(layer.layer(service_fn(inner)))
}

fn in_memory(limit: Limit) -> FixedWindowLayer {
    in_store(limit, paused_memory(), None)
}

/// In this memory, or so many milliseconds away from it.
fn in_store(limit: Limit, memory: MemoryStore, way: Option<u64>) -> FixedWindowLayer {
    FixedWindowLayer::new(match way {
        Some(way) => limit.store(far_from(memory, move || way)),
        None => limit.store(memory),
    })
}

/// A service under this limit, with a queue, so many milliseconds away from its store.
fn far(limit: Limit, way: u64, most: u64, max_wait: Duration) -> Boxed {
    let limit = limit.name("far").key(Key::global());
    boxed(&in_store(limit, paused_memory(), Some(way)).queue(most, max_wait))
}

/// A layer so many milliseconds away from its store, of which others have used some tokens.
async fn used_by_others(limit: Limit, used: u64, way: u64) -> (Limiter, FixedWindowLayer) {
    let memory = paused_memory();
    let others = limit.clone().store(memory.clone());
    assert!(others.charge(Key::global(), used).await.expect("memory").is_ok());
    (others, in_store(limit, memory, Some(way)))
}

/// The path is the cost.
fn cost_of(parts: &Parts) -> u64 {
    parts.uri.path()[1..].parse().expect("a cost")
}

async fn status(request: impl Future<Output = Result<Response<Body>, Infallible>>) -> u16 {
    let Ok(response) = request.await;
    response.status().as_u16()
}

fn spawn<S>(service: &S, path: &str) -> JoinHandle<u16>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send>,
    S: Clone + Send + 'static,
{
    tokio::spawn(status(service.clone().oneshot(get(path))))
}

async fn pass(requests: impl IntoIterator<Item = JoinHandle<u16>>) {
    for request in requests {
        assert_eq!(request.await.expect("no panic"), 200);
    }
}

/// Longer on the way than their windows allow, and than the queue lets it wait.
#[tokio::test(start_paused = true)]
async fn a_lone_request_passes_limits_that_are_charged_in_turns() {
    for at in 0..100 {
        let limits =
            ["a", "b", "c"].map(|name| Quota::new(100, secs(2)).name(name).key(Key::global()));
        let layer = FixedWindowLayer::new(Limits::new(limits).store(far_store(|| 90)));
        let service = boxed(&layer.queue(10, ms(300)));
        sleep(ms(at * 20)).await;
        assert_eq!(status(service.oneshot(get("/"))).await, 200, "at {}", at * 20);
    }
}

/// A new key's requests near the end of a second, whose charges may be in either one.
#[tokio::test(start_paused = true)]
async fn requests_are_not_refused_by_tokens_of_their_own() {
    for requests in 1..=3 {
        for at in 900..1_010 {
            let quotas = Quota::per_second(requests).and(Quota::per_minute(requests));
            let service = far(Limit::new(quotas), 20, 10, secs(5));
            sleep(ms(at)).await;
            let all = (0..requests).map(|_| status(service.clone().oneshot(get("/"))));
            assert!(join_all(all).await.iter().all(|status| *status == 200), "at {at}");
        }
    }
}

/// On another thread in practice. The line is full then, so it is refused.
#[tokio::test(start_paused = true)]
async fn others_may_be_refused_while_a_request_asks_its_service() {
    let limit = Quota::per_minute(10).name("asks-its-service").key(Key::global());
    let (_others, layer) = used_by_others(limit, 10, 20).await;
    let layer = layer.queue(1, ms(500));
    let (service, asks) = (boxed(&layer), Arc::new(Mutex::new(Vec::<Pending>::new())));
    let todo = Arc::clone(&asks);
    let when_asked = ReadyIf::new(move |_, _| {
        let todo = std::mem::take(&mut *todo.lock().unwrap());
        todo.into_iter().for_each(|request| _ = request.now_or_never());
        true
    });
    let mut asking: Vec<Pending> = Vec::new();
    for _ in 0..10 {
        let mut request: Pending = Box::pin(service.clone().oneshot(get("/")));
        assert!(request.as_mut().now_or_never().is_none());
        asking.push(request);
    }
    let mut late = Box::pin(layer.layer(when_asked).call(get("/")));
    assert!((&mut late).now_or_never().is_none());
    sleep(ms(160)).await;
    *asks.lock().unwrap() = asking;
    assert_eq!(status(late).await, 429);
    assert_eq!(status(service.oneshot(get("/"))).await, 429);
}

/// The answer is of the quotas under which the charge was sent.
#[tokio::test(start_paused = true)]
async fn quotas_may_be_added_and_removed_while_the_store_decides() {
    let one = Quotas::from(Quota::per_minute(2));
    let two = Quota::per_second(2).and(Quota::per_minute(2));
    for (before, after) in [(one, two), (two, one)] {
        let limit = Limit::new(before).name("changes").key(Key::global());
        let layer = FixedWindowLayer::new(limit.store(far_store(|| 200))).queue(9, LONG);
        let service = boxed(&layer);
        let spawn = || spawn(&service, "/");
        let mut requests: Vec<_> = (0..5).map(|_| spawn()).collect();
        sleep(ms(10)).await;
        Limits::from(&layer).limiter("changes").set_quotas(after);
        requests.extend((0..3).map(|_| spawn()));
        pass(requests).await;
    }
}

/// 8 of 10 are used, so there is room for 1 where there is none for 5.
#[tokio::test(start_paused = true)]
async fn a_lower_cost_passes_when_the_higher_one_before_it_leaves() {
    let layer = in_memory(Quota::per_hour(10).key(Key::global()).cost_fn(cost_of)).queue(10, LONG);
    let service = boxed(&layer);
    assert_eq!(status(service.clone().oneshot(get("/8"))).await, 200);
    let high = tokio::spawn(service.clone().oneshot(get("/5")));
    sleep(ms(1)).await;
    let low = spawn(&service, "/1");
    sleep(secs(600)).await;
    let start = Instant::now();
    high.abort();
    assert_eq!(low.await.expect("no panic"), 200);
    assert!(start.elapsed() <= ms(100), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn requests_that_are_refused_at_the_same_time_ask_again_after_a_second() {
    let limit = Quota::per_day(50).name("at-the-same-time").key(Key::global());
    let (others, layer) = used_by_others(limit, 50, 20).await;
    let service = boxed(&layer.queue(99, LONG));
    let start = Instant::now();
    let requests: Vec<_> = (0..40).map(|_| spawn(&service, "/")).collect();
    sleep(ms(500)).await;
    others.reset(Key::global()).await.expect("memory");
    pass(requests).await;
    assert!(start.elapsed() <= ms(1_200), "{:?}", start.elapsed());
}

/// Six of ten are used: the first needs five. Nothing is taken back of the others.
#[tokio::test(start_paused = true)]
async fn whoever_is_granted_goes_also_behind_one_that_is_refused() {
    let limit = Quota::per_minute(10).name("returned").key(Key::global()).cost_fn(cost_of);
    let (others, layer) = used_by_others(limit, 6, 5).await;
    let service = boxed(&layer.queue(2, LONG));
    let requests: Vec<_> =
        ["/5", "/1", "/1", "/1", "/1"].into_iter().map(|path| spawn(&service, path)).collect();
    sleep(secs(1)).await;
    let waiting = requests.iter().filter(|request| !request.is_finished()).count();
    assert_eq!(waiting, 1);
    assert_eq!(others.peek(Key::global()).await.expect("memory").used(), 10);
}

/// Two were let through by what was left, which others have taken meanwhile. By then, the line was
/// full of those behind them.
#[tokio::test(start_paused = true)]
async fn a_line_that_is_too_long_loses_those_who_came_last() {
    let limit = Quota::per_minute(3).name("loses-last").key(Key::global());
    let (others, layer) = used_by_others(limit, 0, 20).await;
    let service = boxed(&layer.queue(1, LONG));
    let call = || spawn(&service, "/");
    let first = call();
    sleep(ms(30)).await;
    let next = call();
    assert!(others.charge(Key::global(), 2).await.expect("memory").is_ok());
    assert_eq!(first.await.expect("no panic"), 200);
    let behind = [call(), call()];
    let start = Instant::now();
    for request in behind {
        assert_eq!(request.await.expect("no panic"), 429);
    }
    assert!(start.elapsed() <= ms(100), "{:?}", start.elapsed());
    assert_eq!(next.await.expect("no panic"), 200, "in the next minute");
}

/// The first is refused, and those behind one that is polled late are granted.
#[tokio::test(start_paused = true)]
async fn one_that_was_refused_while_later_ones_were_granted_is_the_first_again() {
    let (order, start) = (Arc::new(Mutex::new(Vec::new())), Instant::now());
    let limit = Quota::per_second(3).name("between").key(Key::global());
    let (others, layer) = used_by_others(limit, 3, 200).await;
    let notes = Arc::clone(&order);
    let service = layer.queue(50, LONG).layer(service_fn(move |request: Request<Body>| {
        notes.lock().unwrap().push(request.uri().path().to_owned());
        inner(request)
    }));
    let take_all = || others.charge(Key::global(), 3);
    let call = |path| Box::pin(service.clone().oneshot(get(path)));
    let mut requests = vec![tokio::spawn(call("/first"))];
    sleep_until(start + ms(410)).await;
    let mut late = call("/late");
    assert!((&mut late).now_or_never().is_none());
    requests.extend(["/a", "/b"].map(|path| tokio::spawn(call(path))));
    // The first one's charge is on its way. Those of the last two are sent 100 ms later.
    sleep_until(start + ms(1_000)).await;
    assert!(take_all().await.expect("memory").is_ok());
    assert!((&mut late).now_or_never().is_none());
    sleep_until(start + ms(1_080)).await;
    others.reset(Key::global()).await.expect("memory");
    drop(late);
    requests.extend(["/c", "/d"].map(|path| tokio::spawn(call(path))));
    for request in requests {
        assert_eq!(status(request.map(|done| done.expect("no panic"))).await, 200);
    }
    // Those in flight with it go; the others don't ask before it has.
    let expected = ["/a", "/b", "/first", "/c", "/d"].map(str::to_owned);
    assert_eq!(order.lock().unwrap()[..], expected);
}

/// It waits in another line from then on, for as long as it would have waited in the first.
#[tokio::test(start_paused = true)]
async fn a_request_one_of_whose_limits_goes_into_shadow_mode_keeps_its_deadline() {
    let limits = Limits::new([
        Quota::new(1, ms(2_000)).name("slow").key(Key::global()),
        Quota::per_second(1).name("fast").key(Key::global()),
    ]);
    let limits = limits.store(paused_memory());
    let service = boxed(&FixedWindowLayer::new(&limits).queue(9, ms(1_500)));
    let began = Instant::now();
    assert_eq!(status(service.clone().oneshot(get("/"))).await, 200);
    sleep_until(began + ms(600)).await;
    let waiting = spawn(&service, "/");
    sleep_until(began + ms(1_900)).await;
    // The fast limit has no room before the third second then.
    let receipt =
        limits.limiter("fast").charge(Key::global(), 1).await.expect("memory").expect("room");
    limits.limiter("fast").settle(receipt, 2).await.expect("memory");
    limits.limiter("slow").set_shadow(true);
    assert_eq!(waiting.await.expect("no panic"), 429);
    let waited = began.elapsed() - ms(600);
    assert!(waited <= ms(1_510), "{waited:?}");
}

/// The services are limits of concurrency, which panic if they are called without a permit.
#[tokio::test(start_paused = true)]
async fn a_request_that_is_charged_in_another_line_keeps_its_service_ready() {
    type Ease = fn(&Limiter);
    let eases: [Ease; 2] =
        [|limiter| limiter.set_quotas(Plan::UNLIMITED), |limiter| limiter.set_shadow(true)];
    for ease in eases {
        let limit = |name, tokens| Quota::per_day(tokens).name(name).key(Key::global());
        let limits = Limits::new([limit("a", 1), limit("b", 9)]).store(far_store(|| 20));
        let layer = FixedWindowLayer::new(&limits).queue(9, LONG);
        let service = layer.layer(ConcurrencyLimitLayer::new(1).layer(service_fn(inner)));
        assert_eq!(status(service.clone().oneshot(get("/"))).await, 200);
        let waiting = spawn(&service, "/");
        sleep(ms(10_000)).await;
        ease(limits.limiter("a"));
        assert_eq!(waiting.await.expect("no panic"), 200);
    }
}

/// A service that may end what eases a limit, just when a request asks whether it is ready.
#[derive(Clone)]
struct Ends<S>(S, Arc<Mutex<Option<Limiter>>>);

impl<S: Service<Request<Body>>> Service<Request<Body>> for Ends<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        if let Some(limiter) = self.1.lock().expect("no panic").take() {
            limiter.set_shadow(false);
        }
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> S::Future {
        self.0.call(request)
    }
}

/// Nor a place among those that wait for one. A request may be polled at any time, as in a `join!`.
#[tokio::test(start_paused = true)]
async fn a_request_that_waits_again_holds_no_permit_of_its_service() {
    let layer = || {
        let limit = Quota::per_day(1).name("a").key_fn(|parts| Some(Key::from(parts.uri.path())));
        in_memory(limit).queue(9, 2 * LONG)
    };
    let slow = service_fn(async |request: Request<Body>| {
        if request.uri().path() == "/slow" {
            sleep(ms(100)).await;
        }
        inner(request).await
    });
    // The service is busy, or becomes ready just when the limit is enforced again.
    for is_busy in [true, false] {
        let (layer, ends) = (layer(), Arc::default());
        let limits = Limits::from(&layer);
        let limiter = limits.limiter("a");
        let service = Ends(ConcurrencyLimitLayer::new(1).layer(slow), Arc::clone(&ends));
        let service = layer.layer(service);
        let send = |path| spawn(&service, path);
        assert_eq!(send("/alice").await.expect("no panic"), 200);
        let mut waits = Box::pin(status(service.clone().oneshot(get("/alice"))));
        let mut is_waiting = || (&mut waits).now_or_never().is_none();
        assert!(is_waiting());
        limiter.set_shadow(true);
        if is_busy {
            let busy = send("/slow");
            yield_now().await;
            assert!(is_waiting());
            limiter.set_shadow(false);
            assert!(is_waiting());
            assert_eq!(busy.await.expect("no panic"), 200);
        } else {
            *ends.lock().expect("no panic") = Some(limiter.clone());
            assert!(is_waiting());
            assert!(ends.lock().expect("no panic").is_none());
        }
        let other = timeout(ms(500), send("/bob")).await;
        assert_eq!(other.expect("the permit is free").expect("no panic"), 200, "{is_busy}");
        assert!(is_waiting());
    }
}

/// After a step back, a window that runs may begin later than now (S4).
#[tokio::test(start_paused = true)]
async fn a_limit_with_room_is_no_reason_to_wait_when_the_clock_has_stepped_back() {
    let clock = ManualClock::at_ms(MINUTE_MS + 10_500);
    let limit = |tokens, window, name| Quota::new(tokens, window).name(name).key(Key::global());
    let limits = Limits::new([limit(1, ms(1_000), "short"), limit(9, ms(10_000), "long")])
        .store(MemoryStore::new().clock(clock.clone()));
    let service = boxed(&FixedWindowLayer::new(limits).queue(10, ms(5_000)));
    assert_eq!(status(service.clone().oneshot(get("/"))).await, 200);
    clock.set_ms(MINUTE_MS + 2_300);
    let waiting = spawn(&service, "/");
    sleep(ms(1)).await;
    clock.set_ms(MINUTE_MS + 3_000);
    assert_eq!(waiting.await.expect("no panic"), 200, "a second begins after 0.7 s");
}

/// Fails if it takes too long: on another thread, since a poll may never return.
pub(crate) fn ends<F: Future<Output = ()>>(test: impl FnOnce() -> F + Send + 'static) {
    let (done, is_done) = channel();
    let thread = thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.expect("a runtime").block_on(test());
        let _ = done.send(());
    });
    match is_done.recv_timeout(secs(60)) {
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("a poll never returns"),
        _ => thread.join().expect("no panic"),
    }
}

/// No time passes during a poll. Windows may be as short as a tick.
#[test]
fn each_poll_ends_while_time_stands_still() {
    ends(|| async {
        let waits = [0, 1, 2, 1_000].map(|wait| (1, wait)).into_iter();
        for (most, wait) in waits.chain([(0, 0), (9, 0), (9, 1), (9, 1_000)]) {
            for window in [1, 2, 1_000] {
                let clock = ManualClock::at_ms(MINUTE_MS);
                let limit = || Quota::new(2, ms(window)).name("still").key(Key::global());
                let memory = MemoryStore::new().clock(clock);
                let far = far_from(memory.clone(), || 1);
                let layers = [limit().store(memory), limit().store(far)].map(FixedWindowLayer::new);
                for (layer, ready) in
                    layers.iter().flat_map(|layer| [(layer, true), (layer, false)])
                {
                    let layer = layer.clone().queue(most, ms(wait));
                    let call = || -> Pending {
                        match ready {
                            true => Box::pin(boxed(&layer).oneshot(get("/"))),
                            false => Box::pin(layer.layer(ReadyIf::never()).call(get("/"))),
                        }
                    };
                    let mut requests: Vec<_> = (0..6).map(|_| call()).collect();
                    for _ in 0..3 {
                        requests.retain_mut(|request| request.now_or_never().is_none());
                        tokio::task::yield_now().await;
                    }
                    sleep(ms(wait + 300)).await;
                    requests.retain_mut(|request| request.now_or_never().is_none());
                    requests.retain_mut(|request| request.now_or_never().is_none());
                }
            }
        }
    });
}

/// In each of their places: a decision that grants, one that refuses, the response to it.
#[test]
fn a_future_that_is_polled_again_after_a_hook_has_panicked_does_not_spin_and_passes_nothing() {
    for (place, far) in [0, 1, 2].into_iter().flat_map(|place| [(place, false), (place, true)]) {
        ends(move || async move {
            let limit = Quota::per_second(1).name("panics").key(Key::global());
            let memory = paused_memory();
            let others = limit.clone().store(memory.clone());
            let layer = in_store(limit, memory, far.then_some(5));
            let layer = layer.on_decision(move |_, decision| {
                assert!(decision.is_allowed() != (place == 0) && place < 2, "on purpose");
            });
            let layer = layer
                .queue(9, ms(1_500))
                .on_reject(|_, _| -> Response<Body> { panic!("on purpose") });
            let called = Arc::new(AtomicUsize::new(0));
            let counted = Arc::clone(&called);
            let service = layer.layer(service_fn(move |request: Request<Body>| {
                counted.fetch_add(1, Ordering::SeqCst);
                inner(request)
            }));
            assert!(others.check(Key::global()).await.expect("memory").is_allowed());
            let mut request: Pending = Box::pin(service.oneshot(get("/")));
            assert!((&mut request).now_or_never().is_none());
            let mut panicked = 0;
            for _ in 0..30 {
                sleep(ms(100)).await;
                if place > 0 {
                    let _ = others.check(Key::global()).await;
                }
                let poll = || (&mut request).now_or_never().is_some();
                match catch_unwind(AssertUnwindSafe(poll)) {
                    Err(_) => panicked += 1,
                    Ok(answered) => assert!(!answered, "{place}"),
                }
            }
            assert!(panicked > 0, "{place}");
            assert_eq!(called.load(Ordering::SeqCst), 0, "{place}");
        });
    }
}

/// One look, one turn: what was true when the service was not ready yet may not be when it is.
#[tokio::test(start_paused = true)]
async fn a_request_asks_in_its_turn_also_if_a_shadow_mode_ends_while_its_service_becomes_ready() {
    for limits in 1..=2 {
        let names = ["a", "b"].into_iter().take(limits);
        let limits =
            Limits::new(names.map(|name| Quota::per_second(1).name(name).key(Key::global())))
                .store(paused_memory());
        let layer = FixedWindowLayer::new(&limits).queue(9, LONG);
        let shadow = limits.clone();
        let service = layer.layer(ReadyIf::new(move |_, _| {
            shadow.limiter("a").set_shadow(false);
            true
        }));
        let call = || -> Pending { Box::pin(service.clone().call(get("/"))) };
        let poll = |request: &mut Pending| request.as_mut().now_or_never().is_some();
        assert!(poll(&mut call()));
        let (mut first, mut second) = (call(), call());
        assert!(!poll(&mut first) && !poll(&mut second));
        tokio::time::advance(ms(1_000)).await;
        limits.limiter("a").set_shadow(true);
        assert!(!poll(&mut second), "the first is before it");
        assert!(poll(&mut first));
        tokio::time::advance(ms(1_000)).await;
        assert!(poll(&mut second));
    }
}

/// Far away, its charge takes place all the same, and its tokens are given back.
#[tokio::test(start_paused = true)]
async fn tokens_of_one_that_is_dropped_while_it_is_charged_are_for_the_next_at_once() {
    for (dropped, before) in (1..=3).flat_map(|dropped| [(dropped, 0), (dropped, 1)]) {
        for after in [1, 5, 25, 39] {
            let service = far(Quota::per_day(dropped + before).into(), 20, 9, LONG);
            for _ in 0..before {
                assert_eq!(status(service.clone().oneshot(get("/"))).await, 200);
            }
            let spawn = || spawn(&service, "/");
            let gone: Vec<_> = (0..dropped).map(|_| spawn()).collect();
            sleep(ms(after)).await;
            let next = spawn();
            gone.iter().for_each(tokio::task::JoinHandle::abort);
            let start = Instant::now();
            assert_eq!(next.await.expect("no panic"), 200);
            let took = start.elapsed();
            assert!(took <= ms(150), "{took:?} behind {dropped} that are gone after {after} ms");
        }
    }
}

/// It may hold tokens for as long as it likes.
#[tokio::test(start_paused = true)]
async fn a_charge_that_is_not_polled_makes_no_line_longer() {
    let limit = Quota::per_hour(3).name("holds").key(Key::global());
    let (_others, layer) = used_by_others(limit, 3, 20).await;
    let service = boxed(&layer.queue(2, LONG));
    let call = || Box::pin(service.clone().oneshot(get("/")));
    let (first, mut forgotten) = (tokio::spawn(call()), call());
    sleep(ms(1)).await;
    assert!((&mut forgotten).now_or_never().is_none());
    sleep(ms(500)).await;
    let others: Vec<_> = (0..5).map(|_| tokio::spawn(call())).collect();
    sleep(secs(10)).await;
    let waiting = others.iter().filter(|request| !request.is_finished()).count();
    assert!(!first.is_finished() && waiting <= 1, "{waiting} wait behind the first");
}

/// Others are refused by an answer of now, not by the one before.
#[tokio::test(start_paused = true)]
async fn a_request_that_is_not_polled_keeps_no_answer() {
    let limit = Quota::per_day(1).name("kept").key(Key::global());
    let (others, layer) = used_by_others(limit, 1, 20).await;
    let service = boxed(&layer.queue(9, secs(5)));
    let mut forgotten = Box::pin(service.clone().oneshot(get("/")));
    assert!((&mut forgotten).now_or_never().is_none());
    sleep(ms(200)).await;
    assert_eq!(status(service.clone().oneshot(get("/"))).await, 429);
    others.reset(Key::global()).await.expect("memory");
    sleep(secs(5)).await;
    assert_eq!((status(service.oneshot(get("/"))).await, status(forgotten).await), (200, 429));
}

/// The newcomer's own is on its way.
#[tokio::test(start_paused = true)]
async fn a_request_that_is_polled_too_late_is_refused_by_an_answer_that_newcomers_do_not_look_at() {
    let limit = Quota::new(1, secs(4)).name("late").key(Key::global());
    let (_others, layer) = used_by_others(limit, 1, 20).await;
    let service = boxed(&layer.queue(9, secs(5)));
    let mut late = Box::pin(status(service.clone().oneshot(get("/"))));
    for after in [50, 5_100] {
        assert!((&mut late).now_or_never().is_none());
        sleep(ms(after)).await;
    }
    assert_eq!(join(status(service.oneshot(get("/"))), late).await, (200, 429));
}

/// A request that is never polled again keeps the line and its last answer, which has room.
#[tokio::test(start_paused = true)]
async fn requests_under_other_quotas_wait_for_no_answer_that_has_room() {
    let limit = Limit::by_plan(|parts, _| match parts.uri.path() {
        "/hour" => Quota::per_hour(9),
        _ => Quota::per_minute(9),
    });
    let service = far(limit, 20, 1, LONG);
    let mut forgotten = Box::pin(service.clone().oneshot(get("/hour")));
    assert!((&mut forgotten).now_or_never().is_none());
    assert_eq!(status(service.clone().oneshot(get("/hour"))).await, 200);
    sleep(ms(300)).await;
    let both = (0..2).map(|_| status(service.clone().oneshot(get("/minute"))));
    assert_eq!(join_all(both).await, [200; 2]);
}

/// Also if no other limit is left. A lifted one does not count, and nobody waits for it.
#[tokio::test(start_paused = true)]
async fn a_limit_in_shadow_mode_counts_requests_that_have_waited_unless_it_was_lifted() {
    for (lifted, counted) in [("a", 2), ("b", 0)] {
        let limit = |name, tokens| Quota::per_minute(tokens).name(name).key(Key::global());
        let limits = Limits::new([limit("a", 1), limit("b", 9).shadow()]);
        let limits = limits.store(paused_memory());
        let service = boxed(&FixedWindowLayer::new(&limits).queue(9, LONG));
        assert_eq!(status(service.clone().oneshot(get("/"))).await, 200);
        let waiting = spawn(&service, "/");
        sleep(ms(10_000)).await;
        limits.limiter(lifted).set_quotas(Plan::UNLIMITED);
        pass([waiting]).await;
        let shadow = limits.limiter("b").with_quotas(Quota::per_minute(9));
        assert_eq!(shadow.peek(Key::global()).await.expect("memory").used(), counted, "{lifted}");
    }
}

/// In real time, on several threads.
#[test]
fn hundreds_on_four_threads_pass_window_by_window() {
    for far in [false, true] {
        let limit = Quota::new(50, ms(100)).name("threads").key(Key::global());
        let layer = in_store(limit, MemoryStore::new(), far.then_some(3));
        let service = boxed(&layer.queue(1_000, secs(60)));
        let runtime = Builder::new_multi_thread().worker_threads(4).enable_time().build();
        let runtime = runtime.expect("a runtime");
        let requests: Vec<_> = (0..600)
            .map(|i| {
                let service = service.clone();
                let task = runtime.spawn(async move { status(service.oneshot(get("/"))).await });
                if i % 7 == 0 {
                    thread::sleep(ms(1));
                    task.abort();
                }
                task
            })
            .collect();
        for request in requests {
            match runtime.block_on(request) {
                Ok(status) => assert_eq!(status, 200),
                Err(error) => assert!(error.is_cancelled(), "{error}"),
            }
        }
    }
}
