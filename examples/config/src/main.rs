//! `cargo run -p config`
//!
//! Limits from a file, or from a built-in text: `LIMITS=limits.toml cargo run -p config`.

use std::net::SocketAddr;

use axum::Router;
use axum::routing::{get, post};
use serde::Deserialize;
use tower::util::option_layer;
use tower_fixed_window::{FixedWindowLayer, Plan, Quota, Quotas};

const BUILT_IN: &str = r#"
login = "5/minute"
search = "30/minute, 1_000 per hour"
internal = "unlimited"
"#;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Limits {
    login: Quotas,
    search: Quotas,
    /// A plan may have no limit.
    internal: Plan,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let addr = std::env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let text = match std::env::var("LIMITS") {
        Ok(file) => std::fs::read_to_string(file)?,
        Err(_) => BUILT_IN.into(),
    };
    // An invalid limit fails at startup, and the error has its line and column.
    let mut limits: Limits = toml::from_str(&text).unwrap_or_else(|error| {
        eprintln!("{error}");
        std::process::exit(1)
    });
    if let Ok(limit) = std::env::var("LIMIT") {
        let quota = Quota::per_minute(limit.parse()?);
        limits = Limits { login: quota.into(), search: quota.into(), internal: quota.into() };
    }

    let login = FixedWindowLayer::new(limits.login.name("login"));
    let search = FixedWindowLayer::new(limits.search.name("search"));
    // Plans without a limit have no layer.
    let internal = limits.internal.quotas();
    let internal = internal.map(|quotas| FixedWindowLayer::new(quotas.name("internal")));
    let app = Router::new()
        .route("/login", post(async || "welcome\n").route_layer(login))
        .route("/search", get(async || "found\n").route_layer(search))
        .route("/internal", get(async || "welcome back\n").route_layer(option_layer(internal)));

    let listener = tokio::net::TcpListener::bind(addr).await?;
    let addr = listener.local_addr()?;
    println!("try: curl -i -X POST http://{addr}/login  # {}", limits.login);
    println!("     curl -i http://{addr}/search  # {}", limits.search);
    println!("     curl -i http://{addr}/internal  # {}", limits.internal);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
