//! A network between clients and a server: late, silent, cut, forgetful, or leading elsewhere.
//!
//! Threads carry the bytes: they sleep more precisely than a runtime's timers, take nothing of its
//! time, and outlive the runtimes of tests.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A TCP proxy on a port of its own. Its connections end with this value.
pub struct Proxy {
    pub port: u16,
    network: Arc<Network>,
    accepts: Option<JoinHandle<()>>,
}

type Delay = Box<dyn FnMut() -> Duration + Send>;

struct Network {
    /// The port that new connections lead to.
    target: AtomicU16,
    /// How long bytes take one way. Asked for all that is read at once.
    delay: Mutex<Delay>,
    /// Milliseconds after which an idle connection is forgotten; 0: never.
    forgets: AtomicU64,
    silent: Mutex<bool>,
    delivers: Condvar,
    links: Mutex<Vec<Weak<Link>>>,
    made: AtomicU64,
    open: AtomicU64,
    ended: AtomicBool,
}

impl Proxy {
    /// A network without delay to a port of this machine.
    pub fn to(port: u16) -> Self {
        let network = Arc::new(Network {
            target: port.into(),
            delay: Mutex::new(Box::new(|| Duration::ZERO)),
            forgets: 0.into(),
            silent: false.into(),
            delivers: Condvar::new(),
            links: Mutex::default(),
            made: 0.into(),
            open: 0.into(),
            ended: false.into(),
        });
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let accepting = Arc::clone(&network);
        let accepts = thread::spawn(move || accept(&listener, &accepting));
        Self { port, network, accepts: Some(accepts) }
    }

    /// The address for clients of Redis.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// Bytes take this long in each direction.
    pub fn delay(self, one_way: Duration) -> Self {
        self.set_delay(move || one_way);
        self
    }

    /// Bytes that are read from now on take as long as `one_way` says, each time.
    pub fn set_delay(&self, one_way: impl FnMut() -> Duration + Send + 'static) {
        *lock(&self.network.delay) = Box::new(one_way);
    }

    /// Connections that are idle for this long are forgotten without a sign, as a NAT forgets them:
    /// bytes that are sent later go nowhere.
    pub fn forgets_after(self, idle: Duration) -> Self {
        self.network.forgets.store(idle.as_millis() as u64, SeqCst);
        self
    }

    /// Forgets all connections that there are. New ones work.
    pub fn forget(&self) {
        self.network.links().iter().for_each(|link| link.forgotten.store(true, SeqCst));
    }

    /// Closes all connections that there are. New ones work.
    pub fn cut(&self) {
        self.network.links().iter().for_each(|link| link.close());
    }

    /// A silent network delivers no bytes, on old and on new connections, until it is no longer
    /// silent. Ends without bytes before them arrive.
    pub fn set_silent(&self, silent: bool) {
        *lock(&self.network.silent) = silent;
        self.network.delivers.notify_all();
    }

    /// New connections lead to this port. Old ones stay where they are.
    pub fn set_target(&self, port: u16) {
        self.network.target.store(port, SeqCst);
    }

    /// Connections made so far.
    pub fn made(&self) -> u64 {
        self.network.made.load(SeqCst)
    }

    /// Connections that the client has not closed.
    pub fn open(&self) -> u64 {
        self.network.open.load(SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.network.ended.store(true, SeqCst);
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        let _ = self.accepts.take().map(JoinHandle::join);
        self.cut();
        self.set_silent(false);
    }
}

impl Network {
    fn links(&self) -> Vec<Arc<Link>> {
        lock(&self.links).iter().filter_map(Weak::upgrade).collect()
    }
}

/// A connection, as both directions see it.
struct Link {
    network: Arc<Network>,
    client: TcpStream,
    server: TcpStream,
    start: Instant,
    /// When bytes were sent last, in milliseconds since the start.
    last: AtomicU64,
    forgotten: AtomicBool,
}

impl Link {
    /// Notes that bytes were sent, and returns `false` if they go nowhere.
    fn passes(&self) -> bool {
        let now = self.start.elapsed().as_millis() as u64;
        let idle = now - self.last.swap(now, SeqCst).min(now);
        let forgets = self.network.forgets.load(SeqCst);
        if forgets > 0 && idle >= forgets {
            self.forgotten.store(true, SeqCst);
        }
        !self.forgotten.load(SeqCst)
    }

    fn close(&self) {
        let _ = self.client.shutdown(Shutdown::Both);
        let _ = self.server.shutdown(Shutdown::Both);
    }
}

fn accept(listener: &TcpListener, network: &Arc<Network>) {
    for client in listener.incoming().flatten() {
        if network.ended.load(SeqCst) {
            return;
        }
        network.made.fetch_add(1, SeqCst);
        network.open.fetch_add(1, SeqCst);
        let network = Arc::clone(network);
        thread::spawn(move || {
            connect(client, &network);
            network.open.fetch_sub(1, SeqCst);
        });
    }
}

/// Carries a connection's bytes until the client closes it.
fn connect(client: TcpStream, network: &Arc<Network>) {
    let target = network.target.load(SeqCst);
    let Ok(server) = TcpStream::connect(("127.0.0.1", target)) else { return };
    // Or delivered bytes wait for the other side's confirmations.
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let link = Arc::new(Link {
        network: Arc::clone(network),
        client,
        server,
        start: Instant::now(),
        last: 0.into(),
        forgotten: false.into(),
    });
    let mut links = lock(&network.links);
    links.retain(|link| link.strong_count() > 0);
    links.push(Arc::downgrade(&link));
    drop(links);
    // The proxy may have ended meanwhile.
    if network.ended.load(SeqCst) {
        link.close();
    }
    let back = Arc::clone(&link);
    thread::spawn(move || carry(&back, &back.server, &back.client));
    carry(&link, &link.client, &link.server);
}

/// Reads until the other side closes the connection.
fn carry(link: &Arc<Link>, mut from: &TcpStream, to: &TcpStream) {
    let (sender, in_flight) = channel();
    let (to, delivering) = (to.try_clone().expect("a socket"), Arc::clone(link));
    thread::spawn(move || deliver(&delivering, to, &in_flight));
    let mut buffer = vec![0; 1 << 16];
    loop {
        let read = from.read(&mut buffer).unwrap_or(0);
        let due = Instant::now() + lock(&link.network.delay)();
        match (link.passes(), read) {
            (_, 0) => return,
            (true, _) => _ = sender.send((due, buffer[..read].to_vec())),
            (false, _) => {}
        }
    }
}

/// Writes in order: a late packet holds back those after it, and the end follows the last.
fn deliver(link: &Link, mut to: TcpStream, in_flight: &Receiver<(Instant, Vec<u8>)>) {
    for (due, bytes) in in_flight {
        thread::sleep(due.saturating_duration_since(Instant::now()));
        let silent = lock(&link.network.silent);
        drop(link.network.delivers.wait_while(silent, |silent| *silent));
        if to.write_all(&bytes).is_err() {
            return;
        }
    }
    // A forgotten connection stays open on this side.
    if !link.forgotten.load(SeqCst) {
        let _ = to.shutdown(Shutdown::Write);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Ends {
        listener: TcpListener,
        proxy: Proxy,
    }

    impl Ends {
        fn start() -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            let proxy = Proxy::to(listener.local_addr().expect("an address").port());
            Self { listener, proxy }
        }

        fn connect(&self) -> [TcpStream; 2] {
            let client = TcpStream::connect(("127.0.0.1", self.proxy.port)).expect("a network");
            let (server, _) = self.listener.accept().expect("a client");
            [client, server]
        }
    }

    /// Sends a byte, and returns what arrives within 100 ms: that byte, the end, or `None`.
    fn arrives(from: &mut TcpStream, to: &mut TcpStream) -> Option<usize> {
        let _ = from.write_all(b"1");
        to.set_read_timeout(Some(Duration::from_millis(100))).expect("a socket");
        to.read(&mut [0]).ok()
    }

    #[test]
    fn the_proxy_drops_connections_silently() {
        let ends = Ends::start();
        let [mut client, mut server] = ends.connect();
        assert_eq!(arrives(&mut client, &mut server), Some(1));
        ends.proxy.forget();
        assert_eq!(arrives(&mut client, &mut server), None, "not even an end");
        let [mut client, mut server] = ends.connect();
        assert_eq!(arrives(&mut client, &mut server), Some(1));
        assert_eq!((ends.proxy.made(), ends.proxy.open()), (2, 2));
        assert_eq!(ends.proxy.url(), format!("redis://127.0.0.1:{}/", ends.proxy.port));
    }

    #[test]
    fn cut_connections_end_and_new_ones_lead_to_the_new_target() {
        let (mut ends, other) = (Ends::start(), Ends::start());
        let [mut client, mut server] = ends.connect();
        ends.proxy.set_target(other.listener.local_addr().expect("an address").port());
        assert_eq!(arrives(&mut client, &mut server), Some(1), "an old connection");
        ends.proxy.cut();
        assert_eq!(arrives(&mut server, &mut client), Some(0), "the end");
        ends.listener = other.listener;
        let [mut client, mut server] = ends.connect();
        assert_eq!(arrives(&mut server, &mut client), Some(1));
    }
}
