//! A network between a store and its server: it delays, falls silent, and forgets connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

/// A TCP proxy with a runtime of its own, so that it also works for tests that end theirs.
pub(crate) struct Proxy {
    pub(crate) port: u16,
    network: Arc<Network>,
    runtime: Option<Runtime>,
}

#[derive(Default)]
struct Network {
    target: AtomicU16,
    /// One way, in microseconds.
    delay: AtomicU64,
    /// An idle connection is forgotten after so many milliseconds; 0: never.
    forgets: AtomicU64,
    /// Connections that were made before this many times are forgotten.
    forgotten: AtomicU64,
    silent: AtomicBool,
    made: AtomicU64,
    open: AtomicU64,
}

impl Proxy {
    /// A network without delay to a port of this machine.
    pub(crate) fn to(port: u16) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let network = Arc::new(Network::default());
        network.target.store(port, Ordering::SeqCst);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        listener.set_nonblocking(true).expect("it can");
        let of = Arc::clone(&network);
        runtime.spawn(async move {
            let listener = TcpListener::from_std(listener).expect("in a runtime");
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(connection(client, Arc::clone(&of)));
            }
        });
        Self { port, network, runtime: Some(runtime) }
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// What is sent takes so long in each direction.
    pub(crate) fn delay(self, one_way: Duration) -> Self {
        self.network.delay.store(one_way.as_micros() as u64, Ordering::SeqCst);
        self
    }

    /// Connections on which nothing was sent for so long are forgotten without a word, as a NAT does:
    /// what is sent later goes nowhere.
    pub(crate) fn forgets_after(self, idle: Duration) -> Self {
        self.network.forgets.store(idle.as_millis() as u64, Ordering::SeqCst);
        self
    }

    /// Forgets all connections that there are; new ones work.
    pub(crate) fn forget(&self) {
        self.network.forgotten.store(self.made(), Ordering::SeqCst);
    }

    /// While it is silent nothing is delivered, on any connection, and new ones lead nowhere.
    pub(crate) fn set_silent(&self, silent: bool) {
        self.network.silent.store(silent, Ordering::SeqCst);
    }

    /// Connections made so far.
    pub(crate) fn made(&self) -> u64 {
        self.network.made.load(Ordering::SeqCst)
    }

    /// Connections that the client has not closed.
    pub(crate) fn open(&self) -> u64 {
        self.network.open.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // In place: a runtime can't be dropped inside of another one.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// One connection, as both directions see it.
struct Seen {
    network: Arc<Network>,
    number: u64,
    start: Instant,
    /// When something was sent last, in milliseconds since the start.
    last: AtomicU64,
    forgotten: AtomicBool,
}

impl Seen {
    /// Notes that something was sent, and says whether it gets through.
    fn passes(&self) -> bool {
        let now = self.start.elapsed().as_millis() as u64;
        let idle = now - self.last.swap(now, Ordering::SeqCst).min(now);
        let forgets = self.network.forgets.load(Ordering::SeqCst);
        let all = self.network.forgotten.load(Ordering::SeqCst);
        if forgets > 0 && idle >= forgets || self.number <= all {
            self.forgotten.store(true, Ordering::SeqCst);
        }
        !self.forgotten.load(Ordering::SeqCst)
    }
}

async fn connection(client: TcpStream, network: Arc<Network>) {
    let number = network.made.fetch_add(1, Ordering::SeqCst) + 1;
    network.open.fetch_add(1, Ordering::SeqCst);
    let target = network.target.load(Ordering::SeqCst);
    let Ok(server) = TcpStream::connect(("127.0.0.1", target)).await else {
        network.open.fetch_sub(1, Ordering::SeqCst);
        return;
    };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let seen = Arc::new(Seen {
        network: Arc::clone(&network),
        number,
        start: Instant::now(),
        last: AtomicU64::new(0),
        forgotten: AtomicBool::new(false),
    });
    let ((from_client, to_client), (from_server, to_server)) =
        (client.into_split(), server.into_split());
    tokio::spawn(direction(from_server, to_client, Arc::clone(&seen)));
    direction(from_client, to_server, seen).await;
    network.open.fetch_sub(1, Ordering::SeqCst);
}

/// Ends with what it reads from. An end is delivered like everything else.
async fn direction(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, seen: Arc<Seen>) {
    let (sender, mut way) = mpsc::unbounded_channel::<(Instant, Vec<u8>)>();
    let other = Arc::clone(&seen);
    tokio::spawn(async move {
        while let Some((due, bytes)) = way.recv().await {
            tokio::time::sleep_until(due.into()).await;
            while other.network.silent.load(Ordering::SeqCst) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            if to.write_all(&bytes).await.is_err() {
                return;
            }
        }
        // What is sent has ended, and so has this side.
    });
    let mut buffer = vec![0; 65_536];
    loop {
        let read = from.read(&mut buffer).await.unwrap_or(0);
        let due = Instant::now() + Duration::from_micros(seen.network.delay.load(Ordering::SeqCst));
        match (seen.passes(), read) {
            (true, 0) => return,
            (true, _) => drop(sender.send((due, buffer[..read].to_vec()))),
            // Nobody hears of it: the other side stays open.
            (false, 0) => return std::mem::forget(sender),
            (false, _) => {}
        }
    }
}

#[tokio::test]
async fn the_proxy_drops_connections_silently() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let proxy = Proxy::to(listener.local_addr().expect("an address").port());
    let mut client = TcpStream::connect(("127.0.0.1", proxy.port)).await.expect("it connects");
    let (mut server, _) = listener.accept().await.expect("it is there");
    let mut byte = [0];
    client.write_all(b"1").await.expect("it is sent");
    server.read_exact(&mut byte).await.expect("it arrives");
    proxy.forget();
    client.write_all(b"2").await.expect("it seems to be sent");
    let heard = tokio::time::timeout(Duration::from_millis(100), server.read_exact(&mut byte));
    assert!(heard.await.is_err(), "nothing arrives, not even an end");
    let mut next = TcpStream::connect(("127.0.0.1", proxy.port)).await.expect("it connects");
    let (mut server, _) = listener.accept().await.expect("it is there");
    next.write_all(b"3").await.expect("it is sent");
    server.read_exact(&mut byte).await.expect("it arrives");
    assert_eq!((&byte, proxy.made(), proxy.open()), (b"3", 2, 2));
    assert_eq!(proxy.url(), format!("redis://127.0.0.1:{}/", proxy.port));
}
