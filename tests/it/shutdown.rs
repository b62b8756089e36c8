//! Requests that wait, and corrections that are in flight, when a server ends.

use std::sync::Arc;
use std::time::Duration;

use axum::routing::get as on_get;
use axum::{Router, http::StatusCode};
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Notify, oneshot};
use tower::ServiceExt;
use tower_fixed_window::testing::block_on;
use tower_fixed_window::{FixedWindowLayer, Key, ManualClock, MemoryStore, Quota};

use crate::support::{Mood, TestStore, get};

/// A runtime under which one request has been answered whose charge is to be given back.
fn answered(store: &TestStore) -> Runtime {
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.expect("a runtime");
    let limit = FixedWindowLayer::new(
        Quota::per_minute(5).name("login").key(Key::global()).store(store.clone()),
    )
    .count_if(|response| response.status == StatusCode::UNAUTHORIZED);
    let app: Router = Router::new().route("/", on_get(async || "welcome")).layer(limit);
    let response = runtime.block_on(app.oneshot(get("/"))).expect("infallible");
    assert_eq!(response.status(), StatusCode::OK);
    runtime
}

/// The store's count in the end.
fn used(store: &TestStore) -> u64 {
    store.set(Mood::Now);
    let limiter = Quota::per_minute(5).name("login").store(store.clone());
    block_on(limiter.peek(Key::global())).expect("an answer").used()
}

/// In memory it is complete with the response, and elsewhere if the runtime lives for the store's
/// deadline. If it is lost, the charge stays.
#[test]
fn a_refund_is_complete_if_the_runtime_lives_for_as_long_as_it_takes() {
    for (mood, lives_for, left) in [(Mood::Now, 0, 0), (Mood::Later, 0, 1), (Mood::Later, 250, 0)] {
        let store = TestStore::new(mood);
        let runtime = answered(&store);
        if lives_for > 0 {
            runtime.block_on(async {
                tokio::time::sleep(Duration::from_millis(lives_for)).await;
            });
        }
        drop(runtime);
        assert_eq!(used(&store), left, "{mood:?} for {lives_for} ms");
    }
}

#[tokio::test]
async fn a_server_whose_queue_is_closed_ends_without_waiting_for_the_window() {
    let arrived = Arc::new(Notify::new());
    let arrives = arrived.clone();
    let limit = Quota::per_day(1).key(Key::global()).cost_fn(move |_| {
        arrives.notify_one();
        1
    });
    let limiter = limit.store(MemoryStore::new().clock(ManualClock::at_ms(0)));
    let layer = FixedWindowLayer::new(&limiter).queue(10, Duration::from_secs(86_400));
    let closing = layer.clone();
    let app = Router::new().route("/", on_get(async || "hello")).layer(layer);

    let (stop, stopped) = oneshot::channel::<()>();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}/", listener.local_addr().expect("an address"));
    let stopped = async move {
        stopped.await.ok();
        closing.close_queue();
    };
    let server = axum::serve(listener, app).with_graceful_shutdown(stopped);
    let server = tokio::spawn(async move { server.await });

    let client = reqwest::Client::builder().no_proxy().build().expect("a client");
    assert_eq!(client.get(&url).send().await.expect("a response").status(), 200);
    arrived.notified().await;
    let waiting = tokio::spawn(client.get(&url).send());
    arrived.notified().await;

    stop.send(()).expect("the server runs");
    let response = waiting.await.expect("no panic").expect("a response");
    assert_eq!(response.status(), 503);
    assert_eq!(limiter.peek(Key::global()).await.expect("memory").used(), 1);
    server.await.expect("no panic").expect("no error");
}
