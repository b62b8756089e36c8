//! A Unix socket behind a proxy on the same host, such as nginx. The socket has no address, so the
//! proxy is given one, and `client_ip` trusts it.

use std::io;

use axum::{Extension, Router, routing::get};
use tokio::net::UnixListener;
use tower_fixed_window::key::{PeerAddr, client_ip};
use tower_fixed_window::{FixedWindowLayer, Quota};

async fn serve(listener: UnixListener) -> io::Result<()> {
    let proxy = PeerAddr(([127, 0, 0, 1], 0).into());
    let client = client_ip().trusting(["127.0.0.1"]);
    let limit = FixedWindowLayer::new(Quota::per_hour(2).from_first_request().key(client));
    let app = Router::new()
        .route("/", get(async || "hello\n"))
        .layer(limit)
        // Added last, it runs first.
        .layer(Extension(proxy));
    axum::serve(listener, app).await
}

#[tokio::test]
async fn each_client_of_the_proxy_has_a_limit() {
    use tokio::net::UnixStream;
    use tower_fixed_window_stacks::{assert_limited, send};

    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("app.sock");
    tokio::spawn(serve(UnixListener::bind(&path).expect("a new socket")));
    for client in ["192.0.2.7", "192.0.2.8"] {
        assert_limited(async || {
            let stream = UnixStream::connect(&path).await.expect("the server listens");
            send(stream, "GET /", &format!("x-forwarded-for: {client}\r\n"), "").await
        })
        .await;
    }
}
