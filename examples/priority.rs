//! `cargo run --example priority`
//!
//! Exports are not urgent: they stop at 80 of 100 requests a minute, so that the last 20 are left
//! for purchases. Both limits share a counter, since the number of requests is not part of its
//! identity.

use std::net::SocketAddr;

use axum::Router;
use axum::routing::{get, post};
use tower_fixed_window::{FixedWindowLayer, Limit, Quota};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limit = std::env::var("LIMIT").map_or(Ok(100), |limit| limit.parse())?;
    let addr = std::env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());

    let all = Quota::per_minute(limit);
    let not_urgent = all.with_limit(limit * 8 / 10);
    // The route decides the limit, since a client could claim any header.
    let shop = Limit::by_plan(move |parts, _| match parts.uri.path() {
        "/export" => not_urgent,
        _ => all,
    });
    let layer = FixedWindowLayer::new(shop.name("shop"));
    let app = Router::new()
        .route("/export", get(async || "exported\n"))
        .route("/purchase", post(async || "purchased\n"))
        .layer(layer);

    let listener = tokio::net::TcpListener::bind(addr).await?;
    let addr = listener.local_addr()?;
    println!("try: curl -i http://{addr}/export");
    println!("and: curl -i -X POST http://{addr}/purchase");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
