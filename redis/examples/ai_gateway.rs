//! `cargo run -p tower-fixed-window-redis --example ai_gateway`
//!
//! A gateway for a language model. An organization has limits of requests and of tokens a minute,
//! and each of its users a limit of cents a calendar month. A request passes only if all three
//! limits hold. It is charged its `max_tokens` first, and when the stream ends, the charge is
//! corrected to what the model has used.
//!
//! `LIMITS` sets the limits. `PLANS` is a file with a line for each organization that has its own
//! limits (`acme: requests=6000/minute tokens=unlimited cents=90000/month`); the gateway rereads
//! the file when it changes. With `REDIS_URL` all gateways share their counts.

use std::collections::HashMap;
use std::convert::Infallible;
use std::env;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::{Extension, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::{Router, routing::post};
use futures_util::stream;
use tower_fixed_window::key::extension;
use tower_fixed_window::{FixedWindowLayer, Key, Limit, Limits, Plan, RateLimitEndpoint, TrueCost};
use tower_fixed_window_redis::RedisStore;

type Error = Box<dyn std::error::Error + Send + Sync>;

#[derive(Clone)]
struct Org(String);

#[derive(Clone)]
struct User(String);

impl From<&Org> for Key {
    fn from(org: &Org) -> Key {
        Key::from(&org.0)
    }
}

impl From<&User> for Key {
    fn from(user: &User) -> Key {
        Key::from(&user.0)
    }
}

/// Stands in for authentication. In production, a verified token names the user and organization.
async fn authenticate(mut request: Request, next: Next) -> Result<Response, StatusCode> {
    let org = header(&request, "x-org").ok_or(StatusCode::UNAUTHORIZED)?;
    let user = header(&request, "x-user").ok_or(StatusCode::UNAUTHORIZED)?;
    // Users of two organizations may have the same name.
    let user = User(format!("{org}/{user}"));
    request.extensions_mut().insert(Org(org));
    request.extensions_mut().insert(user);
    Ok(next.run(request).await)
}

fn header(request: &Request, name: &str) -> Option<String> {
    let value = request.headers().get(name)?.to_str().ok()?;
    (!value.is_empty()).then(|| value.to_owned())
}

/// The body of a request, as far as the limits and the fake model read it.
#[derive(Clone, serde::Deserialize)]
struct Chat {
    max_tokens: u64,
    /// The tokens that the fake model will use; by default, all of `max_tokens`.
    uses: Option<u64>,
    /// Whether the fake model fails.
    #[serde(default)]
    fails: bool,
}

/// Reads the body before the limits, which need its `max_tokens`.
async fn read_chat(request: Request, next: Next) -> Result<Response, Response> {
    const LONGEST: usize = 1 << 20;

    let (mut parts, body) = request.into_parts();
    let body = to_bytes(body, LONGEST).await;
    let body = body.map_err(|_| StatusCode::PAYLOAD_TOO_LARGE.into_response())?;
    let chat: Chat = serde_json::from_slice(&body)
        .map_err(|error| (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response())?;
    parts.extensions.insert(chat);
    Ok(next.run(Request::from_parts(parts, Body::empty())).await)
}

fn estimated_tokens(parts: &Parts) -> u64 {
    // The least charge is one token, so that an exhausted limit refuses.
    parts.extensions.get::<Chat>().map_or(1, |chat| chat.max_tokens.max(1))
}

/// A cent for each 1,000 tokens, rounded up.
fn cents(tokens: u64) -> u64 {
    tokens.div_ceil(1_000)
}

/// Stands in for the model: streams a word for each token, and reports at the end how many it used.
async fn chat(Extension(chat): Extension<Chat>) -> Response {
    if chat.fails {
        return StatusCode::BAD_GATEWAY.into_response();
    }
    let uses = chat.uses.unwrap_or(chat.max_tokens);
    let (cost, mut meter) = TrueCost::metered();
    let words = (1..=uses + 1).map(move |said| {
        Ok::<_, Infallible>(if said <= uses {
            // The costs are updated with each word, since the client may disconnect after any of
            // them.
            meter.set("tokens", said);
            meter.set("cents", cents(said));
            "word ".to_owned()
        } else {
            format!("\n{{\"usage\":{{\"total_tokens\":{uses}}}}}\n")
        })
    });
    let mut response = Body::from_stream(stream::iter(words)).into_response();
    response.extensions_mut().insert(cost);
    response
}

const NAMES: [&str; 3] = ["requests", "tokens", "cents"];

/// An organization's limits, by their names.
type Plans = HashMap<String, Plan>;

/// Reads limits such as `requests=600/minute tokens=200000/minute cents=5000/month`.
fn parse(text: &str) -> Result<Plans, Error> {
    let mut plans = Plans::new();
    for limit in text.split_whitespace() {
        let (name, plan) = limit.split_once('=').ok_or(format!("{limit}: name=limit"))?;
        if !NAMES.contains(&name) {
            return Err(format!("{name} is none of {NAMES:?}").into());
        }
        plans.insert(name.to_owned(), plan.parse()?);
    }
    Ok(plans)
}

/// The default limits, and those of organizations with limits of their own.
struct Book {
    default: Plans,
    by_org: RwLock<HashMap<String, Plans>>,
}

impl Book {
    fn plan(&self, parts: &Parts, name: &str) -> Plan {
        let by_org = self.by_org.read().unwrap_or_else(PoisonError::into_inner);
        let org = parts.extensions.get::<Org>().and_then(|Org(org)| by_org.get(org));
        let plan = org.and_then(|plans| plans.get(name)).or_else(|| self.default.get(name));
        plan.copied().unwrap_or(Plan::UNLIMITED)
    }

    fn read(&self, text: &str) -> Result<(), Error> {
        let mut by_org = HashMap::new();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let (org, plans) = line.split_once(':').ok_or(format!("{line}: org: limits"))?;
            by_org.insert(org.trim().to_owned(), parse(plans)?);
        }
        *self.by_org.write().unwrap_or_else(PoisonError::into_inner) = by_org;
        Ok(())
    }

    /// Rereads the file when it changes. A file that can't be read changes nothing.
    async fn follow(self: Arc<Self>, file: String) {
        let mut seen = String::new();
        loop {
            if let Ok(text) = tokio::fs::read_to_string(&file).await
                && text != seen
            {
                match self.read(&text) {
                    Ok(()) => println!("plans: read {file}"),
                    Err(error) => println!("plans: unchanged, {error}"),
                }
                seen = text;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

/// Makes limiters that count in Redis if `REDIS_URL` is set, else in memory.
fn counted(limits: Limits) -> Result<Limits, Error> {
    match env::var("REDIS_URL") {
        Err(_) => Ok(limits),
        Ok(url) => Ok(limits.store(RedisStore::new(url)?)),
    }
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let default = env::var("LIMITS")
        .unwrap_or_else(|_| "requests=600/minute tokens=200000/minute cents=5000/month".into());
    let book = Arc::new(Book { default: parse(&default)?, by_org: RwLock::default() });
    if let Ok(file) = env::var("PLANS") {
        tokio::spawn(Arc::clone(&book).follow(file));
    }

    let limit = |name: &'static str| {
        let book = Arc::clone(&book);
        Limit::by_plan(move |parts, _key| book.plan(parts, name)).name(name)
    };
    let limits = counted(Limits::new([
        limit("requests").key(extension::<Org>()),
        limit("tokens").key(extension::<Org>()).cost_fn(estimated_tokens).settled(),
        limit("cents")
            .key(extension::<User>())
            .cost_fn(|parts| cents(estimated_tokens(parts)))
            .settled(),
    ]))?;
    // A request that is dropped before its response costs nothing, and neither does a model that
    // fails.
    let layer = FixedWindowLayer::new(&limits)
        .refund_dropped()
        .count_if(|response| !response.status.is_server_error());

    let app = Router::new()
        .route(
            "/v1/chat",
            post(chat).route_layer(layer).route_layer(middleware::from_fn(read_chat)),
        )
        .route_service("/usage", RateLimitEndpoint::new([&limits]))
        .layer(middleware::from_fn(authenticate));

    let listener = tokio::net::TcpListener::bind(addr).await?;
    let addr = listener.local_addr()?;
    let client = format!("-i -H 'x-org: acme' -H 'x-user: ann' http://{addr}");
    println!("try: curl {client}/v1/chat -d '{{\"max_tokens\": 100, \"uses\": 40}}'");
    println!("and: curl {client}/usage");
    axum::serve(listener, app).await?;
    Ok(())
}
