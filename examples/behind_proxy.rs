//! `cargo run --example behind_proxy`
//!
//! A server behind a proxy: responds with the address that it would count, so that you can check a
//! deployment with curl. `TRUSTED` has the proxies' networks, `SOURCE` names the header that they
//! write.

use std::net::SocketAddr;

use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::{Router, routing::get};
use tower_fixed_window::key::client_ip;
use tower_fixed_window::{FixedWindowLayer, Key, Quota};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let var = |name, usual: &str| std::env::var(name).unwrap_or_else(|_| usual.into());
    let limit = var("LIMIT", "60").parse()?;
    let addr = var("ADDR", "127.0.0.1:3000");
    let trusted = var("TRUSTED", "");
    let source = var("SOURCE", "x-forwarded-for");
    let prefix = var("PREFIX", "64").parse()?;

    // By default, no proxy is trusted, and the peer is the client.
    let trusted = trusted.split(',').map(str::trim).filter(|network| !network.is_empty());
    let client = client_ip()
        .trusting(trusted)
        .from_header(source.parse::<axum::http::HeaderName>()?)
        .ipv6_prefix(prefix);

    let counted = client.clone();
    let respond = async move |parts: Parts| match counted.address(&parts) {
        // Responses are 192.0.2.7, or 2001:db8::7 (2001:db8::/64) with the prefix that is the key.
        Ok(address) if address.is_ipv4() => Ok(format!("{address}\n")),
        Ok(address) => {
            let key = Key::from_ip(address, prefix).readable();
            Ok(format!("{address} ({})\n", key.replace('_', "/")))
        }
        Err(missing) => Err((StatusCode::INTERNAL_SERVER_ERROR, missing.to_string())),
    };
    let app = Router::new()
        .route("/", get(respond))
        .layer(FixedWindowLayer::new(Quota::per_minute(limit).key(client)));

    let listener = tokio::net::TcpListener::bind(addr).await?;
    let addr = listener.local_addr()?;
    println!("try: curl -i http://{addr}/ -H '{source}: 192.0.2.7'");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
