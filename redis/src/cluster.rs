//! Connects to a cluster, of which some nodes may be silent.

use std::future::Future;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::aio::ConnectionLike;
use redis::cluster::{ClusterClient, ClusterConfig, NodeAddress};
use redis::cluster_async::{ClusterConnection, Connect};
use redis::cluster_routing::{
    MultipleNodeRoutingInfo, ResponsePolicy, Route, RoutingInfo, SingleNodeRoutingInfo, SlotAddr,
};
use redis::{
    Cmd, ErrorKind, Pipeline, RedisError, RedisFuture, RedisResult, ServerErrorKind, Value,
};

use super::connect::{first_success, host_and_port, silence};
use super::link::{Answering, Connected, Ranges, Servers, Shards, Slots, owner_of};
use crate::sync;

/// How long the client library waits for a silent node's connection at first: near nodes connect
/// sooner. When slots have moved to such a node, calls to all others wait for this, too, and should
/// not miss the usual deadline.
const NEAR: Duration = Duration::from_millis(100);
/// A node that takes longer is given up. No call waits this long unless its deadline is longer.
const SILENT: Duration = Duration::from_secs(5);

/// Slots may move on while a call is redirected.
const REDIRECTIONS: usize = 4;

type Ask = Arc<dyn Fn(Cmd, RoutingInfo) -> Answering<Value> + Send + Sync>;

/// `connecting` is how long to wait for a node's connection, by default as long as the app has set,
/// and `answering` for each answer.
pub(crate) async fn open(
    client: ClusterClient,
    connecting: Option<Duration>,
    answering: Duration,
) -> RedisResult<ClusterConnection> {
    let mut config = ClusterConfig::new().set_response_timeout(answering);
    if let Some(connecting) = connecting {
        config = config.set_connection_timeout(connecting);
    }
    client.get_async_connection_with_config(config).await
}

/// The library waits for all nodes that it knows, and one may be silent: so the first attempt is
/// short.
pub(crate) async fn connect<C, R>(
    open: Arc<impl Fn(Option<Duration>, Duration) -> R>,
    servers: Arc<Servers>,
) -> RedisResult<Connected>
where
    C: ConnectionLike + Connect + Clone + Send + Sync + Unpin + 'static,
    R: Future<Output = RedisResult<ClusterConnection<C>>>,
{
    let connection = match open(Some(NEAR), SILENT).await {
        Ok(connection) => connection,
        // All nodes may be far away.
        Err(_) => open(None, SILENT).await?,
    };
    let other = connection.clone();
    let ask: Ask = Arc::new(move |call, to| {
        let mut connection = other.clone();
        Box::pin(async move { connection.route_command(call, to).await?.extract_error() })
    });
    let ranges = note_slots(ask_a_master(&ask, slots_call()).await?, &servers);
    let known = Arc::new(Mutex::new(ranges.clone()));
    let connection =
        Redirected { connection, ranges: Arc::clone(&known), silent: Arc::new(AtomicU64::new(0)) };
    let slots: Slots = Arc::new(move |slots| {
        let asked = ask_masters(Arc::clone(&ask), slots, Arc::clone(&servers));
        let known = Arc::clone(&known);
        Box::pin(async move {
            let ranges = asked.await?;
            sync::lock(&known).clone_from(&ranges);
            Ok(ranges)
        })
    });
    Ok((Box::new(connection), Shards::new(ranges, Some(slots))))
}

/// Follows redirections: a call that was redirected was not executed. The library follows them only
/// if it may also repeat a call whose outcome is unknown, and a correction would count twice.
#[derive(Clone)]
struct Redirected<C> {
    connection: ClusterConnection<C>,
    ranges: Arc<Mutex<Ranges>>,
    /// A node to which the library could not connect again.
    silent: Arc<AtomicU64>,
}

impl<C> Redirected<C>
where
    C: ConnectionLike + Connect + Clone + Send + Sync + Unpin + 'static,
{
    async fn follow(&mut self, call: &Cmd) -> RedisResult<Value> {
        let silent = self.silent.load(Relaxed);
        let mut last = None;
        let mut answer = self.connection.req_packed_command(call).await;
        for _ in 0..REDIRECTIONS {
            let Some((slot, node, asks)) = answer.as_ref().err().and_then(redirection) else {
                break;
            };
            let id = node_id(node.host().as_bytes(), node.port().into());
            // The library has no connection to the node that the slot is known to be of, and tries
            // to connect after each such answer. Meanwhile calls to all nodes wait.
            let is_unconnected = !asks && owner_of(&sync::lock(&self.ranges), slot) == Some(id);
            if is_unconnected && (silent == id || last == Some(id)) {
                self.silent.store(id, Relaxed);
                return Err(silence());
            }
            last = Some(id);
            let (host, port) = (node.host().to_owned(), node.port());
            let to = SingleNodeRoutingInfo::ByAddress { host, port };
            answer = if is_unconnected {
                self.connection.req_packed_command(call).await
            } else if asks {
                // In one piece: `ASKING` is of the next command, whichever that is.
                let asking = redis::pipe().cmd("ASKING").add_command(call.clone()).clone();
                let answers = self.connection.route_pipeline(asking, 1, 1, to).await;
                answers.map(|mut answers| answers.pop().unwrap_or(Value::Nil))
            } else {
                self.connection.route_command(call.clone(), RoutingInfo::SingleNode(to)).await
            };
        }
        answer
    }
}

/// Returns the slot, its node, and whether the key is only on its way there.
fn redirection(error: &RedisError) -> Option<(u16, NodeAddress, bool)> {
    let asks = error.kind() == ErrorKind::Server(ServerErrorKind::Ask);
    let (node, slot) = error.redirect_node()?;
    Some((slot, NodeAddress::try_from(node).ok()?, asks))
}

impl<C> ConnectionLike for Redirected<C>
where
    C: ConnectionLike + Connect + Clone + Send + Sync + Unpin + 'static,
{
    fn req_packed_command<'a>(&'a mut self, call: &'a Cmd) -> RedisFuture<'a, Value> {
        Box::pin(self.follow(call))
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        calls: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        self.connection.req_packed_commands(calls, offset, count)
    }

    fn get_db(&self) -> i64 {
        self.connection.get_db()
    }
}

fn slots_call() -> Cmd {
    redis::cmd("CLUSTER").arg("SLOTS").take()
}

/// Returns the first answer to a call of each master. A single call of all would stay unsent while
/// calls of a silent one are in flight, until another call comes.
async fn ask_masters(ask: Ask, slots: Vec<u16>, servers: Arc<Servers>) -> RedisResult<Ranges> {
    let asked = slots.into_iter().map(|slot| {
        let route = SingleNodeRoutingInfo::SpecificNode(Route::new(slot, SlotAddr::Master));
        ask(slots_call(), RoutingInfo::SingleNode(route))
    });
    let asked: Vec<_> = asked.collect();
    Ok(note_slots(first_success(asked, silence()).await?, &servers))
}

async fn ask_a_master(ask: &Ask, call: Cmd) -> RedisResult<Value> {
    let any = (MultipleNodeRoutingInfo::AllMasters, Some(ResponsePolicy::OneSucceeded));
    ask(call, RoutingInfo::MultiNode(any)).await
}

/// Leaves malformed entries out.
fn note_slots(slots: Value, servers: &Servers) -> Ranges {
    let Value::Array(slots) = slots else { return Ranges::new() };
    let range = |range: Value| {
        let Value::Array(range) = range else { return None };
        let [Value::Int(first), Value::Int(last), Value::Array(master), ..] = &range[..] else {
            return None;
        };
        let [Value::BulkString(host), Value::Int(port), ..] = &master[..] else { return None };
        let (first, last) = (u16::try_from(*first).ok()?, u16::try_from(*last).ok()?);
        let node = node_id(host, *port);
        let name = host_and_port(str::from_utf8(host).ok()?, u16::try_from(*port).ok()?);
        Some(((node, name), (last, (first, node))))
    };
    let (names, ranges): (Vec<_>, _) = slots.into_iter().filter_map(range).unzip();
    servers.set_all(names);
    ranges
}

fn node_id(host: &[u8], port: i64) -> u64 {
    let mut hasher = DefaultHasher::new();
    (host, port).hash(&mut hasher);
    hasher.finish()
}
