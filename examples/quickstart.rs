//! `cargo run --example quickstart`
//!
//! A limited axum server: 60 requests a minute for each client address.

use std::net::SocketAddr;

use axum::{Router, routing::get};
use tower_fixed_window::{FixedWindowLayer, Quota};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limit = std::env::var("LIMIT").map_or(Ok(60), |limit| limit.parse())?;
    let addr = std::env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());

    let app = Router::new()
        .route("/", get(async || "hello\n"))
        .layer(FixedWindowLayer::new(Quota::per_minute(limit)));

    let listener = tokio::net::TcpListener::bind(addr).await?;
    println!("try: curl -i http://{}/", listener.local_addr()?);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
