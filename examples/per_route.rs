//! `cargo run --example per_route`
//!
//! A limit per route: 5 logins and 30 searches a minute, for each client address.

use std::net::SocketAddr;

use axum::Router;
use axum::routing::{get, post};
use tower_fixed_window::{FixedWindowLayer, Quota};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limit = |usual| std::env::var("LIMIT").map_or(Ok(usual), |limit| limit.parse());
    let addr = std::env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());

    // Each layer has its own count. `x-ratelimit-resource` has the name of the limit.
    let login = FixedWindowLayer::new(Quota::per_minute(limit(5)?).name("login"));
    let search = FixedWindowLayer::new(Quota::per_minute(limit(30)?).name("search"));

    let app = Router::new()
        .route("/login", post(async || "welcome\n").route_layer(login))
        .route("/search", get(async || "found\n").route_layer(search));

    let listener = tokio::net::TcpListener::bind(addr).await?;
    let addr = listener.local_addr()?;
    println!("try: curl -i -X POST http://{addr}/login");
    println!("     curl -i http://{addr}/search");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
