//! A layer counts what passes it, whatever is answered behind it: by a layer of this crate, by a
//! limited client of the handler's, or by the handler itself (S9).

use std::future::{Ready, ready};

use axum::BoxError;
use axum::response::{IntoResponse, Response};
use futures_util::future::select;
use futures_util::{Stream, StreamExt, stream};
use tower::retry::{Policy, RetryLayer};
use tower::util::BoxCloneSyncService;
use tower_http::timeout::TimeoutLayer;

use crate::prelude::*;

type Inner = BoxCloneSyncService<Request<Body>, Response, BoxError>;

/// A service in which each request works, and is then answered by `answer`.
fn working<F>(answer: impl Fn(Request<Body>) -> F + Clone + Send + Sync + 'static) -> Inner
where
    F: Future<Output = Result<Response, BoxError>> + Send + 'static,
{
    Inner::new(service_fn(move |request| {
        let answer = answer.clone();
        async move {
            sleep(ms(300)).await;
            answer(request).await
        }
    }))
}

fn works() -> Inner {
    working(async |_| Ok(Response::default()))
}

/// A limit that is used up.
fn refuses(mood: Mood, headers: Headers) -> Inner {
    Inner::new(per_minute(0, mood).headers(headers).layer(works()))
}

/// A byte each half second, for eight seconds, which a refusal waits for.
fn upload() -> Request<Body> {
    fn bytes() -> impl Stream<Item = Result<&'static str, Infallible>> + Send + 'static {
        stream::iter(0..16).then(async |_| {
            sleep(ms(500)).await;
            Ok("x")
        })
    }
    Request::post("/").body(Body::from_stream(bytes())).expect("a request")
}

/// Answers by a client of its own.
fn client(
    limited: Inner,
    answer: impl Fn(Response) -> Result<Response, BoxError> + Clone + Send + Sync + 'static,
) -> Inner {
    working(move |_| {
        let (limited, answer) = (limited.clone(), answer.clone());
        async move { answer(limited.oneshot(get("/")).await?) }
    })
}

/// Sends a request that failed once more.
#[derive(Clone)]
struct OnceMore(bool);

impl Policy<Request<Body>, Response, BoxError> for OnceMore {
    type Future = Ready<()>;

    fn retry(
        &mut self,
        _: &mut Request<Body>,
        result: &mut Result<Response, BoxError>,
    ) -> Option<Self::Future> {
        let failed = result.as_ref().is_ok_and(|response| response.status() == 503);
        (failed && std::mem::take(&mut self.0)).then(|| ready(()))
    }

    fn clone_request(&mut self, _: &Request<Body>) -> Option<Request<Body>> {
        Some(get("/"))
    }
}

/// Fails the first attempt after it has worked, and refuses the second.
fn fails_then_refuses(mood: Mood) -> Inner {
    let (refusing, attempts) = (refuses(mood, Headers::GitHub), Arc::new(AtomicU64::new(0)));
    Inner::new(service_fn(move |request| {
        let is_first = attempts.fetch_add(1, Ordering::SeqCst).is_multiple_of(2);
        let refusing = refusing.clone();
        async move {
            if is_first {
                sleep(ms(300)).await;
                return Ok(StatusCode::SERVICE_UNAVAILABLE.into_response());
            }
            refusing.oneshot(request).await
        }
    }))
}

/// All that may stand behind a layer.
fn all_behind(mood: Mood) -> Vec<(&'static str, Inner)> {
    let github = || refuses(mood, Headers::GitHub);
    let mut all = vec![("a service", works())];
    for headers in [Headers::GitHub, Headers::IetfDraft10, Headers::None] {
        all.push(("a layer that refuses", refuses(mood, headers)));
        all.push(("the answer of a limited client", client(refuses(mood, headers), Ok)));
    }
    let keyless = layered(everyone(9).key_fn(|_| None), mood).layer(works());
    all.push(("a layer that finds no key", Inner::new(keyless)));
    let copied = client(github(), |of| {
        let mut response = Response::default();
        response.headers_mut().clone_from(of.headers());
        response.extensions_mut().clone_from(of.extensions());
        Ok(response)
    });
    all.push(("an answer with the headers of a client's", copied));
    let written = working(async |_| {
        let limiter = Limiter::new(everyone(0));
        let refused = limiter.check(Key::global()).await?;
        let mut response = Response::default();
        response.headers_mut().extend(limiter.headers(&refused, Headers::GitHub));
        Ok(response)
    });
    all.push(("an answer with a limiter's headers", written));
    let denied = working(async |_| {
        let refused = Limiter::new(everyone(0)).check(Key::global()).await?;
        Ok(Response::from(refused.into_result().expect_err("it is refused")))
    });
    all.push(("an answer of a limiter's error", denied));
    let limited = github();
    let asks_first = Inner::new(service_fn(move |_| {
        // Refused at once or later, and dropped while its rest is read, or awaited.
        let asked = limited.clone().oneshot(upload());
        async move {
            let asked = select(Box::pin(asked), Box::pin(sleep(ms(50))));
            let rest = asked.await;
            sleep(ms(300)).await;
            drop(rest);
            sleep(ms(300)).await;
            Ok(Response::default())
        }
    }));
    all.push(("a client that is asked first, and dropped later", asks_first));
    let retries = ServiceBuilder::new()
        .layer(RetryLayer::new(OnceMore(true)))
        .service(fails_then_refuses(mood));
    all.push(("a retry", Inner::new(retries)));
    let (slow, refusing) = (works(), github());
    let hedges = Inner::new(service_fn(move |_| {
        let first = Box::pin(slow.clone().oneshot(get("/")));
        let second = Box::pin(refusing.clone().oneshot(get("/")));
        async move { select(first, second).await.factor_first().0 }
    }));
    all.push(("a hedge", hedges));
    let late = TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, secs(2));
    let late = ServiceBuilder::new().layer(late).map_request(|_| upload()).service(github());
    all.push(("a time-out", Inner::new(late)));
    let (cache, cached) = (Arc::new(Mutex::new(None)), github());
    let caches = Inner::new(service_fn(move |request| {
        let (cache, cached) = (Arc::clone(&cache), cached.clone());
        async move {
            let kept = cache.lock().expect("no panic").clone();
            let kept = match kept {
                Some(kept) => kept,
                None => cached.oneshot(request).await?.into_parts().0,
            };
            *cache.lock().expect("no panic") = Some(kept.clone());
            Ok(Response::from_parts(kept, Body::empty()))
        }
    }));
    all.push(("a cache", caches));
    let fails = client(github(), |refused| Err(refused.status().to_string().into()));
    all.push(("an error made of a refusal", fails));
    all
}

/// Settings of a limit, and of its layer.
type Settings = (fn(Limit) -> Limit, fn(FixedWindowLayer) -> FixedWindowLayer);

/// None of these says that something isn't counted.
const SETTINGS: [Settings; 5] = [
    (|limit| limit, |layer| layer),
    (|limit| limit, |layer| layer.headers(Headers::GitHubAndIetfDraft10)),
    (|limit| limit, |layer| layer.count_if(|_| true)),
    (|limit| limit.settled(), |layer| layer),
    (|limit| limit.shadow(), |layer| layer),
];

/// A layer around a service, and how often it has called it.
fn counted(layer: FixedWindowLayer, inner: Inner) -> (Inner, Limiter, Arc<AtomicU64>) {
    let (limiter, calls) = (limiter_of(&layer), Arc::new(AtomicU64::new(0)));
    let counter = Arc::clone(&calls);
    let inner = inner.map_request(move |request| {
        counter.fetch_add(1, Ordering::SeqCst);
        request
    });
    (Inner::new(layer.layer(inner)), limiter, calls)
}

/// The used tokens after all corrections.
async fn used(limiter: &Limiter) -> u64 {
    sleep(secs(1)).await;
    limiter.peek(Key::global()).await.expect("memory answers").used()
}

#[tokio::test(start_paused = true)]
async fn a_layer_counts_what_passes_it_whatever_is_answered_behind_it() {
    for (mood, limits) in ANSWERS.into_iter().flat_map(|mood| [1, 3].map(|n| (mood, Some(n)))) {
        for (i, (set, with)) in SETTINGS.into_iter().enumerate() {
            for (behind, inner) in all_behind(mood) {
                let outer = with(layered(set(everyone(3)), Case { mood, limits }));
                let (service, limiter, calls) = counted(outer, inner);
                for _ in 0..5 {
                    let _ = service.clone().oneshot(get("/")).await;
                }
                let what = format!("{behind}, {mood:?}, {limits:?}, settings {i}");
                assert_eq!(used(&limiter).await, 3, "{what}");
                let is_shadow = i == SETTINGS.len() - 1;
                assert_eq!(calls.load(Ordering::SeqCst), if is_shadow { 5 } else { 3 }, "{what}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_outer_layer_may_choose_not_to_count_a_status() {
    for mood in ANSWERS {
        for (behind, inner) in all_behind(mood) {
            let outer = per_minute(9, mood).count_if(|response| response.status != 429);
            let (service, limiter, _) = counted(outer, inner);
            let answer = service.oneshot(get("/")).await;
            let is_429 = answer.is_ok_and(|response| response.status() == 429);
            assert_eq!(used(&limiter).await, u64::from(!is_429), "{behind}, {mood:?}");
        }
    }
}

/// A layer around a client writes its numbers, unless it is told not to.
#[tokio::test(start_paused = true)]
async fn a_clients_numbers_reach_inbound_clients_unless_its_layer_writes_none() {
    for (headers, shown) in [(Headers::GitHub, "2"), (Headers::None, "9")] {
        let api = per_minute(2, Mood::Now).headers(headers).layer(works());
        let copies = client(Inner::new(api), |of| {
            let mut response = Response::default();
            response.headers_mut().clone_from(of.headers());
            Ok(response)
        });
        let response = per_minute(9, Mood::Now).layer(copies).oneshot(get("/")).await;
        assert_eq!(limit_headers(&response.expect("an answer"))["limit"], shown);
    }
}
