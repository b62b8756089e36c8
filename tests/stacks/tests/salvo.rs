//! salvo: its feature `tower-compat` makes a handler of the layer. A handler before it passes the
//! peer's address on.

use salvo::conn::tcp::TcpAcceptor;
use salvo::prelude::*;
use tower_fixed_window::key::PeerAddr;
use tower_fixed_window::{FixedWindowLayer, Quota};

#[handler]
async fn peer(req: &mut Request) {
    if let Some(addr) = req.remote_addr().clone().into_std() {
        req.extensions_mut().insert(PeerAddr(addr));
    }
}

#[handler]
async fn hello() -> &'static str {
    "hello\n"
}

async fn serve(acceptor: TcpAcceptor) {
    let limit = FixedWindowLayer::new(Quota::per_hour(2).from_first_request());
    let router = Router::new().hoop(peer).hoop(limit.compat()).get(hello);
    Server::new(acceptor).serve(router).await;
}

#[tokio::test]
async fn the_third_request_is_refused() {
    use tower_fixed_window_stacks::{assert_limited, get};

    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("bound");
    tokio::spawn(serve(TcpAcceptor::try_from(listener).expect("bound")));
    assert_limited(async || get(addr).await).await;
}
