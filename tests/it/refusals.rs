//! The response to a refused request: whoever makes it, the layer completes it once.

use axum::body::{Body, to_bytes};
use http::header::{ACCEPT, CONTENT_TYPE, RETRY_AFTER};
use http::request::Parts;
use http::{HeaderMap, Request, Response};
use tower::{Layer, ServiceExt};
use tower_fixed_window::{
    EmptyBody, FixedWindowLayer, Headers, OnStoreFailure, Reject, Rejection, testing,
};

use crate::support::{ANSWERS, Mood, RETRY_AFTER as SECONDS, get, per_minute};

/// Somebody else's way of refusing: it knows nothing of rate-limit headers.
struct Plain;

impl Reject<Body> for Plain {
    fn reject(&self, parts: &Parts, why: &Rejection<'_>) -> Response<Body> {
        let mut response = Response::new(Body::from(parts.uri.path().to_owned()));
        *response.status_mut() = why.status();
        response.headers_mut().insert(CONTENT_TYPE, "text/plain".parse().expect("a value"));
        response
    }
}

async fn refused<J: Reject<Body>>(layer: &FixedWindowLayer<J>) -> Response<Body> {
    let service = layer.layer(axum::Router::new());
    let _ = service.clone().oneshot(get("/")).await.expect("infallible");
    service.oneshot(get("/asked")).await.expect("infallible")
}

/// What is left without the headers that describe the body.
fn without_type(response: &Response<Body>) -> HeaderMap {
    let mut headers = response.headers().clone();
    headers.remove(CONTENT_TYPE);
    headers
}

#[tokio::test]
async fn a_reject_of_your_own_gets_the_headers_that_the_ready_made_ones_have() {
    let styles =
        [Headers::GitHub, Headers::IetfDraft10, Headers::GitHubAndIetfDraft10, Headers::None];
    for (mood, style) in ANSWERS.into_iter().flat_map(|mood| styles.map(|style| (mood, style))) {
        let limit = || per_minute(1, mood).name("api").headers(style);
        let ready_made = refused(&limit().reject(EmptyBody)).await;
        let own = refused(&limit().reject(Plain)).await;
        assert_eq!(own.status(), ready_made.status());
        assert_eq!(without_type(&own), without_type(&ready_made), "{style:?}");
        assert_eq!(own.headers()[CONTENT_TYPE], "text/plain");
        let names = own.headers().keys().count();
        assert_eq!(own.headers().len(), names, "each of them once, under {style:?}");
        let body = to_bytes(own.into_body(), 1_000).await.expect("a body");
        assert_eq!(body, "/asked");
        let closure = limit().on_reject(|parts, why| Plain.reject(parts, why));
        assert_eq!(without_type(&refused(&closure).await), without_type(&ready_made));
    }
}

#[tokio::test]
async fn a_failure_is_completed_as_a_refusal_by_a_limit_is() {
    let failing = || per_minute(1, Mood::FailsNow).on_store_failure(OnStoreFailure::Deny);
    let own = refused(&failing().reject(Plain)).await;
    assert_eq!(own.status(), 503);
    assert_eq!(without_type(&own), without_type(&refused(&failing().reject(EmptyBody)).await));
}

#[tokio::test]
async fn closures_get_the_request_and_the_seconds_of_the_header() {
    for mood in ANSWERS {
        let limit = per_minute(1, mood).on_reject(|parts, why| {
            let accept = parts.headers[ACCEPT].clone();
            let mut response = Response::new(Body::from(format!("{:?}", why.retry_after_secs())));
            response.headers_mut().insert("accepted", accept);
            response
        });
        let service = limit.layer(axum::Router::new());
        let _ = service.clone().oneshot(get("/")).await.expect("infallible");
        let request = Request::get("/").header(ACCEPT, "text/html").body(Body::empty());
        let response = service.oneshot(request.expect("a request")).await.expect("infallible");
        assert_eq!(response.headers()["accepted"], "text/html");
        assert_eq!(response.headers()[RETRY_AFTER], SECONDS);
        let body = to_bytes(response.into_body(), 1_000).await.expect("a body");
        assert_eq!(body, format!("Some({SECONDS})"));
    }
}

#[test]
fn seconds_are_there_where_waiting_helps() {
    let seconds = |layer: FixedWindowLayer| {
        let layer = layer.on_reject(|_, why| {
            Response::builder()
                .header("seconds", format!("{:?}", why.retry_after_secs()))
                .body(bytes::Bytes::new())
                .expect("a response")
        });
        let response = testing::ask(&layer, Request::get("/"));
        let told = response.headers()["seconds"].to_str().expect("ASCII").to_owned();
        (told, response.headers().get(RETRY_AFTER).is_some())
    };
    let never = per_minute(0, Mood::Now);
    assert_eq!(seconds(never), ("None".into(), false));
    let keyless = per_minute(1, Mood::Now).key_fn(|_| None);
    assert_eq!(seconds(keyless), ("None".into(), false));
    let failing = per_minute(1, Mood::FailsNow).on_store_failure(OnStoreFailure::Deny);
    assert_eq!(seconds(failing), ("Some(1)".into(), true));
}
