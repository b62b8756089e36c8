use std::net::SocketAddr;

use axum::Router;
use axum::extract::Request;
use axum::http::header::AUTHORIZATION;
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::routing::{get, post};
use tower_fixed_window::key::{client_ip, extension};
use tower_fixed_window::{FixedWindowLayer, Key, KeyExtractor, Quota};

#[derive(Clone)]
struct User {
    id: u64,
}

impl From<&User> for Key {
    fn from(user: &User) -> Key {
        Key::from(user.id)
    }
}

/// Your authentication, which verifies the token.
async fn authenticate(mut request: Request, next: Next) -> Response {
    let user = match request.headers().get(AUTHORIZATION).map(|token| token.as_bytes()) {
        Some(b"Bearer ann") => Some(User { id: 1 }),
        Some(b"Bearer bob") => Some(User { id: 2 }),
        _ => None,
    };
    if let Some(user) = user {
        request.extensions_mut().insert(user);
    }
    next.run(request).await
}

fn app() -> Router {
    let address = client_ip().trusting(["127.0.0.1"]);
    let login = Quota::per_minute(5).and(Quota::per_hour(50)).name("login").key(address.clone());
    let search = Quota::per_minute(30).name("search").key(extension::<User>().or(address));

    Router::new()
        .route("/login", post(async || "welcome\n").route_layer(FixedWindowLayer::new(login)))
        .route("/search", get(async || "found\n").route_layer(FixedWindowLayer::new(search)))
        .layer(from_fn(authenticate))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let app = app();

    let addr = std::env::var("ADDR").unwrap_or("127.0.0.1:3000".into());
    let listener = tokio::net::TcpListener::bind(addr).await?;
    println!("try: curl -i http://{}/search", listener.local_addr()?);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
