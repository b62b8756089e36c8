//! `cargo run -p stacks --example outbound`
//!
//! The other side: a client that stays inside somebody else's limit. The server here allows 5
//! requests in 2 seconds and refuses the sixth; the client's own limit has the same windows and
//! waits for them, so that none of its 12 requests is refused.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{Request, Response};
use axum::{Router, routing::get};
use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
use tower_fixed_window::key::global;
use tower_fixed_window::{FixedWindowLayer, Key, Quota};

const WINDOW: Duration = Duration::from_secs(2);

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limit = std::env::var("LIMIT").map_or(Ok(5), |limit| limit.parse())?;

    // Somebody else's API.
    let theirs = FixedWindowLayer::new(Quota::new(limit, WINDOW));
    let app = Router::new().route("/", get(async || "hello\n")).layer(theirs);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/", listener.local_addr()?);
    tokio::spawn(async move {
        axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await
    });

    // Clocks differ, and requests take time to arrive. Windows that begin a little later than theirs
    // keep those that waited for a window from being early.
    let ours = Quota::new(limit, WINDOW).starting_at(Duration::from_millis(100));
    let layer = FixedWindowLayer::new(ours).key(global()).queue(100, Duration::from_secs(60));
    // They don't help one that leaves in the last moment of a window and arrives in their next one,
    // where it takes the place of another. So this begins with a window. Where requests come at any
    // time, ask for a little less than is granted, and obey a 429 all the same.
    let left = layer.control().peek(Key::global()).await?.reset_after();
    tokio::time::sleep(left).await;

    // Any HTTP client is a service: this is reqwest's.
    let client = reqwest::Client::new();
    let mut api =
        ServiceBuilder::new().layer(layer).service(service_fn(move |request: Request<Body>| {
            let client = client.clone();
            async move {
                let request =
                    request.map(|body| reqwest::Body::wrap_stream(body.into_data_stream()));
                let response = client.execute(request.try_into()?).await?;
                Ok::<_, reqwest::Error>(Response::from(response).map(Body::new))
            }
        }));

    let started = Instant::now();
    for i in 1..=12 {
        let request = Request::get(&url).body(Body::empty())?;
        let response = api.ready().await?.call(request).await?;
        println!("{:>5} ms  request {i:>2}: {}", started.elapsed().as_millis(), response.status());
        assert!(response.status().is_success(), "none is refused");
    }
    Ok(())
}
