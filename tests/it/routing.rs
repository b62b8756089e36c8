//! However the layer is mounted, a request counts once, and for the right limit.

use axum::body::Body;
use axum::handler::Handler;
use axum::routing::get as on_get;
use axum::{Router, response::Response};
use http::{Request, StatusCode};
use tower::{Layer, ServiceBuilder, ServiceExt, service_fn};
use tower_fixed_window::key::matched_path;
use tower_fixed_window::{FixedWindowLayer, Key, Quota};
use tower_http::trace::TraceLayer;

use crate::support::{
    ANSWERS, Mood, TestStore, everyone, get, layered, limit_headers, named, per_minute, used,
};

async fn ask(app: &Router, path: &str) -> Response {
    app.clone().oneshot(get(path)).await.expect("infallible")
}

/// Asserts that requests for `path` count one by one.
async fn assert_counts(app: &Router, path: &str) {
    for n in 1..=3 {
        let response = ask(app, path).await;
        assert_eq!(response.status(), StatusCode::OK, "{path}");
        assert_eq!(used(&response), n, "{path}");
    }
}

fn hello() -> Router {
    Router::new().route("/", on_get(async || "hello"))
}

async fn hello_service(_: Request<Body>) -> Result<Response, std::convert::Infallible> {
    Ok(Response::new(Body::from("hello")))
}

#[tokio::test]
async fn layer_counts_each_request_also_those_without_a_route() {
    for mood in ANSWERS {
        let app = hello().layer(per_minute(10, mood));
        assert_counts(&app, "/").await;
        let response = ask(&app, "/missing").await;
        assert_eq!((response.status(), used(&response)), (StatusCode::NOT_FOUND, 4));
    }
}

#[tokio::test]
async fn a_route_that_is_added_after_the_layer_is_not_limited() {
    let app = hello().layer(per_minute(1, Mood::Now)).route("/health", on_get(async || "alive"));
    assert_eq!([ask(&app, "/").await.status(), ask(&app, "/").await.status()], [200, 429]);
    for _ in 0..2 {
        let response = ask(&app, "/health").await;
        assert_eq!(response.status(), StatusCode::OK);
        assert!(limit_headers(&response).is_empty());
    }
}

#[tokio::test]
async fn route_layer_counts_only_requests_that_have_a_route() {
    for mood in ANSWERS {
        let app = hello().route_layer(per_minute(10, mood));
        assert_counts(&app, "/").await;
        let response = ask(&app, "/missing").await;
        assert_eq!(response.status(), StatusCode::NOT_FOUND);
        assert!(limit_headers(&response).is_empty());
        assert_eq!(used(&ask(&app, "/").await), 4);
    }
}

#[tokio::test]
async fn a_method_routers_layer_counts_its_route_only() {
    for mood in ANSWERS {
        let app = Router::new()
            .route("/limited", on_get(async || "").layer(per_minute(10, mood)))
            .route("/free", on_get(async || ""));
        assert_counts(&app, "/limited").await;
        assert!(limit_headers(&ask(&app, "/free").await).is_empty());
    }
}

#[tokio::test]
async fn a_method_routers_layer_counts_wrong_methods_and_its_route_layer_does_not() {
    let post = || Request::post("/").body(Body::empty()).expect("a path");
    for mood in ANSWERS {
        let app = Router::new().route("/", on_get(async || "").layer(per_minute(10, mood)));
        let response = app.oneshot(post()).await.expect("infallible");
        assert_eq!((response.status(), used(&response)), (StatusCode::METHOD_NOT_ALLOWED, 1));

        let app = Router::new().route("/", on_get(async || "").route_layer(per_minute(10, mood)));
        let response = app.oneshot(post()).await.expect("infallible");
        assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED);
        assert!(limit_headers(&response).is_empty());
    }
}

#[tokio::test]
async fn nest_counts_once_inside_and_once_outside() {
    for mood in ANSWERS {
        let inside = hello().nest("/api", hello().layer(per_minute(10, mood)));
        assert_counts(&inside, "/api").await;
        assert!(limit_headers(&ask(&inside, "/").await).is_empty());

        let outside = hello().nest("/api", hello()).layer(per_minute(10, mood));
        assert_counts(&outside, "/api").await;
        assert_eq!(used(&ask(&outside, "/").await), 4);
    }
}

#[tokio::test]
async fn nest_service_counts_once() {
    for mood in ANSWERS {
        let app = hello().nest_service("/api", per_minute(10, mood).layer(hello()));
        assert_counts(&app, "/api").await;
        assert!(limit_headers(&ask(&app, "/").await).is_empty());
    }
}

#[tokio::test]
async fn route_service_counts_once() {
    for mood in ANSWERS {
        let limited = per_minute(10, mood).layer(service_fn(hello_service));
        let app = hello().route_service("/limited", limited);
        assert_counts(&app, "/limited").await;
        assert!(limit_headers(&ask(&app, "/").await).is_empty());
    }
}

#[tokio::test]
async fn a_fallback_counts_only_requests_that_reach_it() {
    for mood in ANSWERS {
        let handler = async || "fell back";
        let as_handler = hello().fallback(handler.layer(per_minute(10, mood)));
        let as_service =
            hello().fallback_service(per_minute(10, mood).layer(service_fn(hello_service)));
        for app in [as_handler, as_service] {
            assert_counts(&app, "/missing").await;
            assert!(limit_headers(&ask(&app, "/").await).is_empty());
        }
    }
}

#[tokio::test]
async fn service_builder_counts_once() {
    for mood in ANSWERS {
        let stack =
            ServiceBuilder::new().layer(TraceLayer::new_for_http()).layer(per_minute(10, mood));
        assert_counts(&hello().layer(stack), "/").await;
    }
}

#[tokio::test]
async fn by_matched_path_each_route_has_a_count_and_all_404s_share_one() {
    for mood in ANSWERS {
        let layer = layered(everyone(10).key(matched_path()), mood);
        let app = Router::new()
            .route("/users/{id}", on_get(async || ""))
            .route("/search", on_get(async || ""))
            .route("/search/", on_get(async || ""))
            .route("/", on_get(async || ""))
            .layer(layer);
        let paths = [
            ("/users/1", 1),
            ("/users/2", 2),
            ("/search", 1),
            ("/search/", 2),
            ("/", 1),
            ("/no", 1),
            ("/nor", 2),
        ];
        for (path, n) in paths {
            assert_eq!(used(&ask(&app, path).await), n, "{path}");
        }
    }
}

#[tokio::test]
async fn a_skip_compares_the_path_as_it_is_where_the_layer_stands() {
    use axum::extract::OriginalUri;

    let skips_by = async |skip: fn(&http::request::Parts) -> bool, path: &str| {
        let limit = || per_minute(10, Mood::Now).skip(skip);
        let nested = Router::new().route("/health", on_get(async || "")).layer(limit());
        let app = hello().route("/health", on_get(async || "")).layer(limit()).nest("/api", nested);
        limit_headers(&ask(&app, path).await).is_empty()
    };
    let own = |parts: &http::request::Parts| parts.uri.path() == "/health";
    let whole = |parts: &http::request::Parts| {
        parts.extensions.get::<OriginalUri>().is_some_and(|uri| uri.path() == "/api/health")
    };
    assert!(skips_by(own, "/health").await && !skips_by(own, "/health/").await);
    assert!(skips_by(own, "/api/health").await, "its beginning is cut off");
    assert!(skips_by(whole, "/api/health").await && !skips_by(whole, "/health").await);
}

/// axum sets no `MatchedPath` for a nested service, which may be no router.
#[tokio::test]
async fn by_matched_path_each_nested_service_has_a_count() {
    for mood in ANSWERS {
        let layer = layered(everyone(10).key(matched_path()), mood);
        let nested = |service: FixedWindowLayer| service.layer(service_fn(hello_service));
        let inside = Router::new()
            .nest_service("/a", nested(layer.clone()))
            .nest_service("/b", nested(layer.clone()))
            .nest("/c", hello().nest_service("/a", nested(layer.clone())))
            .route_service("/d", nested(layer.clone()))
            .nest_service("/e", layer.clone().layer(hello()))
            .nest_service("/f/", nested(layer.clone()))
            .fallback_service(nested(layer));

        let layer = layered(everyone(10).key(matched_path()), mood);
        let outside = Router::new()
            .nest_service("/a", service_fn(hello_service))
            .nest_service("/b", service_fn(hello_service))
            .nest("/c", hello().nest_service("/a", service_fn(hello_service)))
            .route_service("/d", service_fn(hello_service))
            .nest_service("/e", hello())
            .nest_service("/f/", service_fn(hello_service))
            .layer(layer);
        for (app, of) in [(inside, "inside"), (outside, "outside")] {
            let paths = [
                ("/a/1", 1),
                ("/a/2", 2),
                ("/a", 3),
                ("/a/", 4),
                ("/a//", 5),
                ("/a/{*}", 6),
                ("/b/1", 1),
                ("/c/a/1", 1),
                ("/c/a/2/3", 2),
                ("/c/a", 3),
                ("/c/a/", 4),
                ("/d", 1),
                ("/e", 1),
                ("/e/", 2),
                ("/e/unknown", 3),
                ("/f/", 1),
                ("/f/1", 2),
                ("/no", 1),
                ("/nor/this", 2),
                ("/c/nor/that", 3),
            ];
            for (path, n) in paths {
                assert_eq!(used(&ask(&app, path).await), n, "{path} {of}");
            }
        }
    }
}

#[tokio::test]
async fn named_layers_never_share_a_count() {
    for mood in ANSWERS {
        // On one store: the name alone keeps them apart.
        let store = TestStore::new(mood);
        let limited = |name: &str, tokens| {
            FixedWindowLayer::new(everyone(tokens).name(name).store(store.clone()))
        };
        let app = Router::new()
            .route("/login", on_get(async || "").layer(limited("login", 1)))
            .route("/search", on_get(async || "").layer(limited("search", 2)));

        assert_eq!(ask(&app, "/login").await.status(), StatusCode::OK);
        assert_eq!(ask(&app, "/login").await.status(), StatusCode::TOO_MANY_REQUESTS);
        for n in 1..=2 {
            let response = ask(&app, "/search").await;
            assert_eq!((response.status(), used(&response)), (StatusCode::OK, n));
            assert_eq!(limit_headers(&response)["resource"], "search");
        }
        let response = ask(&app, "/search").await;
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    }
}

#[tokio::test]
async fn unnamed_layers_on_one_store_never_share_a_count() {
    for mood in ANSWERS {
        let store = TestStore::new(mood);
        let unnamed =
            || FixedWindowLayer::new(Quota::per_minute(1).key(Key::global()).store(store.clone()));
        let app = Router::new()
            .route("/a", on_get(async || "").layer(unnamed()))
            .route("/b", on_get(async || "").layer(unnamed()));
        assert_eq!(ask(&app, "/a").await.status(), StatusCode::OK);
        assert_eq!(ask(&app, "/b").await.status(), StatusCode::OK);
        assert_eq!(ask(&app, "/a").await.status(), StatusCode::TOO_MANY_REQUESTS);
    }
}

#[tokio::test]
async fn clones_of_a_layer_on_two_routes_are_one_limit() {
    for mood in ANSWERS {
        for limit in [per_minute(2, mood), named("both", 2, mood)] {
            let app = Router::new()
                .route("/a", on_get(async || "").layer(limit.clone()))
                .route("/b", on_get(async || "").layer(limit));
            assert_eq!(used(&ask(&app, "/a").await), 1);
            assert_eq!(used(&ask(&app, "/b").await), 2);
            assert_eq!(ask(&app, "/a").await.status(), StatusCode::TOO_MANY_REQUESTS);
        }
    }
}

#[tokio::test]
async fn layers_of_one_name_on_one_store_are_one_limit() {
    for mood in ANSWERS {
        let store = TestStore::new(mood);
        let both = || FixedWindowLayer::new(everyone(2).name("both").store(store.clone()));
        let app = Router::new()
            .route("/a", on_get(async || "").layer(both()))
            .route("/b", on_get(async || "").layer(both()));
        assert_eq!(used(&ask(&app, "/a").await), 1);
        assert_eq!(used(&ask(&app, "/b").await), 2);
    }
}
