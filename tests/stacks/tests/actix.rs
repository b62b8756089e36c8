//! actix-web has middleware and types of its own, so this middleware asks a `Limiter`.

use std::io;
use std::net::TcpListener;

use actix_web::body::MessageBody;
use actix_web::dev::{Server, ServiceRequest, ServiceResponse};
use actix_web::error::{Error, ErrorInternalServerError, InternalError};
use actix_web::http::StatusCode;
use actix_web::http::header::{HeaderName, HeaderValue};
use actix_web::middleware::{Next, from_fn};
use actix_web::{App, HttpResponse, HttpServer, web};
use tower_fixed_window::{Headers, Limiter, Quota};

async fn limit(
    limiter: web::Data<Limiter>,
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<impl MessageBody>, Error> {
    let peer = request.peer_addr().ok_or_else(|| ErrorInternalServerError("no peer"))?;
    let decision = limiter.check(peer.ip()).await.map_err(|failed| refusal(failed.into()))?;
    let headers = limiter.headers(&decision, Headers::GitHub);
    decision.into_result().map_err(|limited| refusal(limited.into()))?;

    let mut response = next.call(request).await?;
    for (name, value) in &headers {
        let name = HeaderName::try_from(name.as_str()).expect("a name");
        let value = HeaderValue::from_bytes(value.as_bytes()).expect("a value");
        response.headers_mut().insert(name, value);
    }
    Ok(response)
}

/// A refusal is a response of the crate `http` 1. actix has types of its own.
fn refusal(refused: http::Response<Vec<u8>>) -> Error {
    let status = StatusCode::from_u16(refused.status().as_u16()).expect("a status");
    let mut response = HttpResponse::build(status);
    for (name, value) in refused.headers() {
        response.insert_header((name.as_str(), value.as_bytes()));
    }
    InternalError::from_response("refused", response.body(refused.into_body())).into()
}

fn serve(listener: TcpListener) -> io::Result<Server> {
    let limiter = web::Data::new(Limiter::new(Quota::per_hour(2).from_first_request()));
    let app = move || {
        App::new()
            .app_data(limiter.clone())
            .wrap(from_fn(limit))
            .route("/", web::get().to(async || "hello\n"))
    };
    Ok(HttpServer::new(app).workers(1).disable_signals().listen(listener)?.run())
}

#[tokio::test]
async fn the_third_request_is_refused() {
    use tower_fixed_window_stacks::{assert_limited, get};

    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let addr = listener.local_addr().expect("bound");
    tokio::spawn(serve(listener).expect("it listens"));
    assert_limited(async || get(addr).await).await;
}
