//! Connections that are cut while Redis is well: how many requests the policy decides.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use harness::{ALONE, Fate, Proxy, Server, gateway};
use tower_fixed_window::{Limiter, OnStoreFailure, Quota};
use tower_fixed_window_redis::RedisStore;

use crate::outage::{By, Load};

fn limiter(store: RedisStore) -> Limiter {
    Quota::per_day(1_000_000_000).from_first_request().name("cuts").store(store)
}

fn store(port: u16) -> RedisStore {
    RedisStore::new(format!("redis://127.0.0.1:{port}/")).expect("an address")
}

/// Sends so many requests at a time, and returns how many the policy has decided after `cut`.
async fn decided_after(limiter: &Limiter, load: usize, cut: impl FnOnce()) -> usize {
    while limiter.check(0_u64).await.expect("it answers").is_local() {}
    let load = Load::start(std::slice::from_ref(limiter), load as u64, load);
    // On a busy machine the first of many may be late.
    tokio::time::sleep(Duration::from_millis(700)).await;
    let since = Instant::now();
    cut();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let answers = load.stop().await;
    answers.iter().filter(|of| of.is_by(By::Memory) && of.ends_after(since)).count()
}

/// All connections are closed once. With the breaker's pause after that, there were thousands.
#[tokio::test(flavor = "multi_thread")]
async fn a_cut_lets_the_policy_decide_at_most_the_requests_in_flight() {
    let _alone = ALONE.lock().await;
    let Some(server) = Server::start() else { return };
    for (distance, load) in [0, 1, 20].into_iter().flat_map(|ms| [1, 32, 1_000].map(|n| (ms, n))) {
        let far = Proxy::to(server.port).delay(Duration::from_millis(distance));
        // A busy machine is late now and then.
        let limiter = limiter(store(far.port).deadline(Duration::from_secs(5)));
        let cut = || {
            let cut: u64 = server.ask(&["CLIENT", "KILL", "TYPE", "normal"]);
            assert!(cut > 0, "there was a connection");
        };
        let decided = decided_after(&limiter, load, cut).await;
        println!("{distance} ms, {load} in flight: {decided} decided by the policy");
        assert!(decided <= load, "{distance} ms, {load} in flight: {decided}");
    }
}

/// Such an answer can't be read, and is no answer of another kind of server.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_ends_inside_an_answer_is_a_cut_one() {
    let _alone = ALONE.lock().await;
    let Some(server) = Server::start() else { return };
    let (port, breaks) = (server.port, Arc::new(AtomicBool::new(false)));
    let next = Arc::clone(&breaks);
    let way = gateway(move |command| {
        match command[0].starts_with(b"EVAL") && next.swap(false, Ordering::SeqCst) {
            true => Fate::Break(port),
            false => Fate::To(port),
        }
    });
    let network = Proxy::to(way).delay(Duration::from_millis(20));
    let far = limiter(store(network.port).deadline(Duration::from_secs(5)));
    let decided = decided_after(&far, 8, || breaks.store(true, Ordering::SeqCst)).await;
    assert!(!breaks.load(Ordering::SeqCst) && decided <= 8, "{decided}");
    let limiter = limiter(store(way).on_failure(OnStoreFailure::Deny));
    assert!(limiter.check(1_u64).await.expect("it answers").is_allowed());
    breaks.store(true, Ordering::SeqCst);
    let error = limiter.check(1_u64).await.expect_err("its answer is lost").to_string();
    assert_eq!(error, "Redis can't be reached (unexpected end of file)");
}

/// The calls of a patient handle wait for their answers over the forgotten connection.
#[tokio::test(flavor = "multi_thread")]
async fn calls_over_a_forgotten_connection_do_not_hold_up_others_for_long() {
    let _alone = ALONE.lock().await;
    let Some(server) = Server::start() else { return };
    let proxy = Proxy::to(server.port);
    let store = store(proxy.port);
    let of = |seconds| limiter(store.clone().deadline(Duration::from_secs(seconds)));
    let (usual, patient) = (of(1), of(10));
    while usual.check(0_u64).await.expect("it answers").is_local() {}
    for key in 0..200_u64 {
        assert!(!usual.check(key).await.expect("it answers").is_local());
    }
    proxy.forget();
    let forgotten = Instant::now();
    let mut asked = Vec::new();
    while forgotten.elapsed() < Duration::from_millis(120) {
        asked.push(tokio::spawn(patient.check(0_u64)));
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    for key in 0..20_u64 {
        let decision = usual.check(key).await.expect("it answers");
        assert!(!decision.is_local(), "after {:?}", forgotten.elapsed());
    }
    assert!(forgotten.elapsed() < Duration::from_secs(5));
    let waiting = asked.iter().filter(|asked| !asked.is_finished()).count();
    println!("{waiting} of {} patient requests wait", asked.len());
    assert!(waiting < asked.len(), "those that were not sent go over another connection");
}
