//! Tests of limits: [`ask`] sends one request through a layer.
//!
//! A store of your own is tested by the crate `tower-fixed-window-conformance`.

use std::convert::Infallible;
use std::fmt::Debug;
use std::future::{Future, Ready, poll_fn, ready};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use bytes::Bytes;
use http::request::Builder;
use http::{Request, Response};
use tower_layer::Layer;
use tower_service::Service;

use crate::sync::{AtEnd, held_up};

/// Sends a request through a layer, or a stack of them, to a service that responds with 200 and
/// `hello`, and waits for the response:
///
/// ```
/// use http::Request;
/// use tower_fixed_window::key::header;
/// use tower_fixed_window::testing::ask;
/// use tower_fixed_window::{FixedWindowLayer, ManualClock, MemoryStore, Quota};
///
/// let store = MemoryStore::new().clock(ManualClock::at_ms(1_700_000_040_000));
/// let limit = Quota::per_minute(1).key(header("x-api-key"));
/// let layer = FixedWindowLayer::new(limit.store(store));
///
/// let request = || Request::get("/").header("x-api-key", "alpha");
/// assert_eq!(ask(&layer, request()).body(), "hello");
/// assert_eq!(ask(&layer, request()).headers()["retry-after"], "60");
/// ```
///
/// The request has no body. The thread blocks until the response is there. If the layer has a
/// queue, or its store needs a runtime, call a service of the layer in a test of that runtime
/// instead.
///
/// # Panics
/// If the request is malformed, or an outer layer fails.
#[track_caller]
pub fn ask<L, R>(layer: &L, request: Builder) -> Response<R>
where
    L: Layer<Hello>,
    L::Service: Service<Request<String>, Response = Response<R>, Error: Debug>,
{
    ask_around(layer, Hello, request)
}

/// Sends a request as [`ask`] does, to your own service, as in the example of
/// [`FixedWindowLayer::count_if`](crate::FixedWindowLayer::count_if). Use it if the limit depends
/// on the response, or if the service reads what the limit puts into the request.
///
/// # Panics
/// If the request is malformed, or the service fails.
#[track_caller]
pub fn ask_around<L, S, R>(layer: &L, service: S, request: Builder) -> Response<R>
where
    L: Layer<S>,
    L::Service: Service<Request<String>, Response = Response<R>, Error: Debug>,
{
    let mut service = layer.layer(service);
    let request = request.body(String::new()).expect("a request that is well-formed");
    block_on(async {
        poll_fn(|cx| service.poll_ready(cx)).await.expect("a service that is ready");
        service.call(request).await.expect("a service that does not fail")
    })
}

/// The service of [`ask`]. Only signatures name this type.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Hello;

impl<B> Service<Request<B>> for Hello {
    type Response = Response<Bytes>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Bytes>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<B>) -> Self::Future {
        ready(Ok(Response::new(Bytes::from_static(b"hello"))))
    }
}

/// Blocks this thread until a future is done. Use it for stores that need no runtime.
///
/// ```
/// use tower_fixed_window::testing::block_on;
///
/// assert_eq!(block_on(async { 7 }), 7);
/// ```
pub fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

/// Delays some decisions of stores in this process by a millisecond, between what they read and
/// what they write, until the guard is dropped, so that calls that are not atomic meet in a test.
///
/// ```
/// use tower_fixed_window::testing::hold_up_decisions;
///
/// let held_up = hold_up_decisions();
/// // ... charges from several threads
/// drop(held_up);
/// ```
pub fn hold_up_decisions() -> impl Drop {
    held_up::GUARDS.fetch_add(1, Ordering::Relaxed);
    AtEnd(|| _ = held_up::GUARDS.fetch_sub(1, Ordering::Relaxed))
}
