//! `cargo run --example failed_logins`
//!
//! Counts only failures: 5 wrong passwords a minute for each client address, and any number of
//! right ones. A request counts until its result is known, so at most 5 attempts are in flight.

use std::net::SocketAddr;

use axum::{Form, Router, http::StatusCode, routing::post};
use tower_fixed_window::{FixedWindowLayer, Quota};

#[derive(serde::Deserialize)]
struct Login {
    user: String,
    password: String,
}

async fn login(Form(login): Form<Login>) -> (StatusCode, String) {
    if login.password == "open sesame" {
        (StatusCode::OK, format!("welcome, {}\n", login.user))
    } else {
        (StatusCode::UNAUTHORIZED, "wrong user or password\n".into())
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limit = std::env::var("LIMIT").map_or(Ok(5), |limit| limit.parse())?;
    let addr = std::env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());

    let failures = FixedWindowLayer::new(Quota::per_minute(limit).name("failed-logins"))
        .count_if(|response| response.status == StatusCode::UNAUTHORIZED);
    let app = Router::new().route("/login", post(login).route_layer(failures));

    let listener = tokio::net::TcpListener::bind(addr).await?;
    let addr = listener.local_addr()?;
    println!("try: curl -i http://{addr}/login -d user=ali -d password=guess");
    println!(
        "and: curl -i http://{addr}/login -d user=ali --data-urlencode 'password=open sesame'"
    );
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
