//! WebSockets: a layer limits how many a client opens, a `Limiter` what it sends through them.

use std::io;
use std::net::SocketAddr;

use axum::Router;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::extract::{ConnectInfo, State};
use axum::response::Response;
use axum::routing::any;
use tokio::net::TcpListener;
use tower_fixed_window::{FixedWindowLayer, Limiter, Quota};

async fn open(
    upgrade: WebSocketUpgrade,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    State(messages): State<Limiter>,
) -> Response {
    upgrade.on_upgrade(move |socket| echo(socket, peer, messages))
}

/// All sockets of a client share the count of its messages.
async fn echo(mut socket: WebSocket, peer: SocketAddr, messages: Limiter) {
    while let Some(Ok(Message::Text(text))) = socket.recv().await {
        let reply = match messages.check(peer.ip()).await.map(|decision| decision.into_result()) {
            Ok(Ok(())) => text,
            Ok(Err(refused)) => refused.to_string().into(),
            Err(_) => return, // the store failed
        };
        if socket.send(Message::Text(reply)).await.is_err() {
            return;
        }
    }
}

async fn serve(listener: TcpListener) -> io::Result<()> {
    let sockets = FixedWindowLayer::new(Quota::per_hour(2).from_first_request().name("sockets"));
    let messages = Limiter::new(Quota::per_hour(3).from_first_request().name("messages"));
    let app = Router::new().route("/", any(open)).layer(sockets).with_state(messages);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await
}

#[tokio::test]
async fn the_third_socket_and_the_fourth_message_are_refused() {
    use futures_util::{SinkExt, StreamExt};
    use tokio_tungstenite::tungstenite::{Error, Message};
    use tower_fixed_window_stacks::Answer;

    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("ws://{}/", listener.local_addr().expect("bound"));
    tokio::spawn(serve(listener));

    let mut replies = Vec::new();
    for n in 1..=2 {
        let (mut socket, response) = tokio_tungstenite::connect_async(&url).await.expect("open");
        let headers = response.headers().iter();
        let headers = headers.map(|(name, value)| (name.as_str(), value.as_bytes()));
        Answer::new(response.status().as_u16(), headers, "").assert_is(n);
        for _ in 0..2 {
            socket.send(Message::text("hello")).await.expect("sent");
            replies.push(socket.next().await.expect("a reply").expect("readable"));
        }
    }
    assert_eq!(replies[..3], ["hello"; 3].map(Message::text));
    let refused = replies[3].to_text().expect("text");
    assert!(refused.starts_with("rate limit exceeded: 3 of 3 used, retry in "), "{refused}");

    let Err(Error::Http(response)) = tokio_tungstenite::connect_async(&url).await else {
        panic!("a third socket is open");
    };
    let headers = response.headers().iter();
    let headers = headers.map(|(name, value)| (name.as_str(), value.as_bytes()));
    Answer::new(response.status().as_u16(), headers, "").assert_is(3);
}
