//! aide: the responses are added to each operation of the document.

use aide::axum::{ApiRouter, routing::get};
use aide::openapi::{OpenApi, ReferenceOr, Responses};
use axum::{Json, Router};
use tower_fixed_window::{FixedWindowLayer, Quota};

async fn hello() -> &'static str {
    "hello\n"
}

fn app() -> Result<Router, serde_json::Error> {
    let limit = FixedWindowLayer::new(Quota::per_hour(2).from_first_request());
    let limited: Responses = serde_json::from_value(limit.openapi_responses())?;

    let mut api = OpenApi::default();
    let app = ApiRouter::new().api_route("/", get(hello)).layer(limit).finish_api(&mut api);
    for path in api.paths.iter_mut().flat_map(|paths| paths.paths.values_mut()) {
        let ReferenceOr::Item(path) = path else { continue };
        for operation in [&mut path.get, &mut path.post].into_iter().flatten() {
            let responses = operation.responses.get_or_insert_default();
            responses.responses.extend(limited.responses.clone());
        }
    }
    Ok(app.route("/openapi.json", axum::routing::get(async || Json(api))))
}

#[tokio::test]
async fn the_third_request_is_refused() {
    use tower_fixed_window_stacks::{assert_documented, serve};

    let addr = serve(app().expect("readable")).await;
    assert_documented(addr).await;
}
