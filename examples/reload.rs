//! `cargo run --example reload`
//!
//! Limits from a file that is reloaded while the server runs: edit it, and the next request uses
//! the new limit. Requests counted so far stay counted. `unlimited` lifts it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use axum::{Router, routing::get};
use tower_fixed_window::{FixedWindowLayer, Limiter, Plan, Quota};

/// Watches the file. A file that can't be parsed changes nothing.
async fn follow(file: PathBuf, limiter: Limiter) {
    let mut seen = String::new();
    loop {
        if let Ok(text) = tokio::fs::read_to_string(&file).await
            && text != seen
        {
            match text.trim().parse::<Plan>() {
                Ok(quotas) => {
                    println!("limits: {quotas}");
                    limiter.set_quotas(quotas);
                }
                Err(error) => println!("limits unchanged: {error}"),
            }
            seen = text;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limit = std::env::var("LIMIT").map_or(Ok(60), |limit| limit.parse())?;
    let addr = std::env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let file = std::env::var_os("LIMITS")
        .map_or_else(|| std::env::temp_dir().join("tower-fixed-window-limits.txt"), PathBuf::from);
    std::fs::write(&file, format!("{}\n", Quota::per_minute(limit)))?;

    let limiter = Limiter::new(Quota::per_minute(limit));
    let layer = FixedWindowLayer::new(&limiter);
    tokio::spawn(follow(file.clone(), limiter));
    let app = Router::new().route("/", get(async || "hello\n")).layer(layer);

    let listener = tokio::net::TcpListener::bind(addr).await?;
    println!("try: curl -i http://{}/", listener.local_addr()?);
    println!("and: echo '5/minute, 100/hour' > {}", file.display());
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
