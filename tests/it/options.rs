//! The layer's options: plans, costs, outcomes, shadow mode, changes at run time. Each over a store
//! that answers at once and one that answers later, for one limit, two and three.

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use futures_util::{StreamExt, stream};
use http::{HeaderMap, Request, Response, StatusCode};
use tokio::task::yield_now;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_fixed_window::key::header;
use tower_fixed_window::{
    Decision, FixedWindowLayer, Key, Limit, Limiter, Limits, MemoryStore, OnStoreFailure, Plan,
    Quota, TrueCost,
};

use crate::support::{
    ANSWERS, CASES, Case, Mood, NOW_MS, TestStore, beside, everyone, get, layered, limit_headers,
    limiter_of, per_minute, used,
};

/// Lets corrections finish, which are made in the background.
async fn corrected() {
    for _ in 0..20 {
        yield_now().await;
    }
}

async fn peeked(limiter: &Limiter) -> u64 {
    corrected().await;
    limiter.peek(tower_fixed_window::Key::global()).await.expect("the store answers").used()
}

/// Answers with the status in the request's path. If the path says so, the body's length is the
/// true cost.
async fn inner(request: Request<Body>) -> Result<Response<Body>, std::convert::Infallible> {
    let path = request.uri().path().trim_start_matches('/').to_owned();
    let mut response = Response::new(Body::empty());
    if let Some(cost) = path.strip_prefix("cost/") {
        response.extensions_mut().insert(TrueCost::of("tested", cost.parse().expect("a number")));
    } else if let Ok(status) = path.parse::<u16>() {
        *response.status_mut() = StatusCode::from_u16(status).expect("a status");
    }
    if let Some(decision) = request.extensions().get::<Decision>() {
        let remaining = decision.remaining().to_string().parse().expect("digits");
        response.headers_mut().insert("seen-by-handler", remaining);
    }
    Ok(response)
}

/// The sentence of a refusal.
async fn body(refused: Response<Body>) -> serde_json::Value {
    let body = axum::body::to_bytes(refused.into_body(), 1_000).await.expect("a body");
    serde_json::from_slice(&body).expect("JSON")
}

macro_rules! service {
    ($layer:expr) => {
        ServiceBuilder::new().layer($layer).service(service_fn(inner))
    };
}

/// Those of other limits are there.
fn assert_no_fields_of_tested<B>(response: &Response<B>, case: Case) {
    let fields = limit_headers(response);
    assert_ne!(fields.get("resource"), Some(&"tested"));
    assert_eq!(fields.is_empty(), case.limits == Some(1), "{case:?}: {fields:?}");
}

async fn call<S>(service: &mut S, path: &str) -> Response<Body>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = std::convert::Infallible>,
{
    let Ok(service) = service.ready().await;
    let Ok(response) = service.call(get(path)).await;
    corrected().await;
    response
}

#[tokio::test]
async fn a_refusal_names_the_plan_that_refused() {
    for case in CASES {
        let layer = layered(Limit::by_plan(|_, _| Quota::per_hour(0)).key(Key::global()), case);
        let refused = call(&mut service!(layer), "/").await;
        let body = axum::body::to_bytes(refused.into_body(), 1_000).await.expect("a body");
        let text = std::str::from_utf8(&body).expect("JSON");
        assert!(text.contains(r#""violated-policies":["tested:0/hour"]"#), "{text}");
    }
}

#[tokio::test]
async fn a_request_costs_what_the_closure_says() {
    for case in CASES {
        let layer = layered(
            everyone(10).cost_fn(|parts| match parts.uri.path() {
                "/free" => 0,
                "/huge" => 11,
                _ => 4,
            }),
            case,
        );
        let mut service = service!(layer);
        assert_eq!(used(&call(&mut service, "/").await), 4);
        assert_eq!(used(&call(&mut service, "/free").await), 4);
        assert_eq!(used(&call(&mut service, "/").await), 8);
        let refused = call(&mut service, "/").await;
        // Clients recognise a refusal by a remaining 0, also where 2 are left.
        assert_eq!(
            (limit_headers(&refused)["remaining"], limit_headers(&refused)["used"]),
            ("0", "8")
        );
        assert!(refused.headers().contains_key("retry-after"));
        let wait = refused.headers()["retry-after"].to_str().expect("digits").to_owned();
        let told = body(refused).await;
        assert_eq!(
            told["message"],
            "API rate limit exceeded: tested:10/minute; 2 left for a cost of 4"
        );
        assert_eq!(told["retry_after"].to_string(), wait);
        let never = call(&mut service, "/huge").await;
        assert_eq!(never.status(), 429);
        assert!(!never.headers().contains_key("retry-after"), "it can never fit");
        let exceeds = "API rate limit exceeded: tested:10/minute; 2 left for a cost of 11, which exceeds the limit";
        let told = body(never).await;
        assert_eq!((&told["message"], told.get("retry_after")), (&exceeds.into(), None));
        assert_eq!(call(&mut service, "/free").await.status(), 200);
    }
}

#[tokio::test]
async fn the_status_of_a_refusal_can_be_chosen() {
    for case in CASES {
        let refused =
            call(&mut service!(per_minute(0, case).status(StatusCode::FORBIDDEN)), "/").await;
        assert_eq!(refused.status(), 403);
        let body = axum::body::to_bytes(refused.into_body(), 1_000).await.expect("a body");
        assert!(std::str::from_utf8(&body).expect("JSON").contains(r#""status":403"#));
    }
}

#[tokio::test]
async fn only_failures_count() {
    for case in CASES {
        let layer = per_minute(2, case).count_if(|response| response.status == 401);
        let limiter = limiter_of(&layer);
        let mut service = service!(layer);
        for _ in 0..10 {
            assert_eq!(used(&call(&mut service, "/200").await), 0, "and the headers say so");
        }
        assert_eq!(used(&call(&mut service, "/401").await), 1);
        assert_eq!(used(&call(&mut service, "/200").await), 1);
        assert_eq!(used(&call(&mut service, "/401").await), 2);
        assert_eq!(call(&mut service, "/200").await.status(), 429);
        assert_eq!(peeked(&limiter).await, 2);
    }
}

#[tokio::test]
async fn a_response_is_judged_only_if_its_request_is_charged() {
    for mood in ANSWERS {
        let plan = Limit::by_plan(|parts, _| match parts.uri.path() {
            "/free" => Plan::UNLIMITED,
            _ => Plan::from(Quota::per_minute(2)),
        });
        let judged = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
        let judge = std::sync::Arc::clone(&judged);
        let layer = layered(plan.key(Key::global()), mood)
            .skip(|parts| parts.uri.path() == "/health")
            .count_if(move |response| {
                judge.lock().expect("no panic").push(response.status.as_u16());
                true
            });
        let mut service = service!(layer);
        for path in ["/free", "/health", "/401", "/200", "/200"] {
            let _ = call(&mut service, path).await;
        }
        assert_eq!(*judged.lock().expect("no panic"), [401, 200], "{mood:?}");
    }
}

/// An inner service whose requests wait until they are released, one by one.
#[derive(Clone)]
struct Gate(std::sync::Arc<tokio::sync::Semaphore>);

impl Gate {
    fn new() -> Self {
        Self(std::sync::Arc::new(tokio::sync::Semaphore::new(0)))
    }

    fn service(
        &self,
        layer: &FixedWindowLayer,
    ) -> impl Service<
        Request<Body>,
        Response = Response<Body>,
        Error = std::convert::Infallible,
        Future: Send,
    > + Clone
    + use<> {
        let gate = self.0.clone();
        layer.layer(service_fn(move |request| {
            let gate = gate.clone();
            async move {
                gate.acquire().await.expect("open").forget();
                inner(request).await
            }
        }))
    }
}

#[tokio::test]
async fn a_request_counts_until_its_outcome_is_known() {
    for case in CASES {
        let layer = per_minute(5, case).count_if(|response| response.status == 401);
        let gate = Gate::new();
        let service = gate.service(&layer);
        let tried: Vec<_> =
            (0..20).map(|_| tokio::spawn(service.clone().oneshot(get("/401")))).collect();
        corrected().await;
        gate.0.add_permits(20);
        let mut statuses = Vec::new();
        for tried in tried {
            let Ok(response) = tried.await.expect("no panic");
            statuses.push(response.status().as_u16());
        }
        assert_eq!(statuses.iter().filter(|&&status| status == 401).count(), 5, "{statuses:?}");
        assert_eq!(statuses.iter().filter(|&&status| status == 429).count(), 15, "{statuses:?}");
    }
}

#[tokio::test]
async fn a_dropped_request_is_refunded_only_with_refund_dropped() {
    for case in CASES {
        for (layer, left) in [
            (per_minute(9, case), 1),
            (per_minute(9, case).refund_dropped(), 0),
            (per_minute(9, case).count_if(|_| false), 1),
            (layered(everyone(9).shadow(), case), 1),
            (layered(everyone(9).shadow(), case).refund_dropped(), 0),
        ] {
            let limiter = limiter_of(&layer);
            let service = Gate::new().service(&layer);
            let request = tokio::spawn(service.oneshot(get("/")));
            corrected().await;
            assert_eq!(peeked(&limiter).await, 1, "under way");
            request.abort();
            assert!(request.await.expect_err("it was dropped").is_cancelled());
            assert_eq!(peeked(&limiter).await, left);
        }
    }
}

/// The documentation of `cost_fn` and `settled` promises this for estimates.
#[tokio::test]
async fn an_estimate_of_zero_passes_where_the_true_cost_does_not_fit_and_one_of_one_does_not() {
    for (case, (estimate, status)) in
        CASES.into_iter().flat_map(|case| [(0, 200), (1, 429)].map(|of| (case, of)))
    {
        let mut service =
            service!(layered(everyone(100).cost_fn(move |_| estimate).settled(), case));
        assert_eq!(call(&mut service, "/cost/100").await.status(), 200);
        let after = call(&mut service, "/cost/50").await.status();
        assert_eq!(after, status, "estimated at {estimate}, and nothing is left");
    }
}

/// Streams so many chunks, each of which costs 1.
fn streaming(chunks: u64) -> Response<Body> {
    let (cost, mut meter) = TrueCost::metered();
    let chunks = stream::iter(1..=chunks).map(move |sent| {
        meter.set("tested", sent);
        Ok::<_, std::convert::Infallible>("chunk")
    });
    let mut response = Response::new(Body::from_stream(chunks));
    response.extensions_mut().insert(cost);
    response
}

/// The client hangs up before the first chunk, and the service may have bought what it costs.
#[tokio::test]
async fn a_stream_that_reported_no_cost_keeps_its_estimate() {
    for case in CASES {
        let layer = layered(everyone(1_000).cost_fn(|_| 10).settled(), case);
        let service = layer.layer(service_fn(async |_: Request<Body>| {
            Ok::<_, std::convert::Infallible>(streaming(300))
        }));
        for requests in 1..=50 {
            let Ok(response) = service.clone().oneshot(get("/")).await;
            drop(response);
            assert_eq!(peeked(&limiter_of(&layer)).await, 10 * requests);
        }
    }
}

#[tokio::test]
async fn a_streamed_response_settles_once_when_it_ends_or_is_dropped() {
    for case in CASES {
        let layer = layered(everyone(1_000).cost_fn(|_| 10).settled(), case);
        let limiter = limiter_of(&layer);
        let service = layer.layer(service_fn(async |_: Request<Body>| {
            Ok::<_, std::convert::Infallible>(streaming(300))
        }));

        let Ok(response) = service.clone().oneshot(get("/")).await;
        assert_eq!(peeked(&limiter).await, 10, "the estimate, while it runs");
        let body = axum::body::to_bytes(response.into_body(), usize::MAX).await.expect("chunks");
        assert_eq!(body.len(), 5 * 300);
        assert_eq!(peeked(&limiter).await, 300);

        // The client hangs up after two chunks.
        let Ok(response) = service.oneshot(get("/")).await;
        let mut chunks = response.into_body().into_data_stream();
        chunks.next().await.expect("a chunk").expect("a chunk");
        chunks.next().await.expect("a chunk").expect("a chunk");
        assert_eq!(peeked(&limiter).await, 310);
        drop(chunks);
        assert_eq!(peeked(&limiter).await, 302);
        drop(limiter);
    }
}

#[tokio::test]
async fn a_body_that_ends_before_its_response_is_seen_settles_too() {
    // A cost of nothing is a cost.
    for (case, cost) in CASES.into_iter().flat_map(|case| [(case, 7), (case, 0)]) {
        let layer = layered(everyone(1_000).settled(), case);
        let limiter = limiter_of(&layer);
        let service = layer.layer(service_fn(move |_: Request<Body>| {
            let (reported, mut meter) = TrueCost::metered();
            meter.set("tested", cost);
            drop(meter);
            let mut response = Response::new(Body::empty());
            response.extensions_mut().insert(reported);
            std::future::ready(Ok::<_, std::convert::Infallible>(response))
        }));
        let Ok(_) = service.oneshot(get("/")).await;
        assert_eq!(peeked(&limiter).await, cost);
    }
}

#[tokio::test]
async fn shadow_mode_counts_but_neither_refuses_nor_sends_headers() {
    for case in CASES {
        let layer = layered(everyone(2).shadow(), case);
        let limiter = limiter_of(&layer);
        let mut service = service!(layer);
        for _ in 0..5 {
            let response = call(&mut service, "/").await;
            assert_eq!(response.status(), 200);
            assert_no_fields_of_tested(&response, case);
        }
        assert_eq!(peeked(&limiter).await, 2, "what would have been refused is not counted");
        limiter.set_shadow(false);
        assert_eq!(call(&mut service, "/").await.status(), 429);
        limiter.set_shadow(true);
        assert_eq!(call(&mut service, "/").await.status(), 200);
    }
}

#[tokio::test]
async fn shadow_on_a_clone_of_a_limit_does_not_change_the_original() {
    let (enforced, store) = (everyone(0).name("api"), TestStore::new(Mood::Now));
    let trial = enforced.clone().shadow();
    for (limit, status) in [(&trial, 200), (&enforced, 429), (&trial, 200)] {
        let layer = FixedWindowLayer::new(limit.clone().store(store.clone()));
        assert_eq!(call(&mut service!(layer), "/").await.status(), status);
    }
}

#[tokio::test]
async fn shadow_mode_lets_requests_without_a_key_and_a_failing_store_pass() {
    let keyless = layered(everyone(9).key_fn(|_| None).shadow(), Mood::Now);
    assert_eq!(call(&mut service!(keyless), "/").await.status(), 200);
    for mood in [Mood::FailsNow, Mood::FailsLater] {
        let store = TestStore::new(mood).on_failure(OnStoreFailure::Deny);
        let failing = FixedWindowLayer::new(everyone(9).shadow().store(store));
        let response = call(&mut service!(failing), "/").await;
        assert_eq!(response.status(), 200);
        assert!(limit_headers(&response).is_empty());
    }
}

#[tokio::test]
async fn a_limit_that_is_changed_applies_to_the_next_request_of_every_service() {
    for case in CASES {
        let store = TestStore::new(case.mood);
        let clock = store.clock.clone();
        let limits = beside(everyone(2), case.limits.expect("so many")).store(store);
        let (limiter, layer) = (limits.of("tested"), || FixedWindowLayer::new(&limits));
        let (mut one, mut other) = (service!(layer()), service!(layer()));
        assert_eq!(used(&call(&mut one, "/").await), 1);
        assert_eq!(used(&call(&mut other, "/").await), 2);
        assert_eq!(call(&mut one, "/").await.status(), 429);

        limiter.set_quotas(Quota::per_minute(4));
        let response = call(&mut one.clone(), "/").await;
        assert_eq!(
            (limit_headers(&response)["limit"], limit_headers(&response)["used"]),
            ("4", "3")
        );
        assert_eq!(used(&call(&mut other, "/").await), 4);

        limiter.set_quotas(Quota::per_minute(1));
        assert_eq!(call(&mut one, "/").await.status(), 429);
        assert_eq!(call(&mut other, "/").await.status(), 429);
        // No debt for the next window.
        clock.set_ms(NOW_MS + 60_000);
        assert_eq!(used(&call(&mut one, "/").await), 1);

        limiter.reset(tower_fixed_window::Key::global()).await.expect("the store answers");
        assert_eq!(used(&call(&mut one, "/").await), 1);
    }
}

#[tokio::test]
async fn handlers_find_the_decision_if_the_layer_exposes_it() {
    for case in CASES {
        let response = call(&mut service!(per_minute(9, case)), "/").await;
        assert!(!response.headers().contains_key("seen-by-handler"));
        let response = call(&mut service!(per_minute(9, case).expose_decision()), "/").await;
        assert_eq!(response.headers()["seen-by-handler"], "8");
    }
}

#[tokio::test]
async fn an_exempted_preflight_is_neither_counted_nor_refused() {
    let preflight = || {
        Request::options("/")
            .header("origin", "https://app.example")
            .header("access-control-request-method", "PUT")
            .body(Body::empty())
            .expect("a request")
    };
    for case in CASES {
        let layer = per_minute(0, case);
        let Ok(response) = service!(layer.clone()).oneshot(preflight()).await;
        assert_eq!(response.status(), 429, "unless it is exempted");
        let mut service = service!(layer.skip_preflight());
        let Ok(response) = service.ready().await.expect("ready").call(preflight()).await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers(), &HeaderMap::new());
        // An OPTIONS request that is no preflight is a request.
        for field in ["accept", "origin", "access-control-request-method"] {
            let options = Request::options("/").header(field, "PUT").body(Body::empty());
            let Ok(response) = service.clone().oneshot(options.expect("a request")).await;
            assert_eq!(response.status(), 429, "with {field} alone");
        }
    }
}

#[tokio::test]
async fn a_plan_that_is_none_has_no_limit_whatever_type_the_closure_returns() {
    fn is_free(parts: &http::request::Parts) -> bool {
        parts.uri.path() != "/unlimited"
    }
    fn by_plan<Q: Copy + Send + Sync + 'static>(quotas: Q) -> Limit
    where
        Option<Q>: Into<Plan>,
    {
        let plan = move |parts: &_, _: &_| is_free(parts).then_some(quotas);
        Limit::by_plan(plan).key(Key::global())
    }
    for case in CASES {
        let (one, several) = (Quota::per_minute(1), Quota::per_minute(1).and(Quota::per_hour(1)));
        let layers = [
            layered(by_plan(one), case),
            layered(by_plan(several), case),
            layered(by_plan(one), case).queue(9, Duration::ZERO),
        ];
        // A request for which all limits are unlimited is in the last of these.
        let none = [by_plan(one).name("tested"), by_plan(several).name("other")];
        let none = FixedWindowLayer::new(Limits::new(none).store(TestStore::new(case.mood)));
        let alone = Case { limits: Some(1), ..case };
        for (layer, case) in layers.map(|layer| (layer, case)).into_iter().chain([(none, alone)]) {
            let service = layer.layer(Router::new());
            for _ in 0..3 {
                let unlimited =
                    service.clone().oneshot(get("/unlimited")).await.expect("infallible");
                assert_eq!(unlimited.status(), StatusCode::NOT_FOUND, "the router's");
                assert_no_fields_of_tested(&unlimited, case);
            }
            let first = service.clone().oneshot(get("/")).await.expect("infallible");
            assert_eq!(used(&first), 1, "what has no limit was not counted");
            let second = service.clone().oneshot(get("/")).await.expect("infallible");
            assert_eq!(second.status(), StatusCode::TOO_MANY_REQUESTS);
        }
    }
}

#[tokio::test]
async fn each_hook_sees_the_decision() {
    let (sender, seen) = std::sync::mpsc::channel();
    let mut layer = per_minute(5, Mood::Now);
    for hook in ["first", "second"] {
        let sender = sender.clone();
        layer = layer.on_decision(move |_, _| {
            let _ = sender.send(hook);
        });
    }
    let _ = layer.layer(Router::new()).oneshot(get("/")).await.expect("infallible");
    assert_eq!(seen.try_iter().collect::<Vec<_>>(), ["first", "second"]);
}

#[tokio::test]
async fn an_extractor_may_be_chosen_at_run_time() {
    use std::sync::Arc;
    use tower_fixed_window::{Key, KeyExtractor};

    let boxed: Box<dyn KeyExtractor> = Box::new(header("x-key"));
    let shared: Arc<dyn KeyExtractor> = Arc::new(Key::global());
    for (key, expected) in [(Ok(boxed), None), (Err(shared), Some(Key::global()))] {
        let limit = match key {
            Ok(boxed) => Quota::per_minute(9).key(boxed),
            Err(shared) => Quota::per_minute(9).key(shared),
        };
        let layer = FixedWindowLayer::new(limit);
        let limiter = limiter_of(&layer);
        let response = layer.layer(Router::new()).oneshot(get("/")).await.expect("infallible");
        let Some(key) = expected else {
            assert_eq!(response.status(), StatusCode::BAD_REQUEST);
            continue;
        };
        assert_eq!(limiter.peek(key).await.expect("memory").used(), 1);
    }
}

/// The same limit, however it is written.
#[tokio::test]
async fn setters_of_a_limit_have_no_order() {
    type Setter = fn(Limit) -> Limit;
    let setters: [Setter; 5] = [
        |limit| limit.name("tested"),
        |limit| limit.key(header("x-tenant")),
        |limit| limit.cost_fn(|_| 3),
        |limit| limit.settled(),
        |limit| limit.track_refused(10),
    ];
    let mut order = [0, 1, 2, 3, 4];
    // Swaps of neighbours, until each setter was first and last.
    for i in 0..20 {
        order.swap(i % 4, i % 4 + 1);
        let by_quota = Limit::new(Quota::per_hour(5));
        let limit = order.iter().fold(by_quota, |limit, setter| setters[*setter](limit));
        let layer = FixedWindowLayer::new(limit.store(MemoryStore::new()));
        let mut service = service!(layer.clone());
        let mut ask = async |path| {
            let request = Request::get(path).header("x-tenant", "a").body(Body::empty());
            let Ok(response) = service.call(request.expect("a request")).await;
            response.status().as_u16()
        };
        assert_eq!((ask("/cost/4").await, ask("/cost/1").await), (200, 429), "{order:?}");
        let tenants = limiter_of(&layer);
        let used = tenants.peek(Key::secret("a")).await.expect("it answers").used();
        assert_eq!((used, tenants.refused().expect("it tracks").total), (4, 1), "{order:?}");
    }
}
