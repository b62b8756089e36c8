//! The layers, each around the same service, which answers a few bytes with a content-type.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::hint::black_box;
#[cfg(feature = "others")]
use std::net::IpAddr;
use std::net::SocketAddr;
use std::task::{Context, Waker};

use axum::body::Body;
use axum::extract::ConnectInfo;
use governor::middleware::StateInformationMiddleware;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};
use tower::service_fn;
use tower_fixed_window::{FixedWindowLayer, Headers, Limit, MemoryStore, Quota};
use tower_governor::GovernorLayer;
use tower_governor::key_extractor::PeerIpKeyExtractor;
use tower_layer::Layer;
#[cfg(feature = "others")]
use tower_rate_limiter::{FixedWindow, IpKeyExtractor, RateLimitLayer};
use tower_service::Service;

#[cfg(feature = "others")]
use crate::stores::governor_quota;
use crate::{DAY, Limiter, REFUSED, address, each, now};

type Answer = Ready<Result<Response<Body>, Infallible>>;

/// The service that is limited.
fn bare(_: Request<()>) -> Answer {
    let mut response = Response::new(Body::from("hello"));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    ready(Ok(response))
}

const LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const USED: HeaderName = HeaderName::from_static("x-ratelimit-used");
const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

/// The least that four headers cost: fixed ones, inserted by hand, and nothing is counted.
#[inline]
pub fn four_headers(headers: &mut HeaderMap) {
    headers.insert(LIMIT, HeaderValue::from_static("1000000000"));
    headers.insert(REMAINING, HeaderValue::from_static("999999999"));
    headers.insert(USED, HeaderValue::from_static("1"));
    headers.insert(RESET, HeaderValue::from_static("1795234260"));
}

/// The least that a refusal with seven headers and a problem body costs.
#[inline]
pub fn refusal() -> Response<Body> {
    const PROBLEM: &str = r#"{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Quota exceeded","status":429,"message":"API rate limit exceeded: 1/day","violated-policies":["1/day"]}"#;
    let mut response = Response::new(Body::from(PROBLEM));
    *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    let headers = response.headers_mut();
    // Without this, growing the map costs 700 instructions more.
    headers.reserve(7);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    four_headers(headers);
    headers.insert(RETRY_AFTER, HeaderValue::from_static("29"));
    response
}

pub fn ours(limit: u32) -> FixedWindowLayer {
    // The default store finds no entry for some 400 of a million keys, and refuses them early.
    let store = MemoryStore::with_max_keys(1_250_000);
    let limit = Limit::new(Quota::per_day(u64::from(limit)));
    FixedWindowLayer::new(limit.store(store))
}

/// With headers, of which it sends two.
pub fn tower_governor(
    limit: u32,
) -> GovernorLayer<PeerIpKeyExtractor, StateInformationMiddleware, Body> {
    let mut config = tower_governor::governor::GovernorConfigBuilder::default();
    let config = config.period(DAY / limit).burst_size(limit).use_headers().finish();
    GovernorLayer::new(config.expect("neither is zero"))
}

#[cfg(feature = "others")]
type TowerRateLimiter =
    RateLimitLayer<IpKeyExtractor, FixedWindow<tower_rate_limiter::MemoryStore>>;

#[cfg(feature = "others")]
fn tower_rate_limiter(limit: u32) -> TowerRateLimiter {
    let store = tower_rate_limiter::MemoryStore::new();
    let policy = FixedWindow::new(store, u64::from(limit), DAY).expect("a long window");
    let layer = RateLimitLayer::builder(IpKeyExtractor::new()).policy_name("default");
    layer.with_policy(policy).build().expect("it is complete")
}

#[cfg(feature = "others")]
fn axum_governor(limit: u32) -> axum_governor::GovernorLayer<IpAddr> {
    let config = axum_governor::GovernorConfigBuilder::default()
        .with_extractor(axum_governor::extractor::PeerIp::default())
        .expect_connect_info()
        .quota_default(governor_quota(limit, DAY).into())
        .finish();
    axum_governor::GovernorLayer::new(config.expect("it is complete"))
}

pub(crate) fn limiter(name: &str, limit: u32) -> Limiter {
    let service = service_fn(bare);
    match name {
        "bare service" => served(service),
        "by hand" if limit == REFUSED => served(service_fn(|_| -> Answer { ready(Ok(refusal())) })),
        "by hand" => served(service_fn(|request| -> Answer {
            let Ok(mut response) = bare(request).into_inner();
            four_headers(response.headers_mut());
            ready(Ok(response))
        })),
        "tower-fixed-window" => served(ours(limit).layer(service)),
        "tower-fixed-window, no headers" => {
            served(ours(limit).headers(Headers::None).layer(service))
        }
        "tower_governor" => served(tower_governor(limit).layer(service)),
        #[cfg(feature = "others")]
        "tower-rate-limiter" => served(tower_rate_limiter(limit).layer(service)),
        #[cfg(feature = "others")]
        "axum-governor" => served(axum_governor(limit).layer(service)),
        _ => panic!("there is no layer {name}"),
    }
}

/// Requests as axum has them: with the address in the extension that all of these layers read.
fn served<S>(mut service: S) -> Limiter
where
    S: Service<Request<()>, Response = Response<Body>, Error = Infallible>,
    S: Clone + Send + 'static,
{
    each(move |client| {
        let mut cx = Context::from_waker(Waker::noop());
        let mut request = Request::new(());
        let peer = SocketAddr::new(address(client), 4711);
        request.extensions_mut().insert(ConnectInfo(peer));
        assert!(service.poll_ready(&mut cx).is_ready());
        let Ok(response) = now(service.call(request));
        let status = black_box(response).status();
        assert!(status == StatusCode::OK || status == StatusCode::TOO_MANY_REQUESTS);
        status == StatusCode::OK
    })
}
