//! The network: sockets whose bytes take time, stop, or vanish, and the hosts they lead to.
//!
//! Everything random comes from one generator, and all tasks run on one thread under tokio's paused
//! clock: a seed replays.

use std::collections::VecDeque;
use std::future::pending;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use fastrand::Rng;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, ErrorKind, RedisConnectionInfo, RedisResult};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::cluster::{self, Cluster};
use crate::history::{Event, History};
use crate::sentinel::Sentinel;
use crate::server::{Data, Reply, Server};
use crate::wire;

/// How the network and the servers behave now.
pub struct Weather {
    /// The time of one way, in milliseconds.
    pub delay: u64,
    pub jitter: u64,
    /// The server closes connections that have been idle for so long.
    pub closes_idle: Option<Duration>,
    /// Something in between forgets them, and tells nobody.
    pub forgets_idle: Option<Duration>,
    /// A lookup of the address takes this long.
    pub lookup: Duration,
    /// For each node: nothing gets through until then, in either direction.
    pub stalled: Vec<Option<Instant>>,
}

pub struct Host {
    pub server: Server,
    pub up: bool,
    pub frozen: Option<Instant>,
    /// Answers everything with this error until then.
    pub refusing: Option<(Instant, &'static str)>,
}

struct State {
    rng: Rng,
    weather: Weather,
    hosts: Vec<Host>,
    /// The master; in a cluster, the only one that fails.
    master: usize,
    cluster: Option<Cluster>,
    sentinels: Vec<Sentinel>,
    /// The host that the address leads to.
    leads_to: usize,
    pipes: Vec<Weak<Pipe>>,
    connections: usize,
    /// Sockets that a client holds.
    held: usize,
    /// How far the servers' clock has stepped, in microseconds.
    stepped: i64,
}

/// Clones are the same network.
#[derive(Clone)]
pub struct Net {
    state: Arc<Mutex<State>>,
    pub history: History,
    /// The server's clock when the simulation began, in microseconds.
    epoch: i64,
    began: Instant,
}

impl Net {
    pub fn new(rng: Rng, weather: Weather, epoch: i64, history: History) -> Self {
        let host = |replica| {
            let mut server = Server::default();
            server.set_replica(replica);
            Host { server, up: true, frozen: None, refusing: None }
        };
        let state = State {
            rng,
            weather,
            hosts: vec![host(false), host(true)],
            master: 0,
            cluster: None,
            sentinels: Vec::new(),
            leads_to: 0,
            pipes: Vec::new(),
            connections: 0,
            held: 0,
            stepped: 0,
        };
        Self { state: Arc::new(Mutex::new(state)), history, epoch, began: Instant::now() }
    }

    /// Sentinels name the master.
    pub fn watched(self, sentinels: Vec<Sentinel>) -> Self {
        self.lock().sentinels = sentinels;
        self
    }

    /// So many masters share the slots, and one of them has a replica.
    pub fn clustered(self, masters: usize, victim: usize) -> Self {
        let mut state = self.lock();
        let host = |replica| {
            let mut server = Server::default();
            server.set_replica(replica);
            Host { server, up: true, frozen: None, refusing: None }
        };
        state.hosts = (0..=masters).map(|i| host(i == masters)).collect();
        state.master = victim;
        state.cluster = Some(Cluster::new(masters, victim));
        drop(state);
        self
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics under it")
    }

    /// The servers' clock in microseconds.
    pub fn micros(&self) -> i64 {
        self.epoch + self.began.elapsed().as_micros() as i64 + self.lock().stepped
    }

    /// The servers' clock steps, by milliseconds.
    pub fn step(&self, by: i64) {
        self.lock().stepped += by * 1_000;
    }

    pub fn weather(&self, change: impl FnOnce(&mut Weather)) {
        change(&mut self.lock().weather);
    }

    pub fn host(&self, host: usize, change: impl FnOnce(&mut Host)) {
        change(&mut self.lock().hosts[host]);
    }

    pub fn master(&self) -> usize {
        self.lock().master
    }

    pub fn set_master(&self, host: usize) {
        self.lock().master = host;
    }

    /// The one that follows the master, or that the master was.
    pub fn other(&self) -> usize {
        let state = self.lock();
        state.cluster.as_ref().map_or_else(|| 1 - state.master, |cluster| cluster.replica.0)
    }

    /// Changes the cluster, if there is one.
    pub fn cluster<T>(&self, change: impl FnOnce(&mut Cluster) -> T) -> Option<T> {
        self.lock().cluster.as_mut().map(change)
    }

    /// Some keys of parts that move go where they will be, or all of them.
    pub fn migrate(&self, parts: &[usize], all: bool) {
        let mut state = self.lock();
        let State { rng, hosts, cluster: Some(cluster), .. } = &mut *state else { return };
        for from in 0..hosts.len() {
            for to in 0..hosts.len() {
                let goes = |key: &[u8]| cluster.goes_to(key, from, parts) == Some(to);
                let keys = hosts[from].server.take(|key| goes(key) && (all || rng.bool()));
                hosts[to].server.put(keys);
            }
        }
    }

    pub fn sentinel(&self, index: usize) -> Sentinel {
        self.lock().sentinels[index].clone()
    }

    pub fn sentinels(&self) -> usize {
        self.lock().sentinels.len()
    }

    /// A Sentinel hears who is the master.
    pub fn tell(&self, sentinel: usize, master: usize) {
        self.lock().sentinels[sentinel].names = master;
    }

    pub fn leads_to(&self, host: usize) {
        self.lock().leads_to = host;
    }

    pub fn data(&self, host: usize) -> Data {
        self.lock().hosts[host].server.data().clone()
    }

    /// How many sockets clients hold.
    pub fn held(&self) -> usize {
        self.lock().held
    }

    fn pipes(&self, of: impl Fn(&Pipe) -> bool) -> Vec<Arc<Pipe>> {
        let mut state = self.lock();
        state.pipes.retain(|pipe| pipe.strong_count() > 0);
        let pipes: Vec<_> = state.pipes.iter().filter_map(Weak::upgrade).collect();
        drop(state);
        pipes.into_iter().filter(|pipe| of(pipe)).collect()
    }

    /// Closes connections. Requests on their way are lost, and answers on theirs, if `answers`.
    pub fn close(&self, answers: bool, of: impl Fn(&Pipe) -> bool) {
        for pipe in self.pipes(of) {
            self.close_one(&pipe, answers, true);
        }
    }

    fn close_one(&self, pipe: &Pipe, answers: bool, reset: bool) {
        let at = self.arrival(pipe.node);
        let mut ends = pipe.lock();
        ends.to_server.clear();
        if answers {
            ends.to_client.clear();
        }
        if !ends.silent {
            let at = ends.to_client.back().map_or(at, |(last, _)| at.max(*last));
            ends.to_client.push_back((at, if reset { Bytes::Reset } else { Bytes::End }));
        }
        ends.server_gone = true;
        ends.wake();
        drop(ends);
        pipe.changed.notify_one();
    }

    /// From now on everything vanishes in them.
    pub fn silence(&self, of: impl Fn(&Pipe) -> bool) {
        for pipe in self.pipes(of) {
            pipe.lock().silent = true;
        }
    }

    /// When something that is sent now gets there.
    fn arrival(&self, node: usize) -> Instant {
        let mut state = self.lock();
        let State { rng, weather, .. } = &mut *state;
        let takes = weather.delay + rng.u64(..=weather.jitter);
        let leaves =
            weather.stalled[node].map_or(Instant::now(), |until| until.max(Instant::now()));
        leaves + Duration::from_millis(takes)
    }

    /// There and back.
    pub async fn round_trip(&self, node: usize) {
        sleep_until(self.arrival(node)).await;
        sleep_until(self.arrival(node)).await;
    }

    /// Connects, for a node's store.
    pub async fn connect(self, node: usize) -> RedisResult<MultiplexedConnection> {
        let lookup = self.lock().weather.lookup;
        if !lookup.is_zero() {
            tokio::time::sleep(lookup).await;
        }
        let host = self.lock().leads_to;
        self.connect_to(node, host, own_deadlines()).await
    }

    pub async fn connect_to(
        self,
        node: usize,
        host: usize,
        config: AsyncConnectionConfig,
    ) -> RedisResult<MultiplexedConnection> {
        let refused = |text| redis::RedisError::from((ErrorKind::Io, text));
        sleep_until(self.arrival(node)).await;
        let up = self.lock().hosts[host].up;
        sleep_until(self.arrival(node)).await;
        if !up {
            self.history.add(Event::Refused { node });
            return Err(refused("connection refused"));
        }
        let pipe = {
            let mut state = self.lock();
            state.connections += 1;
            state.held += 1;
            let id = state.connections;
            let pipe = Arc::new(Pipe {
                id,
                node,
                host,
                forgets: state.weather.forgets_idle,
                ends: Mutex::new(Ends::default()),
                changed: Notify::new(),
                asking: AtomicBool::new(false),
            });
            state.pipes.push(Arc::downgrade(&pipe));
            pipe
        };
        self.history.add(Event::Connected { node, connection: pipe.id, host });
        tokio::spawn(self.clone().serve(Arc::clone(&pipe)));
        let socket = Socket { pipe, net: self.clone(), sleep: None };
        let info = RedisConnectionInfo::default();
        let (connection, driver) =
            MultiplexedConnection::new_with_config(&info, socket, config).await?;
        tokio::spawn(driver);
        Ok(connection)
    }

    /// The server's side of a connection.
    async fn serve(self, pipe: Arc<Pipe>) {
        let closes_idle = self.lock().weather.closes_idle;
        let mut buffer = Vec::new();
        let mut idle_since = Instant::now();
        loop {
            let (next, gone) = {
                let ends = pipe.lock();
                (ends.to_server.front().map(|(at, _)| *at), ends.server_gone)
            };
            if gone {
                return;
            }
            let due = async {
                match next {
                    Some(at) => sleep_until(at).await,
                    None => pending().await,
                }
            };
            let idle = async {
                match closes_idle {
                    Some(idle) => sleep_until(idle_since + idle).await,
                    None => pending().await,
                }
            };
            tokio::select! {
                biased;
                () = pipe.changed.notified() => continue,
                () = due => {}
                () = idle => {
                    self.close_one(&pipe, false, false);
                    return;
                }
            }
            // A frozen host has what arrives in its buffers.
            loop {
                let frozen = self.lock().hosts[pipe.host].frozen;
                match frozen.filter(|until| *until > Instant::now()) {
                    Some(until) => sleep_until(until).await,
                    None => break,
                }
            }
            let arrived = {
                let mut ends = pipe.lock();
                if ends.server_gone {
                    return;
                }
                ends.to_server.pop_front()
            };
            idle_since = Instant::now();
            match arrived {
                Some((_, Bytes::Some(bytes))) => buffer.extend(bytes),
                Some((_, Bytes::End | Bytes::Reset)) => return,
                None => continue,
            }
            let mut answers = Vec::new();
            while let Some(args) = wire::command(&mut buffer) {
                wire::reply(&self.execute(&pipe, args), &mut answers);
            }
            self.send(&pipe, false, Bytes::Some(answers));
        }
    }

    fn execute(&self, pipe: &Pipe, args: Vec<Vec<u8>>) -> Reply {
        let micros = self.micros();
        let mut state = self.lock();
        let State { hosts, cluster, .. } = &mut *state;
        let host = &mut hosts[pipe.host];
        let has = |key: &[u8]| host.server.data().has(key);
        let asks = |words: &[&[u8]]| args.iter().zip(words).all(|(arg, word)| arg == word);
        let instead = match cluster {
            _ if host.refusing.is_some_and(|(until, _)| until > Instant::now()) => {
                host.refusing.map(|(_, error)| Reply::Error(error.to_owned()))
            }
            Some(_) if asks(&[b"ASKING"]) => {
                pipe.asking.store(true, Ordering::Relaxed);
                Some(Reply::Status("OK".to_owned()))
            }
            Some(cluster) if asks(&[b"CLUSTER", b"SLOTS"]) => Some(cluster.slots(pipe.host)),
            Some(cluster) => {
                let asking = pipe.asking.swap(false, Ordering::Relaxed);
                cluster.refuses(pipe.host, &args, asking, has)
            }
            None => None,
        };
        let executed = instead.is_none();
        let (reply, writes) = match instead {
            Some(reply) => (reply, Vec::new()),
            None => host.server.call(&args, micros),
        };
        let keys = match &args[0][..] {
            b"EVAL" | b"EVALSHA" => cluster::keys(&args),
            _ => args.get(1..2).unwrap_or_default(),
        };
        let data = host.server.data();
        let absent = |key: &&Vec<u8>| data.fields(key).is_none_or(|fields| fields.is_empty());
        // Another host of a cluster may have the key.
        let keys = keys.iter().filter(|_| executed || cluster.is_none());
        let absent = keys.filter(absent).cloned().collect();
        drop(state);
        self.history.add(Event::Executed {
            node: pipe.node,
            connection: pipe.id,
            host: pipe.host,
            command: args,
            reply: reply.clone(),
            writes,
            absent,
        });
        reply
    }

    /// Puts bytes on their way.
    fn send(&self, pipe: &Pipe, to_server: bool, bytes: Bytes) {
        let at = self.arrival(pipe.node);
        let mut ends = pipe.lock();
        let now = Instant::now();
        if let (Some(forgets), Some(last)) = (pipe.forgets, ends.last)
            && now - last >= forgets
        {
            ends.silent = true;
        }
        ends.last = Some(now);
        if ends.silent || to_server && ends.server_gone {
            return;
        }
        let way = if to_server { &mut ends.to_server } else { &mut ends.to_client };
        // In order, as in a stream.
        let at = way.back().map_or(at, |(last, _)| at.max(*last));
        way.push_back((at, bytes));
        ends.wake();
        drop(ends);
        if to_server {
            pipe.changed.notify_one();
        }
    }
}

enum Bytes {
    Some(Vec<u8>),
    /// The other side has closed it.
    End,
    Reset,
}

/// A connection, seen from above.
pub struct Pipe {
    pub id: usize,
    pub node: usize,
    pub host: usize,
    forgets: Option<Duration>,
    ends: Mutex<Ends>,
    /// For the server's side.
    changed: Notify,
    /// The next command is asked of one that does not have its slot yet.
    asking: AtomicBool,
}

/// Deadlines are the store's and the link's, as where the crate connects by itself.
pub fn own_deadlines() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None)
}

#[derive(Default)]
struct Ends {
    to_server: VecDeque<(Instant, Bytes)>,
    to_client: VecDeque<(Instant, Bytes)>,
    reader: Option<Waker>,
    /// Whatever is sent vanishes.
    silent: bool,
    server_gone: bool,
    /// When something was sent last.
    last: Option<Instant>,
}

impl Pipe {
    fn lock(&self) -> MutexGuard<'_, Ends> {
        self.ends.lock().expect("nobody panics under it")
    }
}

impl Ends {
    fn wake(&mut self) {
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }
}

/// The client's side of a connection.
struct Socket {
    pipe: Arc<Pipe>,
    net: Net,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            let mut ends = this.pipe.lock();
            let Some((at, bytes)) = ends.to_client.front_mut() else {
                ends.reader = Some(cx.waker().clone());
                return Poll::Pending;
            };
            if *at <= Instant::now() {
                return Poll::Ready(match bytes {
                    Bytes::Some(bytes) => {
                        let some = bytes.len().min(buf.remaining());
                        buf.put_slice(&bytes[..some]);
                        bytes.drain(..some);
                        if bytes.is_empty() {
                            ends.to_client.pop_front();
                        }
                        Ok(())
                    }
                    // The end stays: every further read says the same.
                    Bytes::End => Ok(()),
                    Bytes::Reset => Err(io::ErrorKind::ConnectionReset.into()),
                });
            }
            let at = *at;
            ends.reader = Some(cx.waker().clone());
            drop(ends);
            let sleep = this.sleep.insert(Box::pin(sleep_until(at)));
            if sleep.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let reset = matches!(
            this.pipe.lock().to_client.front(),
            Some((at, Bytes::Reset)) if *at <= Instant::now()
        );
        if reset {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        this.net.send(&this.pipe, true, Bytes::Some(bytes.to_vec()));
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.net.lock().held -= 1;
        self.net.history.add(Event::Dropped { node: self.pipe.node, connection: self.pipe.id });
        self.net.send(&self.pipe, true, Bytes::End);
        // Where that vanishes the server would wait for ever; nobody looks at that.
        if self.pipe.lock().silent {
            self.pipe.lock().server_gone = true;
            self.pipe.changed.notify_one();
        }
    }
}
