//! The layer's types can be written down, and it fits the bodies that people have.

use bytes::Bytes;
use http_body_util::Full;
use http_body_util::combinators::BoxBody;
use tower_fixed_window::{FixedWindow, Rejection};
use tower_http::compression::CompressionLayer;

use crate::prelude::*;

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
        let compressed = CompressionLayer::new().layer(answering::<Body, Body>());
        assert_limits::<_, Body, _>(limit().layer(compressed)).await;
    }
}
