//! Requests of two nodes that wait in line for a key.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, Response};
use harness::Postgres;
use tower::{Layer, ServiceExt, service_fn};
use tower_fixed_window::{Decision, FixedWindowLayer, Key, Quota};
use tower_fixed_window_postgres::PostgresStore;

#[tokio::test]
async fn each_second_passes_as_many_as_it_should() {
    const LIMIT: u64 = 50;
    let Some(server) = Postgres::start() else { return };
    let windows = Arc::new(Mutex::new(Vec::new()));
    let mut waiting = Vec::new();
    for node in 0..2 {
        let store = PostgresStore::new(&server.url()).expect("an address");
        let store = store.deadline(Duration::from_secs(20));
        store.create_schema().await.expect("it is created");
        let quota = Quota::per_second(LIMIT).name("line").key(Key::global()).store(store);
        let layer = FixedWindowLayer::new(quota).queue(1_000, Duration::from_secs(60));
        let windows = Arc::clone(&windows);
        let service = layer.expose_decision().layer(service_fn(move |request: Request<Body>| {
            let decision: &Decision = request.extensions().get().expect("it was charged");
            assert!(!decision.is_local());
            windows.lock().expect("no panic").push((decision.usage()[0].reset_at(), node));
            async { Ok::<_, Infallible>(Response::new(Body::empty())) }
        }));
        for _ in 0..100 {
            let request = Request::get("/").body(Body::empty()).expect("a request");
            waiting.push(tokio::spawn(service.clone().oneshot(request)));
        }
    }
    for response in waiting {
        let Ok(response) = response.await.expect("no panic");
        assert_eq!(response.status(), 200);
    }
    let windows = windows.lock().expect("no panic");
    assert_eq!(windows.len(), 200);
    for (window, _) in windows.iter() {
        let of = windows.iter().filter(|(other, _)| other == window).count() as u64;
        assert!(of <= LIMIT, "{of} passed in one second");
    }
}
