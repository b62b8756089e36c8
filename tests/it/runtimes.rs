//! Waits and deadlines need timers. In a tokio runtime without, and outside of tokio, nothing panics
//! and nothing waits for ever; what a thread has done before makes no difference.

use std::thread;
use std::time::Instant;

use futures_util::future::join_all;
use futures_util::stream;
use harness::{Operation, forward_to_memory};
use tokio::runtime::Builder;
use tokio::sync::oneshot;
use tower_fixed_window::store::{Remote, Reply};

use crate::prelude::*;

#[derive(Clone, Copy, PartialEq, Debug)]
enum Runtime {
    Timers,
    NoTimers,
    NoTimersOfThreads,
    None,
}

use Runtime::{NoTimers, NoTimersOfThreads, None as NoRuntime, Timers};

impl Runtime {
    fn run<T>(self, test: impl Future<Output = T>) -> T {
        match self {
            Timers => Builder::new_current_thread().enable_time().build().unwrap().block_on(test),
            NoTimers => Builder::new_current_thread().build().unwrap().block_on(test),
            NoTimersOfThreads => Builder::new_multi_thread().build().unwrap().block_on(test),
            NoRuntime => block_on(test),
        }
    }
}

/// Memory that answers so many milliseconds later, on a thread of its own.
struct Late(MemoryStore, u64);

impl Late {
    fn forward<T: Send + 'static>(
        &self,
        _: Operation,
        ask: impl FnOnce(&MemoryStore) -> Reply<T> + Send + 'static,
    ) -> Reply<T> {
        let (answer, answered) = oneshot::channel();
        let (memory, late) = (self.0.clone(), ms(self.1));
        thread::spawn(move || {
            thread::sleep(late);
            let _ = answer.send(block_on(ask(&memory)));
        });
        Reply::later(async move { answered.await.expect("it answers") })
    }
}

forward_to_memory!(Late, {});

/// A call has a deadline where there are timers.
async fn ask_a_store_that_is_late(runtime: Runtime) {
    let store = Remote::around(Late(MemoryStore::new(), 1_500)).deadline(ms(100));
    let limit = Quota::per_minute(5).name("late").store(store);
    let decision = limit.check(Key::global()).await.expect("memory stands in");
    assert_eq!(decision.is_local(), runtime == Timers, "{runtime:?}");
}

/// The limits of this store are charged in order.
async fn ask_for_two_limits(runtime: Runtime) {
    let store = Remote::around(Late(MemoryStore::new(), 1_500)).deadline(ms(2_250));
    let limits = ["a", "b", "c"].map(|name| Quota::per_minute(5).name(name).key(Key::global()));
    let layer = FixedWindowLayer::new(Limits::new(limits).store(store)).expose_decision();
    let service = layer.layer(service_fn(move |request: Request<Body>| {
        let decision: &Decision = request.extensions().get().expect("it was charged");
        let local = ["a", "b", "c"].map(|name| decision.of(name).expect("of each").is_local());
        // The last one is not asked at all, since the deadline is over.
        assert_eq!(local, [false, runtime == Timers, true], "{runtime:?}");
        async { Ok::<_, Infallible>(Response::new(Body::empty())) }
    }));
    let Ok(response) = service.oneshot(get("/")).await;
    assert_eq!(response.status(), 200);
}

/// A request waits where there are timers, and is refused elsewhere.
async fn queue(runtime: Runtime) {
    for far in [false, true] {
        let limit = Quota::new(2, ms(200)).name("queue").key(Key::global());
        let layer = FixedWindowLayer::new(match far {
            true => {
                let late = Remote::around(Late(MemoryStore::new(), 5)).deadline(Duration::MAX);
                limit.store(late)
            }
            false => limit.store(MemoryStore::new()),
        });
        let layer = layer.queue(9, secs(60));
        let service = layer.layer(service_fn(inner));
        let all = join_all((0..7).map(|_| service.clone().oneshot(get("/")))).await;
        let mut passed = 0;
        for response in all {
            let Ok(response) = response;
            match response.status().as_u16() {
                200 => passed += 1,
                status => {
                    assert_eq!(status, 429, "{runtime:?}");
                    assert_eq!(response.headers()["retry-after"], "1", "{runtime:?}");
                }
            }
        }
        let expected = if runtime == Timers { 7..=7 } else { 2..=4 };
        assert!(expected.contains(&passed), "{passed} passed, {runtime:?}, {far}");
    }
}

/// What a refused client sends is read until it is silent for a second, if there are timers.
async fn upload(runtime: Runtime) {
    let limit = Quota::per_minute(0).key(Key::global()).store(MemoryStore::new());
    let layer = FixedWindowLayer::new(limit).drain_refused::<Body>();
    let service = layer.layer(service_fn(inner));
    let silent = Body::from_stream(stream::pending::<Result<&'static str, Infallible>>());
    let start = Instant::now();
    let Ok(response) = service.oneshot(Request::post("/").body(silent).expect("valid")).await;
    assert_eq!(response.status(), 429);
    let is_read = start.elapsed() >= ms(900);
    assert_eq!(is_read, runtime == Timers, "{runtime:?}: {:?}", start.elapsed());
}

#[test]
fn each_runtime_is_served_by_what_it_has_whatever_ran_on_the_thread_before() {
    let all = [Timers, NoTimers, NoTimersOfThreads, NoRuntime];
    let pairs = all.into_iter().flat_map(|first| all.map(|second| [first, second]));
    let threads = pairs.map(|pair| {
        thread::spawn(move || {
            for runtime in pair {
                runtime.run(ask_a_store_that_is_late(runtime));
                runtime.run(ask_for_two_limits(runtime));
                runtime.run(queue(runtime));
                runtime.run(upload(runtime));
            }
        })
    });
    for thread in threads.collect::<Vec<_>>() {
        thread.join().expect("no panic");
    }
}
