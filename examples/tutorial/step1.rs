use std::net::SocketAddr;

use axum::Router;
use axum::routing::{get, post};

fn app() -> Router {
    Router::new()
        .route("/login", post(async || "welcome\n"))
        .route("/search", get(async || "found\n"))
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
