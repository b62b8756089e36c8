//! `cargo run -p stacks --example outbound`
//!
//! A client that respects the limit of an API. The server here allows 5 requests in 2 seconds and
//! refuses the sixth. The client's own limit has the same windows and waits for them, so that none
//! of its 12 requests is refused.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{Request, Response};
use axum::{Router, routing::get};
use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
use tower_fixed_window::{FixedWindowLayer, Headers, Key, Limiter, Quota};

const WINDOW: Duration = Duration::from_secs(2);

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limit = std::env::var("LIMIT").map_or(Ok(5), |limit| limit.parse())?;

    // Stands in for the API of another team.
    let theirs = FixedWindowLayer::new(Quota::new(limit, WINDOW));
    let app = Router::new().route("/", get(async || "hello\n")).layer(theirs);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/", listener.local_addr()?);
    tokio::spawn(async move {
        axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await
    });

    // Clocks differ, and requests take time to arrive. Windows that begin slightly later than the
    // server's prevent requests from arriving early.
    let ours = Quota::new(limit, WINDOW).starting_at(Duration::from_millis(100));
    let limiter = Limiter::new(ours.key(Key::global()));
    // Without headers: the numbers of this limit are not for the clients of this program.
    let layer =
        FixedWindowLayer::new(&limiter).queue(100, Duration::from_secs(60)).headers(Headers::None);
    // Requests can still leave at the end of one window and arrive in the server's next one, where
    // they take the place of others. So this example begins with a window. If requests come at any
    // time, use a slightly lower limit than the server's, and handle a 429 anyway.
    let left = limiter.peek(Key::global()).await?.reset_after();
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
