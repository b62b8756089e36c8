//! utoipa: the responses are added to each operation of the document.

use std::collections::BTreeMap;

use axum::{Json, Router, routing::get};
use tower_fixed_window::{FixedWindowLayer, Quota};
use utoipa::OpenApi;
use utoipa::openapi::{RefOr, Response};

#[utoipa::path(get, path = "/", responses((status = 200, content_type = "text/plain", body = str)))]
async fn hello() -> &'static str {
    "hello\n"
}

#[derive(OpenApi)]
#[openapi(paths(hello))]
struct Api;

fn app() -> Result<Router, serde_json::Error> {
    let limit = FixedWindowLayer::new(Quota::per_hour(2).from_first_request());
    let responses: BTreeMap<String, RefOr<Response>> =
        serde_json::from_value(limit.openapi_responses())?;

    let mut api = Api::openapi();
    for path in api.paths.paths.values_mut() {
        for operation in [&mut path.get, &mut path.post].into_iter().flatten() {
            operation.responses.responses.extend(responses.clone());
        }
    }
    let limited = Router::new().route("/", get(hello)).layer(limit);
    Ok(limited.route("/openapi.json", get(async || Json(api))))
}

#[tokio::test]
async fn the_third_request_is_refused() {
    use tower_fixed_window_stacks::{assert_documented, serve};

    let addr = serve(app().expect("readable")).await;
    assert_documented(addr).await;
}
