//! Layers around each other: an outer one refunds what an inner one refuses, when the response is
//! there or when the request is dropped, and not before that (S9, S17).

use std::convert::Infallible;
use std::fmt::Debug;
use std::future::ready;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use futures_util::{Stream, StreamExt, stream};
use http::{Request, StatusCode};
use http_body::Frame;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tower::retry::{Policy, RetryLayer};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_fixed_window::key::header;
use tower_fixed_window::{FixedWindowLayer, Key, Limit, Limiter, Limits, Quota, TrueCost};

use crate::support::{
    ANSWERS, CASES, Case, FarStore, Mood, TestStore, everyone, get, layered, limit_headers,
    limiter_of, per_minute, serve,
};

/// A byte each half second, for eight seconds.
fn bytes() -> impl Stream<Item = Result<&'static str, Infallible>> + Send + 'static {
    stream::iter(0..16).then(async |_| {
        sleep(Duration::from_millis(500)).await;
        Ok("x")
    })
}

fn slow_upload() -> Request<Body> {
    from("alice", Body::from_stream(bytes()))
}

fn from<B>(user: &str, body: B) -> Request<B> {
    Request::post("/").header("x-user", user).body(body).expect("a request")
}

/// Reads the whole body.
async fn inner(request: Request<Body>) -> Result<Response, Infallible> {
    let body = axum::body::to_bytes(request.into_body(), usize::MAX).await;
    Ok(body.expect("a body").into_response())
}

async fn used(limiter: &Limiter) -> u64 {
    limiter.peek(Key::global()).await.expect("memory answers").used()
}

/// Sends a request, and lets a second pass: its response is not complete then.
async fn sent<S, B>(service: S, request: Request<B>) -> JoinHandle<StatusCode>
where
    S: Service<Request<B>, Response = Response, Error: Debug + Send, Future: Send>,
    S: Send + 'static,
    B: Send + 'static,
{
    let response = tokio::spawn(async {
        let response = service.oneshot(request).await;
        response.expect("a response").status()
    });
    sleep(Duration::from_secs(1)).await;
    assert!(!response.is_finished());
    response
}

/// Drops a request that was [`sent`], as a server does when the client hangs up.
async fn break_off(response: JoinHandle<StatusCode>) {
    response.abort();
    assert!(response.await.is_err_and(|error| error.is_cancelled()));
    sleep(Duration::from_secs(1)).await;
}

#[tokio::test(start_paused = true)]
async fn refused_uploads_hold_tokens_until_they_are_read() {
    for case in CASES {
        let outer = per_minute(4, case);
        let limiter = limiter_of(&outer);
        let per_user = layered(everyone(2).key(header("x-user")), case);
        let service = ServiceBuilder::new().layer(outer).layer(per_user).service(service_fn(inner));
        let status = async |request| {
            let Ok(response) = service.clone().oneshot(request).await;
            response.status()
        };
        for _ in 0..2 {
            assert_eq!(status(from("alice", Body::empty())).await, StatusCode::OK);
        }
        let start = Instant::now();
        let refused = [slow_upload(), slow_upload()].map(|upload| service.clone().oneshot(upload));
        let refused = refused.map(tokio::spawn);
        sleep(Duration::from_secs(1)).await;
        let bob = status(from("bob", Body::empty())).await;
        assert_eq!(bob, StatusCode::TOO_MANY_REQUESTS, "{case:?}");
        for refused in refused {
            let Ok(refused) = refused.await.expect("no panic");
            assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
            assert_eq!(limit_headers(&refused)["limit"], "2");
        }
        assert_eq!(start.elapsed().as_secs(), 8, "they were read to their ends");
        for _ in 0..2 {
            assert_eq!(status(from("bob", Body::empty())).await, StatusCode::OK, "{case:?}");
        }
        assert_eq!(used(&limiter).await, 4, "each charge was given back once");
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_broken_off_counts_if_no_inner_layer_has_refused_it() {
    for mood in ANSWERS {
        let far = everyone(0).name("inner").store(FarStore::new(|| 5_000));
        let layers = [
            FixedWindowLayer::new(far),
            layered(everyone(0).shadow(), mood),
            layered(everyone(9), mood),
        ];
        for (i, inner_layer) in layers.into_iter().enumerate() {
            let outer = per_minute(9, mood);
            let limiter = limiter_of(&outer);
            let service =
                ServiceBuilder::new().layer(outer).layer(inner_layer).service(service_fn(inner));
            break_off(sent(service, slow_upload()).await).await;
            assert_eq!(used(&limiter).await, 1, "layer {i}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_for_another_reason_is_refunded_too() {
    for (case, breaks_off) in CASES.into_iter().flat_map(|case| [(case, false), (case, true)]) {
        let outer = per_minute(9, case);
        let limiter = limiter_of(&outer);
        let keyless = layered(everyone(9).key_fn(|_| None), case);
        let service = ServiceBuilder::new().layer(outer).layer(keyless).service(service_fn(inner));
        let refused = sent(service, slow_upload()).await;
        if breaks_off {
            break_off(refused).await;
        } else {
            assert_eq!(refused.await.expect("no panic"), StatusCode::BAD_REQUEST);
        }
        assert_eq!(used(&limiter).await, 0, "{case:?}");
    }
}

/// Settings of a limit, and of its layer.
type Correction = (fn(Limit) -> Limit, fn(FixedWindowLayer) -> FixedWindowLayer);

/// Ways to correct a charge by its response.
const CORRECTIONS: [Correction; 6] = [
    (|limit| limit, |layer| layer),
    (|limit| limit, |layer| layer.count_if(|_| true)),
    (|limit| limit, |layer| layer.count_if(|_| false)),
    (|limit| limit, |layer| layer.refund_dropped()),
    (|limit| limit.settled(), |layer| layer),
    (|limit| limit.shadow(), |layer| layer),
];

#[tokio::test(start_paused = true)]
async fn a_charge_is_given_back_once_whatever_else_may_correct_it() {
    for mood in ANSWERS {
        for (correction, (set, correct)) in CORRECTIONS.into_iter().enumerate() {
            for hangs_up in [false, true] {
                let store = TestStore::new(mood);
                let limiter = everyone(9).name("outer").store(store.clone());
                let outer = set(everyone(9).name("outer")).store(store);
                let outer = FixedWindowLayer::new(outer);
                // Other clients have used a token.
                let Ok(_) = FixedWindowLayer::new(&limiter)
                    .layer(service_fn(inner))
                    .oneshot(get("/"))
                    .await;
                let service = ServiceBuilder::new()
                    .layer(correct(outer))
                    .layer(per_minute(0, mood))
                    .service(service_fn(inner));
                let refused = sent(service, slow_upload()).await;
                assert_eq!(used(&limiter).await, 2, "correction {correction}");
                if hangs_up {
                    break_off(refused).await;
                } else {
                    assert_eq!(refused.await.expect("no panic"), StatusCode::TOO_MANY_REQUESTS);
                    sleep(Duration::from_secs(1)).await;
                }
                assert_eq!(used(&limiter).await, 1, "correction {correction}");
            }
        }
    }
}

/// Retries a refused request once.
#[derive(Clone)]
struct OnceMore(bool);

impl Policy<Request<Body>, Response, Infallible> for OnceMore {
    type Future = std::future::Ready<()>;

    fn retry(
        &mut self,
        _: &mut Request<Body>,
        result: &mut Result<Response, Infallible>,
    ) -> Option<Self::Future> {
        let refused = result.as_ref().is_ok_and(|response| response.status() == 429);
        (refused && std::mem::take(&mut self.0)).then(|| ready(()))
    }

    fn clone_request(&mut self, request: &Request<Body>) -> Option<Request<Body>> {
        let mut again = Request::new(Body::empty());
        *again.extensions_mut() = request.extensions().clone();
        Some(again)
    }
}

/// The response to an upload that an inner layer refuses at the first try, and lets pass at the
/// second.
async fn served_by_a_second_try(outer: FixedWindowLayer, mood: Mood) -> Response {
    let inner_layer = per_minute(0, mood);
    let inner_limiter = limiter_of(&inner_layer);
    let service = ServiceBuilder::new()
        .layer(outer)
        .layer(RetryLayer::new(OnceMore(true)))
        .layer(inner_layer)
        .service(service_fn(async |_: Request<Body>| {
            let mut response = Body::empty().into_response();
            response.extensions_mut().insert(TrueCost::of("tested", 5));
            Ok::<_, Infallible>(response)
        }));
    let response = tokio::spawn(service.oneshot(slow_upload()));
    sleep(Duration::from_secs(1)).await;
    inner_limiter.set_quotas(Quota::per_minute(99));
    let Ok(response) = response.await.expect("no panic");
    assert_eq!(response.status(), StatusCode::OK);
    response
}

/// The true cost of a request that was refused in its first try and served in its second.
async fn used_by_a_second_try(case: Case, (set, correct): Correction) -> (Response, u64) {
    let outer = correct(layered(set(everyone(9)), case));
    let limiter = limiter_of(&outer);
    let response = served_by_a_second_try(outer, case.mood).await;
    (response, used(&limiter).await)
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_served_after_all_counts() {
    for case in CASES {
        for (correction, expected) in [1, 1, 0, 1, 5, 1].into_iter().enumerate() {
            let (response, used) = used_by_a_second_try(case, CORRECTIONS[correction]).await;
            assert_eq!(used, expected, "correction {correction}");
            let headers = limit_headers(&response);
            // The tighter layer's headers. A layer in shadow mode sends none.
            let limit = if correction == 5 { "99" } else { "9" };
            assert_eq!((headers["limit"], headers["used"]), (limit, &*used.to_string()));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_refunded_is_reported_once() {
    let reports = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&reports);
    let outer = per_minute(9, Mood::Now).on_decision(move |_, decision| {
        assert!(decision.allowed());
        counter.fetch_add(1, Ordering::SeqCst);
    });
    let service =
        ServiceBuilder::new().layer(outer).layer(per_minute(0, Mood::Now)).service_fn(inner);
    let Ok(refused) = service.oneshot(slow_upload()).await;
    assert_eq!(limit_headers(&refused)["limit"], "0");
    assert_eq!(reports.load(Ordering::SeqCst), 1);
}

/// A body of a type that no layer knows.
struct Unknown(Body);

impl http_body::Body for Unknown {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.0).poll_frame(cx)
    }
}

#[tokio::test(start_paused = true)]
async fn layers_between_may_change_the_body_and_buffer_the_request() {
    for mood in ANSWERS {
        let outer = per_minute(9, mood);
        let limiter = limiter_of(&outer);
        let service = ServiceBuilder::new()
            .layer(outer)
            .map_request(|request: Request<Unknown>| request.map(Body::new))
            .buffer(1)
            .layer(per_minute(0, mood))
            .service_fn(inner);
        let upload = from("alice", Unknown(Body::from_stream(bytes())));
        let refused = sent(service, upload).await;
        assert_eq!(used(&limiter).await, 1);
        break_off(refused).await;
        assert_eq!(used(&limiter).await, 0);
    }
}

#[tokio::test]
async fn over_a_socket_a_refused_upload_that_is_broken_off_is_refunded() {
    let clients = [
        reqwest::Client::builder().no_proxy().build().expect("a client"),
        reqwest::Client::builder().no_proxy().http2_prior_knowledge().build().expect("a client"),
    ];
    for (client, mood) in clients.iter().flat_map(|client| ANSWERS.map(|mood| (client, mood))) {
        let (refused, mut refusals) = mpsc::unbounded_channel();
        let inner_layer = per_minute(0, mood).on_decision(move |_, decision| {
            assert!(!decision.allowed());
            refused.send(()).expect("a receiver");
        });
        let app = Router::new()
            .route("/upload", any(async |body: Bytes| body).layer(inner_layer))
            .route("/", any(async || "hello"))
            .layer(per_minute(1, mood));
        let url = format!("http://{}", serve(app).await);
        let body = stream::iter([Ok::<_, Infallible>("half")]).chain(stream::pending());
        let upload =
            client.post(format!("{url}/upload")).body(reqwest::Body::wrap_stream(body)).send();
        let upload = tokio::spawn(upload);
        refusals.recv().await.expect("a refusal");
        assert!(!upload.is_finished());
        upload.abort();
        let start = Instant::now();
        loop {
            let passed = client.get(&url).send().await.expect("a response");
            if passed.status().as_u16() == 200 {
                break;
            }
            assert!(start.elapsed() < Duration::from_secs(30), "{mood:?}");
            sleep(Duration::from_millis(10)).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_shadow_beside_an_enforced_limit_counts_what_is_served_after_all() {
    for mood in ANSWERS {
        let limits = [
            Quota::per_minute(9).name("enforced").key(Key::global()),
            Quota::per_minute(9).name("shadow").key(Key::global()).shadow(),
        ];
        let limits = Limits::new(limits).store(TestStore::new(mood));
        let _ = served_by_a_second_try(FixedWindowLayer::new(&limits), mood).await;
        sleep(Duration::from_secs(1)).await;
        for limiter in ["enforced", "shadow"].map(|name| limits.of(name)) {
            assert_eq!(used(limiter).await, 1, "{}, {mood:?}", limiter.name());
        }
    }
}
