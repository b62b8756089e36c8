//! The servers of a store: one, or the nodes of a cluster, which fail apart. [`Servers`] are common
//! to all runtimes, and each has its own [`Links`] to them.
//!
//! Which node has which slot is asked of all nodes that there is a connection to, and the first
//! answer counts: when a runtime begins, when a call fails, and when a node redirects one. What a
//! redirection says counts at once.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::{ErrorKind, RedisError, RedisResult, ServerErrorKind, Value, cmd};
use tokio::sync::watch;
use tokio::time::timeout;

use super::super::connect::{first_success, host_and_port, silence, split_address};
use super::Connection;
use super::origin::{Handle, Origin};
use super::upkeep::{Link, unless_ended};
use crate::sync;

const SLOTS: u16 = 16_384;
/// How long to wait for an answer about slots.
const LATE: Duration = Duration::from_secs(5);

pub(crate) enum Servers {
    One(Arc<Origin>),
    Cluster(Cluster),
}

pub(crate) struct Cluster {
    seeds: Vec<Arc<Origin>>,
    connect: Connect,
    known: watch::Sender<Known>,
}

/// To a node, by its host and port.
type Connect = Box<dyn Fn(&str) -> Origin + Send + Sync>;

struct Known {
    /// The seeds first.
    nodes: Vec<Arc<Origin>>,
    /// The place of each slot's node. A slot of nobody's is the first node's, which says so.
    slots: Vec<usize>,
}

/// The first and last slot of a range, and host and port of its master.
type Range = (u16, u16, String);

impl Servers {
    pub(crate) fn one(origin: Origin) -> Self {
        Self::One(Arc::new(origin))
    }

    /// `seeds` are not empty.
    pub(crate) fn cluster(
        seeds: Vec<String>,
        connect: impl Fn(&str) -> Origin + Send + Sync + 'static,
    ) -> Self {
        let connect: Connect = Box::new(move |address| {
            let (mut origin, mut hasher) = (connect(address), DefaultHasher::new());
            address.hash(&mut hasher);
            origin.number = hasher.finish();
            origin.name.set(Some(address.to_owned()));
            origin
        });
        let seeds: Vec<_> = seeds.iter().map(|seed| Arc::new(connect(seed))).collect();
        let known =
            watch::Sender::new(Known { nodes: seeds.clone(), slots: vec![0; SLOTS.into()] });
        Self::Cluster(Cluster { seeds, connect, known })
    }

    /// Looks at that of a key.
    pub(crate) fn look<T>(&self, key: impl FnOnce() -> String, at: impl FnOnce(&Origin) -> T) -> T {
        match self {
            Self::One(origin) => at(origin),
            Self::Cluster(cluster) => at(cluster.known.borrow().node_of(key().as_bytes())),
        }
    }
}

impl Known {
    fn node_of(&self, key: &[u8]) -> &Arc<Origin> {
        &self.nodes[self.slots[usize::from(slot_of(key))]]
    }

    /// Adds the node if it is not there, from those `before` if it was.
    fn place_of(&mut self, address: &str, before: &[Arc<Origin>], connect: &Connect) -> usize {
        let is_it = |node: &&Arc<Origin>| node.name.get().as_deref() == Some(address);
        self.nodes.iter().position(|node| is_it(&node)).unwrap_or_else(|| {
            let node = before.iter().find(is_it).cloned();
            self.nodes.push(node.unwrap_or_else(|| Arc::new(connect(address))));
            self.nodes.len() - 1
        })
    }
}

impl Cluster {
    /// If it is said, the slot is this node's from now on.
    fn node_at(&self, address: &str, slot: Option<u16>) -> Arc<Origin> {
        let mut node = None;
        self.known.send_modify(|known| {
            let place = known.place_of(address, &[], &self.connect);
            if let Some(of) = slot.and_then(|slot| known.slots.get_mut(usize::from(slot))) {
                *of = place;
            }
            node = Some(Arc::clone(&known.nodes[place]));
        });
        node.expect("it was found or added")
    }

    fn set_slots(&self, ranges: Vec<Range>) {
        self.known.send_modify(|known| {
            let mut next = Known { nodes: self.seeds.clone(), slots: vec![0; SLOTS.into()] };
            for (first, last, address) in ranges {
                let place = next.place_of(&address, &known.nodes, &self.connect);
                if let Some(slots) = next.slots.get_mut(first.into()..=last.into()) {
                    slots.fill(place);
                }
            }
            *known = next;
        });
    }

    fn nodes(&self) -> Vec<Arc<Origin>> {
        self.known.borrow().nodes.clone()
    }
}

/// The connections of a runtime.
pub(crate) struct Links {
    servers: Arc<Servers>,
    links: Mutex<Vec<Arc<Link>>>,
    /// A task asks for the slots.
    asks: AtomicBool,
}

impl Links {
    /// Begins to connect, in the current runtime.
    pub(crate) fn new(servers: &Arc<Servers>) -> Arc<Self> {
        let (servers, asks) = (Arc::clone(servers), AtomicBool::new(false));
        let this = Arc::new(Self { servers, links: Mutex::default(), asks });
        match &*this.servers {
            Servers::One(origin) => _ = this.link_to(origin),
            Servers::Cluster(_) => this.ask_slots(),
        }
        this
    }

    fn link_to(&self, origin: &Arc<Origin>) -> Arc<Link> {
        let mut links = sync::lock(&self.links);
        if let Some(link) = links.iter().find(|link| Arc::ptr_eq(&link.origin, origin)) {
            return Arc::clone(link);
        }
        if let Servers::Cluster(cluster) = &*self.servers {
            let nodes = &cluster.known.borrow().nodes;
            links.retain(|link| nodes.iter().any(|node| Arc::ptr_eq(&link.origin, node)));
        }
        let link = Link::connecting(origin);
        links.push(Arc::clone(&link));
        link
    }

    /// Returns whether nothing can be sent to the server of this number.
    pub(crate) fn is_cut_off(&self, server: u64) -> bool {
        let links = sync::lock(&self.links);
        let mut of = links.iter().filter(|link| link.origin.number == server);
        of.any(|link| link.is_cut_off.load(Relaxed))
    }

    /// [`Link::get_connection`], to the server of a key. In a cluster, that may change meanwhile.
    pub(crate) async fn get_connection(
        &self,
        key: &[u8],
        patience: Duration,
    ) -> RedisResult<Connection> {
        let cluster = match &*self.servers {
            Servers::One(origin) => return self.link_to(origin).get_connection(patience).await,
            Servers::Cluster(cluster) => cluster,
        };
        let mut changes = cluster.known.subscribe();
        loop {
            let node = Arc::clone(changes.borrow_and_update().node_of(key));
            let link = self.link_to(&node);
            let moves = async {
                _ = changes.wait_for(|known| !Arc::ptr_eq(known.node_of(key), &node)).await;
            };
            if let Some(connection) = unless_ended(link.get_connection(patience), moves).await {
                return connection;
            }
        }
    }

    /// Returns a connection to the node that a node of a cluster has redirected a call to, which it
    /// did not execute. Any other server's error is `None`.
    pub(crate) fn redirected(
        self: &Arc<Self>,
        over: &Connection,
        error: &RedisError,
        patience: Duration,
    ) -> Option<impl Future<Output = RedisResult<Connection>> + Send + use<>> {
        let Servers::Cluster(cluster) = &*self.servers else { return None };
        let (to, slot) = error.redirect_node()?;
        let from = over.link.origin.name.get();
        let address = full_address(to.rsplit_once(':')?, from.as_deref())?;
        // The slot is on its way there, so this holds for this call only.
        let asks = error.kind() == ErrorKind::Server(ServerErrorKind::Ask);
        let node = cluster.node_at(&address, (!asks).then_some(slot));
        if !asks {
            self.ask_slots();
        }
        let link = self.link_to(&node);
        Some(async move { Ok(Connection { asks, ..link.get_connection(patience).await? }) })
    }

    /// If the store is of a cluster: slots may have moved.
    pub(crate) fn ask_slots(self: &Arc<Self>) {
        let Servers::Cluster(cluster) = &*self.servers else { return };
        if self.asks.swap(true, Relaxed) {
            return;
        }
        let asked = cluster.nodes().into_iter().map(|node| {
            let link = self.link_to(&node);
            async move {
                let connection = link.get_connection(LATE).await?.connection;
                ask_for_slots(connection, node.name.get()).await
            }
        });
        let (asked, of) =
            (first_success(asked.collect::<Vec<_>>(), silence()), Arc::downgrade(self));
        tokio::spawn(async move {
            let answer = timeout(LATE, asked).await;
            let Some(this) = of.upgrade() else { return };
            this.asks.store(false, Relaxed);
            if let (Ok(Ok(ranges)), Servers::Cluster(cluster)) = (answer, &*this.servers) {
                cluster.set_slots(ranges);
                cluster.nodes().iter().for_each(|node| _ = this.link_to(node));
            }
        });
    }
}

/// Malformed entries are left out.
async fn ask_for_slots(
    mut node: Box<dyn Handle>,
    name: Option<Arc<str>>,
) -> RedisResult<Vec<Range>> {
    let slots = node.req_packed_command(cmd("CLUSTER").arg("SLOTS")).await?.extract_error()?;
    let range = |range: &Value| {
        let Value::Array(range) = range else { return None };
        let [Value::Int(first), Value::Int(last), Value::Array(master), ..] = &range[..] else {
            return None;
        };
        let [host, Value::Int(port), ..] = &master[..] else { return None };
        let host = if let Value::BulkString(host) = host { str::from_utf8(host).ok()? } else { "" };
        let address = full_address((host, &port.to_string()), name.as_deref())?;
        Some((u16::try_from(*first).ok()?, u16::try_from(*last).ok()?, address))
    };
    let slots = if let Value::Array(slots) = &slots { &slots[..] } else { &[] };
    let ranges: Vec<_> = slots.iter().filter_map(range).collect();
    if ranges.is_empty() { Err(silence()) } else { Ok(ranges) }
}

/// A node that does not say a host means its own.
fn full_address((host, port): (&str, &str), asked: Option<&str>) -> Option<String> {
    let host = if host.is_empty() { split_address(asked?)?.0 } else { host };
    Some(host_and_port(host, port.parse().ok()?))
}

/// CRC-16 (XMODEM) over the text in the key's first braces.
fn slot_of(key: &[u8]) -> u16 {
    let tag = key.iter().position(|&byte| byte == b'{').and_then(|start| {
        let rest = &key[start + 1..];
        let end = rest.iter().position(|&byte| byte == b'}').filter(|&end| end > 0)?;
        Some(&rest[..end])
    });
    let crc = tag.unwrap_or(key).iter().fold(0_u16, |crc, &byte| {
        (0..8).fold(crc ^ u16::from(byte) << 8, |crc, _| {
            if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 }
        })
    });
    crc % SLOTS
}

#[cfg(test)]
#[path = "../../../tests/unit/nodes.rs"]
mod tests;
