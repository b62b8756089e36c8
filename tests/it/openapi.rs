//! The layer's description of its responses for OpenAPI agrees with the responses.

use http::HeaderName;
use serde_json::Value;

use crate::prelude::*;

/// The last response to so many requests, compared with its description.
async fn compare<J: Reject<Body> + Send + Sync + 'static>(
    layer: FixedWindowLayer<J>,
    requests: usize,
    status: u16,
) {
    let document = layer.openapi_responses();
    let service = layer.layer(service_fn(inner));
    let mut last = None;
    for _ in 0..requests {
        last = Some(service.clone().oneshot(get("/")).await.expect("infallible"));
    }
    let (sent, body) = last.expect("a response").into_parts();
    assert_eq!(sent.status, status);
    let described = &document[sent.status.as_str()];

    let headers = described["headers"].as_object().expect("headers");
    for (name, description) in headers {
        let value = sent.headers.get(name).map(|value| value.to_str().expect("text"));
        let Some(value) = value else {
            assert_eq!(description["required"], false, "{name} is missing");
            continue;
        };
        let schema = &description["schema"];
        let value = match schema["type"].as_str() {
            Some("integer") => Value::from(value.parse::<u64>().expect("an integer")),
            _ => Value::from(value),
        };
        assert!(fits(schema, &value), "{name}: {value} is not {schema}");
    }
    let content_type = HeaderName::from_static("content-type");
    for name in sent.headers.keys().filter(|name| **name != content_type) {
        assert!(headers.contains_key(name.as_str()), "{name} is not described");
    }

    let body = to_bytes(body, usize::MAX).await.expect("a body");
    let Some(media) = sent.headers.get(content_type) else {
        assert!(body.is_empty() && described.get("content").is_none());
        return;
    };
    let media = media.to_str().expect("text").split(';').next().expect("a media type");
    let schema = &described["content"][media]["schema"];
    let body: Value = serde_json::from_slice(&body).expect("JSON");
    let properties = schema["properties"].as_object().expect("properties");
    for (name, value) in body.as_object().expect("an object") {
        assert!(fits(&properties[name], value), "{name}: {value} is not {schema}");
    }
    for name in schema["required"].as_array().expect("names") {
        assert!(body.get(name.as_str().expect("a name")).is_some(), "{name} is missing");
    }
}

/// Returns whether a value has the schema's type, and is in its list.
fn fits(schema: &Value, value: &Value) -> bool {
    let has_type = match schema["type"].as_str().expect("a type") {
        "integer" => value.as_u64().is_some_and(|n| n >= schema["minimum"].as_u64().unwrap_or(0)),
        "string" => value.is_string(),
        "array" => value.is_array(),
        other => panic!("a schema of the type {other}"),
    };
    has_type && schema["enum"].as_array().is_none_or(|values| values.contains(value))
}

fn one_a_day() -> FixedWindowLayer {
    FixedWindowLayer::new(Quota::per_day(1).from_first_request().key(Key::global()))
}

#[tokio::test]
async fn a_refusal_is_as_described() {
    let named = || Quota::per_day(1).from_first_request().name("api").key(Key::global());
    let also = || Quota::per_hour(9).name("burst").key(Key::global());
    for headers in
        [Headers::GitHub, Headers::IetfDraft10, Headers::GitHubAndIetfDraft10, Headers::None]
    {
        compare(one_a_day().headers(headers), 2, 429).await;
        compare(one_a_day().headers(headers).reject(GitHubBody), 2, 429).await;
        compare(one_a_day().headers(headers).reject(EmptyBody), 2, 429).await;
        compare(FixedWindowLayer::new([named(), also()]).headers(headers), 2, 429).await;
    }
    let of_one = FixedWindowLayer::new([named(), also().shadow()]);
    compare(of_one.headers(Headers::OpenAi), 2, 429).await;
    compare(one_a_day().status(StatusCode::FORBIDDEN), 2, 403).await;
    // Its status is also that of a request without a key, or of a store that failed.
    compare(one_a_day().status(StatusCode::BAD_REQUEST), 2, 400).await;
    compare(one_a_day().status(StatusCode::BAD_REQUEST).reject(EmptyBody), 2, 400).await;
    let by_header = FixedWindowLayer::new(Quota::per_day(1).key(header("x-api-key")));
    compare(by_header.status(StatusCode::BAD_REQUEST), 1, 400).await;
    let store = TestStore::new(Mood::FailsNow).shared().on_failure(OnStoreFailure::Deny);
    let failing = Quota::per_day(1).name("api").key(Key::global()).store(store);
    compare(FixedWindowLayer::new(failing).status(StatusCode::SERVICE_UNAVAILABLE), 1, 503).await;
    // Waiting does not help.
    compare(FixedWindowLayer::new(Quota::per_day(0).key(Key::global())), 1, 429).await;
}

#[tokio::test]
async fn a_request_that_can_t_be_decided_is_as_described() {
    let by_header = || FixedWindowLayer::new(Quota::per_day(1).key(header("x-api-key")));
    compare(by_header(), 1, 400).await;
    compare(by_header().reject(GitHubBody), 1, 400).await;
    let by_user = || FixedWindowLayer::new(Quota::per_day(1).key(extension::<User>()));
    compare(by_user(), 1, 500).await;
    compare(by_user().reject(EmptyBody), 1, 500).await;
}

#[tokio::test]
async fn a_store_that_may_fail_is_described() {
    for mood in [Mood::FailsNow, Mood::FailsLater] {
        let store = TestStore::new(mood).shared().on_failure(OnStoreFailure::Deny);
        let limit = Quota::per_day(1).name("api").key(Key::global()).store(store);
        compare(FixedWindowLayer::new(limit), 1, 503).await;
    }
    assert_eq!(one_a_day().openapi_responses().get("503"), None);
    for store in [TestStore::new(Mood::Now).shared(), TestStore::new(Mood::Later)] {
        let limit = Quota::per_day(1).name("api").key(Key::global()).store(store);
        assert!(FixedWindowLayer::new(limit).openapi_responses()["503"].is_object());
    }
    let waiting = one_a_day().queue(1, secs(1));
    assert!(waiting.openapi_responses()["503"].is_object());
}

#[test]
fn grpc_has_no_description_and_a_closure_no_body() {
    assert_eq!(one_a_day().reject(Grpc).openapi_responses(), serde_json::json!({}));
    let by_hand = one_a_day().on_reject(|_, why| why.response::<Body>(why.message()));
    let responses = by_hand.openapi_responses();
    assert!(responses["429"]["headers"]["retry-after"].is_object());
    assert_eq!(responses["429"].get("content"), None);
}
