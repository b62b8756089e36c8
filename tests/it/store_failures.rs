//! A store that fails or hangs: requests follow the layer's policy.

use std::pin::pin;

use tower_fixed_window::store::{Adjust, Charge, Remote, Reply, Scope, Store};
use tower_fixed_window::testing::ask as ask_layer;

use crate::prelude::*;

const FAILURES: [Mood; 2] = [Mood::FailsNow, Mood::FailsLater];

/// Three requests in a window so long that a test never sees its end: the fallback in memory runs
/// on the system's clock.
const THREE: Quota = Quota::new(3, Quota::MAX_WINDOW);

/// A service limited to three requests, and the number of calls that reached it.
fn limited(store: &TestStore, policy: OnStoreFailure) -> (Limited, Arc<AtomicUsize>) {
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&calls);
    let inner = service_fn(move |_: Request<Body>| {
        counter.fetch_add(1, Ordering::SeqCst);
        async { Ok(Response::new(Body::empty())) }
    });
    let layer = FixedWindowLayer::new(
        Limit::new(THREE).key(Key::global()).store(store.clone().on_failure(policy)),
    );
    (Limited::new(layer.layer(inner)), calls)
}

async fn ask(service: &Limited) -> Response<Body> {
    service.clone().oneshot(get("/")).await.expect("infallible")
}

#[tokio::test]
async fn by_default_the_quota_is_enforced_in_memory_while_the_store_fails() {
    assert_eq!(OnStoreFailure::default(), OnStoreFailure::Local);
    for failure in FAILURES {
        let store = TestStore::new(Mood::Now);
        let (service, calls) = limited(&store, OnStoreFailure::default());
        assert_eq!(used(&ask(&service).await), 1);

        store.set(failure);
        for n in 1..=3 {
            let response = ask(&service).await;
            assert_eq!((response.status(), used(&response)), (StatusCode::OK, n), "{failure:?}");
        }
        // A single refusal: five consecutive failures would open the breaker.
        let response = ask(&service).await;
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS, "{failure:?}");
        assert_eq!(limit_headers(&response)["remaining"], "0");
        assert_eq!(calls.load(Ordering::SeqCst), 4);

        // Once the store is back, its own count goes on.
        store.set(Mood::Later);
        assert_eq!(used(&ask(&service).await), 2);
    }
}

#[tokio::test]
async fn allow_lets_requests_pass_without_headers() {
    for failure in FAILURES {
        let (service, calls) = limited(&TestStore::new(failure), OnStoreFailure::Allow);
        for _ in 0..10 {
            assert_eq!(shown(&ask(&service).await), "200", "{failure:?}");
        }
        assert_eq!(calls.load(Ordering::SeqCst), 10);
    }
}

#[tokio::test]
async fn deny_answers_503_not_429() {
    for failure in FAILURES {
        let (service, calls) = limited(&TestStore::new(failure), OnStoreFailure::Deny);
        let response = ask(&service).await;
        let headers =
            "cache-control: no-store; content-type: application/problem+json; retry-after: 1";
        assert_eq!(shown(&response), format!("503 {headers}"), "{failure:?}");
        let body: serde_json::Value = serde_json::from_str(&text_of(response).await).expect("JSON");
        assert_eq!(body["status"], 503);
        assert_eq!(calls.load(Ordering::SeqCst), 0);
    }
}

/// Each call fails as it says.
#[derive(Clone)]
struct Fails(StoreError);

impl Store for Fails {
    fn charge(&self, _: Charge<'_>) -> Reply<Decision> {
        Reply::from(Err(self.0.clone()))
    }

    fn adjust(&self, _: Adjust<'_>) -> Reply<()> {
        Reply::from(Err(self.0.clone()))
    }

    fn reset(&self, _: &Scope, _: &Key) -> Reply<()> {
        Reply::from(Err(self.0.clone()))
    }
}

#[test]
fn only_allow_lets_requests_pass_uncounted_whatever_the_store_says() {
    let statuses = |store: Arc<dyn Store>, limits: &[&str]| {
        let limits = limits.iter().map(|name| Limit::new(THREE).name(name).key(Key::global()));
        let layer = FixedWindowLayer::new(Limits::new(limits).store(store));
        [(); 5].map(|()| ask_layer(&layer, Request::get("/")).status().as_u16())
    };
    let log = Log::start();
    for fails in [
        StoreError::new("the table is locked"),
        StoreError::new("the table is locked").unsent(),
        StoreError::new("the table is locked").of_key(),
        StoreError::new("the table is locked").apart(),
    ] {
        let under = |policy| Arc::new(Remote::around(Fails(fails.clone())).on_failure(policy));
        for limits in [&["one"][..], &["one", "two"]] {
            assert_eq!(statuses(Arc::new(Fails(fails.clone())), limits), [503; 5]);
            assert_eq!(statuses(under(OnStoreFailure::Deny), limits), [503; 5]);
            let local = [200, 200, 200, 429, 429];
            assert_eq!(statuses(under(OnStoreFailure::Local), limits), local);
            assert_eq!(statuses(under(OnStoreFailure::Allow), limits), [200; 5]);
        }
    }
    let told = log.text();
    let told: Vec<_> = told.lines().filter(|line| line.contains("ERROR")).collect();
    let is_cause =
        |line: &&&str| line.contains("the table is locked: requests are refused with 503");
    assert_eq!(told.iter().filter(is_cause).count(), 1, "once: {told:#?}");
    assert!(told.iter().any(|line| line.contains("Remote::around(..)")), "{told:#?}");
}

#[tokio::test]
async fn a_request_dropped_while_the_store_hangs_leaves_no_state() {
    for policy in [OnStoreFailure::Local, OnStoreFailure::Allow, OnStoreFailure::Deny] {
        let store = TestStore::new(Mood::Hangs);
        let (service, calls) = limited(&store, policy);
        let held = Arc::strong_count(&calls);
        {
            let mut request = pin!(ask(&service));
            assert!((&mut request).now_or_never().is_none());
            assert!(Arc::strong_count(&calls) > held, "the request waits with a service");
        }
        assert_eq!(Arc::strong_count(&calls), held, "that service is gone");

        store.set(Mood::Later);
        assert_eq!(used(&ask(&service).await), 1, "the dropped request was not charged");
        assert_eq!(calls.load(Ordering::SeqCst), 1);
        store.set(Mood::FailsNow);
        if policy == OnStoreFailure::Local {
            assert_eq!(used(&ask(&service).await), 1, "nor in memory");
        }
    }
}

#[tokio::test]
async fn a_request_waits_for_a_store_that_hangs_briefly() {
    let store = TestStore::new(Mood::Hangs);
    let (service, calls) = limited(&store, OnStoreFailure::Deny);
    for (then, status) in
        [(Mood::Now, StatusCode::OK), (Mood::FailsLater, StatusCode::SERVICE_UNAVAILABLE)]
    {
        store.set(Mood::Hangs);
        let mut request = pin!(ask(&service));
        assert!((&mut request).now_or_never().is_none());
        store.set(then);
        assert_eq!(request.await.status(), status);
    }
    assert_eq!(calls.load(Ordering::SeqCst), 1);
}

/// S14: the store has not counted the token, and would refund another one.
#[tokio::test(start_paused = true)]
async fn a_token_that_was_counted_in_memory_is_returned_to_memory() {
    let store = TestStore::new(Mood::FailsNow).shared();
    let limiter = Limit::new(THREE).name("api").store(store.clone());
    let memory = store.remote.fallback().clone();
    let memory = Limit::new(THREE).name("api").store(memory);
    let used = async |limiter: &Limiter| limiter.peek("alice").await.expect("it answers").used();

    let receipt = limiter.charge("alice", 1).await.expect("memory stands in").expect("it passes");
    assert_eq!((receipt.decision().is_local(), used(&memory).await), (true, 1));
    store.set(Mood::Now);
    tokio::time::advance(secs(1)).await;
    assert!(!limiter.check("alice").await.expect("it answers").is_local());
    limiter.refund(receipt).await.expect("memory answers");
    assert_eq!((used(&limiter).await, used(&memory).await), (1, 0));
}

fn shared() -> TestStore {
    TestStore::new(Mood::Now).shared()
}

#[test]
#[should_panic(expected = "write Quota::per_minute(5).name(\"login\").store(..)")]
fn an_unnamed_limit_on_a_shared_store_panics_with_the_line_to_add() {
    let _ = Limit::new(THREE).store(shared());
}

#[tokio::test]
async fn a_limiter_on_a_store_that_nobody_shares_needs_no_name() {
    let limiter = Limit::new(THREE).store(TestStore::new(Mood::Now).remembering());
    assert!(limiter.check("alice").await.expect("it answers").is_allowed());
}

/// At most 8 more than the 5 that may have passed before, where each node would grant 5.
#[test]
fn nodes_that_share_a_quota_grant_a_share_each_while_the_store_fails() {
    let passes = |nodes: u32, quotas: Quotas| -> u64 {
        let node = || {
            let store = TestStore::new(Mood::FailsNow).remote.local_share(nodes);
            quotas.name("login").store(store.clone().on_failure(OnStoreFailure::Local))
        };
        let one = |limiter: Limiter| {
            let answers = (0..20).map(|_| block_on(limiter.check("alice")).expect("memory"));
            answers.filter(|decision| decision.is_allowed() && decision.is_local()).count() as u64
        };
        (0..4).map(|_| one(node())).sum()
    };
    let five = Quota::new(5, Quota::MAX_WINDOW);
    assert_eq!(passes(1, five.into()), 20);
    assert_eq!(passes(4, five.into()), 8);
    assert_eq!(passes(1_000, five.into()), 4, "one each");
    assert_eq!(passes(4, five.with_limit(0).into()), 0);
    let shorter = Quota::new(3, Quota::MAX_WINDOW / 2);
    assert_eq!(passes(4, five.and(shorter)), 4);
    // Saved tokens are shared, too.
    let first = five.rollover_up_to(9);
    assert_eq!(passes(4, first.into()), 12);
}
