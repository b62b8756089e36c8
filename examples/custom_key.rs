//! `cargo run --example custom_key`
//!
//! Counts by the user that an authentication layer has verified, or by address without one.

use std::net::SocketAddr;

use axum::extract::Request;
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::{Router, routing::get};
use tower_fixed_window::key::{extension, peer_ip};
use tower_fixed_window::{FixedWindowLayer, Key, KeyExtractor, Quota};

#[derive(Clone)]
struct User {
    id: u64,
}

impl From<&User> for Key {
    fn from(user: &User) -> Self {
        Key::from(user.id)
    }
}

/// Puts the user into the request's extensions if the API key is known.
async fn auth(mut request: Request, next: Next) -> Response {
    let api_key = request.headers().get("x-api-key").map(|value| value.as_bytes());
    let user = match api_key {
        Some(b"alpha") => Some(User { id: 1 }),
        Some(b"beta") => Some(User { id: 2 }),
        _ => None,
    };
    if let Some(user) = user {
        request.extensions_mut().insert(user);
    }
    next.run(request).await
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limit = std::env::var("LIMIT").map_or(Ok(60), |limit| limit.parse())?;
    let addr = std::env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());

    // A request with an invented API key has no user, so it counts by its address.
    let per_user =
        FixedWindowLayer::new(Quota::per_minute(limit).key(extension::<User>().or(peer_ip())));

    let app = Router::new()
        .route("/", get(async || "hello\n"))
        .layer(per_user)
        // In axum, the layer added last runs first: the user is known when the limit counts.
        .layer(middleware::from_fn(auth));

    let listener = tokio::net::TcpListener::bind(addr).await?;
    let addr = listener.local_addr()?;
    println!("try: curl -i http://{addr}/");
    println!("     curl -i -H 'x-api-key: alpha' http://{addr}/");
    println!("     curl -i -H 'x-api-key: beta' http://{addr}/");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
