//! Where this layer goes among others: the rows of docs/ordering.md, in the right and in the wrong
//! order.

use axum::BoxError;
use axum::body::Bytes;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use http::{HeaderName, Method};
use tokio::time::Instant;
use tower_http::compression::CompressionLayer;
use tower_http::cors::CorsLayer;
use tower_http::trace::TraceLayer;

use crate::prelude::*;

fn app() -> Router {
    Router::new().route("/", on_get(async || "hello").post(async || "made"))
}

/// In axum, the layer added last is the outermost.
async fn ask(app: &Router, request: http::Request<Body>) -> Response {
    app.clone().oneshot(request).await.expect("infallible")
}

const ORIGIN: &str = "https://app.example";

fn from_browser(method: Method) -> http::Request<Body> {
    let request = http::Request::builder().method(method.clone()).uri("/").header("origin", ORIGIN);
    let request = match method {
        Method::OPTIONS => request.header("access-control-request-method", "POST"),
        _ => request,
    };
    request.body(Body::empty()).expect("a request")
}

fn cors() -> CorsLayer {
    CorsLayer::new()
        .allow_origin([ORIGIN.parse().expect("a value")])
        .allow_methods([Method::GET, Method::POST])
}

#[tokio::test]
async fn cors_outside_of_the_limit_lets_pages_read_a_refusal_and_answers_preflights() {
    use Headers::{GitHub, GitHubAndIetfDraft10, IetfDraft10};

    for style in [GitHub, IetfDraft10, GitHubAndIetfDraft10, Headers::None] {
        pages_read_refusals(named("api", 1, Mood::Now).headers(style)).await;
        pages_read_refusals(named("api", 1, Mood::Now).headers(style).reject(Grpc)).await;
    }
}

async fn pages_read_refusals<J: Reject<Body> + Send + Sync + 'static>(limit: FixedWindowLayer<J>) {
    let cors = cors().expose_headers(limit.header_names());
    let app = app().layer(limit).layer(cors);
    for _ in 0..5 {
        let preflight = ask(&app, from_browser(Method::OPTIONS)).await;
        assert_eq!(preflight.status(), StatusCode::OK);
        assert_eq!(preflight.headers()["access-control-allow-methods"], "GET,POST");
        assert!(limit_headers(&preflight).is_empty(), "not counted");
    }
    assert_eq!(ask(&app, from_browser(Method::POST)).await.status(), StatusCode::OK);
    let refused = ask(&app, from_browser(Method::POST)).await;
    assert!(refused.headers().contains_key("retry-after"), "refused");
    assert_eq!(refused.headers()["access-control-allow-origin"], ORIGIN);
    let exposed = refused.headers()["access-control-expose-headers"].to_str().expect("ASCII");
    for name in refused.headers().keys().map(HeaderName::as_str) {
        let ours = ["ratelimit", "retry-after", "grpc-"].iter().any(|part| name.contains(part));
        assert_eq!(exposed.split(',').any(|exposed| exposed == name), ours, "{name}");
    }
    for name in exposed.split(',') {
        assert!(refused.headers().contains_key(name), "{name}");
    }
}

#[tokio::test]
async fn cors_inside_of_the_limit_is_missing_from_refusals_and_preflights_count() {
    let app = app().layer(cors()).layer(per_minute(2, Mood::Now));
    let preflight = ask(&app, from_browser(Method::OPTIONS)).await;
    assert_eq!(limit_headers(&preflight)["used"], "1", "what is no request of the page's counts");
    assert_eq!(ask(&app, from_browser(Method::POST)).await.status(), StatusCode::OK);
    for method in [Method::OPTIONS, Method::POST] {
        let refused = ask(&app, from_browser(method)).await;
        assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
        // To the page this is a failure of CORS, without a status.
        assert!(!refused.headers().contains_key("access-control-allow-origin"));
    }
}

#[tokio::test]
async fn exempted_preflights_pass_a_limit_outside_of_cors() {
    let app = app().layer(cors()).layer(per_minute(1, Mood::Now).skip_preflight());
    for _ in 0..5 {
        let preflight = ask(&app, from_browser(Method::OPTIONS)).await;
        assert_eq!(preflight.status(), StatusCode::OK);
        assert_eq!(preflight.headers()["access-control-allow-origin"], ORIGIN);
    }
    assert_eq!(limit_headers(&ask(&app, from_browser(Method::POST)).await)["used"], "1");
    assert_eq!(ask(&app, from_browser(Method::POST)).await.status(), 429);
}

#[tokio::test]
async fn a_trace_outside_of_the_limit_sees_refusals_and_one_inside_does_not() {
    for (outside, expected) in [(true, 3), (false, 1)] {
        let seen = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&seen);
        let trace = TraceLayer::new_for_http().on_response(
            move |_: &http::Response<_>, _: Duration, _: &tracing::Span| {
                counter.fetch_add(1, Ordering::Relaxed);
            },
        );
        let limit = per_minute(1, Mood::Now);
        let app = match outside {
            true => app().layer(limit).layer(trace),
            false => app().layer(trace).layer(limit),
        };
        for _ in 0..3 {
            ask(&app, get("/")).await;
        }
        assert_eq!(seen.load(Ordering::Relaxed), expected);
    }
}

fn gzip() -> http::Request<Body> {
    let request = http::Request::get("/").header("accept-encoding", "gzip");
    request.body(Body::empty()).expect("a request")
}

#[tokio::test]
async fn compression_outside_of_the_limit_compresses_refusals_and_keeps_their_headers() {
    let outside = app().layer(per_minute(0, Mood::Now)).layer(CompressionLayer::new());
    let refused = ask(&outside, gzip()).await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(refused.headers()["content-encoding"], "gzip");
    assert_eq!(refused.headers()["cache-control"], "no-store");
    assert_eq!(limit_headers(&refused).len(), 4);
    // Inside, it leaves them uncompressed. Where no axum hides the type of a body, `types` has them.
    let inside = app().layer(CompressionLayer::new()).layer(per_minute(0, Mood::Now));
    assert!(!ask(&inside, gzip()).await.headers().contains_key("content-encoding"));
}

fn paused(quota: Quota) -> FixedWindowLayer {
    in_memory(quota.key(Key::global()))
}

fn in_memory(limit: Limit) -> FixedWindowLayer {
    FixedWindowLayer::new(limit.store(paused_memory()))
}

type Handler =
    tower::util::BoxCloneSyncService<http::Request<Body>, http::Response<Body>, BoxError>;

/// A service that takes ten seconds.
fn ten_seconds() -> Handler {
    Handler::new(service_fn(async |_: http::Request<Body>| {
        sleep(secs(10)).await;
        Ok::<_, BoxError>(http::Response::new(Body::empty()))
    }))
}

/// The outcome of a request, and its seconds since the start.
async fn outcome<S>(service: S, user: &'static str) -> (Result<u16, ()>, u64)
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = BoxError>,
{
    let start = Instant::now();
    let request = http::Request::get("/").header("x-user", user).body(Body::empty());
    let outcome = service.oneshot(request.expect("a request")).await;
    (outcome.map(|response| response.status().as_u16()).map_err(drop), start.elapsed().as_secs())
}

#[tokio::test(start_paused = true)]
async fn queued_requests_take_no_permit_of_a_concurrency_limit_inside_of_the_limit() {
    let limit = Quota::per_minute(1).key(header("x-user"));
    let queued = || in_memory(limit.clone()).queue(9, secs(600));
    let outside = ServiceBuilder::new()
        .layer(queued())
        .load_shed()
        .concurrency_limit(1)
        .service(ten_seconds());
    assert_eq!(outcome(outside.clone(), "alice").await, (Ok(200), 10));
    let waiting = tokio::spawn(outcome(outside.clone(), "alice"));
    sleep(secs(1)).await;
    assert_eq!(outcome(outside, "bob").await, (Ok(200), 10), "while alice waits");
    assert_eq!(waiting.await.expect("no panic"), (Ok(200), 60));

    let inside = ServiceBuilder::new()
        .load_shed()
        .concurrency_limit(1)
        .layer(queued())
        .service(ten_seconds());
    assert_eq!(outcome(inside.clone(), "alice").await, (Ok(200), 10));
    let waiting = tokio::spawn(outcome(inside.clone(), "alice"));
    sleep(secs(1)).await;
    assert_eq!(outcome(inside, "bob").await, (Err(()), 0), "alice waits in the only place");
    waiting.abort();
}

#[tokio::test(start_paused = true)]
async fn requests_shed_inside_of_the_limit_count_unless_they_are_excluded() {
    for (limit, left) in
        [(paused(Quota::per_minute(9)), 2), (paused(Quota::per_minute(9)).refund_dropped(), 1)]
    {
        let limiter = limiter_of(&limit);
        let service = ServiceBuilder::new()
            .layer(limit)
            .load_shed()
            .concurrency_limit(1)
            .service(ten_seconds());
        let served = tokio::spawn(outcome(service.clone(), "alice"));
        sleep(secs(1)).await;
        assert_eq!(outcome(service, "bob").await, (Err(()), 0));
        assert_eq!(served.await.expect("no panic"), (Ok(200), 10));
        assert_eq!(limiter.peek(Key::global()).await.expect("memory").used(), left);
    }
}

#[tokio::test(start_paused = true)]
async fn without_load_shed_a_refusal_waits_for_a_concurrency_permit() {
    let service = ServiceBuilder::new()
        .layer(paused(Quota::per_minute(1)))
        .concurrency_limit(1)
        .service(ten_seconds());
    let served = tokio::spawn(outcome(service.clone(), "alice"));
    sleep(secs(1)).await;
    assert_eq!(outcome(service, "bob").await, (Ok(429), 9), "as late as if it were served");
    assert_eq!(served.await.expect("no panic"), (Ok(200), 10));
}

/// Knows two tokens.
async fn auth(mut request: Request, next: Next) -> Response {
    let user = match request.headers().get("authorization").map(|token| token.as_bytes()) {
        Some(b"alpha") => User(1),
        Some(b"beta") => User(2),
        _ => return StatusCode::UNAUTHORIZED.into_response(),
    };
    request.extensions_mut().insert(user);
    next.run(request).await
}

fn with_token(token: &str) -> http::Request<Body> {
    let request = http::Request::get("/").header("authorization", token);
    request.body(Body::empty()).expect("a request")
}

#[tokio::test]
async fn authentication_outside_of_the_limit_provides_the_users_key() {
    let app =
        app().layer(layered(everyone(1).key(extension::<User>()), Mood::Now)).layer(from_fn(auth));
    assert_eq!(ask(&app, with_token("alpha")).await.status(), StatusCode::OK);
    assert_eq!(ask(&app, with_token("alpha")).await.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(ask(&app, with_token("beta")).await.status(), StatusCode::OK);
    // The user's limit does not see guesses: authentication rejects them first.
    for _ in 0..5 {
        let guess = ask(&app, with_token("guess")).await;
        assert_eq!(guess.status(), StatusCode::UNAUTHORIZED);
        assert!(limit_headers(&guess).is_empty());
    }
}

#[tokio::test]
async fn authentication_inside_of_the_limit_is_too_late_for_the_key() {
    let app =
        app().layer(from_fn(auth)).layer(layered(everyone(1).key(extension::<User>()), Mood::Now));
    let response = ask(&app, with_token("alpha")).await;
    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR, "and no free pass");
}

/// A fallback hides the wrong order: requests then count by their address.
#[tokio::test]
async fn behind_authentication_a_user_has_one_count_at_two_addresses() {
    for (is_outside, second) in [(true, 2), (false, 1)] {
        let limit = layered(everyone(9).key(extension::<User>().or(peer_ip())), Mood::Now);
        let app = app();
        let app = match is_outside {
            true => app.layer(limit).layer(from_fn(auth)),
            false => app.layer(from_fn(auth)).layer(limit),
        };
        for (address, expected) in [([192, 0, 2, 1], 1), ([192, 0, 2, 2], second)] {
            let mut request = with_token("alpha");
            request.extensions_mut().insert(PeerAddr((address, 4711).into()));
            assert_eq!(used(&ask(&app, request).await), expected);
        }
    }
}

#[tokio::test]
async fn a_second_limit_outside_of_authentication_stops_password_guessing() {
    let guesses = per_minute(2, Mood::Now).count_if(|response| response.status == 401);
    let per_user = layered(everyone(9).key(extension::<User>()), Mood::Now);
    let app = app().layer(per_user).layer(from_fn(auth)).layer(guesses);
    for _ in 0..5 {
        assert_eq!(ask(&app, with_token("alpha")).await.status(), StatusCode::OK);
    }
    for _ in 0..2 {
        assert_eq!(ask(&app, with_token("guess")).await.status(), StatusCode::UNAUTHORIZED);
    }
    assert_eq!(ask(&app, with_token("guess")).await.status(), StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test]
async fn shared_caches_may_store_allowed_responses_but_never_a_refusal() {
    let cached = on_get(async || ([("cache-control", "public, max-age=60")], "hello"));
    let limit = per_minute(1, Mood::Now).status(StatusCode::NOT_FOUND).on_reject(|_, why| {
        let mut response = http::Response::new(Body::from(Bytes::from(why.message())));
        *response.status_mut() = why.status();
        response.headers_mut().insert("cache-control", "max-age=60".parse().expect("a value"));
        response
    });
    let app = Router::new().route("/", cached).layer(limit);
    let passed = ask(&app, get("/")).await;
    assert_eq!(passed.headers()["cache-control"], "public, max-age=60");
    // A 404 is one of the statuses that caches may keep by themselves.
    let refused = ask(&app, get("/")).await;
    assert_eq!(refused.status(), StatusCode::NOT_FOUND);
    let controls: Vec<_> = refused.headers().get_all("cache-control").iter().collect();
    assert_eq!(controls, ["no-store"]);
}
