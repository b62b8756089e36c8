//! `cargo run --example hyper`
//!
//! A limited service on hyper's server, without axum: HTTP/1 and HTTP/2.

use std::convert::Infallible;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tower::{Layer, ServiceExt, service_fn};
use tower_fixed_window::key::PeerAddr;
use tower_fixed_window::{FixedWindowLayer, Quota};

async fn hello(_: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new("hello\n".into()))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limit = std::env::var("LIMIT").map_or(Ok(60), |limit| limit.parse())?;
    let addr = std::env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());

    let limited = FixedWindowLayer::new(Quota::per_minute(limit))
        .drain_refused::<Incoming>()
        .layer(service_fn(hello));

    let listener = tokio::net::TcpListener::bind(addr).await?;
    println!("try: curl -i http://{}/", listener.local_addr()?);
    loop {
        let Ok((stream, peer)) = listener.accept().await else { continue };
        // Clones of a service share its counters, so there is one for each connection.
        let service = limited.clone().map_request(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(PeerAddr(peer));
            request
        });
        tokio::spawn(async move {
            let server = auto::Builder::new(TokioExecutor::new());
            // An error here means that the client disconnected.
            server.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service)).await
        });
    }
}
