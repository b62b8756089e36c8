//! Distances in time count from the moment at which a response is handed on, after a handler or the
//! rest of an upload, and not from the decision (S18, S20).

use futures_util::{StreamExt, stream};
use tokio::time::Instant;

use crate::prelude::*;

/// Until the window ends, in a store whose clock stands still.
const LEFT_MS: u64 = 39_500;

/// What is left of the window by tokio's clock, as whole seconds.
fn left(since: Instant) -> u64 {
    LEFT_MS.saturating_sub(since.elapsed().as_millis() as u64).div_ceil(1_000)
}

/// The `t` of each quota.
fn distances<B>(response: &Response<B>) -> Vec<u64> {
    let field = response.headers()["ratelimit"].to_str().expect("ASCII");
    let distance = |item: &str| item.rsplit_once(";t=").expect("a distance").1.parse();
    field.split(", ").map(|item| distance(item).expect("an integer")).collect()
}

/// Takes eight seconds.
fn slow_upload() -> Request<Body> {
    let frames = stream::iter(0..10).then(async |_| {
        sleep(ms(800)).await;
        Ok::<_, Infallible>("x")
    });
    Request::post("/").body(Body::from_stream(frames)).expect("a request")
}

#[tokio::test(start_paused = true)]
async fn a_refusal_counts_from_the_end_of_the_upload() {
    for mood in ANSWERS {
        let layer = per_minute(1, mood).headers(Headers::GitHubAndIetfDraft10);
        let queued = layer.clone().queue(1, ms(1));
        for layer in [layer, queued] {
            let _ = layer.layer(Router::new()).oneshot(get("/")).await;
            let start = Instant::now();
            let refused = layer.layer(Router::new()).oneshot(slow_upload()).await;
            let refused = refused.expect("infallible");
            assert_eq!(start.elapsed().as_secs(), 8);
            assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
            let left = left(start);
            assert_eq!(refused.headers()["retry-after"], left.to_string(), "{mood:?}");
            assert_eq!(distances(&refused), [left], "{mood:?}");
            let text = text_of(refused).await;
            assert!(text.contains(&format!("\"retry_after\":{left},")), "{left}: {text}");
        }
    }
}

/// The same for several limits, and in what a closure makes of it.
#[tokio::test(start_paused = true)]
async fn a_closure_reads_the_distance_from_the_end_of_the_upload() {
    for mood in ANSWERS {
        let limit = |name, limit| Quota::per_minute(limit).name(name).key(Key::global());
        let store = TestStore::new(mood);
        let limits = [limit("one", 1), limit("two", 1), limit("three", 9)];
        let limits = Limits::new(limits).store(store);
        let layer = FixedWindowLayer::new(limits).headers(Headers::IetfDraft10);
        let layer = layer.on_reject(|_, why| {
            let tower_fixed_window::Reason::RateLimited(decision) = why.reason else { panic!() };
            let each = decision.limits().map(|(_, of)| of.retry_after());
            let seconds = |after: Duration| after.as_millis().div_ceil(1_000);
            let all = [why.retry_after(), decision.retry_after()].into_iter().chain(each);
            let all: Vec<_> = all.flatten().map(seconds).collect();
            why.response(Body::from(format!("{all:?}")))
        });
        let _ = layer.layer(Router::new()).oneshot(get("/")).await;
        let start = Instant::now();
        let refused = layer.layer(Router::new()).oneshot(slow_upload()).await.expect("infallible");
        let left = left(start);
        assert_eq!(distances(&refused), [left; 3], "{mood:?}");
        assert_eq!(text_of(refused).await, format!("{:?}", [left; 4]), "{mood:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_response_counts_from_the_end_of_its_handler() {
    let settled = || Quota::per_minute(9).name("api").key(Key::global()).settled();
    for mood in ANSWERS {
        for seconds in [0, 8, 30, 50] {
            let layers = [
                per_minute(9, mood),
                per_minute(9, mood).count_if(|_| true),
                per_minute(9, mood).queue(3, secs(1)),
                layered(settled(), mood),
            ];
            for layer in layers {
                for headers in [Headers::IetfDraft10, Headers::GitHubAndIetfDraft10] {
                    let handler = service_fn(move |_: Request<Body>| async move {
                        sleep(secs(seconds)).await;
                        let mut response = Response::new(Body::empty());
                        response.extensions_mut().insert(TrueCost::of("api", 2));
                        Ok::<_, Infallible>(response)
                    });
                    let start = Instant::now();
                    let Ok(response) =
                        layer.clone().headers(headers).layer(handler).oneshot(get("/")).await;
                    assert_eq!(distances(&response), [left(start)], "{mood:?}, {seconds} s");
                }
            }
        }
    }
}

/// The inner one may have waited, and each counts for itself.
#[tokio::test(start_paused = true)]
async fn stacked_layers_count_from_the_end_of_the_handler() {
    let layer = || per_minute(9, Mood::Now).headers(Headers::IetfDraft10);
    let handler = service_fn(async |_: Request<Body>| {
        sleep(secs(8)).await;
        Ok::<_, Infallible>(Response::new(Body::empty()))
    });
    let start = Instant::now();
    let Ok(response) = layer().layer(layer().layer(handler)).oneshot(get("/")).await;
    for field in response.headers().get_all("ratelimit") {
        let field = field.to_str().expect("ASCII");
        assert!(field.ends_with(&format!(";t={}", left(start))), "{field}");
    }
}
