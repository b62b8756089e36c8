//! `cargo run -p tower-fixed-window-redis --example admin`
//!
//! Routes for support, behind authentication: who is limited, on which routes, and who soon will
//! be, the usage of a key, unblock it, give it more until tonight, give all more, or refuse nothing
//! for an hour; for limits by address, by user and by API key. docs/support.md goes from the
//! question to the answer.
//!
//! Each change ends by itself, and a restart forgets it: quotas for good belong in configuration
//! (`config`, `reload`) or a database (`database_plans`).
//!
//! With the variable `REDIS_URL`, several nodes share their counts.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::extract::{FromRequestParts, Path, Query, Request, State};
use axum::http::{Method, StatusCode, request::Parts};
use axum::middleware::{self, Next};
use axum::response::{Response, Result};
use axum::routing::{delete, get, post, put};
use axum::{Json, Router};
use serde_json::{Value, json};
use tower_fixed_window::key::{extension, header, peer_ip};
use tower_fixed_window::{
    FixedWindowLayer, Key, KeyExtractor, Limit, Limiter, ParseQuotaError, Plan, Quota,
};
use tower_fixed_window_redis::RedisStore;

/// Reads what a limit counts by, as support writes it, or says how to write it.
type ReadKey = fn(&str) -> Result<Key, &'static str>;

/// A limit that support can change.
struct Managed {
    limiter: Limiter,
    read_key: ReadKey,
    /// Who has used 80% of which quota, and until when that counts, the last one first.
    near: Arc<Mutex<VecDeque<(Key, Quota, SystemTime)>>>,
    /// What `quotas` or `shadow` was changed to, and until when.
    changes: Mutex<BTreeMap<String, (String, SystemTime)>>,
}

/// The status of a request that can't be served, and a sentence that says why.
type Refusal = (StatusCode, String);

fn bad_request(why: impl std::fmt::Display) -> Refusal {
    (StatusCode::BAD_REQUEST, why.to_string())
}

impl Managed {
    fn new(
        count: impl Fn(Limit) -> Limiter,
        usual: (&str, Quota),
        by: impl KeyExtractor,
        read_key: ReadKey,
    ) -> Self {
        let (name, quota) = usual;
        let near = Arc::<Mutex<VecDeque<_>>>::default();
        let warned = Arc::clone(&near);
        // In production: an e-mail to the customer, sent by another task.
        let limit = quota.name(name).key(by).track_refused(1_000);
        let limit = limit.warn_at(80, move |near| {
            let mut warned = warned.lock().unwrap();
            warned.retain(|(key, quota, _)| (key, *quota) != (near.key, near.quota));
            warned.truncate(99);
            warned.push_front((near.key.clone(), near.quota, near.usage.reset_at()));
        });
        Self { limiter: count(limit), read_key, near, changes: Mutex::default() }
    }

    /// Finds a key as the lists of this node show it, also a hash, or reads it.
    fn key(&self, text: &str) -> Result<Key, Refusal> {
        let near = self.near.lock().unwrap().iter().map(|near| near.0.clone()).collect::<Vec<_>>();
        let refused = self.limiter.refused().into_iter().flat_map(|refused| refused.keys);
        let own = self.limiter.key_quotas().into_iter().map(|(key, _, _)| key);
        let mut listed = refused.map(|client| client.key).chain(near).chain(own);
        match listed.find(|key| key.readable() == text) {
            Some(key) => Ok(key),
            None => (self.read_key)(text).map_err(bad_request),
        }
    }

    /// Notes a change, for those who ask what holds now.
    fn note(&self, of: &str, to: impl ToString, until: SystemTime) {
        self.changes.lock().unwrap().insert(of.to_owned(), (to.to_string(), until));
    }

    /// What is changed now, also of single keys.
    fn changes(&self) -> BTreeMap<String, (String, SystemTime)> {
        let mut changes = self.changes.lock().unwrap();
        changes.retain(|_, (_, until)| *until > SystemTime::now());
        let own = self
            .limiter
            .key_quotas()
            .into_iter()
            .map(|(key, quotas, until)| (key.readable(), (quotas.to_string(), until)));
        own.chain(changes.clone()).collect()
    }
}

/// Returns where limits count: in memory, or in a Redis that other nodes share.
fn store() -> Result<impl Fn(Limit) -> Limiter, Box<dyn std::error::Error>> {
    let redis = match std::env::var("REDIS_URL") {
        // A reset on one node is effective on the others within a second.
        Ok(url) => Some(RedisStore::new(url)?),
        Err(_) => None,
    };
    Ok(move |limit: Limit| match &redis {
        Some(store) => limit.store(store.clone()),
        None => Limiter::new(limit),
    })
}

type Shared = State<Arc<Managed>>;

/// Until when a change holds: `?until=`. DELETE ends a change, as an instant in the past does.
struct Until(SystemTime);

impl<S: Sync> FromRequestParts<S> for Until {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Refusal> {
        if parts.method == Method::DELETE {
            return Ok(Self(UNIX_EPOCH));
        }
        let query = Query::<HashMap<String, String>>::try_from_uri(&parts.uri).ok();
        let until = query.and_then(|query| query.get("until")?.parse().ok());
        let (now, month) = (seconds(SystemTime::now()), 31 * 24 * 3_600);
        match until {
            Some(until) if (now + 1..=now + month).contains(&until) => {
                Ok(Self(UNIX_EPOCH + Duration::from_secs(until)))
            }
            _ => Err(bad_request(format_args!(
                "?until= is an instant of the next 31 days, in seconds since 1970; now is {now}"
            ))),
        }
    }
}

/// Reads quotas. The end of a change needs none.
fn quotas(text: &str, until: SystemTime) -> Result<Plan, Refusal> {
    let text = if until == UNIX_EPOCH { "0/s" } else { text };
    text.parse().map_err(|error: ParseQuotaError| bad_request(error))
}

fn seconds(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Who is limited? The keys that this process refused lately, most often first.
async fn refused(State(limit): Shared) -> Json<Value> {
    let refused = limit.limiter.refused().into_iter();
    let keys = refused.flat_map(|refused| refused.keys).map(|client| {
        json!({
            "key": client.key.readable(),
            "count": client.count,
            "share": client.share,
            "quota": client.quota.to_string(),
            "first": seconds(client.first),
            "last": seconds(client.last),
            "retry_at": client.retry_at.map(seconds),
        })
    });
    Json(keys.collect())
}

/// On which routes? Those whose requests this process refused lately, most often first.
async fn refused_routes(State(limit): Shared) -> Json<Value> {
    let refused = limit.limiter.refused().into_iter();
    let routes = refused
        .flat_map(|refused| refused.routes)
        .map(|of| json!({ "route": of.route, "count": of.count, "share": of.share }));
    Json(routes.collect())
}

/// Who will be limited soon? Those who have used 80% of the limit, in a charge of this process.
async fn near(State(limit): Shared) -> Json<Value> {
    let near = limit.near.lock().unwrap();
    let keys = near.iter().filter(|(_, _, reset)| *reset > SystemTime::now());
    let keys = keys.map(|(key, quota, reset)| {
        let key = key.readable();
        json!({ "key": key, "quota": quota.to_string(), "reset": seconds(*reset) })
    });
    Json(keys.collect())
}

/// The quotas of all keys, shadow mode, and what is changed until when, also of single keys.
async fn show(State(limit): Shared) -> Json<Value> {
    let changes = limit.changes();
    let list = changes
        .iter()
        .map(|(of, (to, until))| json!({ "of": of, "to": to, "until": seconds(*until) }));
    Json(json!({
        "quotas": limit.limiter.quotas().map(|plan| plan.to_string()),
        "shadow": changes.contains_key("shadow"),
        "changes": list.collect::<Value>(),
    }))
}

/// The quotas of all keys without an exception, in this process.
async fn set_quotas(limit: Shared, Until(until): Until, text: String) -> Result<Json<Value>> {
    let quotas = quotas(&text, until)?;
    limit.limiter.set_quotas_until(quotas, until);
    limit.note("quotas", quotas, until);
    Ok(show(limit).await)
}

/// Refuse nothing, in this process.
async fn set_shadow(limit: Shared, Until(until): Until, body: String) -> Result<Json<Value>> {
    if !body.is_empty() {
        return Err(bad_request("shadow mode takes no body: DELETE ends it").into());
    }
    limit.limiter.set_shadow_until(true, until);
    limit.note("shadow", true, until);
    Ok(show(limit).await)
}

/// Why is a key limited? How much of each quota it has used, and until when it has its own.
async fn show_key(State(limit): Shared, Path(text): Path<String>) -> Result<Json<Value>> {
    let key = limit.key(&text)?;
    let decision = limit.limiter.peek(&key).await?;
    let usage = decision.usage().iter().map(|usage| {
        json!({
            "limit": usage.limit(),
            "used": usage.used(),
            "remaining": usage.remaining(),
            "reset": seconds(usage.reset_at()),
        })
    });
    let key = key.readable();
    Ok(Json(json!({
        "usage": usage.collect::<Value>(),
        "exception_until": limit.changes().get(&key).map(|(_, until)| seconds(*until)),
        "store_fails": decision.is_local(), // and this node counts by itself
        "key": key,
    })))
}

/// Lets a key in now. An answer says what holds then, as after each change.
async fn reset(limit: Shared, Path(text): Path<String>) -> Result<Json<Value>> {
    limit.limiter.reset(limit.key(&text)?).await.map_err(|error| {
        let why = format!("the count was cleared on this node at most: {error}");
        (StatusCode::SERVICE_UNAVAILABLE, why)
    })?;
    show_key(limit, Path(text)).await
}

/// An exception: more, or less, for one key, in this process.
async fn set_key_quotas(
    limit: Shared,
    Path(text): Path<String>,
    Until(until): Until,
    body: String,
) -> Result<Json<Value>> {
    let (key, quotas) = (limit.key(&text)?, quotas(&body, until)?);
    limit.limiter.set_key_quotas_until(&key, quotas, until);
    show_key(limit, Path(text)).await
}

async fn clear_key_quotas(limit: Shared, Path(text): Path<String>) -> Result<Json<Value>> {
    limit.limiter.clear_key_quotas(limit.key(&text)?);
    show_key(limit, Path(text)).await
}

fn routes(limit: Managed) -> Router {
    Router::new()
        .route("/", get(show))
        .route("/refused", get(refused))
        .route("/refused/routes", get(refused_routes))
        .route("/near", get(near))
        .route("/quotas", put(set_quotas).delete(set_quotas))
        .route("/shadow", put(set_shadow).delete(set_shadow))
        .route("/key/{key}", get(show_key))
        .route("/key/{key}/used", delete(reset))
        .route("/key/{key}/quotas", put(set_key_quotas).delete(clear_key_quotas))
        .with_state(Arc::new(limit))
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

async fn support_only(request: Request, next: Next) -> Result<Response, Refusal> {
    // In production: your authentication of support staff.
    if token(&request) != Some("support") {
        return Err((StatusCode::UNAUTHORIZED, "for support only".into()));
    }
    Ok(next.run(request).await)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let quota = std::env::var("LIMIT").map_or(Ok(Quota::per_minute(60)), |limit| limit.parse())?;
    let addr = std::env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());

    let store = store()?;
    let login = Managed::new(&store, ("login", quota), peer_ip(), |text| {
        // The lists show networks, such as 2001:db8::_64.
        let address = text.split('_').next().unwrap_or_default().parse::<IpAddr>();
        address.map(Key::from).map_err(|_| "write an address, such as 192.0.2.1")
    });
    let upload = Managed::new(&store, ("upload", quota), header("x-api-key"), |text| {
        match text.len() == 65 && text.starts_with('s') {
            true => Err("no list of this node has this hash: write the value of x-api-key"),
            false => Ok(Key::secret(text)),
        }
    });
    let api = Managed::new(&store, ("api", quota), extension::<User>(), |text| {
        let id = text.strip_prefix('u').unwrap_or(text).parse::<u64>();
        id.map(Key::from).map_err(|_| "write the user's number, such as u1 or 1")
    });
    let app = Router::new()
        .route("/api", get(async || "hello\n"))
        .route("/api/search", get(async || "found\n"))
        .route_layer(FixedWindowLayer::new(&api.limiter))
        .route_layer(middleware::from_fn(authenticate))
        // The layers above are of the routes before them.
        .route(
            "/login",
            post(async || "welcome\n").route_layer(FixedWindowLayer::new(&login.limiter)),
        )
        .route(
            "/upload",
            post(async || "stored\n").route_layer(FixedWindowLayer::new(&upload.limiter)),
        );

    let admin = Router::new()
        .nest("/login", routes(login))
        .nest("/upload", routes(upload))
        .nest("/api", routes(api))
        .layer(middleware::from_fn(support_only));
    let app = app.nest("/admin", admin);

    let listener = tokio::net::TcpListener::bind(addr).await?;
    let addr = listener.local_addr()?;
    let support = format!("curl -H 'authorization: Bearer support' http://{addr}/admin");
    println!("try: curl -i http://{addr}/api -H 'authorization: Bearer ann'");
    println!("     {support}/api/refused  # who is limited?");
    println!("     {support}/api/key/u1  # ann's usage");
    println!("     {support}/api/key/u1/used -X DELETE  # unblock ann");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
