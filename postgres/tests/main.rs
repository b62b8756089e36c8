//! The store over real servers, which the tests start and kill.

use std::process::Command;
use std::time::Duration;

use harness::{Postgres, wait_for};
use tower_fixed_window_postgres::PostgresStore;

mod clock;
mod conformance;
mod failover;
mod nodes;
mod outage;
mod pooler;
mod runtimes;
mod table;
#[cfg(feature = "tls")]
mod tls;

/// A deadline that a busy machine meets.
const PATIENT: Duration = Duration::from_secs(20);

/// A server with the schema, and a patient store.
async fn start() -> Option<(Postgres, PostgresStore)> {
    let server = Postgres::start()?;
    let store = PostgresStore::new(&server.url()).expect("an address").deadline(PATIENT);
    store.create_tables().await.expect("it is created");
    Some((server, store))
}

/// Runs SQL in a transaction that stays open for a minute, or until it is [ended](end_held).
fn hold(server: &Postgres, sql: &str) {
    let (url, sql) = (server.url(), format!("BEGIN; {sql}; SELECT pg_sleep(60)"));
    std::thread::spawn(move || Command::new("psql").args(["-Xqc", &sql, &url]).output());
    wait_for("the transaction", || {
        server.run("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'") == "1"
    });
}

fn end_held(server: &Postgres) {
    server
        .run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event = 'PgSleep'");
    wait_for("its end", || {
        server.run("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'") == "0"
    });
}

fn fastrand(below: u64) -> u64 {
    use std::hash::{BuildHasher, RandomState};

    RandomState::new().hash_one(()) % below
}
