//! Corrections that are in flight when the runtime ends.

use std::time::Duration;

use axum::routing::get as on_get;
use axum::{Router, http::StatusCode};
use tokio::runtime::{Builder, Runtime};
use tower::ServiceExt;
use tower_fixed_window::key::global;
use tower_fixed_window::testing::block_on;
use tower_fixed_window::{FixedWindowLayer, Key, Quota};

use crate::support::{Mood, TestStore, get};

/// A runtime under which one request has been answered whose charge is to be given back.
fn answered(store: &TestStore) -> Runtime {
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.expect("a runtime");
    let limit = FixedWindowLayer::new(
        Quota::per_minute(5).name("login").key(global()).store(store.clone()),
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

#[test]
fn a_refund_in_memory_is_complete_with_the_response() {
    let store = TestStore::new(Mood::Now);
    drop(answered(&store));
    assert_eq!(used(&store), 0);
}

#[test]
fn a_refund_lost_with_its_runtime_leaves_the_charge() {
    let store = TestStore::new(Mood::Later);
    drop(answered(&store));
    assert_eq!(used(&store), 1);
}

#[test]
fn a_refund_completes_if_the_runtime_lives_for_the_stores_deadline() {
    let store = TestStore::new(Mood::Later);
    let runtime = answered(&store);
    runtime.block_on(async { tokio::time::sleep(Duration::from_millis(250)).await });
    drop(runtime);
    assert_eq!(used(&store), 0);
}
