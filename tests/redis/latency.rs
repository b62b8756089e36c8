//! A server that is far, slow or busy is not one that failed.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use harness::{ALONE, Proxy, Server};
use tokio::runtime::{Builder, Runtime};
use tokio::time::{sleep, timeout};
use tower_fixed_window::{Limiter, OnStoreFailure, Quota};
use tower_fixed_window_redis::RedisStore;

use crate::outage::Load;

fn limiter(store: RedisStore) -> Limiter {
    Quota::per_day(1_000_000).from_first_request().name("distance").store(store)
}

fn store(port: u16) -> RedisStore {
    RedisStore::new(format!("redis://127.0.0.1:{port}/")).expect("an address")
}

async fn is_local(limiter: &Limiter, key: u64) -> bool {
    limiter.check(key).await.expect("memory answers").is_local()
}

/// Sends concurrent requests for these keys, and returns for each whether it was counted locally.
async fn at_once(limiter: &Limiter, keys: impl IntoIterator<Item = u64>) -> Vec<bool> {
    let ask = |key| {
        let limiter = limiter.clone();
        tokio::spawn(async move { is_local(&limiter, key).await })
    };
    let tasks: Vec<_> = keys.into_iter().map(ask).collect();
    join_all(tasks).await.into_iter().map(|answer| answer.expect("no panic")).collect()
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Calls of 128 charges, two at a time, would take eight round trips.
#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_concurrent_calls_take_one_round_trip_at_any_latency() {
    let _alone = ALONE.lock().await;
    let Some(server) = Server::start() else { return };
    let far = Proxy::to(server.port).delay(Duration::from_millis(400));
    let limiter = limiter(store(far.port).deadline(Duration::from_secs(4)));
    while is_local(&limiter, 0).await {}
    let local = at_once(&limiter, 0..2_000).await;
    assert_eq!(local.iter().filter(|&&local| local).count(), 0);
}

#[tokio::test]
async fn calls_that_time_out_open_the_breaker_even_if_their_callers_have_left() {
    let _alone = ALONE.lock().await;
    let Some(server) = Server::start() else { return };
    let deadline = Duration::from_secs(2);
    let limiter = limiter(store(server.port).deadline(deadline));
    assert!(!is_local(&limiter, 0).await);
    server.freeze();
    let impatient = async |key| timeout(Duration::from_millis(50), is_local(&limiter, key)).await;
    for key in 0..10 {
        assert!(impatient(key).await.is_err(), "nobody answers yet");
    }
    sleep(deadline + deadline / 4).await;
    // A single request may try whether the server is back.
    let answers = join_all((0..3).map(|key| timeout(deadline / 2, is_local(&limiter, key)))).await;
    let at_once = answers.iter().filter(|answer| matches!(answer, Ok(true))).count();
    assert!(at_once >= 2, "{answers:?}");
    server.thaw();
}

/// The connection is checked, and the check gets no answer, either.
#[tokio::test]
async fn a_single_call_to_a_frozen_server_opens_the_breaker() {
    let _alone = ALONE.lock().await;
    let Some(server) = Server::start() else { return };
    let limiter = limiter(store(server.port).on_failure(OnStoreFailure::Deny));
    while limiter.check(0_u64).await.is_err() {}
    server.freeze();
    let error = async || limiter.check(0_u64).await.expect_err("it is frozen").to_string();
    assert_eq!(error().await, "Redis did not answer in time");
    assert_eq!(error().await, "Redis did not answer in time", "it waits for the check");
    // A single request may try whether the server is back.
    let errors = join_all((0..10).map(|_| error())).await;
    let is_open =
        |error: &&String| *error == "the store keeps failing: the circuit breaker is open";
    assert!(errors.iter().filter(is_open).count() >= 9, "{errors:?}");
    server.thaw();
}

/// Handles share a breaker, and none holds it closed for others (S32).
#[tokio::test(flavor = "multi_thread")]
async fn a_patient_handle_does_not_make_the_others_wait() {
    let _alone = ALONE.lock().await;
    let Some(server) = Server::start() else { return };
    let store = store(server.port);
    let (usual, patient) =
        (limiter(store.clone()), limiter(store.deadline(Duration::from_secs(5))));
    while is_local(&usual, 0).await {}
    let load = Load::of_keys(&[patient], vec![1], 64);
    sleep(Duration::from_millis(300)).await;
    server.freeze();
    let (frozen, mut waited) = (Instant::now(), 0);
    while frozen.elapsed() < Duration::from_secs(3) {
        let asked = Instant::now();
        assert!(is_local(&usual, 0).await);
        waited += u32::from(asked.elapsed() > Duration::from_millis(125));
        sleep(Duration::from_millis(20)).await;
    }
    server.thaw();
    load.stop().await;
    assert!(waited <= 2, "{waited} waited");
}

/// Closes a connection that was used lately, so that only the next call notices.
async fn closed(server: &Server, proxy: &Proxy, limiter: &Limiter) {
    // The next requests of these keys share a call.
    while at_once(limiter, 10..20).await.contains(&true) {}
    proxy.set_silent(true);
    server.ask::<u64>(&["CLIENT", "KILL", "TYPE", "normal"]);
    sleep(Duration::from_millis(50)).await;
}

/// Clones share the connection, and each has its own deadline.
#[tokio::test]
async fn a_short_deadline_of_one_clone_does_not_shorten_that_of_another() {
    let _alone = ALONE.lock().await;
    let Some(server) = Server::start() else { return };
    let proxy = Proxy::to(server.port).delay(Duration::from_millis(30));
    let patient = RedisStore::new(proxy.url()).expect("an address");
    let patient = patient.deadline(Duration::from_secs(5));
    let hasty = limiter(patient.clone().deadline(Duration::from_millis(10)));
    let patient = limiter(patient);
    assert!(!is_local(&patient, 0).await, "connecting takes several round trips");
    // A hasty caller that gives up does not cut off those that still wait for a connection, or
    // begin to.
    proxy.set_delay(|| Duration::ZERO);
    closed(&server, &proxy, &patient).await;
    let ask = || {
        let patient = patient.clone();
        tokio::spawn(async move { is_local(&patient, 0).await })
    };
    let first = ask();
    sleep(Duration::from_millis(20)).await;
    assert!(is_local(&hasty, 0).await);
    let second = ask();
    sleep(Duration::from_millis(50)).await;
    proxy.set_silent(false);
    assert!(!first.await.expect("no panic"));
    assert!(!second.await.expect("no panic"));
}

/// The deadline is later than any instant.
#[tokio::test]
async fn a_store_without_a_deadline_answers() {
    let Some(server) = Server::start() else { return };
    let limiter = limiter(store(server.port).deadline(Duration::MAX));
    let decision = limiter.check(0_u64).await.expect("memory answers");
    assert_eq!((decision.is_local(), decision.used()), (false, 1));
}

/// The task that listens for the server may be in a runtime that no thread drives any more.
#[test]
fn a_blocked_runtime_does_not_delay_the_end_of_an_outage() {
    let _alone = ALONE.blocking_lock();
    let Some(server) = Server::start() else { return };
    let limiter = limiter(store(server.port));
    let (still, other) = (runtime(), runtime());
    other.block_on(async { while is_local(&limiter, 0).await {} });
    server.freeze();
    still.block_on(async { assert_eq!(at_once(&limiter, 0..10).await, [true; 10]) });
    // The blocked runtime has the task that listens for the server, for two seconds.
    other.block_on(async { sleep(Duration::from_secs(3)).await });
    server.thaw();
    other.block_on(async {
        while is_local(&limiter, 0).await {
            sleep(Duration::from_millis(10)).await;
        }
        server.freeze();
        assert_eq!(at_once(&limiter, 0..10).await, [true; 10]);
        server.thaw();
        let answered: String = server.ask(&["PING"]);
        assert_eq!(answered, "PONG");
        sleep(Duration::from_millis(100)).await;
        assert!(!is_local(&limiter, 0).await);
    });
    drop(still);
}
