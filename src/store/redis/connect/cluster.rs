//! Connecting to a cluster, of which some nodes may be silent.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use redis::cluster::{ClusterClient, ClusterConfig};
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{MultipleNodeRoutingInfo, ResponsePolicy, RoutingInfo};
use redis::{Cmd, RedisResult, Value};

use super::super::link::{Connected, Ranges, Shards, Slots};
use super::super::script::rights;

/// How long the client library waits for silent nodes at first: nodes that are near answer within
/// it.
const NEAR: Duration = Duration::from_millis(250);
/// An answer that takes longer does not come. No call waits that long unless its deadline is
/// longer.
const SILENT: Duration = Duration::from_secs(5);

/// The library waits for all nodes that it knows, and one of them may be silent.
pub(crate) async fn connect(client: ClusterClient, asks: bool) -> RedisResult<Connected> {
    let config = ClusterConfig::new().set_response_timeout(SILENT);
    let near = config.clone().set_connection_timeout(NEAR);
    let connection = match client.get_async_connection_with_config(near).await {
        Ok(connection) => connection,
        // All of them may be far.
        Err(_) => client.get_async_connection_with_config(config).await?,
    };
    let other = connection.clone();
    let slots: Slots = Arc::new(move || Box::pin(slots(other.clone())));
    let ranges = slots().await?;
    if asks {
        permitted(connection.clone()).await?;
    }
    Ok((Box::new(connection), Shards::new(ranges, Some(slots))))
}

/// Whether a node has all commands that are needed. The others say so when they are called.
async fn permitted(mut connection: ClusterConnection) -> RedisResult<()> {
    rights::permitted(first(&mut connection, rights::load().clone()).await)?;
    rights::permitted(first(&mut connection, rights::ask()).await)
}

/// What nodes have which slots. The library follows redirections, and does not report
/// them.
async fn slots(mut connection: ClusterConnection) -> RedisResult<Ranges> {
    let mut slots = redis::cmd("CLUSTER");
    slots.arg("SLOTS");
    Ok(ranges(first(&mut connection, slots).await?))
}

async fn first(connection: &mut ClusterConnection, cmd: Cmd) -> RedisResult<Value> {
    let first = (MultipleNodeRoutingInfo::AllMasters, Some(ResponsePolicy::OneSucceeded));
    connection.route_command(cmd, RoutingInfo::MultiNode(first)).await?.extract_error()
}

/// What node has which slots, as `CLUSTER SLOTS` says it. What makes no sense is left out.
fn ranges(slots: Value) -> Ranges {
    let Value::Array(slots) = slots else { return Ranges::new() };
    let range = |range: Value| {
        let Value::Array(range) = range else { return None };
        let [Value::Int(first), Value::Int(last), Value::Array(master), ..] = &range[..] else {
            return None;
        };
        let [Value::BulkString(host), Value::Int(port), ..] = &master[..] else { return None };
        let mut hasher = DefaultHasher::new();
        (host, port).hash(&mut hasher);
        let (first, last) = (u16::try_from(*first).ok()?, u16::try_from(*last).ok()?);
        Some((last, (first, hasher.finish())))
    };
    slots.into_iter().filter_map(range).collect()
}
