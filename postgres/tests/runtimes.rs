//! A store in two runtimes, one of which ends, or stands still.

use std::time::Duration;

use harness::Postgres;
use tokio::runtime::{Builder, Runtime};
use tower_fixed_window::{Limit, Limiter, Quota};
use tower_fixed_window_postgres::PostgresStore;

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// The tokens used after one more.
async fn counts(limiter: &Limiter) -> u64 {
    let decision = limiter.check("a").await.expect("Postgres answers");
    assert!(!decision.is_local());
    decision.used()
}

#[test]
fn a_reset_outside_of_a_runtime_fails() {
    let store = PostgresStore::new("postgres://127.0.0.1:1/none").expect("an address");
    let limiter = Limit::new(Quota::per_minute(1)).name("outside").store(store);
    let mut reset = std::pin::pin!(limiter.reset("a"));
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    let std::task::Poll::Ready(answer) = reset.as_mut().poll(&mut cx) else { panic!("it waits") };
    assert!(answer.expect_err("no runtime").to_string().contains("runtime"));
}

#[test]
fn a_connection_ends_with_its_runtime_and_the_other_opens_one() {
    let Some(server) = Postgres::start() else { return };
    let store = PostgresStore::new(&server.url()).expect("an address");
    let store = store.deadline(Duration::from_secs(20));
    let limiter = Limit::new(Quota::per_year(1_000_000)).name("runtimes").store(store.clone());
    let [mut first, second] = [(); 2].map(|()| runtime());
    first.block_on(store.create_tables()).expect("it is created");
    for round in 0..5 {
        assert_eq!(first.block_on(counts(&limiter)), 2 * round + 1);
        // The connection is that of a runtime that stands still now, or has ended.
        if round % 2 == 0 {
            first = runtime();
        }
        assert_eq!(second.block_on(counts(&limiter)), 2 * round + 2);
    }
}
