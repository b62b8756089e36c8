//! `cargo run --example admin`
//!
//! Routes for support, behind authentication. They list who is limited and who soon will be, show
//! the usage of a key, unblock it, and give it a higher limit until tonight. They also change a
//! limit's quotas and shadow mode, for good or until an instant. Limits are by address, by user and
//! by API key. docs/support.md begins with the questions that users ask.
//!
//! With the feature `redis` and the variable `REDIS_URL`, several nodes share their counts.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::extract::{Path, Query, Request, State};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::{Response, Result};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Value, json};
use tower_fixed_window::key::{extension, header, peer_ip};
use tower_fixed_window::{
    FixedWindowLayer, Key, KeyExtractor, Limit, Limiter, ParseQuotaError, Quota, Quotas,
};

/// A limit that support can change. Lasting plans belong in a database: `database_plans`.
struct Managed {
    limiter: Limiter,
    /// Parses a key as support writes it, such as an address or a user's number.
    key: fn(&str) -> Option<Key>,
    /// The keys that used 80% of the limit lately, the last one first.
    near: Arc<Mutex<VecDeque<Value>>>,
}

impl Managed {
    fn new(
        count: impl Fn(Limit) -> Limiter,
        usual: (&str, Quota),
        by: impl KeyExtractor,
        key: fn(&str) -> Option<Key>,
    ) -> Self {
        let (name, quota) = usual;
        let near = Arc::<Mutex<VecDeque<_>>>::default();
        let warned = Arc::clone(&near);
        // In production, a separate task e-mails the customer.
        let limit = quota.name(name).key(by).track_refused(1_000).warn_at(80, move |near| {
            let line = json!({
                "key": near.key.readable().to_string(),
                "quota": near.quota.to_string(),
                "used": near.usage.used(),
                "reset": seconds(near.usage.reset_at()),
            });
            let mut warned = warned.lock().unwrap();
            warned.truncate(99);
            warned.push_front(line);
        });
        Self { limiter: count(limit), key, near }
    }
}

/// Returns a function that makes limiters: in memory, or in a Redis that other nodes share.
fn store() -> Result<impl Fn(Limit) -> Limiter, Box<dyn std::error::Error>> {
    #[cfg(feature = "redis")]
    let redis = match std::env::var("REDIS_URL") {
        // `revalidate_refusals` makes a reset effective on all nodes within a second.
        Ok(url) => Some(tower_fixed_window::RedisStore::new(url)?.revalidate_refusals()),
        Err(_) => None,
    };
    #[cfg(not(feature = "redis"))]
    let redis = None::<tower_fixed_window::MemoryStore>;
    Ok(move |limit: Limit| match &redis {
        Some(store) => limit.store(store.clone()),
        None => Limiter::new(limit),
    })
}

type Limits = Arc<HashMap<&'static str, Managed>>;

/// `?until=`, in seconds since the Unix epoch. Without it, a change is for good.
#[derive(Deserialize)]
struct Until {
    until: Option<u64>,
}

impl Until {
    fn instant(&self) -> Option<SystemTime> {
        // Later instants count as the year 2106, since a `SystemTime` can overflow.
        let last = Duration::from_secs(u32::MAX.into());
        self.until.map(|seconds| UNIX_EPOCH + Duration::from_secs(seconds).min(last))
    }
}

fn find<'a>(limits: &'a Limits, name: &str) -> Result<&'a Managed, (StatusCode, &'static str)> {
    limits.get(name).ok_or((StatusCode::NOT_FOUND, "no such limit\n"))
}

fn key(limit: &Managed, text: &str) -> Result<Key, (StatusCode, &'static str)> {
    (limit.key)(text).ok_or((StatusCode::BAD_REQUEST, "not a key of this limit\n"))
}

fn invalid(error: ParseQuotaError) -> (StatusCode, String) {
    (StatusCode::BAD_REQUEST, format!("{error}\n"))
}

fn seconds(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Lists the keys that this process refused lately, the most often refused first.
async fn refused(State(limits): State<Limits>, Path(name): Path<String>) -> Result<Json<Value>> {
    let refused = find(&limits, &name)?.limiter.refused().into_iter();
    let keys = refused.flat_map(|refused| refused.keys).map(|client| {
        json!({
            "key": client.key.readable().to_string(),
            "refused": client.count,
            "share": client.share,
            "quota": client.quota.to_string(),
            "last": seconds(client.last),
            "until": client.retry_at.map(seconds),
        })
    });
    Ok(Json(keys.collect()))
}

/// Lists the keys that are close to the limit: a charge of this process took them to 80% of it.
async fn near(State(limits): State<Limits>, Path(name): Path<String>) -> Result<Json<Value>> {
    let near = find(&limits, &name)?.near.lock().unwrap();
    Ok(Json(near.iter().cloned().collect()))
}

/// Shows why a key is limited: how much of each quota it has used.
async fn usage(
    State(limits): State<Limits>,
    Path((name, text)): Path<(String, String)>,
) -> Result<Json<Value>> {
    let limit = find(&limits, &name)?;
    let decision = limit.limiter.peek(key(limit, &text)?).await?;
    let usage = decision.usage().iter().map(|usage| {
        json!({
            "limit": usage.limit(),
            "used": usage.used(),
            "remaining": usage.remaining(),
            "reset": seconds(usage.reset_at()),
        })
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

/// Gives one key a higher or lower limit until an instant, in this process.
async fn set_key_quotas(
    State(limits): State<Limits>,
    Path((name, text)): Path<(String, String)>,
    Query(until): Query<Until>,
    quotas: String,
) -> Result<String> {
    let limit = find(&limits, &name)?;
    let (key, quotas): (_, Quotas) = (key(limit, &text)?, quotas.parse().map_err(invalid)?);
    let until = until.instant().ok_or((StatusCode::BAD_REQUEST, "?until= is missing\n"))?;
    limit.limiter.set_key_quotas_until(key, quotas, until);
    Ok(format!("{quotas}\n"))
}

/// Replaces the quotas of all keys.
async fn set_quotas(
    State(limits): State<Limits>,
    Path(name): Path<String>,
    Query(until): Query<Until>,
    quotas: String,
) -> Result<String> {
    let limiter = &find(&limits, &name)?.limiter;
    let quotas: Quotas = quotas.parse().map_err(invalid)?;
    match until.instant() {
        Some(until) => limiter.set_quotas_until(quotas, until),
        None => limiter.set_quotas(quotas),
    }
    Ok(format!("{quotas}\n"))
}

async fn set_shadow(
    State(limits): State<Limits>,
    Path((name, shadow)): Path<(String, bool)>,
    Query(until): Query<Until>,
) -> Result<String> {
    let limiter = &find(&limits, &name)?.limiter;
    match until.instant() {
        Some(until) => limiter.set_shadow_until(shadow, until),
        None => limiter.set_shadow(shadow),
    }
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
    // In production, your authentication of support staff decides this.
    if token(&request) != Some("support") {
        return Err(StatusCode::UNAUTHORIZED);
    }
    Ok(next.run(request).await)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limit = std::env::var("LIMIT").map_or(Ok(60), |limit| limit.parse())?;
    let addr = std::env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());

    let (quota, store) = (Quota::per_minute(limit), store()?);
    let login = Managed::new(&store, ("login", quota), peer_ip(), |text| {
        Some(text.parse::<IpAddr>().ok()?.into())
    });
    let upload = Managed::new(&store, ("upload", quota), header("x-api-key"), |text| {
        Some(Key::secret(text))
    });
    let api = Managed::new(&store, ("api", quota), extension::<User>(), |text| {
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
        .route("/{limit}/refused", get(refused))
        .route("/{limit}/near", get(near))
        .route("/{limit}/shadow/{on}", put(set_shadow))
        .route("/{limit}/key/{key}", get(usage).delete(reset).put(set_key_quotas))
        .with_state(Limits::new(limits))
        .layer(middleware::from_fn(support_only));
    let app = app.nest("/admin", admin);

    let listener = tokio::net::TcpListener::bind(addr).await?;
    let addr = listener.local_addr()?;
    let support = format!("curl -H 'authorization: Bearer support' http://{addr}/admin");
    println!("try: curl -i http://{addr}/api -H 'authorization: Bearer ann'");
    println!("     {support}/api/refused  # who is limited?");
    println!("     {support}/api/near  # who will be soon?");
    println!("     {support}/api/key/1  # ann's usage");
    println!("     {support}/api/key/1 -X DELETE  # unblock ann");
    let tonight = seconds(SystemTime::now()) + 8 * 3_600;
    println!("     {support}/api/key/1?until={tonight} -X PUT -d 1_000/minute");
    println!("     {support}/login/key/127.0.0.1");
    println!("     {support}/login -X PUT -d 600/minute");
    println!("     {support}/login/shadow/true -X PUT");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
