//! `cargo run -p stacks --example proxy_protocol`
//!
//! A server behind a load balancer that sends the client's address by the PROXY protocol, in
//! version 1 (a line of text) or 2 (binary), before the first byte of HTTP. Here, the example sends
//! it by itself: of two clients, each has a limit of its own.

use std::time::Duration;

use axum::{Router, http::Request};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::{server::conn::auto, service::TowerToHyperService};
use proxy_header::{ParseConfig, io::ProxiedStream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tower::ServiceExt;
use tower_fixed_window::key::PeerAddr;
use tower_fixed_window::{FixedWindowLayer, Quota};

/// In a task for each connection that the listener accepts.
async fn serve(stream: TcpStream, app: Router) -> Option<()> {
    let balancer = stream.peer_addr().ok()?;
    if !balancer.ip().is_loopback() {
        return None; // in your app: if it is not an address of the load balancer
    }
    let stream = ProxiedStream::create_from_tokio(stream, ParseConfig::default());
    let stream = timeout(Duration::from_secs(5), stream).await.ok()?.ok()?;
    // A health check by the load balancer itself comes without an address.
    let client = stream.proxy_header().proxied_address().map_or(balancer, |found| found.source);
    let service = app.map_request(move |mut request: Request<_>| {
        request.extensions_mut().insert(PeerAddr(client));
        request
    });
    let server = auto::Builder::new(TokioExecutor::new());
    server.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service)).await.ok()
}

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let limit = FixedWindowLayer::new(Quota::per_day(1).from_first_request());
    let app = Router::new().route("/", axum::routing::get(async || "hello\n")).layer(limit);

    let listener = TcpListener::bind("127.0.0.1:0").await?;
    for client in ["192.0.2.7", "192.0.2.8", "192.0.2.7"] {
        let mut stream = TcpStream::connect(listener.local_addr()?).await?;
        tokio::spawn(serve(listener.accept().await?.0, app.clone()));
        let header = format!("PROXY TCP4 {client} 10.0.0.1 4711 80\r\n");
        let request = format!("{header}GET / HTTP/1.1\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut response = String::new();
        stream.read_to_string(&mut response).await?;
        println!("{client}: {}", response.lines().next().unwrap_or_default());
    }
    Ok(())
}
