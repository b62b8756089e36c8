//! Requests that wait in line for a Redis that is 20 ms away. 20,000 of them with `FULL_SIZE=1`.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, UNIX_EPOCH};

use axum::body::Body;
use harness::{Proxy, Server};
use http::{Request, Response};
use tower::{Layer, ServiceExt, service_fn};
use tower_fixed_window::store::{Adjust, Charge, Remote, Reply, Scope, Store};
use tower_fixed_window::{Decision, FixedWindowLayer, Key, Quota};
use tower_fixed_window_redis::RedisStore;

use crate::agreement::at_once;
use crate::gathered_calls::charges;

const LIMIT: usize = 1_000;

tokio::task_local! {
    static NUMBER: usize;
}

/// What happened to each request, in order.
#[derive(Clone, Copy, PartialEq)]
enum Event {
    Asked(usize),
    Refused(usize),
}

/// Notes what the queue asks, and which requests have to wait again.
struct Noting(RedisStore, Arc<Mutex<Vec<Event>>>);

impl Store for Noting {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        let (reply, events, number) = (self.0.charge(charge), Arc::clone(&self.1), NUMBER.get());
        Reply::later(async move {
            events.lock().unwrap().push(Event::Asked(number));
            let answer = reply.await;
            if answer.as_ref().is_ok_and(|decision| !decision.is_allowed()) {
                events.lock().unwrap().push(Event::Refused(number));
            }
            answer
        })
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        self.0.adjust(adjust)
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        self.0.reset(scope, key)
    }

    fn remote(&self) -> Option<Remote> {
        self.0.remote()
    }
}

/// Many are charged at the same time: each second, a thousand pass and no more.
#[tokio::test]
async fn a_thousand_a_second_pass_in_order_over_twenty_milliseconds() {
    let Some(server) = Server::start() else { return };
    let proxy = Proxy::to(server.port).delay(Duration::from_millis(20));
    let full = std::env::var_os("FULL_SIZE").is_some();
    let requests: usize = if full { 20_000 } else { 3_000 };
    let store = RedisStore::new(proxy.url()).expect("an address");
    // Loads the scripts: a call that finds its own missing is repeated after later ones.
    let _ = at_once(charges(&store, 0..9)).await;
    let events = Arc::<Mutex<Vec<Event>>>::default();
    let limit = Quota::per_second(LIMIT as u64).name("line").key(Key::global());
    let layer = FixedWindowLayer::new(limit.store(Noting(store, events.clone())));
    let layer = layer.queue(requests as u64, Duration::from_secs(120)).expose_decision();
    let calls = Arc::new(Mutex::new(Vec::new()));
    let notes = Arc::clone(&calls);
    let service = layer.layer(service_fn(move |request: Request<Body>| {
        let decision: &Decision = request.extensions().get().expect("it was charged");
        let usage = decision.usage()[0];
        let end = usage.reset_at().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
        // On a busy machine Redis may miss its deadline, and a window of this process counts.
        notes.lock().unwrap().push((decision.is_local(), end, usage.used(), NUMBER.get()));
        async { Ok::<_, Infallible>(Response::new(Body::empty())) }
    }));
    let start = Instant::now();
    let mut waiting = Vec::new();
    for number in 0..requests {
        let request = Request::get("/").body(Body::empty()).expect("a request");
        let response = service.clone().oneshot(request);
        waiting.push(tokio::spawn(NUMBER.scope(number, response)));
        if number % 64 == 0 {
            // Those that came before are polled: one that isn't for 100 ms lets others pass (S13).
            tokio::task::yield_now().await;
        }
    }
    for response in waiting {
        let Ok(response) = response.await.expect("no panic");
        assert_eq!(response.status(), 200);
    }
    let took = start.elapsed();
    // The order in which they were charged. Those that are answered by one call go in the order in
    // which the runtime polls them.
    let mut calls = calls.lock().unwrap().clone();
    calls.sort_unstable();
    let mut seconds = BTreeMap::new();
    // A request counts in the window in which it was charged (S13).
    calls
        .iter()
        .for_each(|(is_local, end, ..)| *seconds.entry((*end, *is_local)).or_insert(0) += 1);
    println!("{requests} requests in {took:?}: {seconds:?}");
    assert!(seconds.values().all(|&passed| passed <= LIMIT), "{seconds:?}");
    // One at a time, they would take two minutes.
    assert!(took <= Duration::from_secs(requests as u64 / 100), "{took:?}: {seconds:?}");
    let events = events.lock().unwrap();
    let last = |event| events.iter().rposition(|at| *at == event);
    let numbers: Vec<_> = calls.iter().filter(|of| !of.0).map(|(.., number)| *number).collect();
    for (place, &number) in numbers.iter().enumerate() {
        // It was refused while the later one was in flight (S13).
        let refused = || last(Event::Refused(number));
        let mut later = numbers[..place].iter().copied().filter(|&before| before > number);
        let wrong = later.find(|&before| last(Event::Asked(before)) >= refused());
        assert_eq!(wrong, None, "charged before {number}");
    }
}
