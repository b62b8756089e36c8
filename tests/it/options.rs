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
async fn a_refusal_says_what_is_left_for_its_cost() {
    let cost = |parts: &Parts| if parts.uri.path() == "/huge" { 11 } else { 8 };
    for case in CASES {
        let mut service = service!(layered(everyone(10).cost_fn(cost), case));
        assert_eq!(used(&call(&mut service, "/").await), 8);
        for (path, says) in [
            ("/", "2 left for a cost of 8"),
            ("/huge", "2 left for a cost of 11, which exceeds the limit"),
        ] {
            let refused = call(&mut service, path).await;
            // Clients recognise a refusal by a remaining 0, also where 2 are left.
            let headers = limit_headers(&refused);
            assert_eq!((headers["remaining"], headers["used"]), ("0", "8"));
            let wait = refused.headers().get("retry-after").map(|of| of.to_str().expect("digits"));
            assert_eq!(wait.is_some(), path == "/", "it can never fit");
            let wait = wait.map(str::to_owned);
            let told = body(refused).await;
            let message = format!("API rate limit exceeded: tested:10/minute; {says}");
            assert_eq!(told["message"], message);
            assert_eq!(told.get("retry_after").map(ToString::to_string), wait);
        }
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
async fn handlers_find_the_decision_if_the_layer_exposes_it() {
    for case in CASES {
        let response = call(&mut service!(per_minute(9, case)), "/").await;
        assert!(!response.headers().contains_key("seen-by-handler"));
        let response = call(&mut service!(per_minute(9, case).expose_decision()), "/").await;
        assert_eq!(response.headers()["seen-by-handler"], "8");
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
