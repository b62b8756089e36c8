//! Tokens that are charged, refunded and settled, as an operator sees them: the tokens spent are those
//! that the store has counted.

use metrics_exporter_prometheus::PrometheusHandle;
use tower_fixed_window::store::Store;

use crate::metrics_and_logs::{recorder, scraped};
use crate::prelude::*;

/// Charged, refunded, settled and spent.
fn tokens(handle: &PrometheusHandle, scope: &str) -> [u64; 4] {
    let scraped = scraped(handle);
    let of = |what: &str| {
        let name = format!("tokens_{what}_total{{scope=\"{scope}\"}}");
        scraped.get(&name).copied().unwrap_or_default() as u64
    };
    let (charged, refunded, settled) = (of("charged"), of("refunded"), of("settled"));
    [charged, refunded, settled, charged + settled - refunded]
}

fn of_tokens(name: &str) -> Limit {
    let cost = |parts: &Parts| {
        parts.headers.get("x-cost").map_or(1, |n| n.to_str().unwrap().parse().unwrap())
    };
    Quota::new(1_000, Quota::MAX_WINDOW).name(name).key(Key::global()).cost_fn(cost).settled()
}

async fn used(limits: &Limits, name: &str) -> u64 {
    limits.limiter(name).peek(Key::global()).await.expect("memory").used()
}

/// Answers with a true cost, a status, or never.
async fn answer(request: Request<Body>) -> Result<Response<Body>, Infallible> {
    let (path, mut response) = (request.uri().path(), Response::new(Body::empty()));
    if let Some(cost) = path.strip_prefix("/cost/") {
        let cost = TrueCost::of("tokens", cost.parse().expect("a number"));
        response.extensions_mut().insert(cost);
    } else if path == "/free" {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
    } else if path == "/never" {
        std::future::pending::<()>().await;
    }
    Ok(response)
}

fn request(path: &str, cost: u64) -> Request<Body> {
    Request::get(path).header("x-cost", cost).body(Body::empty()).expect("valid")
}

async fn spend(store: impl Store) -> (PrometheusHandle, Limits) {
    let (handle, _guard) = recorder();
    let limits = Limits::new([of_tokens("tokens"), of_tokens("estimates")]).store(store);
    let layer = FixedWindowLayer::new(&limits)
        .count_if(|parts| parts.status != StatusCode::NOT_MODIFIED)
        .refund_dropped();
    let service = layer.layer(service_fn(answer));
    // A lower cost, a higher one, one that is refunded, and one that stays.
    for (path, cost) in [("/cost/4", 10), ("/cost/25", 20), ("/free", 30), ("/", 40)] {
        let Ok(response) = service.clone().oneshot(request(path, cost)).await;
        assert!(response.status().as_u16() < 400, "{path}");
    }
    // Refused: nothing is charged.
    let Ok(refused) = service.clone().oneshot(request("/", 999)).await;
    assert_eq!(refused.status(), 429);
    // The first limit would pass: what it has taken meanwhile is no charge.
    let lines = [Line::new("tokens", Key::global(), 1), Line::new("estimates", Key::global(), 999)];
    assert!(!limits.check(&lines).await.expect("memory").is_allowed());
    // Dropped in the handler, and while the store decides.
    for after in [500, 2] {
        let call = service.clone().oneshot(request("/never", 50));
        assert!(tokio::time::timeout(ms(after), call).await.is_err());
    }
    // Without HTTP.
    let lines = [Line::new("tokens", Key::global(), 7), Line::new("estimates", Key::global(), 3)];
    let receipts = limits.charge(&lines).await.expect("memory").expect("it passes");
    limits.settle(receipts, [("tokens", 2), ("estimates", 8)]).await.expect("memory");
    let receipts = limits.charge(&lines).await.expect("memory").expect("it passes");
    limits.refund(receipts).await.expect("memory");
    sleep(secs(1)).await;
    (handle, limits)
}

#[tokio::test(start_paused = true)]
async fn tokens_spent_are_those_that_the_store_has_counted() {
    let memory = || paused_memory();
    let far = far_store(|| 5);
    for ((handle, limits), drops) in [(spend(memory()).await, 2), (spend(far).await, 1)] {
        for (name, expected) in [
            ("tokens", [114 + 50 * drops, 48 + 50 * drops, 5, 71]),
            ("estimates", [106 + 50 * drops, 33 + 50 * drops, 5, 78]),
        ] {
            assert_eq!(tokens(&handle, name), expected, "{name}");
            assert_eq!(used(&limits, name).await, expected[3], "{name}");
        }
    }
}

/// A line takes tokens for requests that may be gone by then. No charge counts those.
#[tokio::test(start_paused = true)]
async fn tokens_that_a_queue_returns_were_never_charged() {
    let (handle, _guard) = recorder();
    let limits = Limits::new([
        Quota::per_second(8).name("seconds").key(Key::global()).cost_fn(|_| 2),
        Quota::per_minute(200).name("minutes").key(Key::global()).cost_fn(|_| 2),
    ]);
    let limits = limits.store(far_store(|| 20));
    let layer = FixedWindowLayer::new(&limits).queue(100, secs(60));
    let called = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&called);
    let service = layer.layer(service_fn(move |_: Request<Body>| {
        count.fetch_add(1, Ordering::SeqCst);
        async { Ok::<_, Infallible>(Response::new(Body::empty())) }
    }));
    let call = |i: u64| {
        let call = service.clone().oneshot(request("/", 1));
        // Every third one is gone at about the time of the answer.
        let patience = if i.is_multiple_of(3) { 30 + i * 7 } else { 60_000 };
        tokio::spawn(tokio::time::timeout(ms(patience), call))
    };
    for call in (0..30).map(call).collect::<Vec<_>>() {
        let _gone_or_served = call.await.expect("no panic");
    }
    sleep(secs(1)).await;
    let called = called.load(Ordering::SeqCst) as u64;
    assert!((20..30).contains(&called), "{called}");
    for name in ["seconds", "minutes"] {
        assert_eq!(tokens(&handle, name), [2 * called, 0, 0, 2 * called], "{name}");
    }
    assert_eq!(used(&limits, "minutes").await, 2 * called);
}

/// Tokens are only counted once a cost differs from 1: until then they equal the requests.
#[test]
fn tokens_are_counted_from_the_first_cost_on() {
    let (handle, _guard) = recorder();
    let limiter = Limiter::new(Quota::per_minute(60).name("api"));
    for (cost, expected) in [(1, 0), (1, 0), (5, 5), (1, 6), (0, 6)] {
        assert!(block_on(limiter.charge(Key::global(), cost)).expect("memory").is_ok());
        assert_eq!(tokens(&handle, "api"), [expected, 0, 0, expected], "{cost}");
    }
    let receipt = block_on(limiter.charge(Key::global(), 0)).expect("memory").expect("it passes");
    block_on(limiter.settle(receipt, u64::MAX)).expect("memory");
    assert_eq!(tokens(&handle, "api")[2], Quota::MAX_TOKENS);
}

#[test]
fn charges_of_one_token_count_where_costs_are_possible() {
    for (cost, expected) in [(Some(5), [1, 0, 4, 5]), (None, [1, 0, 0, 1])] {
        let (handle, _guard) = recorder();
        let limit = Quota::per_minute(60).name("tokens").key(Key::global());
        let limit = if cost.is_some() { limit.settled() } else { limit.cost_fn(|_| 1) };
        let layer = FixedWindowLayer::new(limit.store(MemoryStore::new()));
        let path = cost.map_or("/".to_owned(), |cost| format!("/cost/{cost}"));
        let Ok(_) = block_on(layer.layer(service_fn(answer)).oneshot(request(&path, 1)));
        assert_eq!(tokens(&handle, "tokens"), expected, "{cost:?}");
    }
}
