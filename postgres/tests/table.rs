//! What is in the table, and who reads it.

use std::time::{Duration, Instant};

use harness::Postgres;
use tower_fixed_window::store::Store;
use tower_fixed_window::{Key, Limit, OnStoreFailure, Quota};
use tower_fixed_window_postgres::PostgresStore;

use crate::{PATIENT, end_held, fastrand, hold, start};

#[tokio::test]
async fn a_view_shows_counters_as_the_app_named_them() {
    let Some(server) = Postgres::start() else { return };
    let store = PostgresStore::new(&server.url()).expect("an address").deadline(PATIENT);
    // All nodes at once.
    let created = [(); 4].map(|()| {
        let store = PostgresStore::new(&server.url()).expect("an address").deadline(PATIENT);
        tokio::spawn(async move { store.create_tables().await })
    });
    for created in created {
        created.await.expect("no panic").expect("it is created");
    }
    let limit = Limit::new(Quota::per_hour(60).and(Quota::per_month(9_000))).name("api");
    let limit = limit.store(store);
    for key in [Key::from("alice"), Key::from(7_u64), Key::from(("acme", "a b"))] {
        assert!(limit.charge(key, 3).await.expect("Postgres answers").is_ok());
    }
    let seen = server.run("SELECT name, key, quota, used FROM tfw ORDER BY key, quota DESC");
    assert_eq!(
        seen,
        "api|7|9000/month|3\napi|7|60/hour|3\napi|alice|9000/month|3\napi|alice|60/hour|3\n\
         api|tacme,ta%20b|9000/month|3\napi|tacme,ta%20b|60/hour|3"
    );
    let ends = "SELECT until = date_trunc('hour', now()) + interval '1 hour' FROM tfw \
                WHERE key = 'alice' AND quota = '60/hour'";
    assert_eq!(server.run(ends), "t", "in this hour, unless it has just turned");

    limit.reset("alice").await.expect("Postgres answers");
    assert_eq!(server.run("SELECT count(*) FROM tfw WHERE key = 'alice'"), "0");
    server.run("DELETE FROM tfw_counters WHERE scope = 'api' AND key = 'u7'");
    assert_eq!(limit.peek(7_u64).await.expect("Postgres answers").used(), 0);
}

/// Of many parts: longer than a row of an index may be.
#[tokio::test]
async fn a_long_key_is_counted_under_its_hash() {
    let Some((server, store)) = start().await else { return };
    let store = store.on_failure(OnStoreFailure::Deny).remember_refusals(Duration::ZERO);
    let limit = Limit::new(Quota::per_day(2)).name("long").store(store);
    let long = |last: u64| {
        let mut key = Key::global();
        (0..90).chain([last]).for_each(|n| key.append(&Key::secret(n.to_string())));
        key
    };
    for key in [long(90), long(91)] {
        for allowed in [true, true, false] {
            assert_eq!(limit.check(&key).await.expect("it answers").is_allowed(), allowed);
        }
    }
    limit.reset(long(90)).await.expect("it answers");
    let used = async |key| limit.peek(key).await.expect("it answers").used();
    assert_eq!((used(long(90)).await, used(long(91)).await), (0, 2));
    assert_eq!(server.run("SELECT left(key, 2) || length(key) FROM tfw_counters"), "#s66");
}

#[tokio::test]
async fn ended_counters_are_deleted_under_charges() {
    let Some((server, store)) = start().await else { return };
    server.run(
        "INSERT INTO tfw_counters SELECT 'old', 't' || i, '60000+0', 0, 0, 1, 60000, '5/minute', 1 \
         FROM generate_series(1, 2500) i",
    );
    let limit = Limit::new(Quota::per_hour(60)).name("api").store(store);
    for _ in 0..500 {
        assert!(limit.check(Key::from(fastrand(1_000_000))).await.is_ok());
        if server.run("SELECT count(*) FROM tfw_counters WHERE scope = 'old'") == "0" {
            return;
        }
    }
    panic!("ended counters stay");
}

#[tokio::test]
async fn a_deletion_that_failed_is_done_later() {
    let Some((server, store)) = start().await else { return };
    server.run(
        "INSERT INTO tfw_counters VALUES ('old', 'ta', '60000+0', 0, 0, 1, 60000, '', 1); \
         CREATE SEQUENCE failed; \
         CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS \
         $$BEGIN PERFORM nextval('failed'); RAISE 'not now'; END$$; \
         CREATE TRIGGER fail BEFORE DELETE ON tfw_counters FOR EACH ROW EXECUTE FUNCTION fail()",
    );
    let limit = Limit::new(Quota::per_hour(1_000_000)).name("api").store(store);
    let charge_until = async |done: &str| {
        let start = Instant::now();
        while server.run(done) != "t" {
            assert!(start.elapsed() < PATIENT, "{done}");
            assert!(limit.check("a").await.expect("Postgres answers").is_allowed());
        }
    };
    charge_until("SELECT is_called FROM failed").await;
    server.run("DROP TRIGGER fail ON tfw_counters");
    charge_until("SELECT count(*) = 0 FROM tfw_counters WHERE scope = 'old'").await;
}

/// Its time may end when nothing of it asks for that any more.
#[tokio::test]
async fn a_deletion_that_takes_too_long_cancels_no_other_statement() {
    let Some((server, store)) = start().await else { return };
    // A product of long numbers is computed in one go.
    server.run(
        "INSERT INTO tfw_counters VALUES ('old', 'ta', '60000+0', 0, 0, 1, 60000, '', 1); \
         CREATE SEQUENCE slow; \
         CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS \
         $$BEGIN RETURN CASE WHEN repeat('9', 60000 + sign(nextval('slow'))::int)::numeric \
             * repeat('9', 60000)::numeric < 0 THEN 'a' END; END$$; \
         CREATE TRIGGER slow AFTER DELETE ON tfw_counters EXECUTE FUNCTION slow()",
    );
    let limit = Limit::new(Quota::per_hour(1_000_000)).name("api").store(store);
    let start = Instant::now();
    while server.run("SELECT is_called FROM slow") != "t" {
        assert!(start.elapsed() < PATIENT, "nothing is deleted");
        assert!(!limit.check("a").await.expect("Postgres answers").is_local());
    }
    assert!(!limit.check("a").await.expect("Postgres answers").is_local());
}

/// A plan that was made for an empty table is not used for a large one.
#[tokio::test]
async fn a_table_that_grew_is_never_scanned() {
    let Some(server) = Postgres::with(&["autovacuum=off"]) else { return };
    let store = PostgresStore::new(&server.url()).expect("an address").deadline(PATIENT);
    store.create_tables().await.expect("it is created");
    server.run("VACUUM ANALYZE tfw_counters");
    let limit = Limit::new(Quota::per_hour(1_000).and(Quota::per_day(9_000))).name("api");
    let limit = limit.store(store);
    let charge = async |times| {
        for i in 0..times {
            assert!(limit.check(i % 5_u64).await.expect("Postgres answers").is_allowed());
        }
    };
    charge(20).await;
    server.run("VACUUM ANALYZE tfw_counters");
    charge(20).await;
    server.run(
        "INSERT INTO tfw_counters \
         SELECT 'other', 't' || i, '60000+0', 0, 0, 1, 1::bigint << 52, '5/minute', 1 FROM generate_series(1, 1000000) i",
    );
    // A connection reports its numbers with the first statement of a new second.
    let scanned = async || {
        tokio::time::sleep(Duration::from_millis(1_100)).await;
        charge(1).await;
        let read = "SELECT seq_tup_read, (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes) \
                    FROM pg_stat_user_tables WHERE relname = 'tfw_counters'";
        let read = server.run(read);
        let (scanned, by_index) = read.split_once('|').expect("two numbers");
        (scanned.to_owned(), by_index.parse::<u64>().expect("a number"))
    };
    // A scan reads all rows, by an index or without one.
    let charge_and_count = async || {
        let (before, by_index) = scanned().await;
        charge(50).await;
        let (after, by_index_after) = scanned().await;
        assert_eq!(after, before, "rows that were read by a scan");
        let read = by_index_after - by_index;
        assert!(read < 50 * 20, "{read} rows were read by an index");
    };
    charge_and_count().await;
    // Emptied, as a plan is made anew then, and with more than one row in a call.
    server.run("TRUNCATE tfw_counters");
    server.run("VACUUM ANALYZE tfw_counters");
    let at_once = (0..200_u64).map(|i| {
        let limit = limit.clone();
        tokio::spawn(async move { limit.check(i).await.expect("Postgres answers").is_allowed() })
    });
    for passed in at_once.collect::<Vec<_>>() {
        assert!(passed.await.expect("no panic"));
    }
    charge_and_count().await;
}

/// So that a call for many counters fails by none of them.
#[tokio::test]
async fn rows_that_are_no_counts_can_not_be() {
    let Some((server, store)) = start().await else { return };
    for numbers in ["0, 1, NULL", "0, 1, -1", "0, 1::bigint << 60, 60000", "-1::bigint << 63, 1, 9"]
    {
        server.run(&format!(
            "DO $$ BEGIN \
                 INSERT INTO tfw_counters (scope, key, win, end_ms, quota, place, \
                     start_ms, used, until_ms) \
                 VALUES ('api', 'u7', '60000+0', 0, '5/minute', 1, {numbers}); \
                 RAISE 'it is there'; \
             EXCEPTION WHEN not_null_violation OR check_violation OR numeric_value_out_of_range \
                 THEN NULL; END $$"
        ));
    }
    // The largest that can be.
    let most = (1_u64 << 53) - 1;
    server.run(&format!(
        "INSERT INTO tfw_counters SELECT 'api', 'u7', win, start, {most}, {most}, {most}, '', 1 \
         FROM (VALUES ('60000+0', -{most}), ('3600000+0', {most})) AS of(win, start)"
    ));
    let limit = Limit::new(Quota::per_minute(5).and(Quota::per_hour(9))).name("api").store(store);
    assert!(!limit.check(7_u64).await.expect("Postgres answers").is_allowed());
    assert!(limit.check(8_u64).await.expect("Postgres answers").is_allowed());
}

/// While a transaction stays open, the index keeps what was deleted.
#[tokio::test]
async fn entries_of_deleted_rows_are_not_read_again_and_again() {
    let Some((server, store)) = start().await else { return };
    hold(&server, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT FROM tfw_counters");
    let ended = |times: u32, of: &str| {
        server.run(&format!(
            "INSERT INTO tfw_counters SELECT '{of}', 't' || i, '60000+0', 0, 0, 1, 60000 + i, '', 1 \
             FROM generate_series(1, {times}) i"
        ))
    };
    ended(200_000, "deleted");
    server.run("DELETE FROM tfw_counters WHERE scope = 'deleted'");
    ended(1_000, "old");
    let limit = Limit::new(Quota::per_hour(1_000_000)).name("api").store(store);
    let start = Instant::now();
    while server.run("SELECT count(*) FROM tfw_counters WHERE scope = 'old'") != "0" {
        assert!(start.elapsed() < PATIENT * 3, "ended counters stay");
        assert!(limit.check("a").await.expect("Postgres answers").is_allowed());
    }
    // A connection reports its numbers with the first statement of a new second.
    let read = async || {
        tokio::time::sleep(Duration::from_millis(1_100)).await;
        assert!(limit.check("a").await.expect("Postgres answers").is_allowed());
        let read = "SELECT idx_tup_read FROM pg_stat_user_indexes \
                    WHERE indexrelname = 'tfw_counters_until_ms'";
        server.run(read).parse::<u64>().expect("a number")
    };
    // The first walk goes over all of them.
    let _ = read().await;
    let before = read().await;
    for _ in 0..20 {
        assert!(limit.check("a").await.expect("Postgres answers").is_allowed());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let after = read().await;
    assert!(after - before < 100_000, "{} entries were read", after - before);
    end_held(&server);
}

/// To find that the index is there, no lock is needed that a writer's would hold up.
#[tokio::test]
async fn the_schema_is_found_while_a_transaction_has_written() {
    let Some((server, store)) = start().await else { return };
    store.ping().await.expect("Postgres answers");
    hold(&server, "INSERT INTO tfw_counters VALUES ('a', 'ta', '', 0, 0, 1, 9, '', 1)");
    store.create_tables().await.expect("it is found");
    end_held(&server);
}

/// Neither a row that another transaction has locked, nor one that has changed: another node may
/// write those that follow.
#[tokio::test]
async fn the_rest_of_a_lost_group_is_not_locked() {
    let Some((server, store)) = start().await else { return };
    let limit = Limit::new(Quota::per_hour(1_000).and(Quota::per_day(9_000))).name("api");
    let limit = limit.store(store.deadline(Duration::from_secs(2)));
    assert!(limit.check("a").await.expect("Postgres answers").is_allowed());
    let last_lock = || server.run("SELECT xmax FROM tfw_counters ORDER BY win DESC LIMIT 1");
    let before = last_lock();
    hold(&server, "SELECT FROM tfw_counters ORDER BY win LIMIT 1 FOR UPDATE");
    let _ = limit.check("a").await;
    assert_eq!(last_lock(), before);
    end_held(&server);
}

/// What another one has counted is not given back here.
#[test]
fn a_search_path_may_find_another_table_for_each_user() {
    let identity = |of: &str, schema: Option<&str>| {
        let store = PostgresStore::new(&format!("postgres://{of}")).expect("an address");
        schema.map_or(store.clone(), |name| store.schema(name)).identity().expect("it has one")
    };
    let one = identity("ann:secret@host/db", None);
    assert!(!one.contains("secret"));
    assert_eq!(one, identity("ann:other@host/db", None));
    assert_ne!(one, identity("bob@host/db", None));
    assert_ne!(one, identity("ann@host/db?options=-csearch_path%3Dtwo", None));
    assert_ne!(one, identity("ann@host:5433/db", None));
    let limits = identity("ann@host/db", Some("limits"));
    assert_eq!(limits, identity("bob@host/db", Some("limits")));
    assert_ne!(limits, one);
}

#[tokio::test]
async fn only_rights_on_the_table_are_needed() {
    let Some(server) = Postgres::start() else { return };
    let owner = PostgresStore::new(&server.url()).expect("an address").deadline(PATIENT);
    owner.schema("limits").create_tables().await.expect("it is created");
    server.run("CREATE USER app; GRANT USAGE ON SCHEMA limits TO app");
    server.run("REVOKE ALL ON SCHEMA public FROM PUBLIC");
    let url = format!("postgres://app@127.0.0.1:{}/postgres", server.port);
    let store = PostgresStore::new(&url).expect("an address").deadline(PATIENT).schema("limits");
    // The connection is not left in its transaction.
    store.create_tables().await.expect_err("the right to create is missing");
    let error = store.ping().await.expect_err("the right is missing").to_string();
    assert!(error.contains("42501"), "{error}");
    server.run("GRANT SELECT, INSERT, UPDATE, DELETE ON limits.tfw_counters TO app");
    store.ping().await.expect("Postgres answers");
}

/// What others have taken since a row was read stays, if there is room for it and nothing else has
/// changed. A row that a group left behind is none.
#[tokio::test]
async fn a_write_adds_to_what_others_have_taken() {
    let Some((server, _)) = start().await else { return };
    let write = |old: &str, new: &str| {
        let sql = format!(
            "SELECT tfw_write('{{s}}', '{{k}}', '{{w}}', '{{q}}', '{{}}', '{{{old}}}', '{{{new}}}')"
        );
        let written = server.run(&sql);
        let written = written.trim_matches(['{', '}']).split_once(',');
        // Behind the time.
        let written = written.map(|(_, places)| places.to_owned()).unwrap_or_default();
        (written, server.run("SELECT start_ms, used FROM tfw_counters WHERE place > 0"))
    };
    let is = |written: &str, row: &str| (written.to_owned(), row.to_owned());
    // Read as a row, of which none is there.
    assert_eq!(write("0,9,5,9,3", "0,9,7,9"), is("", ""));
    assert_eq!(write("0,0,0,-1,0", "0,9,2,9"), is("1,0", "0|2"));
    assert_eq!(write("0,0,0,-1,0", "0,9,2,9"), is("", "0|2"), "it is there");
    assert_eq!(write("0,9,1,9,0", "0,9,2,9"), is("", "0|2"), "no room");
    assert_eq!(write("0,9,1,9,1", "0,9,4,9"), is("1,1", "0|5"));
    assert_eq!(write("0,9,6,9,9", "0,9,7,9"), is("", "0|5"), "less than was read");
    assert_eq!(write("1,9,5,9,9", "1,9,6,9"), is("", "0|5"), "another window");
    assert_eq!(write("0,9,5,9,9", "9,18,1,18"), is("1,0", "9|1"));
}
