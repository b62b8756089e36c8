//! AWS Lambda behind an API gateway: the event contains the client's address.

use std::net::IpAddr;

use lambda_http::request::RequestContext;
use lambda_http::{Body, Error, Request, Response, Service, service_fn};
use tower::ServiceBuilder;
use tower_fixed_window::{FixedWindowLayer, Key, Limit, Quota};

async fn hello(_: Request) -> Result<Response<Body>, Error> {
    Ok(Response::new("hello\n".into()))
}

fn limited() -> impl Service<Request, Response = Response<Body>, Error = Error, Future: Send> {
    let limit = Limit::new(Quota::per_hour(2).from_first_request()).key_fn(|parts| {
        let RequestContext::ApiGatewayV2(event) = parts.extensions.get()? else { return None };
        let client: IpAddr = event.http.source_ip.as_ref()?.parse().ok()?;
        Some(Key::from(client))
    });
    let limit = FixedWindowLayer::new(limit)
        // Lambda's body can't be made from bytes, as the default refusal is.
        .on_reject(|_, why| why.response(why.message()));
    ServiceBuilder::new().layer(limit).service(service_fn(hello))
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    lambda_http::run(limited()).await
}

#[tokio::test]
async fn the_third_event_is_refused() -> Result<(), Error> {
    use tower::ServiceExt;
    use tower_fixed_window_stacks::{Answer, assert_limited};

    let event = serde_json::json!({
        "version": "2.0",
        "routeKey": "$default",
        "rawPath": "/",
        "rawQueryString": "",
        "headers": { "host": "example.com" },
        "isBase64Encoded": false,
        "requestContext": {
            "http": { "method": "GET", "path": "/", "sourceIp": "192.0.2.7" },
            "stage": "$default",
            "timeEpoch": 1_800_000_000,
        },
    })
    .to_string();
    let mut service = limited();
    assert_limited(async || {
        let request = lambda_http::request::from_str(&event).expect("an event");
        let response = service.ready().await.expect("ready").call(request).await;
        let response = response.expect("an answer");
        let headers = response.headers().iter();
        let headers = headers.map(|(name, value)| (name.as_str(), value.as_bytes()));
        Answer::new(response.status().as_u16(), headers, "")
    })
    .await;
    Ok(())
}
