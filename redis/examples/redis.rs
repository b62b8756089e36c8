//! `cargo run -p tower-fixed-window-redis --example redis`
//!
//! Several nodes share one count in Redis. Start the example twice, and send requests to both:
//!
//! ```sh
//! ADDR=127.0.0.1:3001 cargo run -p tower-fixed-window-redis --example redis
//! ADDR=127.0.0.1:3002 cargo run -p tower-fixed-window-redis --example redis
//! ```
//!
//! `REDIS_URL` is the address of Redis, which may start later or fail. `LIMIT` is a quota such as
//! `60/minute`.

use std::net::SocketAddr;

use axum::{Router, routing::get};
use tower_fixed_window::key::{KeyExtractor, header, peer_ip};
use tower_fixed_window::{FixedWindowLayer, Quotas};
use tower_fixed_window_redis::RedisStore;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let env = |name: &str, default: &str| std::env::var(name).unwrap_or_else(|_| default.into());
    let quotas: Quotas = env("LIMIT", "60/minute").parse()?;
    let store = RedisStore::new(env("REDIS_URL", "redis://127.0.0.1/"))?;

    // Any value of the header is a key here. In an app, count by the user that your authentication
    // has verified.
    let limit = quotas.name("demo").key(header("x-api-key").or(peer_ip()));
    let layer = FixedWindowLayer::new(limit.store(store));
    let app = Router::new().route("/", get(async || "hello\n")).layer(layer);

    let listener = tokio::net::TcpListener::bind(env("ADDR", "127.0.0.1:3000")).await?;
    println!("try: curl -i -H 'x-api-key: alice' http://{}/", listener.local_addr()?);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
