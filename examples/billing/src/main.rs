//! `cargo run -p billing`
//!
//! Plans by the month: 1,000 requests from a customer's billing day on, in the customer's time
//! zone, and 60 a minute. `GET /usage` shows what is left, without a charge. `POST /upgrade` raises
//! the limit to 10,000 in mid-month, and used requests stay used. With `COUNTS=path`, the counts
//! survive a new deployment: they are saved to that file each second, and at the end.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::{Router, routing::get, routing::post};
use tower_fixed_window::key::extension;
use tower_fixed_window::{
    FixedWindowLayer, Key, Limit, Limits, MemoryStore, ParseQuotaError, Quota, RateLimitEndpoint,
};

/// A row of the database.
struct Row {
    id: u64,
    billing_day: u8,
    zone: &'static str,
}

/// A customer with the plan's quota, which is made once and not for each request.
#[derive(Clone)]
struct Customer {
    id: u64,
    plan: Quota,
}

impl Customer {
    /// Fails if the row has a day or a time zone that does not exist.
    fn load(row: &Row, limit: u64) -> Result<Self, ParseQuotaError> {
        let Row { id, billing_day, zone } = row;
        let plan = format!("{limit}/month from day {billing_day} in {zone}").parse()?;
        Ok(Self { id: *id, plan })
    }
}

impl From<&Customer> for Key {
    fn from(customer: &Customer) -> Key {
        Key::from(customer.id)
    }
}

type Customers = Arc<Mutex<HashMap<&'static str, Customer>>>;

fn token(headers: &HeaderMap) -> Option<&str> {
    headers.get("authorization")?.to_str().ok()
}

/// Finds the customer by the token, and rejects all other requests.
async fn authenticate(
    State(customers): State<Customers>,
    mut request: Request,
    next: Next,
) -> Result<Response, StatusCode> {
    let customer = token(request.headers())
        .and_then(|token| customers.lock().expect("no panic").get(token).cloned())
        .ok_or(StatusCode::UNAUTHORIZED)?;
    request.extensions_mut().insert(customer);
    Ok(next.run(request).await)
}

async fn upgrade(State(customers): State<Customers>, headers: HeaderMap) -> &'static str {
    let mut customers = customers.lock().expect("no panic");
    if let Some(customer) = token(&headers).and_then(|token| customers.get_mut(token)) {
        // The limit is not part of the counter's identity, so the count goes on.
        customer.plan = customer.plan.with_limit(10_000);
    }
    "welcome to the larger plan\n"
}

/// Waits for SIGTERM, which systemd and Docker send, or Ctrl-C.
async fn told_to_stop() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};

        let mut terminate = signal(SignalKind::terminate()).expect("a handler for SIGTERM");
        tokio::select! {
            _ = terminate.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
    }
    #[cfg(not(unix))]
    let _ = tokio::signal::ctrl_c().await;
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // LIMIT overrides the smaller plan.
    let limit = std::env::var("LIMIT").ok().map(|limit| limit.parse()).transpose()?;
    let addr = std::env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());

    let mut customers = HashMap::new();
    for (token, row) in [
        ("Bearer ann", Row { id: 1, billing_day: 31, zone: "America/New_York" }),
        ("Bearer yuki", Row { id: 2, billing_day: 15, zone: "Asia/Tokyo" }),
    ] {
        customers.insert(token, Customer::load(&row, limit.unwrap_or(1_000))?);
    }
    let customers = Customers::new(Mutex::new(customers));

    let counts = std::env::var_os("COUNTS");
    let store = match &counts {
        Some(path) => MemoryStore::open(path, Duration::from_secs(1))?,
        None => MemoryStore::new(),
    };

    let rate = Quota::per_minute(60).name("rate");
    let none = Quota::per_month(0);
    let plan = Limit::by_plan(move |parts, _key| {
        parts.extensions.get().map_or(none, |customer: &Customer| customer.plan)
    });
    let limits = [plan.name("plan"), rate].map(|limit| limit.key(extension::<Customer>()));
    let layer = FixedWindowLayer::new(Limits::new(limits).store(store.clone()));

    // In axum, the layer added last is the outermost: authentication runs first, then the limit.
    let api = Router::new().route("/", get(async || "hello\n"));
    let app = api
        .layer(layer.clone())
        .route_service("/usage", RateLimitEndpoint::new([&layer]))
        .route("/upgrade", post(upgrade))
        .with_state(customers.clone())
        .layer(middleware::from_fn_with_state(customers, authenticate));

    let listener = tokio::net::TcpListener::bind(addr).await?;
    let addr = listener.local_addr()?;
    println!("try: curl -i http://{addr}/ -H 'authorization: Bearer ann'");
    println!("and: curl -i http://{addr}/usage -H 'authorization: Bearer ann'");
    println!("and: curl -i http://{addr}/upgrade -H 'authorization: Bearer ann' -X POST");
    axum::serve(listener, app).with_graceful_shutdown(told_to_stop()).await?;
    if counts.is_some() {
        store.save()?;
    }
    Ok(())
}
