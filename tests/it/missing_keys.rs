//! A request without a key is refused, with the fault where it is, and never a free pass.

use axum::extract::ConnectInfo;
use serde_json::Value;
use tower_fixed_window::MissingKey;

use crate::prelude::*;

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
    // Nobody's standing.
    let expected = "cache-control: no-store; content-type: application/problem+json";
    assert_eq!(shown(&response), format!("{} {expected}", status.as_u16()));
    let body: Value = serde_json::from_str(&text_of(response).await).expect("JSON");
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

/// The text of an extractor of the app's may be anything.
#[tokio::test]
async fn what_is_missing_is_told_in_valid_json() {
    let own = Own(|_: &Parts, _: &mut Key| Err(MissingKey::client("a \"name\"\n")));
    let layer = layered(everyone(1).key(own), Mood::Now);
    for response in [
        layer.clone().layer(service_fn(inner)).oneshot(get("/")).await,
        layer.reject(GitHubBody).layer(service_fn(inner)).oneshot(get("/")).await,
    ] {
        let body = text_of(response.expect("infallible")).await;
        let _: Value = serde_json::from_str(&body).expect("JSON");
        assert!(body.contains(r#"a \"name\""#), "{body}");
    }
}
