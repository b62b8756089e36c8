//! utoipa: the responses of each route's limit are added to its operations.

use std::collections::BTreeMap;

use axum::routing::{get, post};
use axum::{Json, Router};
use tower_fixed_window::{FixedWindowLayer, Quota};
use utoipa::OpenApi;
use utoipa::openapi::{PathItem, RefOr, Response as ApiResponse};

#[utoipa::path(get, path = "/", responses((status = 200, description = "a greeting")))]
async fn hello() -> &'static str {
    "hello\n"
}

#[utoipa::path(post, path = "/in", responses((status = 200, description = "logged in")))]
async fn login() -> &'static str {
    "welcome\n"
}

#[derive(OpenApi)]
#[openapi(paths(hello, login))]
struct Api;

/// Adds the responses of a path's limit.
fn add_refusals(path: &mut PathItem, limit: &FixedWindowLayer) -> Result<(), serde_json::Error> {
    let responses: BTreeMap<String, RefOr<ApiResponse>> =
        serde_json::from_value(limit.openapi_responses())?;
    // Add the other methods of your API.
    for operation in [&mut path.get, &mut path.post].into_iter().flatten() {
        operation.responses.responses.extend(responses.clone());
    }
    Ok(())
}

fn app() -> Result<Router, serde_json::Error> {
    let hellos = FixedWindowLayer::new(Quota::per_hour(2).from_first_request());
    let logins = FixedWindowLayer::new(Quota::per_hour(1).from_first_request());

    let mut api = Api::openapi();
    for (path, limit) in [("/", &hellos), ("/in", &logins)] {
        add_refusals(api.paths.paths.get_mut(path).expect("a documented path"), limit)?;
    }
    let limited = Router::new()
        .route("/", get(hello).route_layer(hellos))
        .route("/in", post(login).route_layer(logins));
    Ok(limited.route("/openapi.json", get(async || Json(api))))
}

#[tokio::test]
async fn the_third_request_is_refused() {
    use tower_fixed_window_stacks::{assert_documented, serve};

    let addr = serve(app().expect("readable")).await;
    assert_documented(addr).await;
}
