//! Requests that wait in line for a Redis that is 20 ms away. 20,000 of them with `FULL_SIZE=1`.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, UNIX_EPOCH};

use axum::body::Body;
use harness::{Proxy, Server};
use http::{Request, Response};
use tower::{Layer, ServiceExt, service_fn};
use tower_fixed_window::{Decision, FixedWindowLayer, Key, Limit, Limits, Quota};
use tower_fixed_window_redis::RedisStore;

use crate::gathered_calls::{at_once, charges};

const LIMIT: usize = 1_000;

/// Many are charged at the same time: each second, a thousand pass and no more.
#[tokio::test]
async fn a_thousand_a_second_pass_in_order_over_twenty_milliseconds() {
    let quota = Quota::per_second(LIMIT as u64).name("line").key(Key::global());
    pass_in_order([quota].into()).await;
}

/// The same where each request is charged for two limits.
#[tokio::test]
async fn a_thousand_a_second_of_two_limits_pass_in_order_over_twenty_milliseconds() {
    let seconds = Quota::per_second(LIMIT as u64).name("seconds").key(Key::global());
    pass_in_order([seconds, Quota::per_hour(1_000_000).name("hours").key(Key::global())].into())
        .await;
}

async fn pass_in_order(limits: Vec<Limit>) {
    let Some(server) = Server::start() else { return };
    let proxy = Proxy::to(server.port).delay(Duration::from_millis(20));
    let full = std::env::var_os("FULL_SIZE").is_some();
    let requests = if full { 20_000 } else { 3_000 };
    let store = RedisStore::new(proxy.url()).expect("an address");
    // Loads the scripts: a call that finds its own missing is repeated after later ones.
    let _ = at_once(charges(&store, 0..9)).await;
    let layer = FixedWindowLayer::new(Limits::new(limits).store(store));
    let layer = layer.queue(requests, Duration::from_secs(120)).expose_decision();
    let calls = Arc::new(Mutex::new(Vec::new()));
    let notes = Arc::clone(&calls);
    let service = layer.layer(service_fn(move |request: Request<Body>| {
        let number: usize = request.uri().path()[1..].parse().expect("a number");
        let decision: &Decision = request.extensions().get().expect("it was charged");
        let of = decision.of("seconds").unwrap_or_else(|| decision.clone());
        let end = of.usage()[0].reset_at().duration_since(UNIX_EPOCH).expect("after 1970");
        // On a busy machine Redis may miss its deadline, and a window of this process counts.
        notes.lock().unwrap().push((number, (end.as_secs(), of.is_local())));
        async { Ok::<_, Infallible>(Response::new(Body::empty())) }
    }));
    let start = Instant::now();
    let mut waiting = Vec::new();
    for number in 0..requests {
        let request = Request::get(format!("/{number}")).body(Body::empty()).expect("a request");
        let response = service.clone().oneshot(request);
        waiting.push(tokio::spawn(response));
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
    let calls = calls.lock().unwrap();
    // Of up to 64 in flight, each goes when it is answered: by Redis in order, and on a busy machine
    // also in memory.
    let is_near = |(i, (number, _)): (usize, &(usize, _))| number.abs_diff(i) < 64;
    assert!(calls.iter().enumerate().all(is_near), "nearly in order of arrival");
    let of_redis = calls.iter().filter(|(_, (_, is_local))| !is_local);
    let before = of_redis.clone().zip(of_redis.skip(1)).find(|(one, next)| one.0 > next.0);
    assert_eq!(before, None, "in order of arrival");
    let mut seconds = BTreeMap::new();
    // A request counts in the window in which it was charged (S13).
    calls.iter().for_each(|(_, window)| *seconds.entry(*window).or_insert(0) += 1);
    println!("{requests} requests in {took:?}: {seconds:?}");
    assert!(seconds.values().all(|&passed| passed <= LIMIT), "{seconds:?}");
    let least = requests as usize / LIMIT - 1;
    assert!(took <= Duration::from_secs(least as u64 + 3), "{took:?}: {seconds:?}");
}
