//! The suite that every store passes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use harness::Postgres;
use tower_fixed_window::ManualClock;
use tower_fixed_window_conformance::conformance;
use tower_fixed_window_postgres::PostgresStore;

#[test]
fn postgres_passes_the_conformance_suite() {
    let Some(server) = Postgres::start() else { return };
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let next = AtomicU64::new(0);
    conformance(
        |clock: ManualClock| {
            // SQL would not take this name as it is.
            let schema = next.fetch_add(1, Ordering::Relaxed).to_string();
            let nodes = [(); 2].map(|()| {
                let store = PostgresStore::new(&server.url()).expect("an address");
                let store = store.deadline(Duration::from_secs(20)).schema(&schema);
                store.clock(clock.clone())
            });
            let first = nodes[0].clone();
            let created = std::thread::scope(|scope| {
                scope.spawn(|| runtime.block_on(first.create_tables())).join().expect("no panic")
            });
            created.expect("Postgres answers");
            nodes
        },
        |job| runtime.block_on(job),
    );
}
