//! A reset forgets a key under whatever quotas it was charged, and says so where it can't. A peek
//! never answers by quotas that nobody named (S12).

use std::net::IpAddr;

use axum::routing::any;
use tower_fixed_window::store::Store;
use tower_fixed_window::testing::ask;

use crate::prelude::*;

const FREE: Quota = Quota::per_minute(1);

/// A quota an hour and a quota a day, on grids of their own.
fn pro_plan() -> Quotas {
    Quota::per_hour(1).staggered().and(Quota::per_day(2).from_first_request())
}

async fn status(app: &Router) -> StatusCode {
    let mut request = get("/");
    request.headers_mut().insert("x-user", "alice".parse().expect("a value"));
    app.clone().oneshot(request).await.expect("infallible").status()
}

fn app(layer: &FixedWindowLayer) -> Router {
    Router::new().fallback(any(async || "hello")).layer(layer.clone())
}

/// The key of the header, as the layer has it.
fn alice() -> Key {
    Key::secret("alice")
}

/// The table "Keys in admin routes" in docs/configuration.md.
#[test]
fn a_peek_finds_a_key_that_is_written_as_the_extractor_writes_it_and_no_other() {
    fn used(extractor: impl KeyExtractor, key: impl Into<Key>) -> u64 {
        let store = MemoryStore::new().clock(ManualClock::at_ms(NOW_MS));
        let limiter = Quota::per_day(10).key(extractor).store(store);
        let request = http::Request::get("/")
            .extension(PeerAddr(([192, 0, 2, 1], 4711).into()))
            .extension(User(7))
            .header("x-api-key", "alice");
        assert_eq!(ask(&FixedWindowLayer::new(&limiter), request).status(), 200);
        block_on(limiter.peek(key)).expect("memory").used()
    }
    let address = IpAddr::from([192, 0, 2, 1]);
    assert_eq!(used(peer_ip(), address), 1);
    assert_eq!(used(peer_ip(), "192.0.2.1"), 0, "text");
    assert_eq!(used(extension::<User>(), 7), 1);
    assert_eq!(used(extension::<User>(), "7"), 0);
    assert_eq!(used(header("x-api-key"), Key::secret("alice")), 1);
    assert_eq!(used(header("x-api-key"), "alice"), 0);
    assert_eq!(used(Key::global(), Key::global()), 1);
    assert_eq!(used((extension::<User>(), peer_ip()), (7, address)), 1);
    assert_eq!(used(extension::<User>().or(peer_ip()), 7), 1);
}

#[test]
fn a_reset_in_a_scope_with_too_many_windows_is_an_error() {
    let store = MemoryStore::new().clock(ManualClock::at_ms(NOW_MS));
    let made_up = Limit::new(FREE).name("made-up").store(store.clone());
    let window = |n| Quota::new(1, secs(n));
    for n in 1..=64 {
        assert!(
            block_on(made_up.with_quotas(window(n)).check("alice")).expect("memory").is_allowed()
        );
    }
    block_on(made_up.reset("alice")).expect("all are known");
    for n in 1..=65 {
        let fresh =
            block_on(made_up.with_quotas(window(n)).check("alice")).expect("memory").is_allowed();
        assert!(fresh, "{n} seconds");
    }
    let error = block_on(made_up.reset("alice")).expect_err("one is not known");
    assert!(error.to_string().contains("different windows"), "{error}");
    // Another scope has nothing to do with it.
    let other = Limit::new(FREE).name("other").store(store);
    assert!(block_on(other.check("alice")).expect("memory").is_allowed());
    block_on(other.reset("alice")).expect("one counter");
    assert!(block_on(other.check("alice")).expect("memory").is_allowed());
}

/// Counts that the fallback keeps from one outage would count again in the next one.
#[test]
fn a_reset_that_the_fallback_of_a_store_cannot_apply_is_an_error() {
    let store = TestStore::new(Mood::Now).shared();
    let limiter = Limit::new(FREE).name("api").store(store.clone());
    let memory = store.remote.fallback().clone();
    let memory = Limit::new(FREE).name("api").store(memory);
    for n in 1..=65 {
        let plan = memory.with_quotas(Quota::new(1, secs(n)));
        assert!(block_on(plan.check("alice")).expect("memory").is_allowed());
    }
    let error = block_on(limiter.reset("alice")).expect_err("one count is not known");
    assert!(error.to_string().contains("different windows"), "{error}");
}

#[tokio::test]
async fn a_peek_names_its_quotas_if_they_differ_per_request() {
    let limit = Limit::by_plan(|_, _| pro_plan()).key(header("x-user"));
    let limiter = limit.store(TestStore::new(Mood::Now));
    let layer = FixedWindowLayer::new(&limiter);
    let app = app(&layer);
    assert_eq!(status(&app).await, 200);
    for limiter in [limiter, limiter_of(&layer)] {
        let error: StoreError = limiter.peek(alice()).await.expect_err("by which quotas?");
        assert!(error.to_string().contains("limiter.with_quotas(quotas)"), "{error}");
        let standing = limiter.with_quotas(pro_plan()).peek(alice()).await.expect("memory");
        assert_eq!((standing.limit(), standing.used()), (1, 1));
    }
}

#[test]
fn a_store_behind_a_pointer_behaves_like_the_store() {
    let near = MemoryStore::new();
    let shared: Arc<dyn Store> = Arc::new(near.clone());
    assert!(near.remote().is_none() && shared.remote().is_none());
    assert!(!shared.is_shared());

    let far = TestStore::new(Mood::FailsLater).in_time();
    let shared: Arc<dyn Store> = Arc::new(far.clone());
    assert!(shared.remote().is_some());
    let limiter = Limit::new(FREE).store(shared);
    assert!(block_on(limiter.check("alice")).expect("memory").is_allowed());
    assert_eq!(far.remote.fallback().live_entries(), 1, "the same memory");
}

#[test]
fn a_reset_key_has_the_full_capacity_of_any_plan() {
    let clock = ManualClock::at_ms(NOW_MS);
    let store = MemoryStore::with_max_keys(1).clock(clock);
    let limiter = Limit::new(Quota::per_hour(5)).store(store.clone());
    let plan = Quota::per_hour(5).rollover_up_to(10);
    for key in 0..200_u64 {
        let _ = block_on(limiter.check(key)).expect("memory");
    }
    assert!(store.overflowed() > 0);
    for key in 0..200_u64 {
        if block_on(limiter.reset(key)).is_ok() {
            let standing = block_on(limiter.with_quotas(plan).peek(key)).expect("memory");
            assert_eq!(standing.remaining(), 10);
        }
    }
}

#[tokio::test]
async fn a_reset_through_a_layer_without_a_fallback_clears_the_fallback_of_others() {
    let store = TestStore::new(Mood::FailsNow).shared();
    let limit = everyone(1).name("api");
    let local = FixedWindowLayer::new(limit.clone().store(store.clone()));
    let limiter = limit.store(store.clone().on_failure(OnStoreFailure::Deny));
    let deny = FixedWindowLayer::new(&limiter);
    let (_keep, app) = (app(&deny), app(&local));
    assert_eq!([status(&app).await, status(&app).await], [200, 429]);
    store.set(Mood::Now);
    limiter.reset(Key::global()).await.expect("it can be asked");
    store.set(Mood::FailsNow);
    assert_eq!(status(&app).await, 200);
}
