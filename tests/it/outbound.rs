//! The layer around an HTTP client, which stays inside of somebody else's limit.

use std::time::Duration;

use axum::body::Body;
use axum::{Router, routing::get as on_get};
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tower::{Service, ServiceBuilder, ServiceExt};

use crate::support::{ANSWERS, per_minute, serve};

/// The bodies that hyper's client receives can't be made from bytes, as refusals are: so bodies are
/// boxed under the layer.
#[tokio::test]
async fn hypers_client_is_limited_as_a_service() {
    let addr = serve(Router::new().route("/", on_get(async || "hello"))).await;
    for mood in ANSWERS {
        let mut api = ServiceBuilder::new()
            .layer(per_minute(2, mood).queue(5, Duration::from_secs(1)))
            .map_response(|response: Response<Incoming>| response.map(Body::new))
            .service(Client::builder(TokioExecutor::new()).build_http::<Body>());
        let mut statuses = Vec::new();
        for _ in 0..3 {
            let request = Request::get(format!("http://{addr}/")).body(Body::empty());
            let api = api.ready().await.expect("ready");
            let response = api.call(request.expect("a request")).await.expect("an answer");
            statuses.push(response.status());
        }
        // The third would have to wait for more than a second: 39.5 s.
        assert_eq!(statuses, [StatusCode::OK, StatusCode::OK, StatusCode::TOO_MANY_REQUESTS]);
    }
}
