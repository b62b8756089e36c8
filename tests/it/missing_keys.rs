//! A request without a key is refused, with the fault where it is, and never a free pass.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::{Body, to_bytes};
use axum::extract::ConnectInfo;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{Request, Response, StatusCode};
use serde_json::Value;
use tower::{Layer, ServiceExt, service_fn};
use tower_fixed_window::key::{PeerAddr, extension, header, peer_ip};
use tower_fixed_window::{GitHubBody, Key, KeyExtractor, Limit, MissingKey, Quota};

use crate::support::{CASES, Case, Log, Mood, User, get, inner, layered, limit_headers, used};

const PEER: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 4711);

/// The answer to a request under a limit of 1, and whether it reached the service.
async fn ask(
    limit: impl Fn() -> Limit,
    case: Case,
    request: Request<Body>,
) -> (Response<Body>, bool) {
    let calls = AtomicUsize::new(0);
    let service = layered(limit(), case).layer(service_fn(|request| {
        calls.fetch_add(1, Ordering::SeqCst);
        inner(request)
    }));
    let response = service.oneshot(request).await.expect("infallible");
    (response, calls.load(Ordering::SeqCst) > 0)
}

/// Asserts that a request was refused for its missing key, and returns the message.
async fn assert_refused((response, reached): (Response<Body>, bool), status: StatusCode) -> String {
    assert!(!reached, "a free pass");
    assert_eq!(response.status(), status);
    assert!(limit_headers(&response).is_empty(), "nobody's standing");
    assert_eq!(response.headers()[CACHE_CONTROL], "no-store");
    assert_eq!(response.headers()[CONTENT_TYPE], "application/problem+json");
    let body = to_bytes(response.into_body(), 10_000).await.expect("short");
    let body: Value = serde_json::from_slice(&body).expect("JSON");
    assert_eq!(body["status"], status.as_u16());
    body["message"].as_str().expect("a message").to_owned()
}

#[tokio::test]
async fn a_missing_header_is_a_400_that_names_it() {
    let limit = || Quota::per_minute(1).key(header("x-api-key"));
    let with = |values: &[&str]| {
        let mut request = get("/");
        for value in values {
            request.headers_mut().append("x-api-key", value.parse().expect("valid"));
        }
        request
    };
    for case in CASES {
        for values in [&[][..], &[""], &["alpha", "beta"]] {
            let answer = ask(limit, case, with(values)).await;
            let message = assert_refused(answer, StatusCode::BAD_REQUEST).await;
            assert!(message.contains("x-api-key"), "{message}");
        }
        let (response, reached) = ask(limit, case, with(&["alpha"])).await;
        assert!(reached);
        assert_eq!(used(&response), 1);
    }
}

#[tokio::test]
async fn a_missing_peer_address_is_a_500_and_its_fix_is_logged_once() {
    // No other test in this program makes the same mistake, which a process logs once.
    let log = Log::start();
    let limit = || Limit::new(Quota::per_minute(1));
    for case in CASES {
        for _ in 0..3 {
            let answer = ask(limit, case, get("/")).await;
            let message = assert_refused(answer, StatusCode::INTERNAL_SERVER_ERROR).await;
            assert!(!message.contains("connect_info"), "the set-up is not the client's: {message}");
        }
        // The client's own omission is no mistake.
        let by_user = || Quota::per_minute(1).key(header("x-user"));
        assert_refused(ask(by_user, case, get("/")).await, StatusCode::BAD_REQUEST).await;
    }
    let log = log.warnings();
    // Tests that run meanwhile may have limits of the same names.
    let mistakes = log.lines().filter(|line| !line.contains("rate limits are named"));
    assert_eq!(mistakes.count(), 1, "{log}");
    assert!(log.contains("ERROR tower_fixed_window: requests carry no peer address"), "{log}");
}

#[tokio::test]
async fn a_peer_address_from_axum_or_from_peer_addr_counts() {
    let limit = || Limit::new(Quota::per_minute(1));
    for case in CASES {
        let (mut axum, mut other) = (get("/"), get("/"));
        axum.extensions_mut().insert(ConnectInfo(PEER));
        other.extensions_mut().insert(PeerAddr(PEER));
        for request in [axum, other] {
            let (response, reached) = ask(limit, case, request).await;
            assert!(reached);
            assert_eq!(used(&response), 1);
        }
    }
}

#[tokio::test]
async fn an_extension_that_no_layer_set_is_a_500_unless_there_is_a_fallback() {
    let strict = || Quota::per_minute(1).key(extension::<User>());
    let lenient = || Quota::per_minute(1).key(extension::<User>().or(peer_ip()));
    for case in CASES {
        let answer = ask(strict, case, get("/")).await;
        assert_refused(answer, StatusCode::INTERNAL_SERVER_ERROR).await;

        let mut request = get("/");
        request.extensions_mut().insert(PeerAddr(PEER));
        assert!(ask(lenient, case, request).await.1);
    }
}

/// The text of an extractor of the app's may be anything.
#[tokio::test]
async fn what_is_missing_is_told_in_valid_json() {
    struct Unprintable;

    impl KeyExtractor for Unprintable {
        fn extract(&self, _: &http::request::Parts, _: &mut Key) -> Result<(), MissingKey> {
            Err(MissingKey::client("a \"name\"\n"))
        }
    }

    let layer = layered(Limit::new(Quota::per_minute(1)).key(Unprintable), Mood::Now);
    for response in [
        layer.clone().layer(service_fn(inner)).oneshot(get("/")).await,
        layer.reject(GitHubBody).layer(service_fn(inner)).oneshot(get("/")).await,
    ] {
        let body =
            to_bytes(response.expect("infallible").into_body(), 10_000).await.expect("a body");
        let _: Value = serde_json::from_slice(&body).expect("JSON");
        assert!(String::from_utf8_lossy(&body).contains(r#"a \"name\""#), "{body:?}");
    }
}
