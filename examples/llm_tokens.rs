//! `cargo run --example llm_tokens`
//!
//! Tokens of a language model, 1,000 a minute for each client address. A request is charged an
//! estimate first, and corrected to what it has really used, also if the client disconnects from a
//! stream.

use std::convert::Infallible;
use std::net::SocketAddr;

use axum::body::{Body, Bytes};
use axum::extract::Query;
use axum::response::{IntoResponse, Response};
use axum::{Router, routing::get};
use tower_fixed_window::{FixedWindowLayer, Quota, TrueCost};

/// Asks for a response of this many tokens.
#[derive(serde::Deserialize)]
struct Ask {
    #[serde(default = "some")]
    tokens: u64,
}

fn some() -> u64 {
    50
}

const ESTIMATE: u64 = 100;

/// Responds with all words at once: the cost is known when the response begins.
async fn whole(Query(ask): Query<Ask>) -> Response {
    let mut response =
        format!("{}\n", "word ".repeat(ask.tokens.min(5_000) as usize)).into_response();
    response.extensions_mut().insert(TrueCost::of("tokens", ask.tokens.min(5_000)));
    response
}

/// Streams word by word: the cost is the number of words sent.
async fn streamed(Query(ask): Query<Ask>) -> Response {
    let (cost, mut meter) = TrueCost::metered();
    let words = (1..=ask.tokens.min(5_000)).map(move |sent| {
        meter.set("tokens", sent);
        Ok::<_, Infallible>(Bytes::from("word "))
    });
    let mut response = Body::from_stream(futures_util::stream::iter(words)).into_response();
    response.extensions_mut().insert(cost);
    response
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limit = std::env::var("LIMIT").map_or(Ok(1_000), |limit| limit.parse())?;
    let addr = std::env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());

    let tokens = Quota::per_minute(limit).name("tokens").cost_fn(|_| ESTIMATE).settled();
    let app = Router::new()
        .route("/whole", get(whole))
        .route("/streamed", get(streamed))
        .layer(FixedWindowLayer::new(tokens));

    let listener = tokio::net::TcpListener::bind(addr).await?;
    let addr = listener.local_addr()?;
    println!("try: curl -i 'http://{addr}/whole?tokens=250'");
    println!("and: curl -i 'http://{addr}/streamed?tokens=30'");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
