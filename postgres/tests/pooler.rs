//! PgBouncer in transaction mode, where each statement may run in another session.

use std::time::Duration;

use harness::{Pooler, Postgres};
use tower_fixed_window::{Limit, Quota};
use tower_fixed_window_postgres::PostgresStore;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_that_all_clients_share() {
    let Some(server) = Postgres::start() else { return };
    let Some(pooler) = Pooler::before(&server) else { return };
    let stores = [(); 4].map(|()| {
        let store = PostgresStore::new(&pooler.url()).expect("an address");
        store.deadline(Duration::from_secs(120))
    });
    stores[0].create_tables().await.expect("it is created");
    stores[0].ping().await.expect("Postgres answers");
    let quota = Quota::new(700, Duration::from_secs(10 * 365 * 86_400));
    let one = stores.clone().map(|store| Limit::new(quota).name("one").store(store));
    let two = stores
        .map(|store| Limit::new(quota.and(Quota::per_year(1_000_000))).name("two").store(store));
    let callers = (0..64).map(|caller| {
        let (one, two) = (one[caller % 4].clone(), two[caller % 4].clone());
        tokio::spawn(async move {
            let mut passed = [0, 0];
            for i in 0..20 {
                for (limit, passed) in [&one, &two].into_iter().zip(&mut passed) {
                    let decision = limit.check(i % 2_u64).await.expect("Postgres answers");
                    assert!(!decision.is_local());
                    *passed += u64::from(decision.is_allowed());
                }
            }
            passed
        })
    });
    let mut passed = [0, 0];
    for caller in callers.collect::<Vec<_>>() {
        let of = caller.await.expect("no panic");
        passed = [passed[0] + of[0], passed[1] + of[1]];
    }
    assert_eq!(passed, [1_280, 1_280]);
    assert_eq!(
        server.run("SELECT name, key, used FROM tfw ORDER BY name, key, quota"),
        "one|0|640\none|1|640\ntwo|0|640\ntwo|0|640\ntwo|1|640\ntwo|1|640"
    );
    let sessions = "SELECT count(*) <= 3 AND bool_or(backend_start IS NOT NULL) \
                    FROM pg_stat_activity WHERE application_name = 'tower-fixed-window'";
    assert_eq!(server.run(sessions), "t");
    // Nothing of what the store sets stays in a session.
    for (setting, value) in [
        ("enable_seqscan", "on"),
        ("plan_cache_mode", "auto"),
        ("lock_timeout", "0"),
        ("synchronous_commit", "on"),
    ] {
        assert_eq!(pooler.run(&format!("SHOW {setting}")), value, "{setting}");
    }
}
