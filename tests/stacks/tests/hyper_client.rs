//! hyper-util's client with a limit of its own. The server has none: the third request is refused
//! before it is sent.

use axum::body::Body;
use axum::http::{Request, Response};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tower::{BoxError, Service, ServiceBuilder};
use tower_fixed_window::{FixedWindowLayer, Key, Quota};

fn client() -> impl Service<Request<Body>, Response = Response<Body>, Error = impl Into<BoxError>> {
    // .queue(100, Duration::from_secs(60)) makes requests wait instead
    let limit = FixedWindowLayer::new(Quota::per_hour(2).from_first_request().key(Key::global()));
    ServiceBuilder::new()
        .layer(limit)
        // A refusal has a body made of bytes. hyper's `Incoming` can't be.
        .map_response(|response: Response<_>| response.map(Body::new))
        .service(Client::builder(TokioExecutor::new()).build_http())
}

#[tokio::test]
async fn the_third_request_is_not_sent() -> Result<(), BoxError> {
    use axum::{Router, routing::get};
    use tower::ServiceExt;
    use tower_fixed_window_stacks::Answer;

    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/", listener.local_addr()?);
    let app = Router::new().route("/", get(async || ([("from", "server")], "hello\n")));
    tokio::spawn(async move { axum::serve(listener, app).await });

    let mut client = client();
    for n in 1..=3 {
        let request = Request::get(&url).body(Body::empty())?;
        let response = client.ready().await.map_err(Into::into)?.call(request).await;
        let response = response.map_err(Into::into)?;
        assert_eq!(response.headers().contains_key("from"), n <= 2);
        let headers = response.headers().iter();
        let headers = headers.map(|(name, value)| (name.as_str(), value.as_bytes()));
        Answer::new(response.status().as_u16(), headers, "").assert_is(n);
    }
    Ok(())
}
