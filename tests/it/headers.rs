//! The headers of S18 and S19, to the letter.

use std::collections::BTreeMap;

use axum::response::Response;
use http::HeaderName;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use serde_json::{Value, json};

use crate::prelude::*;

fn app() -> Router {
    Router::new().route("/", on_get(async || "hello"))
}

async fn ask(app: &Router) -> Response {
    app.clone().oneshot(get("/")).await.expect("infallible")
}

fn limit(quotas: impl Into<Quotas>) -> Limit {
    Limit::new(quotas).key(Key::global())
}

/// Asserts limit, remaining, used and reset, and that there is no other rate-limit field.
fn assert_fields(response: &Response, expected: [&str; 4], resource: Option<&str>) {
    let mut all: BTreeMap<_, _> =
        ["limit", "remaining", "used", "reset"].into_iter().zip(expected).collect();
    all.extend(resource.map(|resource| ("resource", resource)));
    assert_eq!(limit_headers(response), all);
}

#[tokio::test]
async fn times_are_rounded_up_and_never_zero() {
    for mood in ANSWERS {
        let store = TestStore::new(mood);
        // A window that ends half-way in a second: 1.5 s of it are left at first.
        let quota = Quota::new(1, ms(2_500)).starting_at(ms(NOW_MS - 1_000));
        let layer =
            FixedWindowLayer::new(Limit::new(quota).key(Key::global()).store(store.clone()));
        let app = app().layer(layer);
        let end = NOW_MS + 1_500;
        let reset = end.div_ceil(1_000).to_string();
        assert_eq!(limit_headers(&ask(&app).await)["reset"], reset);
        for (left, retry_after) in [(1_500, "2"), (1_001, "2"), (1_000, "1"), (1, "1")] {
            store.clock.set_ms(end - left);
            let response = ask(&app).await;
            assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS, "{left} ms are left");
            assert_eq!(response.headers()[RETRY_AFTER], retry_after, "{left} ms are left");
            assert_eq!(limit_headers(&response)["reset"], reset);
        }
        store.clock.set_ms(end);
        assert_eq!(ask(&app).await.status(), StatusCode::OK, "the end is in the next window");
    }
}

#[tokio::test]
async fn the_body_of_a_refusal_is_problem_json_with_githubs_message() {
    for mood in ANSWERS {
        let quotas = Quota::per_minute(1).and(Quota::per_hour(1)).and(Quota::per_day(9));
        for (layer, policies) in [
            (per_minute(1, mood), json!(["1/minute"])),
            (named("login", 1, mood), json!(["login:1/minute"])),
            (layered(limit(quotas).name("all"), mood), json!(["all:1/minute", "all:1/hour"])),
        ] {
            let app = app().layer(layer);
            ask(&app).await;
            let response = ask(&app).await;
            let wait = response.headers()[RETRY_AFTER].to_str().expect("digits").to_owned();
            assert_eq!(response.headers()[CONTENT_TYPE], "application/problem+json");
            let body: Value = serde_json::from_str(&text_of(response).await).expect("JSON");
            let uri = "https://iana.org/assignments/http-problem-types#quota-exceeded";
            assert_eq!(body["type"], uri);
            assert_eq!(body["status"], 429);
            assert_eq!(body["retry_after"].to_string(), wait);
            assert_eq!(body["violated-policies"], policies);
            let message = body["message"].as_str().expect("a text");
            assert!(message.starts_with("API rate limit exceeded"), "{message}");
        }
    }
}

/// An app whose handler sends rate-limit headers of its own, each of them twice.
fn upstream(names: &'static [&'static str]) -> Router {
    let handler = async move || {
        let mut response = Response::new(Body::empty());
        for name in names.iter().chain(names) {
            let name = HeaderName::from_static(name);
            response.headers_mut().append(name, "1".parse().expect("valid"));
        }
        response
    };
    Router::new().route("/", on_get(handler))
}

const ALL: &[&str] = &[
    "x-ratelimit-limit",
    "x-ratelimit-remaining",
    "x-ratelimit-used",
    "x-ratelimit-reset",
    "x-ratelimit-resource",
];

#[tokio::test]
async fn headers_of_an_upstream_are_always_replaced() {
    for mood in ANSWERS {
        // The handler sends all headers, or each one alone. The layer's limit is looser, and its
        // headers replace them all the same.
        let subsets = [ALL].into_iter().chain(ALL.chunks(1));
        for names in subsets {
            let app = upstream(names).layer(per_minute(60, mood));
            assert_fields(&ask(&app).await, ["60", "59", "1", RESET], None);
            let app = upstream(names).layer(named("ours", 60, mood));
            assert_fields(&ask(&app).await, ["60", "59", "1", RESET], Some("ours"));
            let app = upstream(names).layer(per_minute(5, mood)).layer(per_minute(60, mood));
            assert_fields(&ask(&app).await, ["5", "4", "1", RESET], None);
        }
    }
}
