//! `cargo run --example github`
//!
//! A small copy of GitHub's policy, to test clients of GitHub's API with: 5,000 points an hour for
//! each token, 60 for each address without a token, a separate limit for searches, and
//! `/rate_limit`, which reports the client's standing without a charge.
//!
//! `CORE`, `ANON` and `SEARCH` set the limits, `STATUS` (403 or 429) the status of a refusal,
//! `HEADERS` (github, ietf, both) the headers.

use std::error::Error;
use std::net::SocketAddr;
use std::str::FromStr;

use axum::extract::Path;
use axum::http::{Method, StatusCode, request};
use axum::{Json, Router, routing::any};
use serde_json::{Value, json};
use tower_fixed_window::key::{header, peer_ip};
use tower_fixed_window::{
    FixedWindowLayer, GitHubBody, Headers, Key, KeyExtractor, Limit, MemoryStore, Quota,
    RateLimitEndpoint,
};

fn setting<T: FromStr<Err: Into<Box<dyn Error>>>>(
    name: &str,
    usual: T,
) -> Result<T, Box<dyn Error>> {
    std::env::var(name).map_or(Ok(usual), |text| text.parse().map_err(Into::into))
}

/// Reads cost less than writes.
fn points(parts: &request::Parts) -> u64 {
    match (&parts.method, parts.uri.path()) {
        (_, "/rate_limit") => 0,
        (&Method::GET | &Method::HEAD | &Method::OPTIONS, _) => 1,
        _ => 5,
    }
}

/// Returns whether there is a token, in the header where the key looks for one. This copy accepts
/// any token. An API has to verify tokens first, since a client that invents a token gets a fresh
/// count.
fn has_token(parts: &request::Parts) -> bool {
    header("authorization").extract(parts, &mut Key::default()).is_ok()
}

/// The settings from the environment.
pub(crate) struct Policy {
    pub(crate) core: u64,
    pub(crate) anon: u64,
    pub(crate) search: u64,
    pub(crate) status: StatusCode,
    pub(crate) headers: Headers,
}

async fn user() -> Json<Value> {
    Json(json!({"login": "octocat", "id": 1, "type": "User"}))
}

async fn repo(Path((owner, repo)): Path<(String, String)>) -> Json<Value> {
    let full_name = format!("{owner}/{repo}");
    Json(json!({"name": repo, "full_name": full_name, "owner": {"login": owner}}))
}

async fn found() -> Json<Value> {
    Json(json!({"total_count": 0, "incomplete_results": false, "items": []}))
}

async fn not_found() -> (StatusCode, Json<Value>) {
    (StatusCode::NOT_FOUND, Json(json!({"message": "Not Found"})))
}

/// The API, counted in the given store.
pub(crate) fn app(policy: &Policy, store: &MemoryStore) -> Router {
    // Both limits share the key, the cost, the status and the body of refusals.
    let layer = |limit: Limit| {
        let limit = limit.key(header("authorization").or(peer_ip())).cost_fn(points);
        FixedWindowLayer::new(limit.store(store.clone()))
            .status(policy.status)
            .headers(policy.headers)
            .reject(GitHubBody)
    };
    // GitHub's windows begin with a client's first request, not at the full hour.
    let by_token = Quota::per_hour(policy.core).from_first_request();
    let by_address = Quota::per_hour(policy.anon).from_first_request();
    let core =
        Limit::by_plan(move |parts, _key| if has_token(parts) { by_token } else { by_address });
    let core = layer(core.name("core"));
    let search = Quota::per_minute(policy.search).from_first_request();
    let search = layer(search.name("search"));

    let standing = RateLimitEndpoint::new([&core, &search]);
    let searching = Router::new()
        .route("/search/repositories", any(found))
        .route("/search/{*what}", any(not_found))
        .layer(search);
    Router::new()
        .route("/user", any(user))
        .route("/repos/{owner}/{repo}", any(repo))
        // `/rate_limit` is inside of the layer at a cost of 0: never refused, and with the headers.
        .route_service("/rate_limit", standing)
        .fallback(not_found)
        .layer(core)
        .merge(searching)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let addr = setting("ADDR", "127.0.0.1:3000".to_owned())?;
    let policy = Policy {
        core: setting("CORE", 5_000)?,
        anon: setting("ANON", 60)?,
        search: setting("SEARCH", 30)?,
        status: setting("STATUS", StatusCode::FORBIDDEN)?,
        headers: match &*setting("HEADERS", "github".to_owned())? {
            "github" => Headers::GitHub,
            "ietf" => Headers::IetfDraft10,
            "both" => Headers::GitHubAndIetfDraft10,
            other => return Err(format!("HEADERS is github, ietf or both, not {other}").into()),
        },
    };
    let app = app(&policy, &MemoryStore::new());

    let listener = tokio::net::TcpListener::bind(addr).await?;
    let addr = listener.local_addr()?;
    println!("try: curl -i http://{addr}/user");
    println!("     curl -i -H 'authorization: Bearer a' -X PATCH http://{addr}/repos/a/b");
    println!("     curl -i http://{addr}/search/repositories?q=tower");
    println!("     curl http://{addr}/rate_limit");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
