//! `cargo run --example admin`
//!
//! Routes for support, behind authentication: they show and reset the usage of a key, set another
//! limit or plan, and switch shadow mode, for limits by address, by user and by API key.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};

use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::{Response, Result};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use serde_json::{Value, json};
use tower_fixed_window::key::{extension, header, peer_ip};
use tower_fixed_window::{
    FixedWindowLayer, Key, KeyExtractor, Limit, Limiter, ParseQuotaError, Plan, Quota, Quotas,
};

/// The plans of keys. Really, they are in a database.
struct Plans {
    /// Of all other keys.
    usual: Quotas,
    of_keys: HashMap<Key, Plan>,
}

impl Plans {
    fn of(&self, key: &Key) -> Plan {
        self.of_keys.get(key).copied().unwrap_or(self.usual.into())
    }
}

/// A limit that support can change.
struct Managed {
    limiter: Limiter,
    /// Reads what the limit counts by, as support writes it.
    key: fn(&str) -> Option<Key>,
    plans: Arc<Mutex<Plans>>,
}

impl Managed {
    fn new(name: &str, usual: Quota, by: impl KeyExtractor, key: fn(&str) -> Option<Key>) -> Self {
        let plans = Plans { usual: usual.into(), of_keys: HashMap::new() };
        let plans = Arc::new(Mutex::new(plans));
        let of_requests = plans.clone();
        let limit = Limit::by_plan(move |_parts, key| of_requests.lock().unwrap().of(key));
        // With a RedisStore, `.revalidate_refusals()` makes a reset here effective on other nodes.
        Self { limiter: Limiter::new(limit.name(name).key(by)), key, plans }
    }
}

type Limits = Arc<HashMap<&'static str, Managed>>;

fn find<'a>(limits: &'a Limits, name: &str) -> Result<&'a Managed, (StatusCode, &'static str)> {
    limits.get(name).ok_or((StatusCode::NOT_FOUND, "no such limit\n"))
}

fn key(limit: &Managed, text: &str) -> Result<Key, (StatusCode, &'static str)> {
    (limit.key)(text).ok_or((StatusCode::BAD_REQUEST, "not a key of this limit\n"))
}

fn invalid(error: ParseQuotaError) -> (StatusCode, String) {
    (StatusCode::BAD_REQUEST, format!("{error}\n"))
}

async fn usage(
    State(limits): State<Limits>,
    Path((name, text)): Path<(String, String)>,
) -> Result<Json<Value>> {
    let limit = find(&limits, &name)?;
    let key = key(limit, &text)?;
    let plan = limit.plans.lock().unwrap().of(&key);
    let Some(&quotas) = plan.quotas() else { return Ok(Json(json!("unlimited"))) };
    let decision = limit.limiter.with_quotas(quotas).peek(key).await?;
    let usage = quotas.iter().zip(decision.usage()).map(|(quota, usage)| {
        json!({ "quota": quota.to_string(), "used": usage.used(), "remaining": usage.remaining() })
    });
    Ok(Json(usage.collect()))
}

async fn reset(
    State(limits): State<Limits>,
    Path((name, text)): Path<(String, String)>,
) -> Result<&'static str> {
    let limit = find(&limits, &name)?;
    limit.limiter.reset(key(limit, &text)?).await?;
    Ok("reset\n")
}

/// The plan of one key: quotas or "unlimited".
async fn set_plan(
    State(limits): State<Limits>,
    Path((name, text)): Path<(String, String)>,
    plan: String,
) -> Result<String> {
    let limit = find(&limits, &name)?;
    let (key, plan): (_, Plan) = (key(limit, &text)?, plan.parse().map_err(invalid)?);
    limit.plans.lock().unwrap().of_keys.insert(key, plan);
    Ok(format!("{plan}\n"))
}

/// The quotas of all keys without a plan.
async fn set_quotas(
    State(limits): State<Limits>,
    Path(name): Path<String>,
    quotas: String,
) -> Result<String> {
    let quotas: Quotas = quotas.parse().map_err(invalid)?;
    find(&limits, &name)?.plans.lock().unwrap().usual = quotas;
    Ok(format!("{quotas}\n"))
}

async fn set_shadow(
    State(limits): State<Limits>,
    Path((name, shadow)): Path<(String, bool)>,
) -> Result<String> {
    find(&limits, &name)?.limiter.set_shadow(shadow);
    Ok(format!("shadow: {shadow}\n"))
}

#[derive(Clone)]
struct User(u64);

impl From<&User> for Key {
    fn from(user: &User) -> Key {
        Key::from(user.0)
    }
}

fn token(request: &Request) -> Option<&str> {
    request.headers().get("authorization")?.to_str().ok()?.strip_prefix("Bearer ")
}

async fn authenticate(mut request: Request, next: Next) -> Result<Response, StatusCode> {
    let user = match token(&request) {
        Some("ann") => User(1),
        Some("bob") => User(2),
        _ => return Err(StatusCode::UNAUTHORIZED),
    };
    request.extensions_mut().insert(user);
    Ok(next.run(request).await)
}

async fn support_only(request: Request, next: Next) -> Result<Response, StatusCode> {
    // Really: your authentication of support staff.
    if token(&request) != Some("support") {
        return Err(StatusCode::UNAUTHORIZED);
    }
    Ok(next.run(request).await)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limit = std::env::var("LIMIT").map_or(Ok(60), |limit| limit.parse())?;
    let addr = std::env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());

    let quota = Quota::per_minute(limit);
    let login =
        Managed::new("login", quota, peer_ip(), |text| Some(text.parse::<IpAddr>().ok()?.into()));
    let upload = Managed::new("upload", quota, header("x-api-key"), |text| Some(Key::secret(text)));
    let api = Managed::new("api", quota, extension::<User>(), |text| {
        Some(text.parse::<u64>().ok()?.into())
    });
    let app = Router::new()
        .route("/login", post(async || "welcome\n").layer(FixedWindowLayer::new(&login.limiter)))
        .route("/upload", post(async || "stored\n").layer(FixedWindowLayer::new(&upload.limiter)))
        .route(
            "/api",
            get(async || "hello\n")
                .layer(FixedWindowLayer::new(&api.limiter))
                .layer(middleware::from_fn(authenticate)),
        );

    let limits = HashMap::from([("login", login), ("upload", upload), ("api", api)]);
    let admin = Router::new()
        .route("/{limit}", put(set_quotas))
        .route("/{limit}/shadow/{on}", put(set_shadow))
        .route("/{limit}/key/{key}", get(usage).delete(reset).put(set_plan))
        .with_state(Limits::new(limits))
        .layer(middleware::from_fn(support_only));
    let app = app.nest("/admin", admin);

    let listener = tokio::net::TcpListener::bind(addr).await?;
    let addr = listener.local_addr()?;
    let support = format!("curl -H 'authorization: Bearer support' http://{addr}/admin");
    println!("try: curl -i http://{addr}/api -H 'authorization: Bearer ann'");
    println!("     {support}/api/key/1  # ann's usage");
    println!("     {support}/api/key/1 -X PUT -d 1_000/hour  # or: unlimited");
    println!("     {support}/api/key/1 -X DELETE");
    println!("     {support}/login/key/127.0.0.1");
    println!("     {support}/login -X PUT -d 600/minute");
    println!("     {support}/login/shadow/true -X PUT");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
