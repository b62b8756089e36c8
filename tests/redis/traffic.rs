//! Calls to Redis, counted by the server: none where none is needed.

use harness::Server;
use tower_fixed_window::{Limiter, Quota};
use tower_fixed_window_redis::RedisStore;

use crate::gathered_calls::store as strict;

/// Scripts that the server has run.
pub(crate) fn scripts(server: &Server) -> u64 {
    commands(server, "evalsha")
}

/// How often the server has run a command, by itself or in scripts.
pub(crate) fn commands(server: &Server, name: &str) -> u64 {
    let info: String = server.ask(&["INFO", "commandstats"]);
    let calls = |line: &str| {
        let of = line.strip_prefix("cmdstat_")?.strip_prefix(name)?;
        of.strip_prefix(":calls=")?.split(',').next()?.parse::<u64>().ok()
    };
    info.lines().find_map(calls).unwrap_or(0)
}

#[tokio::test]
async fn stores_with_different_prefixes_remember_refusals_separately() {
    let Some(server) = Server::start() else { return };
    let store = strict(RedisStore::new(server.url()).expect("an address"));
    let [one, other] = ["one", "other"].map(|prefix| {
        Quota::new(1, Quota::MAX_WINDOW).name("quiet").store(store.clone().prefix(prefix))
    });
    let allowed =
        async |limiter: &Limiter| limiter.check("ann").await.expect("it answers").is_allowed();
    assert!(allowed(&one).await && !allowed(&one).await);
    assert!(allowed(&other).await);
}
