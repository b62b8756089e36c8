use std::net::SocketAddr;

use axum::Router;
use axum::routing::{get, post};
use tower_fixed_window::{FixedWindowLayer, Quota};

fn app() -> Router {
    let login = Quota::per_minute(5).and(Quota::per_hour(50)).name("login");
    let search = Quota::per_minute(30).name("search");

    Router::new()
        .route("/login", post(async || "welcome\n").route_layer(FixedWindowLayer::new(login)))
        .route("/search", get(async || "found\n").route_layer(FixedWindowLayer::new(search)))
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
