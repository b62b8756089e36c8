//! `cargo run --example plans`
//!
//! Plans and costs: 60 points an hour for free users, 5,000 for paid users, under one name. A read
//! costs 1 point, a write 5. The authentication layer determines the user.

use std::collections::HashMap;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{Method, StatusCode};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::{Router, routing::get};
use tower_fixed_window::key::extension;
use tower_fixed_window::{FixedWindowLayer, Key, Limit, Quota};

#[derive(Clone)]
struct User {
    id: u64,
    plan: Plan,
}

#[derive(Clone, Copy)]
enum Plan {
    Free,
    Pro,
}

impl From<&User> for Key {
    fn from(user: &User) -> Key {
        Key::from(user.id)
    }
}

type Users = Arc<HashMap<&'static str, User>>;

/// Authenticates users by their tokens, and rejects other requests.
async fn authenticate(
    State(users): State<Users>,
    mut request: Request,
    next: Next,
) -> Result<Response, StatusCode> {
    let token = request.headers().get("authorization").and_then(|value| value.to_str().ok());
    let user = token.and_then(|token| users.get(token)).ok_or(StatusCode::UNAUTHORIZED)?;
    request.extensions_mut().insert(user.clone());
    Ok(next.run(request).await)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // LIMIT overrides both plans.
    let limit = std::env::var("LIMIT").ok().map(|limit| limit.parse()).transpose()?;
    let addr = std::env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let free = Quota::per_hour(limit.unwrap_or(60));
    let pro = Quota::per_hour(limit.unwrap_or(5_000));

    let users = Users::new(HashMap::from([
        ("Bearer free", User { id: 1, plan: Plan::Free }),
        ("Bearer pro", User { id: 2, plan: Plan::Pro }),
    ]));
    let by_plan = Limit::by_plan(move |parts, _key| {
        match parts.extensions.get::<User>().map(|user| user.plan) {
            Some(Plan::Pro) => pro,
            Some(Plan::Free) | None => free,
        }
    });
    let points = by_plan
        .name("api")
        .key(extension::<User>())
        .cost_fn(|parts| if parts.method == Method::GET { 1 } else { 5 });
    let api = FixedWindowLayer::new(points);

    // In axum, the layer added last is the outermost: authentication runs first, then the limit.
    let app = Router::new()
        .route("/", get(async || "read\n").post(async || "written\n"))
        .layer(api)
        .layer(middleware::from_fn_with_state(users, authenticate));

    let listener = tokio::net::TcpListener::bind(addr).await?;
    let addr = listener.local_addr()?;
    println!("try: curl -i http://{addr}/ -H 'authorization: Bearer free'");
    println!("and: curl -i http://{addr}/ -H 'authorization: Bearer pro' -X POST");
    axum::serve(listener, app).await?;
    Ok(())
}
