//! Streams, upgrades and other requests beyond plain ones pass unchanged, and count once.

use axum::body::Bytes;
use axum::extract::Request;
use axum::routing::{any, post};
use futures_util::stream;
use http::header::{CONNECTION, CONTENT_LENGTH, UPGRADE};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use crate::prelude::*;

/// Asserts that the next request is the second that counts.
async fn assert_counted_once(addr: SocketAddr) {
    let response = client().get(format!("http://{addr}/counted")).send().await.expect("an answer");
    assert_eq!(response.headers()["x-ratelimit-used"], "2");
}

#[tokio::test]
async fn head_has_the_content_length_of_get() {
    for mood in ANSWERS {
        let app = Router::new().route("/", on_get(async || "hello")).layer(per_minute(9, mood));
        let addr = serve(app).await;
        let response = client().head(format!("http://{addr}/")).send().await.expect("an answer");
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()[CONTENT_LENGTH], "5");
        assert_eq!(response.headers()["x-ratelimit-used"], "1");
        assert_eq!(response.bytes().await.expect("a body"), "");
        assert_counted_once(addr).await;
    }
}

#[tokio::test]
async fn a_refused_head_has_no_body() {
    for mood in ANSWERS {
        let app = Router::new().route("/", on_get(async || "hello")).layer(per_minute(0, mood));
        let addr = serve(app).await;
        let client = client();
        // Twice over one connection: a body that came along would be read as the next answer.
        for _ in 0..2 {
            let response = client.head(format!("http://{addr}/")).send().await.expect("an answer");
            assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
            assert_eq!(response.bytes().await.expect("a body"), "");
        }
    }
}

#[tokio::test]
async fn bodies_stream_both_ways() {
    for mood in ANSWERS {
        // The answer is the request's body, frame by frame.
        let echo = async |request: Request| request.into_body();
        let app = Router::new().route("/", post(echo)).layer(per_minute(9, mood));
        let addr = serve(app).await;

        let (sender, receiver) = mpsc::channel::<Bytes>(1);
        let frames = stream::unfold(receiver, async |mut receiver| {
            receiver.recv().await.map(|frame| (Ok::<_, Infallible>(frame), receiver))
        });
        let request = client().post(format!("http://{addr}/"));
        let request = request.body(reqwest::Body::wrap_stream(frames));
        let mut response = request.send().await.expect("an answer");
        assert_eq!(response.headers()["x-ratelimit-used"], "1");
        for frame in ["one", "two", "three"] {
            // Each comes back before the next one is sent.
            sender.send(frame.into()).await.expect("open");
            assert_eq!(response.chunk().await.expect("a frame").expect("open"), frame);
        }
        drop(sender);
        assert_eq!(response.chunk().await.expect("the end"), None);
        assert_counted_once(addr).await;
    }
}

#[tokio::test]
async fn an_upgraded_connection_belongs_to_the_handler() {
    for mood in ANSWERS {
        let handler = async |mut request: Request| {
            let upgrade = hyper::upgrade::on(&mut request);
            tokio::spawn(async move {
                let mut io = TokioIo::new(upgrade.await.expect("upgraded"));
                let mut ping = [0; 4];
                io.read_exact(&mut ping).await.expect("four bytes");
                assert_eq!(&ping, b"ping");
                io.write_all(b"pong").await.expect("open");
            });
            let fields = [(CONNECTION, "upgrade"), (UPGRADE, "ping")];
            (StatusCode::SWITCHING_PROTOCOLS, fields, Body::empty())
        };
        let app = Router::new().route("/", any(handler)).layer(per_minute(9, mood));
        let addr = serve(app).await;

        let mut socket = TcpStream::connect(addr).await.expect("connected");
        let request = "GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: ping\r\n\r\n";
        socket.write_all(request.as_bytes()).await.expect("open");
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(socket.read_u8().await.expect("a head"));
        }
        let head = String::from_utf8(head).expect("ASCII");
        assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
        assert!(head.contains("\r\nx-ratelimit-used: 1\r\n"), "{head}");
        socket.write_all(b"ping").await.expect("open");
        let mut pong = Vec::new();
        socket.read_to_end(&mut pong).await.expect("an answer");
        assert_eq!(pong, b"pong");
        assert_counted_once(addr).await;
    }
}
