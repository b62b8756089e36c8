//! `cargo run --example playground`
//!
//! A page that shows the limiter live: windows that fill and end, and three experiments to predict
//! and then try, among them a burst at the boundary between two windows.
//!
//! The page is `examples/playground/`. It simulates nothing: it sends requests to the limited
//! routes below and shows the responses.
//!
//! `LIMIT` replaces the 5 requests, `WINDOW` the 10 seconds; the page can change both.

use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::extract::{Query, State};
use axum::http::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE};
use axum::http::request::Parts;
use axum::http::{StatusCode, Uri};
use axum::response::IntoResponse;
use axum::{Extension, Json, Router, routing::get};
use serde_json::{Map, Value, json};
use tower_fixed_window::key::{header, peer_ip};
use tower_fixed_window::{
    Decision, FixedWindowLayer, Key, KeyExtractor, Limit, MemoryStore, Quota, Quotas,
};

/// Allows only this server's own files, and no inline scripts.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; \
    connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Each page invents a name for itself, so that visitors behind one address don't share a count,
/// and see staggered windows differ. A client that invents a name gets a fresh count: right for a
/// demonstration, wrong for an API, which has to verify its keys.
fn visitor() -> impl KeyExtractor {
    header("x-visitor").or(peer_ip())
}

/// The settings of the page: a number of requests, and seconds.
#[derive(Clone, Copy, serde::Deserialize)]
struct Setting {
    limit: u64,
    window: u64,
}

impl Setting {
    /// Reads the query, and clamps its values to what the page can show.
    fn of(uri: &Uri, usual: Self) -> Self {
        let Query(Self { limit, window }) = Query::try_from_uri(uri).unwrap_or(Query(usual));
        Self { limit: limit.clamp(1, 20), window: window.clamp(4, 600) }
    }

    /// The limits that the page shows, by the name of their route.
    fn limits(self) -> [(&'static str, Quotas); 4] {
        let (limit, window) = (self.limit, Duration::from_secs(self.window));
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
}

#[derive(Clone)]
struct Playground {
    usual: Setting,
    store: MemoryStore,
}

/// Reports the visitor's standing under each limit without a charge, and the server's time.
async fn standing(
    State(playground): State<Playground>,
    parts: Parts,
) -> Result<Json<Value>, StatusCode> {
    let mut key = Key::default();
    visitor().extract(&parts, &mut key).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    let mut stands = Map::new();
    for (name, quotas) in Setting::of(&parts.uri, playground.usual).limits() {
        // The name of the layer's limit gives this limiter the same counters.
        let limiter = quotas.name(name).store(playground.store.clone());
        let peek = limiter.peek(key.clone()).await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
        stands.insert(name.to_string(), as_json(&peek));
    }
    Ok(Json(stands.into()))
}

/// Stands in for the inner service: responds with the limit's decision.
async fn passed(Extension(decision): Extension<Decision>) -> Json<Value> {
    Json(as_json(&decision))
}

/// Writes a decision with milliseconds, since `x-ratelimit-reset` has only seconds.
fn as_json(decision: &Decision) -> Value {
    let quotas = decision.usage().iter().map(|quota| {
        let (window, ends) = (quota.window().as_millis() as u64, ms(quota.reset_at()));
        json!({"limit": quota.limit(), "used": quota.used(), "window": window, "ends": ends})
    });
    json!({"at": ms(decision.reset_at() - decision.reset_after()), "quotas": quotas.collect::<Value>()})
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
    let usual = Setting { limit: setting("LIMIT", 5)?, window: setting("WINDOW", 10)? };
    let addr = std::env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());

    // All limits share a store, so a flood of invented names takes no more than its half a
    // megabyte.
    let store = MemoryStore::with_max_keys(10_000);
    let mut limited = Router::new();
    for (i, (name, _)) in usual.limits().into_iter().enumerate() {
        let limit = Limit::by_plan(move |parts, _| Setting::of(&parts.uri, usual).limits()[i].1);
        let limiter = limit.name(name).key(visitor()).store(store.clone());
        let layer = FixedWindowLayer::new(limiter).expose_decision();
        limited = limited.route(&format!("/try/{name}"), get(passed).route_layer(layer));
    }
    let app = limited
        .route("/", get(page))
        .route("/style.css", get(style))
        .route("/script.js", get(script))
        .route("/standing", get(standing))
        .with_state(Playground { usual, store });

    let listener = tokio::net::TcpListener::bind(addr).await?;
    let addr = listener.local_addr()?;
    println!("open http://{addr}/");
    println!("try: curl -i http://{addr}/try/aligned");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
