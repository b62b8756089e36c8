//! Finds the master by Sentinels, of which some may be silent.

use std::future::Future;
use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use redis::sentinel::SentinelClient;
use redis::{ErrorKind, RedisError, RedisResult};
use tokio::task::JoinSet;

use super::super::link::Servers;
use super::settings::{open, server_name, with_keepalive};

/// Asks all Sentinels at once, and returns the connection to the first master that can be reached.
pub(crate) async fn connect<R, C>(sentinels: impl IntoIterator<Item = R>) -> RedisResult<C>
where
    R: Future<Output = RedisResult<C>> + Send + 'static,
    C: Send + 'static,
{
    let mut asked = JoinSet::new();
    for sentinel in sentinels {
        asked.spawn(sentinel);
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

/// Connects to the master that a Sentinel names, and notes its name.
pub(crate) async fn open_master(
    client: RedisResult<SentinelClient>,
    servers: Arc<Servers>,
) -> RedisResult<MultiplexedConnection> {
    let master = with_keepalive(&client?.async_get_client().await?)?;
    servers.set_only(server_name(&master));
    open(&master).await
}
