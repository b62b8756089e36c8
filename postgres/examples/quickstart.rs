//! `DATABASE_URL=postgres://.. cargo run -p tower-fixed-window-postgres --example quickstart`
//!
//! A limited axum server whose counters are in Postgres. Start a second one with `PORT=3001`: both
//! have one count.

use std::env::var;
use std::net::{Ipv4Addr, SocketAddr};

use axum::{Router, routing::get};
use tower_fixed_window::{FixedWindowLayer, Quota};
use tower_fixed_window_postgres::PostgresStore;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = var("DATABASE_URL").unwrap_or("postgres://postgres@127.0.0.1/postgres".to_owned());
    let store = PostgresStore::new(&url)?;
    store.create_tables().await?;
    let limit = Quota::per_minute(60).name("api").store(store);
    let app = Router::new().route("/", get(async || "hello\n")).layer(FixedWindowLayer::new(limit));

    let port = var("PORT").map_or(Ok(3000), |port| port.parse())?;
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
    println!("http://{}/", listener.local_addr()?);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
