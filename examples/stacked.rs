//! `cargo run --example stacked`
//!
//! Three limits on one route, decided together: 5 requests in 10 seconds for each API key, 20 a
//! minute for each address, 100 a minute for all. A request has to pass all of them, and if one
//! refuses, none counts it. (Of layers around each other, the outer one counts what the inner one
//! refuses, so the one with the narrower key would go outside.) The response has the headers of the
//! limit with the smallest share left, and `x-ratelimit-resource` names that limit.
//!
//! `LIMIT` replaces all three limits. The headers of the IETF draft have an item for each limit.

use std::net::SocketAddr;
use std::time::Duration;

use axum::{Router, routing::get};
use tower_fixed_window::key::{header, peer_ip};
use tower_fixed_window::{FixedWindowLayer, Headers, Key, KeyExtractor, Quota};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limit = |usual| std::env::var("LIMIT").map_or(Ok(usual), |limit| limit.parse());
    let addr = std::env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());

    // The key is not verified, so the limit by address is for clients that invent keys.
    let by_key = header("x-api-key").or(peer_ip());
    let layer = FixedWindowLayer::new([
        Quota::per_minute(limit(100)?).name("all").key(Key::global()),
        Quota::per_minute(limit(20)?).name("address"),
        Quota::new(limit(5)?, Duration::from_secs(10)).name("key").key(by_key),
    ]);
    let layer = layer.headers(Headers::GitHubAndIetfDraft10);
    let app = Router::new().route("/", get(async || "hello\n")).layer(layer);

    let listener = tokio::net::TcpListener::bind(addr).await?;
    let addr = listener.local_addr()?;
    println!("try: curl -i http://{addr}/");
    println!("     curl -i -H 'x-api-key: alpha' http://{addr}/");
    println!("     curl -i -H 'x-api-key: beta' http://{addr}/");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
