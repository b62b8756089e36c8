//! The suite that every store passes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use harness::Server;
use redis::AsyncConnectionConfig;
use redis::aio::MultiplexedConnection;
use tower_fixed_window::ManualClock;
use tower_fixed_window::store::Store;
use tower_fixed_window_conformance::conformance;
use tower_fixed_window_redis::RedisStore;

use crate::gathered_calls::Crowd;
use crate::traffic::scripts;

pub(crate) async fn connect(url: &str) -> MultiplexedConnection {
    let client = redis::Client::open(url).expect("an address");
    // A busy machine may stand still for longer than the library waits.
    let config = AsyncConnectionConfig::new().set_response_timeout(None);
    let connection = client.get_multiplexed_async_connection_with_config(&config).await;
    connection.expect("it connects")
}

#[test]
fn redis_passes_the_conformance_suite() {
    let Some(server) = Server::start() else { return };
    passes_the_suite(&server, |store| store);
}

#[test]
fn redis_passes_the_conformance_suite_one_by_one() {
    let Some(server) = Server::start() else { return };
    passes_the_suite(&server, RedisStore::one_by_one);
}

#[test]
fn redis_passes_the_conformance_suite_with_gathered_calls() {
    let Some(server) = Server::start() else { return };
    let asked = Arc::<AtomicU64>::default();
    passes_the_suite(&server, |store| Crowd::new(store, Arc::clone(&asked)));
    let (asked, calls) = (asked.load(Ordering::Relaxed), scripts(&server));
    println!("{asked} decisions in {calls} calls");
    assert!(calls * 10 < asked * 8, "{asked} decisions in {calls} calls");
}

#[tokio::test]
async fn the_time_of_the_store_is_that_of_its_clock() {
    let Some(server) = Server::start() else { return };
    let store = RedisStore::from(connect(&server.url()).await);
    let system = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    assert!(store.now_ms().abs_diff(system.as_millis() as u64) < 60_000);
    let clock = ManualClock::at_ms(1_700_000_000_000);
    assert_eq!(store.clock(clock).now_ms(), 1_700_000_000_000);
}

/// Two nodes have a connection each, and remember no refusals; two handles of one store do.
fn passes_the_suite<S: Store>(server: &Server, with: impl Fn(RedisStore) -> S + Send + Sync) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let connections = [(); 2].map(|()| runtime.block_on(connect(&server.url())));
    let next = AtomicU64::new(0);
    let store = |connection: &MultiplexedConnection, clock| {
        // Empty: nobody has had this prefix.
        let prefix = format!("t{}", next.load(Ordering::Relaxed));
        let store = RedisStore::from(connection.clone()).prefix(&prefix).clock(clock);
        store.deadline(Duration::from_secs(20))
    };
    let nodes = |clock: ManualClock| {
        next.fetch_add(1, Ordering::Relaxed);
        let node = |connection| store(connection, clock.clone()).remember_refusals(Duration::ZERO);
        connections.each_ref().map(node).map(&with)
    };
    conformance(nodes, |job| runtime.block_on(job));
    let one_node = |clock: ManualClock| {
        next.fetch_add(1, Ordering::Relaxed);
        let store = store(&connections[0], clock);
        [store.clone(), store].map(&with)
    };
    conformance(one_node, |job| runtime.block_on(job));
}
