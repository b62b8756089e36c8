//! The layer's options, where the random programs of `tests/programs` don't look: bodies, hooks, what
//! is asked how often. What is counted under which options is theirs.

use std::sync::mpsc;

use crate::prelude::*;

/// Answers with the status in the request's path. If the path says so, the body's length is the
/// true cost.
async fn inner(request: Request<Body>) -> Result<Response<Body>, Infallible> {
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
    serde_json::from_str(&text_of(refused).await).expect("JSON")
}

macro_rules! service {
    ($layer:expr) => {
        ServiceBuilder::new().layer($layer).service(service_fn(inner))
    };
}

async fn call<S>(service: &mut S, path: &str) -> Response<Body>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
{
    let Ok(service) = service.ready().await;
    let Ok(response) = service.call(get(path)).await;
    response
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
        let layer = per_minute(0, case).status(StatusCode::FORBIDDEN);
        let refused = call(&mut service!(layer), "/").await;
        assert_eq!(refused.status(), 403);
        assert_eq!(body(refused).await["status"], 403);
    }
}

#[tokio::test]
async fn a_response_is_judged_only_if_its_request_is_charged() {
    for mood in ANSWERS {
        let plan = Limit::by_plan(|parts, _| match parts.uri.path() {
            "/free" => Plan::UNLIMITED,
            _ => Plan::from(Quota::per_minute(2)),
        });
        let judged = Arc::new(Mutex::new(Vec::new()));
        let judge = Arc::clone(&judged);
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
async fn handlers_find_the_decision_if_the_layer_exposes_it() {
    for case in CASES {
        let response = call(&mut service!(per_minute(9, case)), "/").await;
        assert!(!response.headers().contains_key("seen-by-handler"));
        let response = call(&mut service!(per_minute(9, case).expose_decision()), "/").await;
        assert_eq!(response.headers()["seen-by-handler"], "8");
    }
}

#[tokio::test]
async fn a_plan_that_is_none_has_no_limit_whatever_type_the_closure_returns() {
    fn by_plan<Q: Copy + Send + Sync + 'static>(quotas: Q) -> Limit
    where
        Option<Q>: Into<Plan>,
    {
        let plan = move |parts: &Parts, _: &_| (parts.uri.path() != "/free").then_some(quotas);
        Limit::by_plan(plan).key(Key::global())
    }
    let (one, several) = (Quota::per_minute(1), Quota::per_minute(1).and(Quota::per_hour(1)));
    // A request for which all limits are unlimited is in the last of these.
    let both = Limits::new([by_plan(one).name("a"), by_plan(several).name("b")]);
    for layer in [
        layered(by_plan(one), Mood::Now),
        layered(by_plan(several), Mood::Later),
        layered(by_plan(one), Mood::Now).queue(9, Duration::ZERO),
        FixedWindowLayer::new(both.store(TestStore::new(Mood::Later))),
    ] {
        let mut service = service!(layer);
        for _ in 0..3 {
            let unlimited = call(&mut service, "/free").await;
            assert_eq!(unlimited.status(), 200);
            assert!(limit_headers(&unlimited).is_empty());
        }
        assert_eq!(used(&call(&mut service, "/").await), 1, "what has no limit was not counted");
        assert_eq!(call(&mut service, "/").await.status(), 429);
    }
}

#[tokio::test]
async fn each_hook_sees_the_decision() {
    let (sender, seen) = mpsc::channel();
    let mut layer = per_minute(5, Mood::Now);
    for hook in ["first", "second"] {
        let sender = sender.clone();
        layer = layer.on_decision(move |_, _| {
            let _ = sender.send(hook);
        });
    }
    let _ = call(&mut service!(layer), "/").await;
    assert_eq!(seen.try_iter().collect::<Vec<_>>(), ["first", "second"]);
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
