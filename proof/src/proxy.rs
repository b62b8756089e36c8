//! The network between the nodes and Redis: slow, silent, cut, or leading elsewhere.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::sleep;

/// How the network is.
#[derive(Clone, Debug, Default)]
pub struct Weather {
    /// Where it leads.
    pub port: u16,
    /// For each way.
    pub delay: Duration,
    /// Nothing arrives, and nobody is told.
    pub silent: bool,
    /// All connections that were made under another number are closed.
    pub cut: u64,
}

/// A port of its own in front of a server.
pub struct Proxy {
    pub port: u16,
    weather: Arc<watch::Sender<Weather>>,
}

impl Proxy {
    pub async fn start(to: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("there is a port");
        let port = listener.local_addr().expect("it has an address").port();
        let weather = Arc::new(watch::Sender::new(Weather { port: to, ..Weather::default() }));
        tokio::spawn(accept(listener, Arc::clone(&weather)));
        Self { port, weather }
    }

    pub fn change(&self, change: impl FnOnce(&mut Weather)) {
        self.weather.send_modify(change);
    }
}

async fn accept(listener: TcpListener, weather: Arc<watch::Sender<Weather>>) {
    while let Ok((client, _)) = listener.accept().await {
        let mut weather = weather.subscribe();
        tokio::spawn(async move {
            let made = weather.borrow_and_update().clone();
            // Nobody there: the client's connection is closed.
            let Ok(server) = TcpStream::connect(("127.0.0.1", made.port)).await else { return };
            let _ = (client.set_nodelay(true), server.set_nodelay(true));
            let (from_client, to_client) = client.into_split();
            let (from_server, to_server) = server.into_split();
            let is_cut = {
                let mut weather = weather.clone();
                async move {
                    let _ = weather.wait_for(|now| now.cut != made.cut).await;
                }
            };
            tokio::select! {
                () = carry(from_client, to_server, weather.clone()) => {}
                () = carry(from_server, to_client, weather) => {}
                () = is_cut => {}
            }
        });
    }
}

async fn carry(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut weather: watch::Receiver<Weather>,
) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        let delay = weather.borrow().delay;
        if !delay.is_zero() {
            sleep(delay).await;
        }
        if weather.wait_for(|now| !now.silent).await.is_err() {
            return;
        }
        if to.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
}
