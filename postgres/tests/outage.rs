//! Servers that fail: each request gets an answer within the deadline, by the policy, and the count
//! is the table's again when the server is back.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use harness::{Postgres, Proxy};
use tower_fixed_window::{Limit, Limiter, OnStoreFailure, Quota};
use tower_fixed_window_postgres::PostgresStore;

use crate::{end_held, hold};

const DEADLINE: Duration = Duration::from_millis(500);

async fn store(server: &Postgres) -> PostgresStore {
    let store = PostgresStore::new(&server.url()).expect("an address");
    store.clone().deadline(Duration::from_secs(20)).create_tables().await.expect("it is created");
    store.deadline(DEADLINE).remember_refusals(Duration::ZERO)
}

const YEARS: Duration = Duration::from_secs(10 * 365 * 86_400);

fn limiter_of(store: &PostgresStore) -> Limiter {
    Limit::new(Quota::new(1_000_000, YEARS)).name("outage").store(store.clone())
}

/// The tokens used of a key as the table has them.
fn counted(server: &Postgres, key: &str) -> u64 {
    let counted =
        server.run(&format!("SELECT used FROM tfw WHERE name = 'outage' AND key = '{key}'"));
    counted.parse().unwrap_or(0)
}

/// Sends a request, which is answered in time, and returns whether Postgres has counted it.
async fn is_counted(limiter: &Limiter, key: &str) -> bool {
    let start = Instant::now();
    let decision = limiter.check(key).await.expect("memory answers");
    // A busy machine may stand still for a moment.
    assert!(start.elapsed() < DEADLINE + Duration::from_secs(2), "{:?}", start.elapsed());
    assert!(decision.is_allowed());
    !decision.is_local()
}

async fn wait_until_counted(limiter: &Limiter, key: &str) {
    let start = Instant::now();
    while !is_counted(limiter, key).await {
        assert!(start.elapsed() < Duration::from_secs(90), "the store is not back");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// What fails by `fail` is counted in memory, and in Postgres again after `mend`.
async fn survives(
    server: &mut Postgres,
    fail: impl FnOnce(&mut Postgres),
    mend: impl FnOnce(&mut Postgres),
) {
    // Otherwise a crash loses the last moments.
    let store = store(server).await.wait_for_disk();
    let limiter = limiter_of(&store);
    wait_until_counted(&limiter, "before").await;
    let before = counted(server, "before");
    fail(server);
    for _ in 0..20 {
        assert!(!is_counted(&limiter, "meanwhile").await, "it fails");
    }
    assert!(store.fallback().live_entries() > 0);
    let strict = limiter_of(&store.clone().on_failure(OnStoreFailure::Deny));
    assert!(strict.check("strict").await.is_err());
    mend(server);
    wait_until_counted(&limiter, "before").await;
    assert_eq!(counted(server, "before"), before + 1, "nothing is lost, and nothing is sent again");
}

#[tokio::test]
async fn a_server_that_is_killed_or_stands_still() {
    let Some(mut server) = Postgres::start() else { return };
    survives(&mut server, Postgres::kill, Postgres::restart).await;
    // Charges that were sent may be counted when it goes on: of another key.
    survives(&mut server, |server| server.freeze(), |server| server.thaw()).await;
}

#[tokio::test]
async fn a_disk_that_is_full_and_a_table_that_is_dropped() {
    let Some(mut server) = Postgres::start() else { return };
    let full = "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS \
                $$BEGIN RAISE 'could not extend file' USING ERRCODE = '53100'; END$$; \
                CREATE TRIGGER full_disk BEFORE INSERT OR UPDATE ON tfw_counters \
                FOR EACH ROW EXECUTE FUNCTION full_disk()";
    let gone = "ALTER TABLE tfw_counters RENAME TO gone";
    for (fail, mend, says) in [
        (full, "DROP FUNCTION full_disk CASCADE", "53100"),
        (gone, "ALTER TABLE gone RENAME TO tfw_counters", "create_tables()"),
    ] {
        survives(&mut server, |of| _ = of.run(fail), |of| _ = of.run(mend)).await;
        server.run(fail);
        let store = PostgresStore::new(&server.url()).expect("an address").deadline(DEADLINE * 10);
        let error = store.ping().await.expect_err("nothing can be written").to_string();
        assert!(error.contains(says), "as the server says, and not after more tries: {error}");
        server.run(mend);
    }
    server.run("DROP VIEW tfw; DROP TABLE tfw_counters");
    store(&server).await.deadline(DEADLINE * 10).ping().await.expect("Postgres answers");
}

#[tokio::test]
async fn a_table_that_is_locked_as_by_vacuum_full() {
    let Some(mut server) = Postgres::start() else { return };
    let lock = |of: &mut Postgres| hold(of, "LOCK TABLE tfw_counters IN ACCESS EXCLUSIVE MODE");
    survives(&mut server, lock, |server| end_held(server)).await;
    // A read that waits is given up by the server, too: long before its deadline.
    let patient = store(&server).await.deadline(Duration::from_secs(20));
    hold(&server, "LOCK TABLE tfw_counters IN ACCESS EXCLUSIVE MODE");
    let start = Instant::now();
    assert!(!is_counted(&limiter_of(&patient), "read").await);
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    end_held(&server);
    // As by CREATE INDEX: no counter changes at each try, so the breaker may open.
    hold(&server, "LOCK TABLE tfw_counters IN SHARE MODE");
    let error = patient.ping().await.expect_err("nothing can be written").to_string();
    assert!(error.contains("locked the table"), "{error}");
    end_held(&server);
}

#[tokio::test]
async fn a_row_that_another_transaction_has_locked() {
    let Some(mut server) = Postgres::start() else { return };
    let store = store(&server).await;
    let limiter = limiter_of(&store);
    wait_until_counted(&limiter, "locked").await;
    hold(&server, "UPDATE tfw_counters SET used = used");
    let (others, start) = (limiter.clone(), Instant::now());
    let others = tokio::spawn(async move {
        for key in 0..10 {
            assert!(is_counted(&others, &format!("other {key}")).await, "of another row");
        }
    });
    assert!(!is_counted(&limiter, "locked").await, "its writer may be gone for a minute");
    others.await.expect("no panic");
    assert!(start.elapsed() < Duration::from_secs(30));
    end_held(&server);
    wait_until_counted(&limiter, "locked").await;
    // The charge whose caller went on without an answer may be counted, too.
    assert!((2..=3).contains(&counted(&server, "locked")));
    // Nor do many requests for it open the breaker for other rows.
    hold(&server, "SELECT FROM tfw_counters WHERE key = 'tlocked' FOR UPDATE");
    let rare = limiter_of(&store.clone().deadline(DEADLINE / 2));
    let of = rare.clone();
    let often = tokio::spawn(async move {
        loop {
            let of = of.clone();
            tokio::spawn(async move { is_counted(&of, "locked").await });
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    tokio::time::sleep(DEADLINE * 6).await;
    let mut local = 0;
    for _ in 0..15 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        local += usize::from(!is_counted(&rare, "rare").await);
    }
    // A busy machine may take longer.
    assert!(local <= 2, "{local} of 15");
    often.abort();
    server.kill();
}

/// A row that is being inserted can't be skipped: others would wait for it at each try.
#[tokio::test]
async fn a_key_that_another_transaction_inserts() {
    let Some(server) = Postgres::start() else { return };
    let store = store(&server).await.deadline(Duration::from_secs(5));
    let limiter = limiter_of(&store);
    assert!(is_counted(&limiter, "first").await);
    let window = server.run("SELECT win FROM tfw_counters");
    let row = format!("'outage', 'tinserted', '{window}', 0, 0, 1, 1::bigint << 52, '', 1");
    hold(&server, &format!("INSERT INTO tfw_counters VALUES ({row})"));
    // All but the first share calls.
    let keys = ["first", "inserted", "a", "b", "c", "d", "e", "f"].into_iter();
    let asked = keys.map(|key| {
        let limiter = limiter.clone();
        tokio::spawn(async move { (key, limiter.check(key).await.expect("memory answers")) })
    });
    for asked in asked.collect::<Vec<_>>() {
        let (key, decision) = asked.await.expect("no panic");
        assert_eq!(decision.is_local(), key == "inserted", "{key}");
    }
    end_held(&server);
    wait_until_counted(&limiter, "inserted").await;
}

/// When nobody expects it, it would take later counts with it.
#[tokio::test]
async fn a_reset_that_met_a_lock_is_not_done_later() {
    let Some(server) = Postgres::start() else { return };
    let store = store(&server).await.deadline(Duration::from_secs(5));
    let (limiter, quick) = (limiter_of(&store), limiter_of(&store.clone().deadline(DEADLINE)));
    let proxy = Proxy::to(server.port).delay(Duration::from_millis(40));
    let far = PostgresStore::new(&url_of(&proxy)).expect("an address").deadline(DEADLINE);
    let far = limiter_of(&far);
    for lock in ["LOCK TABLE tfw_counters", "SELECT FROM tfw_counters FOR UPDATE"] {
        wait_until_counted(&limiter, "reset").await;
        wait_until_counted(&far, "reset").await;
        let before = counted(&server, "reset");
        hold(&server, lock);
        let start = Instant::now();
        let reset = async || limiter.reset("reset").await.expect_err("the row is locked");
        let ask = async |of, key| lock.starts_with("LOCK") || is_counted(of, key).await;
        let others = async || ask(&quick, "one").await && ask(&quick, "other").await;
        let (.., are_counted) = tokio::join!(reset(), reset(), reset(), reset(), reset(), others());
        assert!(are_counted && start.elapsed() < Duration::from_secs(4), "nobody waits long");
        for _ in 0..5 {
            let why = far.reset("reset").await.expect_err("the row is locked").to_string();
            assert!(lock.starts_with("LOCK") || why.contains("locked"), "{why}");
        }
        assert!(ask(&far, "more").await, "the failures are those of the locked key");
        let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
        assert_eq!(server.run(waits), "0");
        end_held(&server);
        assert_eq!(counted(&server, "reset"), before);
    }
    limiter.reset("reset").await.expect("Postgres answers");
    assert_eq!(counted(&server, "reset"), 0);
}

/// A server that accepts connections and does not answer.
#[tokio::test]
async fn a_cold_start_opens_no_storm_of_connections() {
    let Some(server) = Postgres::start() else { return };
    store(&server).await;
    let proxy = Proxy::to(server.port);
    proxy.set_silent(true);
    let store = PostgresStore::new(&url_of(&proxy)).expect("an address").deadline(DEADLINE);
    let limiter = limiter_of(&store);
    let mut asked = Vec::new();
    for key in 0..60_u64 {
        let of = limiter.clone();
        asked.push(tokio::spawn(async move { of.check(key).await.is_ok_and(|of| of.is_local()) }));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for asked in asked {
        assert!(asked.await.expect("no panic"));
    }
    assert!(proxy.made() <= 4, "{} connections", proxy.made());
    proxy.set_silent(false);
    wait_until_counted(&limiter, "a").await;
}

/// To connect with a password takes more round trips than a decision.
#[tokio::test]
async fn a_connection_that_takes_longer_than_callers_wait() {
    let Some(mut server) = Postgres::start() else { return };
    store(&server).await;
    let rules = server.run("SHOW hba_file");
    server.run("CREATE USER far SUPERUSER PASSWORD 'secret'");
    server.run(&format!(
        "COPY (VALUES ('host all far all scram-sha-256'), ('host all all all trust')) TO '{rules}'"
    ));
    server.kill();
    server.restart();
    let proxy = Proxy::to(server.port).delay(Duration::from_millis(45));
    let url = format!("postgres://far:secret@127.0.0.1:{}/postgres", proxy.port);
    let store = PostgresStore::new(&url).expect("an address").deadline(DEADLINE / 2);
    wait_until_counted(&limiter_of(&store), "far").await;
    assert!(proxy.made() <= 3, "{} connections", proxy.made());
}

#[tokio::test]
async fn the_first_of_two_hosts_is_silent() {
    let Some(server) = Postgres::start() else { return };
    store(&server).await;
    let first = Proxy::to(server.port);
    first.set_silent(true);
    let url = format!(
        "postgres://postgres@127.0.0.1:{},127.0.0.1:{}/postgres?target_session_attrs=read-write",
        first.port, server.port
    );
    let store = PostgresStore::new(&url).expect("an address").deadline(DEADLINE / 2);
    wait_until_counted(&limiter_of(&store), "other").await;
}

fn url_of(proxy: &Proxy) -> String {
    format!("postgres://postgres@127.0.0.1:{}/postgres", proxy.port)
}

/// As a NAT or a load balancer forgets it: nobody is told.
#[tokio::test]
async fn a_connection_that_is_forgotten_while_it_is_idle() {
    let Some(server) = Postgres::start() else { return };
    store(&server).await;
    let proxy = Proxy::to(server.port);
    // Who waited for the deadline would be too late for `is_counted`.
    let store = PostgresStore::new(&url_of(&proxy)).expect("an address");
    let store = store.deadline(Duration::from_secs(60)).remember_refusals(Duration::ZERO);
    let limiter = limiter_of(&store);
    wait_until_counted(&limiter, "idle").await;
    for _ in 0..3 {
        let before = counted(&server, "idle");
        tokio::time::sleep(Duration::from_millis(1_100)).await;
        proxy.forget();
        assert!(is_counted(&limiter, "idle").await);
        assert_eq!(counted(&server, "idle"), before + 1);
        tokio::time::sleep(Duration::from_millis(1_100)).await;
        proxy.forget();
        limiter.reset("other").await.expect("Postgres answers");
    }
}

/// It keeps all versions of a row that it may still see.
#[tokio::test]
async fn a_transaction_that_stays_open_elsewhere() {
    let Some(server) = Postgres::start() else { return };
    let limiter = limiter_of(&store(&server).await.deadline(Duration::from_secs(20)));
    let limiter = limiter.with_quotas(Quota::new(500, YEARS));
    assert!(is_counted(&limiter, "hot").await);
    hold(&server, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT FROM tfw_counters");
    for _ in 1..500 {
        assert!(is_counted(&limiter, "hot").await);
    }
    assert!(!limiter.check("hot").await.expect("Postgres answers").is_allowed());
    assert_eq!(counted(&server, "hot"), 500);
}

#[tokio::test]
async fn a_server_without_a_free_connection() {
    let Some(server) = Postgres::with(&[
        "max_connections=4",
        "superuser_reserved_connections=0",
        // A server notices that a client has gone.
        "client_connection_check_interval=100",
    ]) else {
        return;
    };
    let first = store(&server).await;
    assert!(is_counted(&limiter_of(&first), "a").await);
    let sleeps = || {
        Command::new("psql")
            .args(["-Xqc", "SELECT pg_sleep(60)", &server.url()])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("psql runs")
    };
    let mut others = [(); 3].map(|()| sleeps());
    let (start, mut full) = (Instant::now(), 0);
    // One that is refused as well may not have ended yet.
    while full < 3 {
        // The store that has a connection keeps it.
        assert!(is_counted(&limiter_of(&first), "a").await);
        let second = PostgresStore::new(&server.url()).expect("an address").deadline(DEADLINE);
        let answer = second.ping().await;
        drop(second);
        let mut all_run = true;
        for other in &mut others {
            if other.try_wait().expect("a process").is_some() {
                *other = sleeps();
                all_run = false;
            }
        }
        match answer {
            Err(error) if all_run && error.to_string().contains("53300") => full += 1,
            _ => full = 0,
        }
        assert!(start.elapsed() < Duration::from_secs(30), "the others connect");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let second = PostgresStore::new(&server.url()).expect("an address").deadline(DEADLINE);
    assert!(!is_counted(&limiter_of(&second), "a").await);
    for mut other in others {
        other.kill().expect("it runs");
        other.wait().expect("it ends");
    }
    wait_until_counted(&limiter_of(&second), "a").await;
}

#[tokio::test]
async fn a_connection_that_is_cut_between_calls_costs_no_decision() {
    let Some(server) = Postgres::start() else { return };
    let store = store(&server).await.deadline(Duration::from_secs(20));
    let limiter = limiter_of(&store);
    for i in 1..=10 {
        assert!(is_counted(&limiter, "cut").await);
        assert_eq!(counted(&server, "cut"), i);
        server.run(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
             WHERE application_name = 'tower-fixed-window'",
        );
    }
}

#[tokio::test]
async fn wrong_addresses_and_passwords_are_named_without_them() {
    let Some(server) = Postgres::start() else { return };
    let error = PostgresStore::new("mysql://secret@host/").expect_err("another database");
    assert!(error.to_string().ends_with(": write postgres://user:password@host/database"));
    // The parser would quote it.
    let error = PostgresStore::new("host=h password=a secret=b").expect_err("no quotes");
    assert!(!error.to_string().contains("secret"), "{error}");
    let ping = async |url: &str| {
        let store = PostgresStore::new(url).expect("an address").deadline(DEADLINE * 10);
        store.ping().await.expect_err("nothing is there").to_string()
    };
    let refused = ping(&format!("postgres://a:secret@127.0.0.1:{}/a", harness::free_port())).await;
    assert_eq!(refused, "no connection to Postgres: connection refused");
    let user = ping(&format!("postgres://nobody:secret@127.0.0.1:{}/postgres", server.port)).await;
    assert!(user.contains("28000"), "{user}");
    let database = ping(&format!("postgres://postgres@127.0.0.1:{}/none", server.port)).await;
    assert_eq!(database, "Postgres: there is no such database (3D000)");
}
