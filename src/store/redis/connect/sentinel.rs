//! Finds the master by Sentinels, of which some may be silent.

use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use redis::sentinel::SentinelClient;
use redis::{ErrorKind, RedisError, RedisResult};
use tokio::task::JoinSet;

use super::super::link::Servers;
use super::settings::{open, server_name, with_keepalive};

/// Asks all Sentinels at once, and connects to the first master that can be reached.
pub(crate) async fn connect(
    clients: Vec<RedisResult<SentinelClient>>,
    servers: Arc<Servers>,
) -> RedisResult<MultiplexedConnection> {
    let mut asked = JoinSet::new();
    for client in clients {
        let servers = Arc::clone(&servers);
        asked.spawn(async move {
            let master = with_keepalive(&client?.async_get_client().await?)?;
            servers.set_only(server_name(&master));
            open(&master).await
        });
    }
    let mut error = RedisError::from((ErrorKind::EmptySentinelList, "there is no Sentinel"));
    while let Some(answer) = asked.join_next().await {
        match answer {
            Ok(Ok(connection)) => return Ok(connection),
            Ok(Err(failed)) => error = failed,
            Err(_) => error = (ErrorKind::Client, "connecting has panicked").into(),
        }
    }
    Err(error)
}
