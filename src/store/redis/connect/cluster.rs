//! Connects to a cluster, of which some nodes may be silent.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use redis::cluster::{ClusterClient, ClusterConfig};
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{MultipleNodeRoutingInfo, ResponsePolicy, RoutingInfo};
use redis::{Cmd, RedisResult, Value};

use super::super::link::{Connected, Ranges, Servers, Shards, Slots};
use super::super::script::rights;
use super::settings::host_and_port;

/// How long the client library waits for silent nodes at first: near nodes answer sooner.
const NEAR: Duration = Duration::from_millis(250);
/// A node that takes longer is given up. No call waits this long unless its deadline is longer.
const SILENT: Duration = Duration::from_secs(5);

/// Connects. The library waits for all nodes that it knows, and one of them may be silent: so the
/// first attempt is a short one.
pub(crate) async fn connect(
    client: ClusterClient,
    asks: bool,
    servers: Arc<Servers>,
) -> RedisResult<Connected> {
    let config = ClusterConfig::new().set_response_timeout(SILENT);
    let near = config.clone().set_connection_timeout(NEAR);
    let connection = match client.get_async_connection_with_config(near).await {
        Ok(connection) => connection,
        // All nodes may be far away.
        Err(_) => client.get_async_connection_with_config(config).await?,
    };
    let other = connection.clone();
    let slots: Slots = Arc::new(move || Box::pin(ask_slots(other.clone(), Arc::clone(&servers))));
    let ranges = slots().await?;
    if asks {
        check_commands(connection.clone()).await?;
    }
    Ok((Box::new(connection), Shards::new(ranges, Some(slots))))
}

/// Fails if a node lacks a needed command. Calls to other nodes fail if those lack one.
async fn check_commands(mut connection: ClusterConnection) -> RedisResult<()> {
    rights::check_permitted(ask_a_master(&mut connection, rights::load_call().clone()).await)?;
    rights::check_permitted(ask_a_master(&mut connection, rights::ask_call()).await)
}

/// Asks which node has which slots. The library follows redirections, and does not report them.
async fn ask_slots(
    mut connection: ClusterConnection,
    servers: Arc<Servers>,
) -> RedisResult<Ranges> {
    let mut slots = redis::cmd("CLUSTER");
    slots.arg("SLOTS");
    let (names, ranges) = parse_slots(ask_a_master(&mut connection, slots).await?);
    servers.set_all(names);
    Ok(ranges)
}

async fn ask_a_master(connection: &mut ClusterConnection, cmd: Cmd) -> RedisResult<Value> {
    let any = (MultipleNodeRoutingInfo::AllMasters, Some(ResponsePolicy::OneSucceeded));
    connection.route_command(cmd, RoutingInfo::MultiNode(any)).await?.extract_error()
}

/// Parses the answer to `CLUSTER SLOTS`, and returns the names of the nodes, too. Malformed entries
/// are left out.
fn parse_slots(slots: Value) -> (Vec<(u64, String)>, Ranges) {
    let Value::Array(slots) = slots else { return Default::default() };
    let range = |range: Value| {
        let Value::Array(range) = range else { return None };
        let [Value::Int(first), Value::Int(last), Value::Array(master), ..] = &range[..] else {
            return None;
        };
        let [Value::BulkString(host), Value::Int(port), ..] = &master[..] else { return None };
        let mut hasher = DefaultHasher::new();
        (host, port).hash(&mut hasher);
        let (first, last) = (u16::try_from(*first).ok()?, u16::try_from(*last).ok()?);
        let node = hasher.finish();
        let name = host_and_port(str::from_utf8(host).ok()?, u16::try_from(*port).ok()?);
        Some(((node, name), (last, (first, node))))
    };
    slots.into_iter().filter_map(range).unzip()
}
