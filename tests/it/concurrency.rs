//! Over real sockets exactly the limit passes, however many connections there are.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::serve::ListenerExt;
use axum::{Router, routing::get};
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::Barrier;
use tokio::task::JoinSet;
use tower::{ServiceBuilder, service_fn};
use tower_fixed_window::key::PeerAddr;
use tower_fixed_window::{FixedWindowLayer, Limit, Quota};

use crate::support::{ANSWERS, TestStore, client};

const REQUESTS: usize = 2_000;
const CONNECTIONS: usize = 64;
const LIMIT: usize = 100;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn exactly_the_limit_passes_of_2000_requests_over_64_connections() {
    for (mood, by_axum) in ANSWERS.into_iter().flat_map(|mood| [true, false].map(|of| (mood, of))) {
        let store = TestStore::new(mood);
        let limit = Limit::new(Quota::per_minute(LIMIT as u64)).store(store.clone());
        let limit = FixedWindowLayer::new(limit);
        let (addr, accepted) =
            if by_axum { serve_axum(limit).await } else { serve_hyper(limit).await };
        let answers = flood(addr).await;
        assert_eq!(answers, BTreeMap::from([(200, LIMIT), (429, REQUESTS - LIMIT)]));
        assert_eq!(accepted.load(Ordering::SeqCst), CONNECTIONS);

        let again = || client().get(format!("http://{addr}/")).send();
        assert_eq!(again().await.expect("an answer").status(), 429, "the window still runs");
        store.clock.advance(Duration::from_secs(60));
        assert_eq!(again().await.expect("an answer").status(), 200, "the next window");
    }
}

/// Sends all requests, and counts the answers by their status.
async fn flood(addr: SocketAddr) -> BTreeMap<u16, usize> {
    let all_connected = Arc::new(Barrier::new(CONNECTIONS));
    let mut clients = JoinSet::new();
    for i in 0..CONNECTIONS {
        let all_connected = Arc::clone(&all_connected);
        clients.spawn(async move {
            // A client has a single connection, since its requests come one by one.
            let client = client();
            all_connected.wait().await;
            let mut answers = BTreeMap::<u16, usize>::new();
            for _ in (i..REQUESTS).step_by(CONNECTIONS) {
                let response = client.get(format!("http://{addr}/")).send().await.expect("sent");
                *answers.entry(response.status().as_u16()).or_default() += 1;
                response.bytes().await.expect("a body");
            }
            answers
        });
    }
    let mut sum = BTreeMap::<u16, usize>::new();
    while let Some(answers) = clients.join_next().await {
        for (status, count) in answers.expect("no panic") {
            *sum.entry(status).or_default() += count;
        }
    }
    sum
}

async fn serve_axum(limit: FixedWindowLayer) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("bound");
    let accepted = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&accepted);
    let listener = listener.tap_io(move |_| {
        counter.fetch_add(1, Ordering::SeqCst);
    });
    let app = Router::new().route("/", get(async || "hello")).layer(limit);
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, app).await });
    (addr, accepted)
}

async fn serve_hyper(limit: FixedWindowLayer) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("bound");
    let accepted = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&accepted);
    let limited = ServiceBuilder::new().layer(limit).service(service_fn(hello));
    tokio::spawn(async move {
        while let Ok((stream, peer)) = listener.accept().await {
            counter.fetch_add(1, Ordering::SeqCst);
            let service = ServiceBuilder::new()
                .map_request(move |mut request: Request<Incoming>| {
                    request.extensions_mut().insert(PeerAddr(peer));
                    request
                })
                .service(limited.clone());
            let service = TowerToHyperService::new(service);
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        }
    });
    (addr, accepted)
}

async fn hello(_: Request<Incoming>) -> Result<Response<Full<Bytes>>, std::convert::Infallible> {
    Ok(Response::new(Full::from("hello")))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_refusal_by_one_of_two_quotas_charges_neither() {
    const MINUTE: usize = 33;
    const HOUR: usize = 2_000;
    for mood in ANSWERS {
        let store = TestStore::new(mood);
        // The start of an hour.
        store.clock.set_ms(1_699_999_200_000);
        let quotas = Quota::per_minute(MINUTE as u64).and(Quota::per_hour(HOUR as u64));
        let limiter = quotas.name("search").store(store.clone());
        let (addr, _) = serve_axum(FixedWindowLayer::new(&limiter)).await;
        let address = std::net::IpAddr::from([127, 0, 0, 1]);
        let used = async || {
            let standing = limiter.peek(address).await.expect("the store answers");
            standing.usage().iter().map(|s| s.used() as usize).collect::<Vec<_>>()
        };

        // Refused by the minute: the hour has only what passed.
        assert_eq!(flood(addr).await[&200], MINUTE);
        assert_eq!(used().await, [MINUTE, MINUTE]);

        // The hour's other tokens but ten are spent elsewhere, under the same name.
        let spent = HOUR - MINUTE - 10;
        store.clock.set_ms(1_699_999_200_000 + 60_000);
        let elsewhere = Quota::per_hour(HOUR as u64).name("search").store(store.clone());
        assert!(elsewhere.charge(address, spent as u64).await.expect("an answer").is_ok());

        // Refused by the hour: the minute has only what passed.
        assert_eq!(flood(addr).await[&200], 10);
        assert_eq!(used().await, [10, HOUR]);
        store.clock.set_ms(1_699_999_200_000 + 120_000);
        assert_eq!(flood(addr).await.get(&200), None);
        assert_eq!(used().await, [0, HOUR]);
    }
}
