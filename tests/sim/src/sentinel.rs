//! Sentinels: which master each of them names, and what the client library does with that. It opens
//! sockets of its own, so its part is done here as it does it: it asks a Sentinel for the master,
//! connects to that, and makes sure of its role.

use std::future::pending;

use redis::aio::MultiplexedConnection;
use redis::{ErrorKind, RedisError, RedisResult, cmd};

use crate::net::{Net, own_deadlines};

#[derive(Clone, Debug)]
pub struct Sentinel {
    /// The host that it takes for the master.
    pub names: usize,
    pub health: Health,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Health {
    Well,
    /// Never says a word.
    Silent,
    /// Nobody is there.
    Gone,
}

/// Connects to the master that a Sentinel names.
pub async fn open_master(
    net: Net,
    node: usize,
    sentinel: usize,
) -> RedisResult<MultiplexedConnection> {
    let failed = |text| RedisError::from((ErrorKind::Io, text));
    // To connect, and to ask.
    net.round_trip(node).await;
    match net.sentinel(sentinel).health {
        Health::Well => net.round_trip(node).await,
        Health::Silent => pending().await,
        Health::Gone => return Err(failed("connection refused")),
    }
    let host = net.sentinel(sentinel).names;
    let mut asked = net.clone().connect_to(node, host, own_deadlines()).await?;
    let role: Vec<redis::Value> = cmd("ROLE").query_async(&mut asked).await?;
    if role.first() != Some(&redis::Value::BulkString(b"master".to_vec())) {
        return Err(failed("it is no master"));
    }
    drop(asked);
    net.connect_to(node, host, own_deadlines()).await
}
