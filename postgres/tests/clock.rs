//! A server's clock that steps: of a function that the tests put in place of the schema's.

use std::time::Duration;

use harness::Postgres;
use tower_fixed_window::{Limit, ManualClock, Quota};
use tower_fixed_window_postgres::{PostgresStore, SCHEMA};

/// The schema of a server whose clock is ahead by so many hours.
pub(crate) fn schema_ahead_by(hours: i32) -> String {
    let read = SCHEMA.split_once("CREATE OR REPLACE FUNCTION tfw_read").expect("it reads").1;
    let (read, _) = read.split_once("CREATE OR REPLACE FUNCTION").expect("it writes");
    let ahead = format!("FROM clock_timestamp() + interval '{hours} hours'");
    format!("CREATE OR REPLACE FUNCTION tfw_read{}", read.replace("FROM clock_timestamp()", &ahead))
}

#[tokio::test]
async fn a_clock_that_steps_back_passes_nothing_twice() {
    let Some((server, store)) = crate::start().await else { return };
    let store = store.remember_refusals(Duration::ZERO);
    let limit = Limit::new(Quota::new(5, Duration::from_secs(10 * 86_400))).name("steps");
    let limit = limit.store(store);
    let passes = async || {
        let decision = limit.check("a").await.expect("Postgres answers");
        assert!(!decision.is_local());
        decision.is_allowed()
    };
    assert!(passes().await && passes().await);
    for (hours, passed) in [(-2, true), (-240, true), (-2_400, true), (-2_400, false)] {
        server.run(&schema_ahead_by(hours));
        assert_eq!(passes().await, passed, "{hours} hours ahead");
    }
    // In the next window, or the one after it.
    server.run(&schema_ahead_by(15 * 24));
    for passed in [true, true, true, true, true, false] {
        assert_eq!(passes().await, passed);
    }
    server.run(&schema_ahead_by(0));
    assert!(!passes().await, "the window that was used up is later");
}

/// A test that has no server fails, instead of counting here.
#[tokio::test]
async fn with_another_clock_a_failure_is_an_error() {
    let store = PostgresStore::new("postgres://nobody@127.0.0.1:1/none").expect("an address");
    let limit = Limit::new(Quota::per_minute(5)).name("failing");
    let limit = limit.store(store.clock(ManualClock::at_ms(0)));
    assert!(limit.check("a").await.is_err());
}

/// Otherwise the end of a window would be in the next one, and its tokens above the limit.
#[test]
fn the_time_that_is_read_is_none_that_is_still_to_come() {
    let Some(server) = Postgres::start() else { return };
    server.run(SCHEMA);
    server.run(
        "DO $$ DECLARE read bigint; BEGIN FOR i IN 1..1000 LOOP \
             SELECT now_ms INTO read FROM tfw_read('{}', '{}', '{}'); \
             ASSERT read <= extract(epoch FROM clock_timestamp()) * 1000; \
         END LOOP; END $$",
    );
}
