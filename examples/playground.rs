//! `cargo run --example playground`
//!
//! A page that shows the limiter at work: windows that fill and turn, and the attack on the
//! boundary between two of them, against four ways to lay windows.
//!
//! The page is `examples/playground/`: nothing in it is simulated. It sends requests to the limited
//! routes below and shows what comes back; when to send is the browser's affair.
//!
//! `LIMIT` replaces the 5 requests, `WINDOW` the 10 seconds.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE};
use axum::http::request::Parts;
use axum::response::IntoResponse;
use axum::{Extension, Json, Router, routing::get};
use serde_json::{Map, Value, json};
use tower_fixed_window::key::{header, peer_ip};
use tower_fixed_window::{
    Decision, FixedWindowLayer, Handle, Key, KeyExtractor, MemoryStore, Quota, Quotas,
};

/// Everything comes from this server, and nothing inline is run.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; \
    connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Each page invents a name for itself, so that visitors behind one address don't spend each
/// other's requests, and see staggered windows differ. Whoever invents a name has a fresh count:
/// right for a demonstration, wrong for an API, whose key is one that it has verified.
fn visitor() -> impl KeyExtractor {
    header("x-visitor").or(peer_ip())
}

/// The limits that the page shows, by the name of their route.
fn limits(limit: u64, window: Duration) -> [(&'static str, Quotas); 4] {
    let aligned = Quota::new(limit, window);
    let two = Quota::new(limit, window).and(Quota::new(limit, window).starting_at(window / 2));
    let staggered = Quota::new(limit, window).staggered();
    let first = Quota::new(limit, window).from_first_request();
    [
        ("aligned", aligned.into()),
        ("two-at-once", two),
        ("staggered", staggered.into()),
        ("first-request", first.into()),
    ]
}

type Handles = Arc<[(&'static str, Handle)]>;

/// How the visitor stands under each limit; asking costs nothing. It also tells the page how its
/// clock differs from the server's.
async fn standing(State(limits): State<Handles>, parts: Parts) -> Result<Json<Value>, StatusCode> {
    let mut key = Key::default();
    visitor().extract(&parts, &mut key).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    let mut stands = Map::new();
    for (name, handle) in limits.iter() {
        let peek = handle.peek(key.clone()).await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
        stands.insert(name.to_string(), told(&peek));
    }
    Ok(Json(stands.into()))
}

/// What is behind a limit: it answers with the decision that let it be called.
async fn passed(Extension(decision): Extension<Decision>) -> Json<Value> {
    Json(told(&decision))
}

/// A decision to the millisecond; `x-ratelimit-reset` is in seconds.
fn told(decision: &Decision) -> Value {
    let quotas = decision.standings().iter().map(|quota| {
        let (window, ends) = (quota.window().as_millis() as u64, ms(quota.reset_at()));
        json!({"limit": quota.limit(), "used": quota.used(), "window": window, "ends": ends})
    });
    json!({"at": ms(decision.decided_at()), "quotas": quotas.collect::<Value>()})
}

fn ms(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

async fn page() -> impl IntoResponse {
    let html = include_str!("playground/index.html");
    ([(CONTENT_TYPE, "text/html; charset=utf-8"), (CONTENT_SECURITY_POLICY, POLICY)], html)
}

async fn style() -> impl IntoResponse {
    ([(CONTENT_TYPE, "text/css; charset=utf-8")], include_str!("playground/style.css"))
}

async fn script() -> impl IntoResponse {
    ([(CONTENT_TYPE, "text/javascript; charset=utf-8")], include_str!("playground/script.js"))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let setting = |name, usual| std::env::var(name).map_or(Ok(usual), |text| text.parse());
    let (limit, window) = (setting("LIMIT", 5)?, Duration::from_secs(setting("WINDOW", 10)?));
    let addr = std::env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());

    // One store for all, so that no flood of invented names takes more than its half a megabyte.
    let store = MemoryStore::with_max_keys(10_000);
    let (mut limited, mut handles) = (Router::new(), Vec::new());
    for (name, quotas) in limits(limit, window) {
        let layer = FixedWindowLayer::new(quotas)
            .name(name)
            .store(store.clone())
            .key(visitor())
            .expose_decision();
        handles.push((name, layer.handle()));
        limited = limited.route(&format!("/try/{name}"), get(passed).layer(layer));
    }
    let app = limited
        .route("/", get(page))
        .route("/style.css", get(style))
        .route("/script.js", get(script))
        .route("/standing", get(standing))
        .with_state(Handles::from(handles));

    let listener = tokio::net::TcpListener::bind(addr).await?;
    let addr = listener.local_addr()?;
    println!("open http://{addr}/");
    println!("try: curl -i http://{addr}/try/aligned");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
