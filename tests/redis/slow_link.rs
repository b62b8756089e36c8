//! A server that is far away: a proxy that holds back what passes it, in each direction and in order.
//!
//! Threads sleep more precisely than a runtime's timers, and take nothing of its time.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

type Way = Arc<Mutex<Box<dyn FnMut() -> Duration + Send>>>;

/// The address of a server, as seen from far away.
pub(crate) struct Far {
    pub(crate) port: u16,
    way: Way,
}

impl Far {
    /// Everything takes so long in each direction.
    pub(crate) fn from(port: u16, distance: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let near = listener.local_addr().expect("it").port();
        let way: Way = Arc::new(Mutex::new(Box::new(move || distance)));
        let ways = Arc::clone(&way);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(("127.0.0.1", port)) else { continue };
                carry(&client, &server, &ways);
                carry(&server, &client, &ways);
            }
        });
        Self { port: near, way }
    }

    /// From now on what is read takes as long as `way` says, each time.
    #[allow(dead_code, reason = "the bench goes one way only")]
    pub(crate) fn becomes(&self, way: impl FnMut() -> Duration + Send + 'static) {
        *self.way.lock().unwrap_or_else(PoisonError::into_inner) = Box::new(way);
    }
}

fn carry(from: &TcpStream, to: &TcpStream, way: &Way) {
    let (mut from, to) = (from.try_clone().expect("a socket"), to.try_clone().expect("a socket"));
    let way = Arc::clone(way);
    let (sender, under_way) = channel();
    // Or what is delivered here would wait for the other side's confirmations.
    to.set_nodelay(true).expect("a socket");
    thread::spawn(move || send(&mut from, &way, &sender));
    thread::spawn(move || deliver(to, &under_way));
}

fn send(from: &mut TcpStream, way: &Way, to: &Sender<(Instant, Vec<u8>)>) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        let takes = way.lock().unwrap_or_else(PoisonError::into_inner)();
        if to.send((Instant::now() + takes, buffer[..n].to_vec())).is_err() {
            break;
        }
    }
}

fn deliver(mut to: TcpStream, under_way: &Receiver<(Instant, Vec<u8>)>) {
    for (due, bytes) in under_way {
        // Until then nothing passes it: a packet that is lost holds back those after it.
        thread::sleep(due.saturating_duration_since(Instant::now()));
        if to.write_all(&bytes).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}
