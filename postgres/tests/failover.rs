//! A primary that ends, and the replica that takes its place.

use std::time::Duration;

use harness::{Postgres, Proxy, wait_for};
use tower_fixed_window::{Limit, Limiter, Quota};
use tower_fixed_window_postgres::PostgresStore;

use crate::clock::schema_ahead_by;

fn limiter(store: PostgresStore) -> Limiter {
    Limit::new(Quota::new(1_000, Duration::from_secs(10 * 365 * 86_400))).name("moves").store(store)
}

/// The tokens used after one more.
async fn counts(limiter: &Limiter) -> Option<u64> {
    let decision = limiter.check("a").await.expect("memory answers");
    (!decision.is_local()).then(|| decision.used())
}

async fn survives(address: impl Fn(&Postgres, &Postgres) -> String, moves: impl Fn(&Postgres)) {
    let Some(mut primary) = Postgres::start() else { return };
    let replica = primary.replica();
    let store = PostgresStore::new(&address(&primary, &replica)).expect("an address");
    let patient = store.clone().deadline(Duration::from_secs(20)).wait_for_disk();
    patient.create_tables().await.expect("it is created");
    let patient = limiter(patient);
    assert_eq!(counts(&patient).await, Some(1));
    assert_eq!(counts(&patient).await, Some(2));
    // Until then it may have no table.
    let written = primary.run("SELECT pg_current_wal_lsn()");
    let follows = format!("SELECT pg_last_wal_replay_lsn() >= '{written}'");
    wait_for("the replica to follow", || replica.run(&follows) == "t");
    assert_eq!(replica.run("SELECT used FROM tfw_counters"), "2");
    let limiter = limiter(store.deadline(Duration::from_secs(2)));
    primary.kill();
    // No one takes writes.
    moves(&replica);
    assert_eq!(counts(&limiter).await, None);
    replica.run("SELECT pg_promote()");
    let mut used = None;
    wait_for("the new primary", || replica.run("SELECT pg_is_in_recovery()") == "f");
    for _ in 0..300 {
        used = counts(&limiter).await;
        if used.is_some() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(used, Some(3));
    assert_eq!(replica.run("SELECT used FROM tfw_counters"), "3");
}

#[tokio::test]
async fn a_replica_that_is_promoted_goes_on_counting() {
    let both = |one: &Postgres, other: &Postgres| {
        format!(
            "postgres://postgres@127.0.0.1:{},127.0.0.1:{}/postgres?target_session_attrs=read-write",
            one.port, other.port
        )
    };
    survives(both, |_| {}).await;
}

/// As behind a name that leads to the new one.
#[tokio::test]
async fn a_name_that_leads_to_a_replica_is_asked_until_it_is_promoted() {
    let proxy = std::sync::OnceLock::new();
    let name = |one: &Postgres, _: &Postgres| {
        proxy.get_or_init(|| Proxy::to(one.port)).url().replace("redis://", "postgres://postgres@")
            + "postgres"
    };
    survives(name, |replica| proxy.get().expect("a proxy").set_target(replica.port)).await;
}

/// What was decided by the clock of a server that takes no writes is decided anew by the other.
#[tokio::test]
async fn a_refused_write_is_decided_by_the_clock_of_the_new_primary() {
    let (Some(old), Some(new)) = (Postgres::start(), Postgres::start()) else { return };
    let proxy = Proxy::to(old.port);
    let url = format!("postgres://postgres@127.0.0.1:{}/postgres", proxy.port);
    for server in [&old, &new] {
        let store = PostgresStore::new(&server.url()).expect("an address");
        let store = store.deadline(Duration::from_secs(20));
        store.create_tables().await.expect("it is created");
    }
    let store = PostgresStore::new(&url).expect("an address").deadline(Duration::from_secs(20));
    let limiter = Limit::new(Quota::per_hour(5)).name("clocks").store(store);
    assert!(limiter.check("before").await.expect("Postgres answers").is_allowed());
    // The old one becomes a replica between the read and the write.
    old.run(&schema_ahead_by(48).replace("IF current_setting", "IF false AND current_setting"));
    old.run("ALTER SYSTEM SET default_transaction_read_only = on");
    old.run("SELECT pg_reload_conf()");
    wait_for("it only reads", || old.run("SHOW default_transaction_read_only") == "on");
    proxy.set_target(new.port);
    assert!(limiter.check("a").await.expect("Postgres answers").is_allowed());
    let ends = "SELECT until < clock_timestamp() + interval '1 hour' FROM tfw WHERE key = 'a'";
    assert_eq!(new.run(ends), "t");
}
