//! Receipts that are settled in another process: here, over another connection.

use std::time::Duration;

use harness::Server;
use tower_fixed_window::{KeptReceipt, Limiter, ManualClock, OnStoreFailure, Quota};
use tower_fixed_window_redis::RedisStore;

use crate::conformance::connect;

const TURN: u64 = 1_700_000_040_000;

async fn process(server: &Server) -> Limiter {
    let store = RedisStore::from(connect(&server.url()).await).clock(ManualClock::at_ms(TURN));
    let store = store.deadline(Duration::from_secs(20)).on_failure(OnStoreFailure::Local);
    Quota::per_hour(1_000).name("jobs").store(store)
}

#[tokio::test]
async fn another_process_settles_what_one_has_charged() {
    let Some(server) = Server::start() else { return };
    let text = {
        let web = process(&server).await;
        let receipt = web.charge("alice", 500).await.expect("an answer").expect("it passes");
        serde_json::to_string(&receipt.keep().expect("the limiter has a name")).expect("text")
    };
    let worker = process(&server).await;
    let kept: KeptReceipt = serde_json::from_str(&text).expect("a receipt");
    worker.settle(kept, 120).await.expect("an answer");
    assert_eq!(worker.peek("alice").await.expect("an answer").used(), 120);
    assert_eq!(process(&server).await.peek("alice").await.expect("an answer").used(), 120);
}

#[tokio::test]
async fn a_receipt_of_a_local_decision_cannot_be_kept() {
    let Some(mut server) = Server::start() else { return };
    let limiter = process(&server).await;
    server.kill();
    let receipt = limiter.charge("alice", 5).await.expect("an answer").expect("it passes");
    assert!(receipt.decision().is_local());
    assert!(receipt.keep().is_err(), "Redis does not know of it");
}
