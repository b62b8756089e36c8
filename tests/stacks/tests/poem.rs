//! poem has requests and responses of its own, so this middleware asks a `Limiter`.

use std::io;
use std::sync::Arc;

use poem::http::StatusCode;
use poem::listener::TcpAcceptor;
use poem::{Endpoint, EndpointExt, Error, Request, Response, Result, Route, Server};
use poem::{get, handler};
use tower_fixed_window::{Headers, Limiter, Quota};

async fn limit(endpoint: Arc<impl Endpoint>, request: Request) -> Result<Response> {
    let limiter: &Limiter = request.data().expect("`.data(limiter)` comes after `.around(limit)`");
    let peer = request.remote_addr().as_socket_addr();
    let peer = peer.ok_or_else(|| Error::from_status(StatusCode::INTERNAL_SERVER_ERROR))?;
    let decision = limiter.check(peer.ip()).await.map_err(|failed| refusal(failed.into()))?;
    let headers = limiter.headers(&decision, Headers::GitHub);
    decision.into_result().map_err(|limited| refusal(limited.into()))?;

    let mut response = endpoint.get_response(request).await;
    response.headers_mut().extend(headers);
    Ok(response)
}

fn refusal(refused: poem::http::Response<Vec<u8>>) -> Error {
    let (parts, body) = refused.into_parts();
    let mut response = Response::builder().status(parts.status).body(body);
    *response.headers_mut() = parts.headers;
    Error::from_response(response)
}

#[handler]
fn hello() -> &'static str {
    "hello\n"
}

async fn serve(acceptor: TcpAcceptor) -> io::Result<()> {
    let limiter = Limiter::new(Quota::per_hour(2).from_first_request());
    let app = Route::new().at("/", get(hello)).around(limit).data(limiter);
    Server::new_with_acceptor(acceptor).run(app).await
}

#[tokio::test]
async fn the_third_request_is_refused() {
    use tower_fixed_window_stacks::{assert_limited, get};

    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("bound");
    tokio::spawn(serve(TcpAcceptor::from_tokio(listener).expect("bound")));
    assert_limited(async || get(addr).await).await;
}
