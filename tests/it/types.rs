//! The layer's types can be written down, and it fits the bodies and layers that people have.

use std::convert::Infallible;

use axum::Router;
use axum::body::Body;
use axum::routing::get as on_get;
use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response, StatusCode};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use tower::util::MapResponseLayer;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_fixed_window::{EmptyBody, FixedWindow, FixedWindowLayer, Rejection};
use tower_http::trace::TraceLayer;

use crate::support::{ANSWERS, Mood, get, limit_headers, per_minute, used};

struct App {
    limit: FixedWindowLayer,
    service: FixedWindow<Router>,
    without_bodies: FixedWindowLayer<EmptyBody>,
    by_closure: FixedWindowLayer<Refuse>,
}

/// The type of a closure that can be written.
type Refuse = fn(&Parts, &Rejection<'_>) -> Response<Body>;

fn a_limit() -> FixedWindowLayer {
    per_minute(1, Mood::Now)
}

#[tokio::test]
async fn layer_and_service_can_be_written_in_a_field_and_returned_from_a_function() {
    let app = App {
        limit: a_limit(),
        service: a_limit().layer(Router::new()),
        without_bodies: a_limit().reject(EmptyBody),
        by_closure: a_limit().on_reject(|_, why| why.response(why.message())),
    };
    let limited = Router::new().layer(app.limit);
    assert_eq!(used(&limited.oneshot(get("/")).await.expect("infallible")), 1);
    assert_eq!(used(&app.service.oneshot(get("/")).await.expect("infallible")), 1);
    let limited = Router::new().layer(app.without_bodies);
    assert_eq!(used(&limited.oneshot(get("/")).await.expect("infallible")), 1);
    let limited = Router::new().layer(app.by_closure);
    let _ = limited.clone().oneshot(get("/")).await.expect("infallible");
    let refused = limited.oneshot(get("/")).await.expect("infallible");
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(!refused.headers().contains_key("content-type"), "the closure's response");
}

/// Asserts that one request passes and a second is refused, and what servers ask of a service.
async fn assert_limits<S, B, R>(service: S)
where
    S: Service<Request<B>, Response = Response<R>, Error: std::fmt::Debug, Future: Send>,
    S: Clone + Send + Sync + 'static,
    B: Default,
{
    for status in [StatusCode::OK, StatusCode::TOO_MANY_REQUESTS] {
        let response =
            service.clone().oneshot(Request::new(B::default())).await.expect("an answer");
        assert_eq!(response.status(), status);
        assert_eq!(used(&response), 1);
    }
}

/// A service that answers with any body.
fn answering<B, R>() -> impl Service<
    Request<B>,
    Response = Response<R>,
    Error = Infallible,
    Future = impl Future<Output = Result<Response<R>, Infallible>> + Send,
> + Clone
+ Send
+ Sync
+ 'static
where
    B: Send + 'static,
    R: Default + Send + 'static,
{
    service_fn(async |_: Request<B>| Ok(Response::new(R::default())))
}

#[test]
fn a_future_without_readable_parts_has_a_debug_text() {
    let mut limited = a_limit().layer(Router::<()>::new());
    let future = limited.call(Request::new(Body::empty()));
    assert_eq!(format!("{future:?}"), "ResponseFuture(calling)");
}

#[tokio::test]
async fn it_fits_the_bodies_of_axum_hyper_and_tonic() {
    for mood in ANSWERS {
        assert_limits(per_minute(1, mood).layer(answering::<Body, Body>())).await;
        assert_limits(per_minute(1, mood).layer(answering::<Body, Full<Bytes>>())).await;
        assert_limits(per_minute(1, mood).layer(answering::<Full<Bytes>, Full<Bytes>>())).await;
    }
}

#[tokio::test]
async fn empty_body_fits_bodies_that_cannot_be_made_from_bytes() {
    type Boxed = BoxBody<Bytes, std::io::Error>;
    type Tonic = tonic::body::Body;
    for mood in ANSWERS {
        let limit = || per_minute(1, mood).reject(EmptyBody);
        assert_limits(limit().layer(answering::<Boxed, Boxed>())).await;
        assert_limits(limit().layer(answering::<Tonic, Tonic>())).await;
    }
}

#[tokio::test]
async fn on_reject_fits_any_body() {
    type Boxed = BoxBody<Bytes, Infallible>;
    for mood in ANSWERS {
        let limit = per_minute(1, mood)
            .status(StatusCode::IM_A_TEAPOT)
            .on_reject(|_, why| why.response(Boxed::new(Full::from(why.message()))));
        let service = limit.layer(answering::<Body, Boxed>());
        let _ = service.clone().oneshot(get("/")).await.expect("infallible");
        let response = service.oneshot(get("/")).await.expect("infallible");
        assert_eq!(response.status(), StatusCode::IM_A_TEAPOT);
        assert_eq!(limit_headers(&response)["remaining"], "0", "the headers come with any answer");
        let body = response.into_body().collect().await.expect("infallible").to_bytes();
        assert!(body.starts_with(b"API rate limit exceeded"));
    }
}

#[tokio::test]
async fn it_fits_under_and_over_the_trace_layer() {
    for mood in ANSWERS {
        let under = ServiceBuilder::new()
            .layer(TraceLayer::new_for_http())
            .layer(per_minute(1, mood))
            .service(answering::<Body, Body>());
        assert_limits(under).await;
        // Trace wraps the body in a type that nobody else can make: it is mapped first, as axum
        // does by itself between two calls of `Router::layer`.
        let over = ServiceBuilder::new()
            .layer(per_minute(1, mood))
            .layer(MapResponseLayer::new(|response: Response<_>| response.map(Body::new)))
            .layer(TraceLayer::new_for_http())
            .service(answering::<Body, Body>());
        assert_limits(over).await;
        let traced = Router::new()
            .route("/", on_get(async || ""))
            .layer(TraceLayer::new_for_http())
            .layer(per_minute(1, mood));
        assert_limits::<_, Body, _>(traced).await;
    }
}
