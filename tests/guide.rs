//! The pages of README and the guide, whose examples are tested here: some need more than the
//! examples in the sources do.

#[doc = include_str!("../README.md")]
pub mod readme {}

#[doc = include_str!("../docs/support.md")]
pub mod support {}

#[path = "../src/guide.rs"]
pub mod guide;

/// What the tables of docs/moving.md name, in whole lines:
///
/// ```rust
/// use std::time::Duration;
/// use axum::handler::Handler;
/// use axum::http::{Method, Request};
/// use axum::{Router, response::IntoResponse, routing::get};
/// use tower_fixed_window::key::{client_ip, header, matched_path, peer_ip};
/// use tower_fixed_window::{
///     EmptyBody, FixedWindowLayer, GitHubBody, Grpc, Headers, Key, KeyExtractor, Limit,
///     ManualClock, MemoryStore, OnStoreFailure, Plan, Quota,
/// };
/// use tower_fixed_window::testing::ask;
/// use tower_fixed_window_redis::RedisStore;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limit = || Quota::per_minute(60).name("api");
/// let layer = || FixedWindowLayer::new(limit());
///
/// // Quotas.
/// let ten_seconds = Quota::new(10, Duration::from_secs(10));
/// let _ = FixedWindowLayer::new(Quota::per_minute(30).and(ten_seconds));
/// let _ = FixedWindowLayer::new(Quota::per_hour(5_000).from_first_request());
/// let _ = FixedWindowLayer::new(Quota::per_second(10).rollover_up_to(30));
/// let _ = FixedWindowLayer::new([limit(), Quota::per_minute(600).name("all").key(Key::global())]);
/// let _ = limit().cost_fn(|parts| if parts.method == Method::GET { 1 } else { 5 });
/// let _ = Quota::new(20, Duration::from_secs(10)).rollover_up_to(100);
/// let _ = Limit::by_plan(|_parts, _key| Plan::UNLIMITED);
/// let _ = FixedWindowLayer::new("5/minute".parse::<Quota>()?.name("login"));
///
/// // A burst and its slow refill: 5 at once, then one every 2 seconds.
/// let clock = ManualClock::at_ms(1_700_000_000_000);
/// let burst = Quota::new(1, Duration::from_secs(2)).rollover_up_to(5);
/// let burst = burst.name("burst").key(Key::global());
/// let burst = FixedWindowLayer::new(burst.store(MemoryStore::new().clock(clock.clone())));
/// let status = || ask(&burst, Request::get("/")).status().as_u16();
/// assert_eq!([(); 6].map(|()| status()), [200, 200, 200, 200, 200, 429]);
/// for _ in 0..3 {
///     clock.advance(Duration::from_secs(2));
///     assert_eq!([(); 2].map(|()| status()), [200, 429]);
/// }
/// assert_eq!(ask(&burst, Request::get("/")).headers()["x-ratelimit-limit"], "1");
///
/// // A new key has 50, and each minute adds 10.
/// let saved = Quota::per_minute(10).rollover_up_to(50).name("saved").key(Key::global());
/// let saved = FixedWindowLayer::new(saved.store(MemoryStore::new().clock(clock.clone())));
/// let passed = || (0..60).filter(|_| ask(&saved, Request::get("/")).status() == 200).count();
/// assert_eq!(passed(), 50);
/// clock.advance(Duration::from_secs(60));
/// assert_eq!(passed(), 10);
///
/// // Keys, on the limit.
/// let _ = limit().key(client_ip().trusting(["10.0.0.0/8"]));
/// let _ = limit().key(header("x-api-key").or(peer_ip()));
/// let _ = limit().key((peer_ip(), matched_path()));
/// let _ = (limit().key(client_ip().ipv6_prefix(56)), limit().key(client_ip().trusting_hops(1)));
/// let _ = limit().key_fn(|parts| {
///     let cookies = parts.headers.get("cookie")?.to_str().ok()?;
///     cookies.split("; ").find_map(|cookie| cookie.strip_prefix("sid=")).map(Key::secret)
/// });
///
/// // Requests that are exempt, and responses that count: on the layer.
/// let _ = layer().skip(|parts| parts.method != Method::POST);
/// let _ = layer().skip(client_ip().is_in(["192.0.2.0/24"]));
/// let _ = layer().count_if(|response| !response.status.is_server_error());
/// let _ = layer().count_if(|response| response.status.as_u16() >= 400);
///
/// // Refusals.
/// let _ = layer().on_reject(|_parts, why| (why.status(), why.message()).into_response());
/// let _ = (layer().reject(EmptyBody), layer().reject(GitHubBody), layer().reject(Grpc));
/// let _ = layer().headers(Headers::GitHubAndIetfDraft10).expose_decision();
/// let _ = layer().queue(20, Duration::from_secs(2));
/// let _ = FixedWindowLayer::new(limit().shadow());
///
/// // Stores: a limit and a store are a limiter, which a layer is made of.
/// let _ = FixedWindowLayer::new(limit().store(MemoryStore::with_max_keys(100_000)));
/// let store = RedisStore::new("redis://127.0.0.1/")?.on_failure(OnStoreFailure::Allow);
/// let _ = FixedWindowLayer::new(limit().store(store));
///
/// // A limiter: at run time, and without HTTP.
/// # async fn at_run_time(limiter: tower_fixed_window::Limiter) -> Result<(), Box<dyn std::error::Error>> {
/// let receipt = limiter.charge("ann", 3).await??;
/// limiter.settle(receipt, 5).await?;
/// assert!(limiter.peek("ann").await?.remaining() >= 3);
/// let (decision, usage) = (limiter.check("ann").await?, limiter.peek("ann").await?);
/// let waits = limiter.reserve("ann", 1).await??;
/// limiter.set_quotas(Quota::per_minute(100));
/// let until = std::time::SystemTime::now() + Duration::from_secs(3_600);
/// limiter.set_key_quotas_until("ann", Quota::per_day(0), until);
/// # let _ = (decision, usage, waits); Ok(()) }
///
/// // A limit for each method of a route.
/// let read = FixedWindowLayer::new(Quota::per_minute(60).name("read"));
/// let write = FixedWindowLayer::new(Quota::per_minute(5).name("write"));
/// let _: Router = Router::new().route(
///     "/",
///     get((async || "read\n").layer(read)).post((async || "written\n").layer(write)),
/// );
/// # Ok(()) }
/// ```
pub mod moving {}
