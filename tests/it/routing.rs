//! However the layer is mounted, a request counts once, and for the right limit.

use axum::handler::Handler;
use axum::response::Response;
use tower_fixed_window::key::matched_path;
use tower_http::trace::TraceLayer;

use crate::prelude::*;

async fn ask(app: &Router, path: &str) -> Response {
    app.clone().oneshot(get(path)).await.expect("infallible")
}

fn hello() -> Router {
    Router::new().route("/", on_get(async || "hello"))
}

async fn hello_service(_: Request<Body>) -> Result<Response, Infallible> {
    Ok(Response::new(Body::from("hello")))
}

/// However the layer is mounted: the app, a path whose requests count, those of another that count
/// with them, and those that don't.
#[tokio::test]
async fn each_way_to_mount_the_layer_counts_each_request_once() {
    let limit = |mood| per_minute(10, mood);
    let service = || service_fn(hello_service);
    for mood in ANSWERS {
        let two = || Router::new().route("/free", on_get(async || ""));
        let trace = ServiceBuilder::new().layer(TraceLayer::new_for_http()).layer(limit(mood));
        let handler = async || "fell back";
        let cases: [(Router, &str, &[&str], &[&str]); 10] = [
            (hello().layer(limit(mood)), "/", &["/missing"], &[]),
            (hello().layer(trace), "/", &["/missing"], &[]),
            (hello().route_layer(limit(mood)), "/", &[], &["/missing"]),
            (hello().layer(limit(mood)).route("/free", on_get(async || "")), "/", &[], &["/free"]),
            (two().route("/", on_get(async || "").layer(limit(mood))), "/", &[], &["/free"]),
            (hello().nest("/api", hello().layer(limit(mood))), "/api", &[], &["/"]),
            (hello().nest("/api", hello()).layer(limit(mood)), "/api", &["/"], &[]),
            (hello().nest_service("/api", limit(mood).layer(hello())), "/api", &[], &["/"]),
            (hello().route_service("/one", limit(mood).layer(service())), "/one", &[], &["/"]),
            (hello().fallback(handler.layer(limit(mood))), "/missing", &[], &["/"]),
        ];
        let service = hello().fallback_service(limit(mood).layer(service()));
        for (app, path, also, free) in
            cases.into_iter().chain([(service, "/no", &[][..], &["/"][..])])
        {
            for (n, path) in (1..).zip([path; 3].iter().chain(also)) {
                assert_eq!(used(&ask(&app, path).await), n, "{path}");
            }
            for path in free {
                assert!(limit_headers(&ask(&app, path).await).is_empty(), "{path}");
            }
        }
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
async fn a_skip_compares_the_path_as_it_is_where_the_layer_stands() {
    use axum::extract::OriginalUri;

    let skips_by = async |skip: fn(&Parts) -> bool, path: &str| {
        let limit = || per_minute(10, Mood::Now).skip(skip);
        let nested = Router::new().route("/health", on_get(async || "")).layer(limit());
        let app = hello().route("/health", on_get(async || "")).layer(limit()).nest("/api", nested);
        limit_headers(&ask(&app, path).await).is_empty()
    };
    let own = |parts: &Parts| parts.uri.path() == "/health";
    let whole = |parts: &Parts| {
        parts.extensions.get::<OriginalUri>().is_some_and(|uri| uri.path() == "/api/health")
    };
    assert!(skips_by(own, "/health").await && !skips_by(own, "/health/").await);
    assert!(skips_by(own, "/api/health").await, "its beginning is cut off");
    assert!(skips_by(whole, "/api/health").await && !skips_by(whole, "/health").await);
}

/// All 404s share a count. axum sets no `MatchedPath` for a nested service, which may be no router.
#[tokio::test]
async fn by_matched_path_each_route_and_each_nested_service_has_a_count() {
    let service = || service_fn(hello_service);
    let routes = || {
        let route = || on_get(async || "");
        let two = Router::new().route("/users/{id}", route()).route("/search", route());
        two.route("/search/", route()).route("/", route())
    };
    for mood in ANSWERS {
        let layer = layered(everyone(10).key(matched_path()), mood);
        let nested = || layer.layer(service());
        let inside = routes().route_layer(layer.clone()).merge(
            Router::new()
                .nest_service("/a", nested())
                .nest_service("/b", nested())
                .nest("/c", hello().nest_service("/a", nested()))
                .route_service("/d", nested())
                .nest_service("/e", layer.clone().layer(hello()))
                .nest_service("/f/", nested())
                .fallback_service(nested()),
        );
        let outside = routes()
            .nest_service("/a", service())
            .nest_service("/b", service())
            .nest("/c", hello().nest_service("/a", service()))
            .route_service("/d", service())
            .nest_service("/e", hello())
            .nest_service("/f/", service())
            .layer(layered(everyone(10).key(matched_path()), mood));
        for (app, of) in [(inside, "inside"), (outside, "outside")] {
            // The paths of one count, in order.
            for paths in [
                &["/a/1", "/a/2", "/a", "/a/", "/a//", "/a/{*}"][..],
                &["/b/1"],
                &["/c/a/1", "/c/a/2/3", "/c/a", "/c/a/"],
                &["/d"],
                &["/e", "/e/", "/e/unknown"],
                &["/f/", "/f/1"],
                &["/no", "/nor/this", "/c/nor/that"],
                &["/users/1", "/users/2"],
                &["/search", "/search/"],
                &["/"],
            ] {
                for (n, path) in (1..).zip(paths) {
                    assert_eq!(used(&ask(&app, path).await), n, "{path} {of}");
                }
            }
        }
    }
}

/// On one store, the name alone keeps them apart. Those without a name never share a count.
#[tokio::test]
async fn layers_share_a_count_if_they_are_clones_or_have_one_name_on_one_store() {
    for mood in ANSWERS {
        let store = TestStore::new(mood);
        let on_store =
            |name: &str| FixedWindowLayer::new(everyone(2).name(name).store(store.clone()));
        let unnamed = || FixedWindowLayer::new(everyone(2).store(store.clone()));
        let (one, named) = (unnamed(), on_store("clones"));
        for (a, b, shared) in [
            (on_store("login"), on_store("search"), false),
            (unnamed(), unnamed(), false),
            (one.clone(), one, true),
            (named.clone(), named, true),
            (on_store("both"), on_store("both"), true),
        ] {
            let app = Router::new()
                .route("/a", on_get(async || "").layer(a))
                .route("/b", on_get(async || "").layer(b));
            assert_eq!(used(&ask(&app, "/a").await), 1);
            assert_eq!(used(&ask(&app, "/b").await), 1 + u64::from(shared));
            let refused = ask(&app, "/a").await.status() == StatusCode::TOO_MANY_REQUESTS;
            assert_eq!(refused, shared);
        }
    }
}
