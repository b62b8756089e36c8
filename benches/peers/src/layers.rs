//! The layers, each around the same service, which answers a few bytes with a content-type.

use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::hint::black_box;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::body::Body;
use axum::extract::ConnectInfo;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};
use tower_fixed_window::{FixedWindowLayer, MemoryStore, Quota};
use tower_layer::Layer;
use tower_service::Service;

use crate::batch::{Batch, Verdict, address};

const DAY: Duration = Duration::from_secs(86_400);

/// The service that is limited.
#[derive(Clone)]
pub struct Bare;

impl Service<Request<()>> for Bare {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        let mut response = Response::new(Body::from("hello"));
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
        ready(Ok(response))
    }
}

const LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const USED: HeaderName = HeaderName::from_static("x-ratelimit-used");
const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

/// The least that four fields cost: fixed ones, inserted by hand, and nothing is counted.
#[derive(Clone)]
struct FourByHand(Bare);

impl Service<Request<()>> for FourByHand {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<()>) -> Self::Future {
        let Ok(mut response) = self.0.call(request).into_inner();
        insert_four(response.headers_mut());
        ready(Ok(response))
    }
}

#[inline]
pub fn insert_four(fields: &mut HeaderMap) {
    fields.insert(LIMIT, HeaderValue::from_static("1000000000"));
    fields.insert(REMAINING, HeaderValue::from_static("999999999"));
    fields.insert(USED, HeaderValue::from_static("1"));
    fields.insert(RESET, HeaderValue::from_static("1795234260"));
}

/// The least that a refusal of seven fields and a problem body costs: fixed ones, by hand, and
/// nothing is counted.
#[derive(Clone)]
struct RefusalByHand;

impl Service<Request<()>> for RefusalByHand {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        const PROBLEM: &str = r#"{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Quota exceeded","status":429,"message":"API rate limit exceeded: 1/day","violated-policies":["1/day"]}"#;
        let mut response = Response::new(Body::from(PROBLEM));
        *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
        let fields = response.headers_mut();
        // Without this, growing the map costs 700 instructions more.
        fields.reserve(7);
        fields.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        fields.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        fields.insert(LIMIT, HeaderValue::from_static("1"));
        fields.insert(REMAINING, HeaderValue::from_static("0"));
        fields.insert(USED, HeaderValue::from_static("1"));
        fields.insert(RESET, HeaderValue::from_static("1795234260"));
        fields.insert(RETRY_AFTER, HeaderValue::from_static("29"));
        ready(Ok(response))
    }
}

/// Who takes part, in the order of the tables.
pub const CONTESTANTS: [(&str, &[Verdict]); 6] = [
    ("bare service", &[Verdict::Allowed]),
    (BY_HAND, &[Verdict::Allowed, Verdict::Refused]),
    (OURS, &[Verdict::Allowed, Verdict::Refused]),
    (TOWER_GOVERNOR, &[Verdict::Allowed, Verdict::Refused]),
    ("tower-rate-limiter", &[Verdict::Allowed, Verdict::Refused]),
    ("axum-governor", &[Verdict::Allowed, Verdict::Refused]),
];

pub const BY_HAND: &str = "fields by hand";
pub const OURS: &str = "tower-fixed-window";
pub const TOWER_GOVERNOR: &str = "tower_governor";

pub fn ours(verdict: Verdict) -> FixedWindowLayer {
    // Of a million keys, the default store finds some 400 no entry of their own, and refuses early.
    let store = MemoryStore::with_max_keys(1_250_000);
    FixedWindowLayer::new(Quota::per_day(u64::from(verdict.limit()))).store(store)
}

/// tower_governor's layer, with its fields. A macro, since its type needs a dozen lines.
#[macro_export]
macro_rules! tower_governor {
    ($verdict:expr) => {{
        let limit = $verdict.limit();
        let config = tower_governor::governor::GovernorConfigBuilder::default()
            .period(std::time::Duration::from_secs(86_400) / limit)
            .burst_size(limit)
            .use_headers()
            .finish()
            .expect("neither is zero");
        tower_governor::GovernorLayer::new(config)
    }};
}

fn tower_rate_limiter(
    verdict: Verdict,
) -> tower_rate_limiter::RateLimitLayer<
    tower_rate_limiter::IpKeyExtractor,
    tower_rate_limiter::FixedWindow<tower_rate_limiter::MemoryStore>,
> {
    use tower_rate_limiter::{FixedWindow, IpKeyExtractor, MemoryStore, RateLimitLayer};
    let policy = FixedWindow::new(MemoryStore::new(), u64::from(verdict.limit()), DAY);
    RateLimitLayer::builder(IpKeyExtractor::new())
        .policy_name("default")
        .with_policy(policy.expect("a long window"))
        .build()
        .expect("it is complete")
}

fn axum_governor(verdict: Verdict) -> axum_governor::GovernorLayer<std::net::IpAddr> {
    let limit = NonZeroU32::new(verdict.limit()).expect("not zero");
    let quota = governor::Quota::with_period(DAY / limit.get()).expect("not zero");
    let config = axum_governor::GovernorConfigBuilder::default()
        .with_extractor(axum_governor::extractor::PeerIp::default())
        .expect_connect_info()
        .quota_default(quota.allow_burst(limit).into())
        .finish();
    axum_governor::GovernorLayer::new(config.expect("it is complete"))
}

pub fn contestant(who: &str, verdict: Verdict) -> Box<dyn Batch> {
    match (who, verdict) {
        ("bare service", _) => Box::new(Served(Bare)),
        (BY_HAND, Verdict::Allowed) => Box::new(Served(FourByHand(Bare))),
        (BY_HAND, Verdict::Refused) => Box::new(Served(RefusalByHand)),
        (OURS, _) => Box::new(Served(ours(verdict).layer(Bare))),
        (TOWER_GOVERNOR, _) => Box::new(Served(tower_governor!(verdict).layer(Bare))),
        ("tower-rate-limiter", _) => Box::new(Served(tower_rate_limiter(verdict).layer(Bare))),
        ("axum-governor", _) => Box::new(Served(axum_governor(verdict).layer(Bare))),
        _ => panic!("there is no layer {who}"),
    }
}

/// A service that is asked by the clients of a batch, as axum would: with their address in the
/// extension that all of these layers read it from.
struct Served<S>(S);

impl<S> Batch for Served<S>
where
    S: Service<Request<()>, Response = Response<Body>, Error = Infallible>,
    S: Clone + Send + 'static,
{
    fn run(&mut self, clients: &[u32]) -> usize {
        let mut cx = Context::from_waker(Waker::noop());
        let mut refused = 0;
        for &client in clients {
            let mut request = Request::new(());
            let peer = SocketAddr::new(address(client), 4711);
            request.extensions_mut().insert(ConnectInfo(peer));
            assert!(self.0.poll_ready(&mut cx).is_ready());
            let Poll::Ready(Ok(response)) = pin!(self.0.call(request)).poll(&mut cx) else {
                panic!("these limits are in memory, and the service answers at once");
            };
            let status = black_box(response).status();
            refused += usize::from(status == StatusCode::TOO_MANY_REQUESTS);
            assert!(status == StatusCode::OK || status == StatusCode::TOO_MANY_REQUESTS);
        }
        refused
    }

    fn fork(&self) -> Box<dyn Batch> {
        Box::new(Self(self.0.clone()))
    }
}
