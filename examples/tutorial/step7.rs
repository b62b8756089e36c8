use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::http::header::AUTHORIZATION;
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::routing::{get, post};
use metrics_exporter_prometheus::PrometheusBuilder;
use tower_fixed_window::key::{client_ip, extension};
use tower_fixed_window::{
    FixedWindowLayer, Key, KeyExtractor, Limit, MemoryStore, Plan, Quota, Store,
};
use tower_fixed_window_redis::RedisStore;

#[derive(Clone)]
struct User {
    id: u64,
    plan: &'static str,
}

impl From<&User> for Key {
    fn from(user: &User) -> Key {
        Key::from(user.id)
    }
}

/// Your authentication, which verifies the token.
async fn authenticate(mut request: Request, next: Next) -> Response {
    let user = match request.headers().get(AUTHORIZATION).map(|token| token.as_bytes()) {
        Some(b"Bearer ann") => Some(User { id: 1, plan: "pro" }),
        Some(b"Bearer bob") => Some(User { id: 2, plan: "internal" }),
        _ => None,
    };
    if let Some(user) = user {
        request.extensions_mut().insert(user);
    }
    next.run(request).await
}

fn app(store: Arc<dyn Store>) -> Router {
    let address = client_ip().trusting(["127.0.0.1"]);
    let login = Quota::per_minute(5).and(Quota::per_hour(50)).name("login").key(address.clone());
    let search = Limit::by_plan(|parts, _key| {
        let user = parts.extensions.get::<User>();
        match user.map(|user| user.plan) {
            Some("internal") => Plan::UNLIMITED,
            Some("pro") => Quota::per_minute(300).into(),
            _ => Quota::per_minute(30).into(),
        }
    });
    let search = search.name("search").key(extension::<User>().or(address));

    let login = FixedWindowLayer::new(login.store(store.clone()));
    let search = FixedWindowLayer::new(search.store(store));
    Router::new()
        .route("/login", post(async || "welcome\n").route_layer(login))
        .route("/search", get(async || "found\n").route_layer(search))
        .layer(from_fn(authenticate))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let store: Arc<dyn Store> = match std::env::var("REDIS_URL") {
        Ok(url) => Arc::new(RedisStore::new(url)?),
        Err(_) => Arc::new(MemoryStore::new()),
    };
    let metrics = PrometheusBuilder::new().install_recorder()?;
    let app = app(store).route("/metrics", get(async move || metrics.render()));

    let addr = std::env::var("ADDR").unwrap_or("127.0.0.1:3000".into());
    let listener = tokio::net::TcpListener::bind(addr).await?;
    println!("try: curl -i http://{}/search", listener.local_addr()?);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
