//! A cluster: which host has which slots, what each host knows of that, and what it answers to who
//! asks the wrong one. The client is the library's own, over simulated connections: [`Wire`].

use std::cell::{Cell, RefCell};
use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::cluster::ClusterClient;
use redis::cluster_async::{ClusterConnection, Connect};
use redis::{
    AsyncConnectionConfig, Cmd, ConnectionAddr, ErrorKind, IntoConnectionInfo, Pipeline,
    RedisError, RedisFuture, RedisResult, Value,
};
use tokio::time::timeout;

use crate::net::Net;
use crate::server::Reply;

/// Slots move in parts of a master's: so many.
pub const PARTS: usize = 4;
/// How long the library waits for a connection if nobody says.
const CONNECTION: Duration = Duration::from_secs(1);

/// The owner of each part of the slots.
type Owners = Vec<usize>;

#[derive(Debug)]
pub struct Cluster {
    /// The owners as each host knows them. A host is the last to know of others.
    views: Vec<Owners>,
    /// As it is.
    owners: Owners,
    /// Where parts are on their way to.
    moving: Vec<Option<usize>>,
    /// The replica of one of the masters, and that master.
    pub replica: (usize, usize),
}

impl Cluster {
    /// The last host is the replica of `victim`.
    pub fn new(masters: usize, victim: usize) -> Self {
        let owners: Owners = (0..masters * PARTS).map(|part| part / PARTS).collect();
        Self {
            views: vec![owners.clone(); masters + 1],
            moving: vec![None; owners.len()],
            owners,
            replica: (masters, victim),
        }
    }

    pub fn part_of(&self, key: &[u8]) -> usize {
        part_of(key, self.owners.len())
    }

    /// Returns the owner of a key.
    pub fn owner(&self, key: &[u8]) -> usize {
        self.owners[self.part_of(key)]
    }

    /// Parts begin to move. Returns those that do: not what moves already.
    pub fn begin(&mut self, parts: &[usize], to: usize) -> Vec<usize> {
        let to = if self.replica.0 == to { self.replica.1 } else { to };
        let starts = |part: &usize| self.moving[*part].is_none() && self.owners[*part] != to;
        let parts: Vec<_> = parts.iter().copied().filter(starts).collect();
        parts.iter().for_each(|part| self.moving[*part] = Some(to));
        parts
    }

    /// Where a key of these parts goes to from a host.
    pub fn goes_to(&self, key: &[u8], from: usize, parts: &[usize]) -> Option<usize> {
        let part = self.part_of(key);
        let goes = self.owners[part] == from && parts.contains(&part);
        self.moving[part].filter(|to| goes && *to != from)
    }

    /// Parts have a new owner. Both know it; others hear of it later.
    pub fn settle(&mut self, parts: &[usize]) {
        for &part in parts {
            let (from, Some(to)) = (self.owners[part], self.moving[part]) else { continue };
            (self.owners[part], self.moving[part]) = (to, None);
            self.views[from][part] = to;
            self.views[to][part] = to;
        }
    }

    /// A replica takes over all parts of its master, which does not know that yet.
    pub fn take_over(&mut self, master: usize, by: usize) {
        for part in 0..self.owners.len() {
            for owner in [&mut self.owners[part], &mut self.views[by][part]] {
                *owner = if *owner == master { by } else { *owner };
            }
            self.moving[part] = self.moving[part].map(|to| if to == master { by } else { to });
        }
        self.replica = (master, by);
    }

    /// A host knows who has what.
    pub fn learn(&mut self, host: usize) {
        self.views[host].clone_from(&self.owners);
    }

    /// All hosts know who has what.
    pub fn gossip(&mut self) {
        self.views.iter_mut().for_each(|view| view.clone_from(&self.owners));
    }

    /// Returns the answer to a command that is not the host's own to execute.
    pub fn refuses(
        &self,
        host: usize,
        args: &[Vec<u8>],
        asking: bool,
        has: impl Fn(&[u8]) -> bool,
    ) -> Option<Reply> {
        let keys = keys(args);
        let first = keys.first()?;
        if keys.iter().any(|key| slot_of(key) != slot_of(first)) {
            let what = "CROSSSLOT Keys in request don't hash to the same slot";
            return Some(Reply::Error(what.to_owned()));
        }
        let (slot, part) = (slot_of(first), self.part_of(first));
        let redirect =
            |how: &str, to: usize| Some(Reply::Error(format!("{how} {slot} h{to}:6379")));
        match (self.views[host][part], self.moving[part]) {
            (owner, Some(to)) if owner == host => {
                if has(first) {
                    None
                } else {
                    redirect("ASK", to)
                }
            }
            (owner, None) if owner == host => None,
            (_, Some(to)) if to == host && asking => None,
            (owner, _) => redirect("MOVED", owner),
        }
    }

    /// The answer to `CLUSTER SLOTS`.
    pub fn slots(&self, host: usize) -> Reply {
        let view = &self.views[host];
        let node = |host: usize| {
            let name = |text: String| Reply::Bulk(text.into_bytes());
            let id = name(format!("{host:040}"));
            Reply::Array(vec![name(format!("h{host}")), Reply::Int(6379), id, Reply::Array(vec![])])
        };
        let mut all = Vec::new();
        let mut begins = 0;
        for part in 1..=view.len() {
            let owner = view[begins];
            if view.get(part) == Some(&owner) {
                continue;
            }
            let slot = |part: usize| (part * 16_384).div_ceil(view.len()) as i64;
            let mut range = vec![Reply::Int(slot(begins)), Reply::Int(slot(part) - 1), node(owner)];
            if self.replica.1 == owner {
                range.push(node(self.replica.0));
            }
            all.push(Reply::Array(range));
            begins = part;
        }
        Reply::Array(all)
    }
}

pub fn part_of(key: &[u8], parts: usize) -> usize {
    usize::from(slot_of(key)) * parts / 16_384
}

/// The keys of a command.
pub fn keys(args: &[Vec<u8>]) -> &[Vec<u8>] {
    match &args[0].to_ascii_uppercase()[..] {
        b"EVAL" | b"EVALSHA" => {
            let keys = args.get(2).and_then(|keys| str::from_utf8(keys).ok()?.parse().ok());
            let all = args.get(3..).unwrap_or_default();
            &all[..keys.unwrap_or(0).min(all.len())]
        }
        b"HMGET" | b"DEL" | b"UNLINK" => args.get(1..2).unwrap_or_default(),
        _ => &[],
    }
}

/// CRC-16 of what is in braces.
fn slot_of(key: &[u8]) -> u16 {
    let text = str::from_utf8(key).expect("keys are text");
    let tag = text.split_once('{').and_then(|(_, rest)| Some(rest.split_once('}')?.0));
    let mut crc = 0_u32;
    for byte in tag.filter(|tag| !tag.is_empty()).unwrap_or(text).bytes() {
        crc ^= u32::from(byte) << 8;
        for _ in 0..8 {
            crc = crc << 1 ^ if crc & 0x8000 == 0 { 0 } else { 0x1021 };
        }
    }
    (crc & 0x3fff) as u16
}

thread_local! {
    /// The network of this thread's run: the library says only an address.
    static NET: RefCell<Option<Net>> = const { RefCell::new(None) };
    /// How many connections of the library were opened in this run.
    static OPENED: Cell<usize> = const { Cell::new(0) };
}

pub fn set_net(net: Option<Net>) {
    NET.set(net);
    OPENED.set(0);
}

/// Opens the library's connection to a cluster, of a node.
pub async fn open(
    node: usize,
    masters: usize,
    connection: Option<Duration>,
    answer: Duration,
) -> RedisResult<ClusterConnection<Wire>> {
    let connection = connection.unwrap_or(CONNECTION);
    let opened = OPENED.replace(OPENED.get() + 1);
    // An address has no more to say who connects, for how long, and for what.
    let user = format!("{node}-{}-{opened}", connection.as_millis());
    let client = ClusterClient::builder((0..masters).map(|host| format!("redis://h{host}:6379")))
        .username(user)
        .response_timeout(answer)
        .retries(0)
        .build()?;
    client.get_async_generic_connection().await
}

/// The library's connection to a host, over the simulated network.
#[derive(Clone)]
pub struct Wire(MultiplexedConnection);

impl Connect for Wire {
    fn connect_with_config<'a, T>(info: T, config: AsyncConnectionConfig) -> RedisFuture<'a, Self>
    where
        T: IntoConnectionInfo + Send + 'a,
    {
        Box::pin(async move {
            let info = info.into_connection_info()?;
            let ConnectionAddr::Tcp(host, _) = info.addr() else { panic!("{info:?}") };
            let host = host[1..].parse().expect("the number of a host");
            let user = info.redis_settings().username().expect("it says who connects");
            let mut numbers = user.split('-').map(|text| text.parse().expect("a number"));
            let mut number = || numbers.next().expect("three numbers");
            let (node, within, opened) = (number(), number(), number());
            let within = Duration::from_millis(within as u64);
            let net = NET.with_borrow(|net| net.clone()).expect("it is set");
            let connecting = net.connect_to(node, host, Some(opened), config);
            let late = |_| RedisError::from((ErrorKind::Io, "no connection in time"));
            Ok(Self(timeout(within, connecting).await.map_err(late)??))
        })
    }
}

impl ConnectionLike for Wire {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        self.0.req_packed_command(cmd)
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        self.0.req_packed_commands(pipeline, offset, count)
    }

    fn get_db(&self) -> i64 {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_redis() {
        // By `CLUSTER KEYSLOT`.
        for (key, of) in [("123456789", 12_739), ("a", 15_495), ("b", 3_300), ("{}a", 10_875)] {
            assert_eq!(slot_of(key.as_bytes()), of, "{key}");
        }
        assert_eq!(slot_of(b"tfw1:{a}"), slot_of(b"a"));
    }
}
