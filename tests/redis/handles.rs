//! Handles of one store share its breaker, and none opens it for others, or holds it closed (S32).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use harness::{ALONE, Proxy, Server};
use tower_fixed_window::{Limiter, OnStoreFailure, Quota};
use tower_fixed_window_redis::RedisStore;

const MS: Duration = Duration::from_millis(1);

fn limiter(store: RedisStore) -> Limiter {
    Quota::per_day(1_000_000).name("handles").store(store)
}

/// A request each millisecond, until this is dropped.
struct Requests(Arc<AtomicBool>);

impl Requests {
    fn of(limiter: &Limiter) -> Self {
        let (limiter, ended) = (limiter.clone(), Arc::new(AtomicBool::new(false)));
        let is_over = Arc::clone(&ended);
        tokio::spawn(async move {
            let mut ticks = tokio::time::interval(MS);
            while !is_over.load(Ordering::SeqCst) {
                ticks.tick().await;
                tokio::spawn(limiter.check(1_u64));
            }
        });
        Self(ended)
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_impatient_handle_leaves_the_store_to_the_others() {
    let _alone = ALONE.lock().await;
    let Some(server) = Server::start() else { return };
    let proxy = Proxy::to(server.port).delay(2 * MS);
    let store = RedisStore::new(proxy.url()).expect("an address");
    let strict = limiter(store.clone().on_failure(OnStoreFailure::Deny));
    let (patient, hasty) = (limiter(store.clone()), limiter(store.deadline(MS)));
    while patient.check(0_u64).await.expect("it answers").is_local() {}
    let _hasty = Requests::of(&hasty);
    tokio::time::sleep(100 * MS).await;
    let (mut local, mut denied) = (0, 0);
    for _ in 0..60 {
        local += u32::from(patient.check(0_u64).await.expect("it answers").is_local());
        denied += u32::from(strict.check(0_u64).await.is_err());
        tokio::time::sleep(50 * MS).await;
    }
    assert_eq!((local, denied), (0, 0), "local, denied of 60");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_patient_handle_does_not_make_the_others_wait() {
    let _alone = ALONE.lock().await;
    let Some(server) = Server::start() else { return };
    let store = RedisStore::new(server.url()).expect("an address");
    let (usual, patient) = (limiter(store.clone()), limiter(store.deadline(5_000 * MS)));
    while usual.check(0_u64).await.expect("it answers").is_local() {}
    let _patient = Requests::of(&patient);
    tokio::time::sleep(300 * MS).await;
    server.freeze();
    let frozen = Instant::now();
    let mut waits = Vec::new();
    while frozen.elapsed() < 3_000 * MS {
        let asked = Instant::now();
        assert!(usual.check(0_u64).await.expect("it answers").is_local());
        waits.push(asked.elapsed());
        tokio::time::sleep(20 * MS).await;
    }
    server.thaw();
    let waited = waits.iter().filter(|wait| **wait > 125 * MS).count();
    assert!(waited <= 2, "{waited} of {} waited", waits.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_may_not_be_touched_fails_alone() {
    let _alone = ALONE.lock().await;
    let Some(server) = Server::start() else { return };
    let user = ["on", ">secret", "~tfw1:{good*", "~tfw1:{}", "+@all"];
    server.ask::<String>(&[&["ACL", "SETUSER", "limiter"][..], &user].concat());
    let url = format!("redis://limiter:secret@127.0.0.1:{}/", server.port);
    // Each in a call of its own.
    let store = RedisStore::new(url).expect("an address").one_by_one();
    let of = |name: &str| Quota::per_day(1_000_000).name(name).store(store.clone());
    let (good, bad) = (of("good"), of("bad"));
    while good.check(0_u64).await.expect("it answers").is_local() {}
    for _ in 0..77 {
        assert!(bad.check(0_u64).await.expect("it answers").is_local());
        assert!(!good.check(0_u64).await.expect("it answers").is_local());
    }
}
