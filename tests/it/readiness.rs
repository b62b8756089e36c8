//! The service that was made ready is the one that is called, and its errors are kept.

use std::future::{Ready, poll_fn, ready};

use tower::limit::ConcurrencyLimitLayer;

use crate::prelude::*;

/// The error is not an `Error`, since the layer needs no trait of it.
#[derive(Debug, PartialEq)]
struct Broken(&'static str);

/// Panics when it is called without having been made ready itself: a clone is not ready.
struct Strict {
    ready: bool,
    calls: Arc<AtomicUsize>,
}

impl Strict {
    fn new() -> (Self, Arc<AtomicUsize>) {
        let calls = Arc::new(AtomicUsize::new(0));
        (Self { ready: false, calls: Arc::clone(&calls) }, calls)
    }
}

impl Clone for Strict {
    fn clone(&self) -> Self {
        Self { ready: false, calls: Arc::clone(&self.calls) }
    }
}

impl Service<Request<Body>> for Strict {
    type Response = Response<Body>;
    type Error = Broken;
    type Future = Ready<Result<Response<Body>, Broken>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        self.ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        assert!(self.ready, "called an instance that nobody made ready");
        self.ready = false;
        self.calls.fetch_add(1, Ordering::SeqCst);
        ready(Ok(Response::new(Body::empty())))
    }
}

#[tokio::test]
async fn the_instance_that_was_made_ready_is_called() {
    for mood in ANSWERS {
        // The limit skips some.
        for (layer, passes) in [(per_minute(5, mood), 5), (per_minute(0, mood).skip(|_| true), 7)] {
            let (strict, calls) = Strict::new();
            let mut service = layer.layer(strict);
            for n in 1..=7 {
                let response =
                    service.ready().await.expect("ready").call(get("/")).await.expect("kept");
                assert_eq!(response.status(), if n <= passes { 200 } else { 429 }, "{mood:?}");
            }
            assert_eq!(calls.load(Ordering::SeqCst), passes, "{mood:?}");
        }
    }
}

#[tokio::test]
async fn several_requests_may_wait_for_the_store_concurrently() {
    let (strict, calls) = Strict::new();
    let store = TestStore::new(Mood::Hangs);
    let layer = FixedWindowLayer::new(Quota::per_minute(2).key(Key::global()).store(store.clone()));
    let mut service = layer.layer(strict);
    let mut waiting = Vec::new();
    for _ in 0..3 {
        let mut request = Box::pin(service.ready().await.expect("ready").call(get("/")));
        assert!((&mut request).now_or_never().is_none());
        waiting.push(request);
    }
    store.set(Mood::Now);
    let mut passed = 0;
    for request in waiting {
        passed += usize::from(request.await.expect("kept").status().is_success());
    }
    assert_eq!((passed, calls.load(Ordering::SeqCst)), (2, 2));
}

#[tokio::test]
async fn it_is_as_ready_as_the_inner_service() {
    for mood in ANSWERS {
        let stack = ServiceBuilder::new()
            .layer(per_minute(2, mood))
            .layer(ConcurrencyLimitLayer::new(1))
            .service(service_fn(async |_: Request<Body>| {
                Ok::<_, Broken>(Response::new(Body::empty()))
            }));
        let (mut first, mut second) = (stack.clone(), stack);
        let request = first.ready().await.expect("ready").call(get("/"));
        assert!(second.ready().now_or_never().is_none(), "{mood:?}: the only place is taken");
        drop(request);
        assert!(second.ready().await.is_ok(), "{mood:?}: a dropped request frees its place");
    }
}

#[tokio::test]
async fn a_permit_held_by_a_waiting_request_is_released_by_its_refusal() {
    let stack = ServiceBuilder::new()
        .layer(per_minute(0, Mood::Later))
        .layer(ConcurrencyLimitLayer::new(1))
        .service(service_fn(async |_: Request<Body>| {
            Ok::<_, Broken>(Response::new(Body::empty()))
        }));
    for _ in 0..3 {
        let response = stack.clone().oneshot(get("/")).await.expect("no error");
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    }
}

#[tokio::test]
async fn errors_of_the_inner_service_are_returned_unchanged() {
    for mood in ANSWERS {
        let failing =
            service_fn(async |_: Request<Body>| Err::<Response<Body>, _>(Broken("in the call")));
        let mut service = per_minute(1, mood).layer(failing);
        let error = service.ready().await.expect("ready").call(get("/")).await.expect_err("fails");
        assert_eq!(error, Broken("in the call"), "{mood:?}");
        // A refusal is a response also of a service that only knows errors.
        let refused = service.ready().await.expect("ready").call(get("/")).await.expect("refused");
        assert_eq!((refused.status(), used(&refused)), (StatusCode::TOO_MANY_REQUESTS, 1));
    }
}

#[derive(Clone)]
struct NeverReady;

impl Service<Request<Body>> for NeverReady {
    type Response = Response<Body>;
    type Error = Broken;
    type Future = Ready<Result<Response<Body>, Broken>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        Poll::Ready(Err(Broken("before the call")))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        unreachable!("it is never ready")
    }
}

#[tokio::test]
async fn an_error_of_poll_ready_is_returned_unchanged() {
    let mut service = per_minute(1, Mood::Now).layer(NeverReady);
    let ready = poll_fn(|cx| Service::<Request<Body>>::poll_ready(&mut service, cx)).await;
    assert_eq!(ready, Err(Broken("before the call")));
}
