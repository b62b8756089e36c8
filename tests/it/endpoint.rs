//! The rate-limit endpoint: how callers stand, in GitHub's JSON, without charging them.

use crate::prelude::*;

/// Status and body.
async fn ask<S, B>(service: &S, request: Request<Body>) -> (StatusCode, String)
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible> + Clone,
    B: http_body::Body<Data = bytes::Bytes, Error: Into<axum::BoxError>> + Send + 'static,
{
    let Ok(response) = service.clone().oneshot(request).await;
    assert_eq!(response.headers()["content-type"], "application/json; charset=utf-8");
    assert_eq!(response.headers()["cache-control"], "no-store");
    let status = response.status();
    let unavailable = status == StatusCode::SERVICE_UNAVAILABLE;
    assert_eq!(response.headers().contains_key("retry-after"), unavailable);
    let body = to_bytes(Body::new(response.into_body()), 10_000).await.expect("a body");
    (status, String::from_utf8(body.into()).expect("text"))
}

/// Two resources under one clock, which are counted and shown.
fn app(mood: Mood) -> Router {
    let store = TestStore::new(mood);
    let core = Quota::per_hour(5_000).name("core").key(Key::global()).store(store.clone());
    let search = everyone(30).name("search").store(store);
    let (core, search) = (FixedWindowLayer::new(core), FixedWindowLayer::new(search));
    Router::new()
        .route("/user", on_get(async || "you").layer(core.clone()))
        .route("/search", on_get(async || "found").layer(search.clone()))
        .route_service("/rate_limit", RateLimitEndpoint::new([&core, &search]))
}

const STANDING: &str = concat!(
    r#"{"resources":{"#,
    r#""core":{"limit":5000,"used":2,"remaining":4998,"reset":1700002800},"#,
    r#""search":{"limit":30,"used":1,"remaining":29,"reset":1700000100}},"#,
    r#""rate":{"limit":5000,"used":2,"remaining":4998,"reset":1700002800}}"#
);

#[tokio::test]
async fn it_answers_in_githubs_json_and_charges_nothing() {
    for mood in ANSWERS {
        let app = app(mood);
        for path in ["/user", "/search", "/user"] {
            app.clone().oneshot(get(path)).await.expect("infallible");
        }
        for _ in 0..50 {
            let told = ask(&app, get("/rate_limit")).await;
            assert_eq!(told, (StatusCode::OK, STANDING.to_owned()));
        }
    }
}

#[tokio::test]
async fn limits_of_one_layer_are_listed_as_those_of_two() {
    let limits =
        [Quota::per_hour(5_000).name("core").key(Key::global()), everyone(30).name("search")];
    let layer = FixedWindowLayer::new(Limits::new(limits).store(TestStore::new(Mood::Now)));
    for _ in 0..2 {
        layer.layer(Router::new()).oneshot(get("/")).await.expect("infallible");
    }
    let told = ask(&RateLimitEndpoint::new([&layer]), get("/")).await.1;
    assert_eq!(told, STANDING.replace(r#""used":1,"remaining":29"#, r#""used":2,"remaining":28"#));
}

#[tokio::test]
async fn it_answers_head_and_refuses_other_methods() {
    let app = app(Mood::Now);
    let head = Request::head("/rate_limit").body(Body::empty()).expect("a request");
    // A server measures the body of a response to HEAD, but does not send it.
    assert_eq!(ask(&app, head).await.0, StatusCode::OK);
    for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
        let request = Request::builder().method(method).uri("/rate_limit").body(Body::empty());
        let response = app.clone().oneshot(request.expect("a request")).await.expect("infallible");
        assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED);
        assert_eq!(response.headers()["allow"], "GET, HEAD");
    }
}

/// A JSON object in which a name comes twice is read in two ways.
#[tokio::test]
async fn a_limit_that_several_layers_share_is_shown_once() {
    let store = TestStore::new(Mood::Now);
    let core = everyone(9).name("core").store(store.clone());
    let search = everyone(3).name("search").store(store);
    let layers = [
        FixedWindowLayer::new(&core),
        FixedWindowLayer::new(&search),
        FixedWindowLayer::new(&core),
    ];
    let again = [Limits::from(search), Limits::from(&layers[0])];
    let endpoint = RateLimitEndpoint::new(layers.iter().map(Limits::from).chain(again));
    let (_, json) = ask(&endpoint, get("/")).await;
    assert_eq!((json.matches("core").count(), json.matches("search").count()), (1, 1), "{json}");
    assert!(json.starts_with(r#"{"resources":{"core":"#), "{json}");
}

#[test]
#[should_panic(
    expected = "two rate limits are named `core`, and a client could not tell them apart: \
    give one of them another name"
)]
fn two_limits_of_one_name_are_not_shown_as_one() {
    let _ = RateLimitEndpoint::new(&[named("core", 9, Mood::Now), named("core", 3, Mood::Now)]);
}

#[tokio::test]
async fn layers_that_refuse_in_other_ways_are_shown_together() {
    let a = named("a", 1, Mood::Now);
    let b = named("b", 2, Mood::Now).reject(GitHubBody);
    let c = named("c", 3, Mood::Later).reject(Grpc);
    let endpoint = RateLimitEndpoint::new([Limits::from(&a), Limits::from(&b), Limits::from(&c)]);
    let (_, told) = ask(&endpoint, get("/")).await;
    let standing = |n| format!(r#"{{"limit":{n},"used":0,"remaining":{n},"reset":1700000100}}"#);
    let [a, b, c] = [1, 2, 3].map(standing);
    assert_eq!(told, format!(r#"{{"resources":{{"a":{a},"b":{b},"c":{c}}},"rate":{a}}}"#));
}

#[derive(Clone)]
struct Allowed(u64);

#[tokio::test]
async fn each_caller_sees_the_quotas_of_its_plan_and_its_own_count() {
    for mood in ANSWERS {
        let layer = FixedWindowLayer::new(
            Limit::by_plan(|parts, _| {
                Quota::per_minute(parts.extensions.get().map_or(1, |&Allowed(tokens)| tokens))
            })
            .name("api")
            .key(header("x-user"))
            .store(TestStore::new(mood)),
        );
        let endpoint = RateLimitEndpoint::new([&layer]);
        let service = layer.layer(service_fn(inner));
        let of = |user, tokens| {
            let request = Request::get("/").header("x-user", user).extension(Allowed(tokens));
            request.body(Body::empty()).expect("a request")
        };
        for _ in 0..3 {
            service.clone().oneshot(of("alice", 9)).await.expect("infallible");
        }
        assert!(ask(&endpoint, of("alice", 9)).await.1.contains(r#""limit":9,"used":3,"#));
        assert!(ask(&endpoint, of("bob", 5)).await.1.contains(r#""limit":5,"used":0,"#));
        // After a downgrade, more is used than the limit grants.
        let told = ask(&endpoint, of("alice", 2)).await.1;
        assert!(told.contains(r#""limit":2,"used":3,"remaining":0,"#), "{told}");
    }
}

#[tokio::test]
async fn of_several_quotas_all_are_shown_after_the_one_with_the_fewest_left() {
    let layer = FixedWindowLayer::new(
        Quota::per_minute(5)
            .and(Quota::per_hour(2))
            .name("api")
            .key(Key::global())
            .store(TestStore::new(Mood::Now)),
    );
    let (_, told) = ask(&RateLimitEndpoint::new([&layer]), get("/")).await;
    let hour = r#""limit":2,"used":0,"remaining":2,"reset":1700002800"#;
    let minute = r#""limit":5,"used":0,"remaining":5,"reset":1700000100"#;
    let quotas = format!(r#"{{"name":"5/minute",{minute}}},{{"name":"2/hour",{hour}}}"#);
    let api = format!(r#"{{{hour},"quotas":[{quotas}]}}"#);
    assert_eq!(told, format!(r#"{{"resources":{{"api":{api}}},"rate":{api}}}"#));
}

#[tokio::test]
async fn a_request_without_a_key_gets_a_400_or_500() {
    let by_key = layered(everyone(5).name("api").key(header("x-api-key")), Mood::Now);
    let told = ask(&RateLimitEndpoint::new([&by_key]), get("/")).await;
    assert_eq!(told, (StatusCode::BAD_REQUEST, r#"{"message":"Bad Request"}"#.to_owned()));
    let by_user = layered(everyone(5).name("api").key(extension::<User>()), Mood::Now);
    let (status, _) = ask(&RateLimitEndpoint::new([&by_user]), get("/")).await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
}

#[tokio::test]
async fn a_store_that_fails_is_a_503_unless_memory_stands_in() {
    for mood in [Mood::FailsNow, Mood::FailsLater] {
        for policy in [OnStoreFailure::Allow, OnStoreFailure::Deny, OnStoreFailure::Local] {
            let store = TestStore::new(Mood::Now);
            let counted = store.clone().on_failure(policy);
            let layer = FixedWindowLayer::new(everyone(5).name("api").store(counted));
            let endpoint = RateLimitEndpoint::new([&layer]);
            assert_eq!(ask(&endpoint, get("/")).await.0, StatusCode::OK);
            store.set(mood);
            let (status, told) = ask(&endpoint, get("/")).await;
            if policy == OnStoreFailure::Local {
                assert_eq!(status, StatusCode::OK);
            } else {
                assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
                assert_eq!(told, r#"{"message":"Service Unavailable"}"#);
            }
            store.set(Mood::Now);
            assert_eq!(ask(&endpoint, get("/")).await.0, StatusCode::OK);
        }
    }
}

#[test]
#[should_panic(
    expected = "a rate limit is shown by its name: write Quota::per_hour(5_000).name(\"core\")"
)]
fn a_layer_without_a_name_can_not_be_shown() {
    let _ = RateLimitEndpoint::new([&per_minute(5, Mood::Now)]);
}

#[tokio::test(start_paused = true)]
async fn it_asks_all_layers_at_once() {
    let store = far_store(|| 50);
    let layer = |name: &str| {
        FixedWindowLayer::new(Quota::per_hour(9).name(name).key(Key::global()).store(store.clone()))
    };
    let layers = ["a", "b", "c", "d", "e"].map(layer);
    let start = tokio::time::Instant::now();
    let (status, json) = ask(&RateLimitEndpoint::new(&layers), get("/")).await;
    assert_eq!(status, StatusCode::OK);
    let names: Vec<_> =
        json.split('"').filter(|name| matches!(name.as_bytes(), [b'a'..=b'z'])).collect();
    assert_eq!(names, ["a", "b", "c", "d", "e"]);
    assert_eq!(start.elapsed().as_millis(), 100, "the time of one");
}

#[tokio::test]
async fn a_caller_without_a_limit_sees_no_numbers() {
    for mood in ANSWERS {
        let store = TestStore::new(mood);
        let unlimited = |name| {
            let limit = Limit::by_plan(|_, _| None::<Quota>).name(name).key(Key::global());
            FixedWindowLayer::new(limit.store(store.clone()))
        };
        let (a, b) = (unlimited("a"), unlimited("b"));
        let search = FixedWindowLayer::new(everyone(30).name("search").store(store.clone()));
        let standing = r#"{"limit":30,"used":0,"remaining":30,"reset":1700000100}"#;

        let told = ask(&RateLimitEndpoint::new([&a, &search]), get("/")).await;
        assert_eq!(told.1, format!(r#"{{"resources":{{"search":{standing}}}}}"#));
        let told = ask(&RateLimitEndpoint::new([&search, &a]), get("/")).await;
        assert_eq!(told.1, format!(r#"{{"resources":{{"search":{standing}}},"rate":{standing}}}"#));
        let told = ask(&RateLimitEndpoint::new([&a, &b]), get("/")).await;
        assert_eq!(told, (StatusCode::OK, r#"{"resources":{}}"#.to_owned()));
    }
}

#[tokio::test]
async fn a_limit_in_shadow_mode_shows_no_numbers() {
    for mood in ANSWERS {
        let core = layered(everyone(5).name("core").key(header("x-user")).shadow(), mood);
        let search = named("search", 30, mood);
        let standing = |limit| {
            format!(r#"{{"limit":{limit},"used":0,"remaining":{limit},"reset":1700000100}}"#)
        };
        // A request without a key for a limit is answered without that limit.
        let endpoint = RateLimitEndpoint::new([&core, &search]);
        let told = ask(&endpoint, get("/")).await;
        let search = standing(30);
        assert_eq!(told, (StatusCode::OK, format!(r#"{{"resources":{{"search":{search}}}}}"#)));
        let limits = Limits::from(&core);
        limits.limiter("core").set_shadow_until(false, UNIX_EPOCH); // ends at once
        let told = ask(&RateLimitEndpoint::new([&core]), get("/")).await;
        let message = r#"{"message":"Rate limiting is not enabled."}"#.to_owned();
        assert_eq!(told, (StatusCode::NOT_FOUND, message));

        limits.limiter("core").set_shadow(false);
        let request = Request::get("/").header("x-user", "alice").body(Body::empty());
        let core = standing(5);
        let both = format!(r#"{{"resources":{{"core":{core},"search":{search}}},"rate":{core}}}"#);
        assert_eq!(ask(&endpoint, request.expect("a request")).await, (StatusCode::OK, both));
    }
}
