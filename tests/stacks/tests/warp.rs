//! warp: a filter is a Tower service, and hyper-util serves it.

use std::io;

use http::Request;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tower::{Layer, ServiceExt};
use tower_fixed_window::key::PeerAddr;
use tower_fixed_window::{FixedWindowLayer, Quota};
use warp::Filter;

async fn serve(listener: TcpListener) -> io::Result<()> {
    let limit = FixedWindowLayer::new(Quota::per_hour(2).from_first_request());
    let limited = limit.layer(warp::service(warp::path::end().map(|| String::from("hello\n"))));
    loop {
        let (stream, peer) = listener.accept().await?;
        // Clones of a service share its counts, so each connection has one.
        let service = limited.clone().map_request(move |mut request: Request<_>| {
            request.extensions_mut().insert(PeerAddr(peer));
            request
        });
        tokio::spawn(async move {
            let server = auto::Builder::new(TokioExecutor::new());
            server.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service)).await
        });
    }
}

#[tokio::test]
async fn the_third_request_is_refused() {
    use tower_fixed_window_stacks::{assert_limited, get};

    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("bound");
    tokio::spawn(serve(listener));
    assert_limited(async || get(addr).await).await;
}
