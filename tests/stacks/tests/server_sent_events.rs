//! Server-sent events: a layer counts the streams that clients open, not their events.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;

use axum::response::sse::{Event, Sse};
use axum::{Router, routing::get};
use futures_util::stream::{self, Stream};
use tokio::net::TcpListener;
use tower_fixed_window::{FixedWindowLayer, Quota};

async fn prices() -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    Sse::new(stream::iter([1, 2, 3].map(|price| Ok(Event::default().data(price.to_string())))))
}

async fn serve(listener: TcpListener) -> io::Result<()> {
    let limit = FixedWindowLayer::new(Quota::per_hour(2).from_first_request());
    let app = Router::new().route("/", get(prices)).layer(limit);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await
}

#[tokio::test]
async fn the_third_stream_is_refused() {
    use tower_fixed_window_stacks::{assert_limited, get};

    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("bound");
    tokio::spawn(serve(listener));
    assert_limited(async || {
        let answer = get(addr).await;
        let events = answer.body.matches("data: ").count();
        assert_eq!(events, if answer.status == 200 { 3 } else { 0 }, "{answer:?}");
        answer
    })
    .await;
}
