//! The service that [`FixedWindowLayer`](crate::FixedWindowLayer) makes.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Request, Response};
use tower_service::Service;

use super::future::ResponseFuture;
use super::rejection::{ProblemJson, Reject};
use super::request::LimitedRequest;
use super::shared::{Lanes, Shared};

/// A service whose requests are limited: see [`FixedWindowLayer`](crate::FixedWindowLayer).
///
/// `S` is the inner service. `J` makes the responses to refused requests, as
/// [`FixedWindowLayer::reject`](crate::FixedWindowLayer::reject) has set it.
///
/// The service is ready when the inner service is, and calls the instance that was made ready. If
/// the store does not answer at once, the request keeps that instance, and a clone takes its place.
/// If the request waits for a window, a clone is made ready when the window begins.
///
/// # If it is not a service
///
/// The compiler may only say that a method such as `ready` or `oneshot` has unsatisfied bounds. The
/// inner service must be `Clone` and answer `http::Request` with `http::Response`, and the layer
/// must be able to make a body of a refusal: by default from bytes, with
/// [`.reject(EmptyBody)`](crate::EmptyBody) from `Default`. The body of hyper-util's client is
/// neither. Turn it into one that can be, under the layer:
///
/// ```
/// use axum::body::Body;
/// use http::{Request, Response};
/// use hyper::body::Incoming;
/// use tower::{Layer, Service, ServiceExt};
/// use tower_fixed_window::{FixedWindowLayer, Key, Quota};
///
/// async fn send<S>(client: S, request: Request<String>) -> Result<Response<Body>, S::Error>
/// where
///     S: Service<Request<String>, Response = Response<Incoming>> + Clone,
/// {
///     let client = client.map_response(|response: Response<Incoming>| response.map(Body::new));
///     let mut api = FixedWindowLayer::new(Quota::per_minute(60).key(Key::global())).layer(client);
///     api.ready().await?.call(request).await
/// }
/// ```
// The compiler shows the next line, and nothing else of this crate, if a method of `Service` is
// missing.
#[rustfmt::skip]
pub struct FixedWindow<S, J = ProblemJson> { // no Service? Write `.reject(EmptyBody)`, or see its docs
    inner: S,
    lanes: Arc<Lanes<J>>,
}

impl<S, J> FixedWindow<S, J> {
    pub(crate) fn new(inner: S, shared: Shared<J>) -> Self {
        Self { inner, lanes: Arc::new(Lanes::new(shared)) }
    }
}

impl<S, J, B, R> Service<Request<B>> for FixedWindow<S, J>
where
    S: Service<Request<B>, Response = Response<R>> + Clone,
    B: 'static,
    J: Reject<R>,
{
    type Response = Response<R>;
    type Error = S::Error;
    type Future = ResponseFuture<S, B, J>;

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let limited = LimitedRequest::new(self.lanes.current());
        ResponseFuture::new(limited, &mut self.inner, request)
    }
}

impl<S: Clone, J> Clone for FixedWindow<S, J> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), lanes: Arc::clone(&self.lanes) }
    }
}

impl<S: fmt::Debug, J> fmt::Debug for FixedWindow<S, J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FixedWindow")
            .field("inner", &self.inner)
            .field("limits", &self.lanes.shared().limits)
            .finish_non_exhaustive()
    }
}
