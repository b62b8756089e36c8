//! `cargo run -p stacks --example tonic`
//!
//! gRPC: a tonic server with a limit on one method, 60 calls a minute for each client address. The
//! service is gRPC's own health check, so that there is no code to generate. A refused call gets
//! RESOURCE_EXHAUSTED, with the same headers as metadata.
//!
//! `cargo run -p stacks --example tonic -- http://127.0.0.1:3000` is a client that calls until it
//! is refused.

use tonic::transport::Endpoint;
use tonic::transport::server::{Server, TcpConnectInfo, TcpIncoming};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tower_fixed_window::{FixedWindowLayer, Grpc, Key, Quota};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    if let Some(url) = std::env::args().nth(1) {
        return call_until_refused(url).await;
    }
    let limit = std::env::var("LIMIT").map_or(Ok(60), |limit| limit.parse())?;
    let addr = std::env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());

    // tonic puts the peer's address into each request.
    let checks = Quota::per_minute(limit).name("health").key_fn(|parts| {
        let peer: &TcpConnectInfo = parts.extensions.get()?;
        Some(Key::from(peer.remote_addr()?.ip()))
    });
    let checks = FixedWindowLayer::new(checks)
        // Other methods are not limited: `Watch` is one long call.
        .skip(|parts| parts.uri.path() != "/grpc.health.v1.Health/Check")
        .reject(Grpc);
    let (_reporter, health) = tonic_health::server::health_reporter();

    let listener = tokio::net::TcpListener::bind(addr).await?;
    println!("try: cargo run -p stacks --example tonic -- http://{}/", listener.local_addr()?);
    Server::builder()
        .layer(checks)
        .add_service(health)
        .serve_with_incoming(TcpIncoming::from(listener))
        .await?;
    Ok(())
}

async fn call_until_refused(url: String) -> Result<(), Box<dyn std::error::Error>> {
    let channel = Endpoint::from_shared(url)?.connect().await?;
    let mut client = HealthClient::new(channel);
    loop {
        match client.check(HealthCheckRequest::default()).await {
            Ok(response) => {
                let left = response.metadata().get("x-ratelimit-remaining");
                println!("serving; {} left", left.ok_or("no limit")?.to_str()?);
            }
            Err(status) => {
                println!("{:?}: {}", status.code(), status.message());
                for field in status.metadata().clone().into_headers() {
                    if let (Some(name), value) = field {
                        println!("{name}: {}", value.to_str()?);
                    }
                }
                return Ok(());
            }
        }
    }
}
