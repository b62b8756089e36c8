//! The suite that every store passes.

use std::sync::atomic::{AtomicU64, Ordering};

use redis::aio::MultiplexedConnection;
use tower_fixed_window::store::RedisStore;
use tower_fixed_window::testing::conformance;

use crate::server::Server;

pub(crate) async fn connect(url: &str) -> MultiplexedConnection {
    let client = redis::Client::open(url).expect("an address");
    client.get_multiplexed_async_connection().await.expect("it connects")
}

#[test]
fn redis_keeps_the_contract() {
    let Some(server) = Server::start() else { return };
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let connection = runtime.block_on(connect(&server.url()));
    let next = AtomicU64::new(0);
    conformance(
        |clock| {
            // Empty: nobody has had this prefix.
            let prefix = format!("t{}", next.fetch_add(1, Ordering::Relaxed));
            RedisStore::from(connection.clone()).prefix(&prefix).clock(clock)
        },
        |job| runtime.block_on(job),
    );
}
