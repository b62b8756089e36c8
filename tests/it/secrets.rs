//! S26: nothing that is secret in a key reaches a log, a metric or a store.

use metrics_exporter_prometheus::PrometheusBuilder;
use tower_fixed_window::key::key_fn;
use tower_fixed_window::store::{Adjust, Charge, Reply, Scope, Store};

use crate::client_ip::request;
use crate::metrics_and_logs::recorder;
use crate::prelude::*;

/// The word in every secret: where it shows up, something has leaked.
const SECRET: &str = "hunter2";
/// The client's address. Stores know it; the crate's log lines and labels don't have it.
const ADDRESS: &str = "192.0.2.7";

/// A store that writes down everything it could put into a Redis key.
#[derive(Clone)]
struct Spy {
    inner: TestStore,
    seen: Arc<Mutex<Vec<u8>>>,
}

impl Spy {
    fn see(&self, scope: &Scope, key: &Key) {
        let mut seen = self.seen.lock().expect("no panic");
        seen.extend_from_slice(key.as_bytes());
        seen.extend_from_slice(key.readable().as_bytes());
        seen.extend_from_slice(scope.name().as_bytes());
    }
}

impl Store for Spy {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        tracing::trace!(?charge, "asked");
        charge.lines().for_each(|(account, _)| self.see(account.scope, account.key));
        self.inner.charge(charge)
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        tracing::trace!(?adjust, "asked");
        self.see(adjust.account.scope, adjust.account.key);
        self.inner.adjust(adjust)
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        tracing::trace!(?scope, ?key, "asked");
        self.see(scope, key);
        self.inner.reset(scope, key)
    }

    fn is_shared(&self) -> bool {
        false
    }
}

/// A user as an app may have it, with more fields than it should.
#[derive(Clone, Debug)]
struct Session(String);

impl From<&Session> for Key {
    fn from(session: &Session) -> Key {
        Key::secret(&session.0)
    }
}

const NAMES: [&str; 7] =
    ["header", "fallback", "session", "missing", "address", "hashed-address", "closure"];

async fn handler(request: Request<Body>) -> Result<Response<Body>, Infallible> {
    tracing::trace!(decision = ?request.extensions().get::<Decision>(), "asked");
    let mut response = Response::new(Body::empty());
    // The true cost is for any of the limits.
    let cost = NAMES.iter().fold(TrueCost::of("", 2), |cost, name| cost.and(name, 2));
    response.extensions_mut().insert(cost);
    Ok(response)
}

#[tokio::test]
async fn a_trace_level_log_and_the_store_hold_no_secret() {
    let log = Log::start();
    let recorder = PrometheusBuilder::new().build_recorder();
    let metrics = recorder.handle();
    let _guard = metrics::set_default_local_recorder(&recorder);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let cookie = |parts: &Parts| parts.headers.get("cookie").map(Key::secret);
    let limits = [
        limit().key(header("authorization")),
        limit().key(header("x-api-key").or(client_ip())),
        limit().key((extension::<Session>(), peer_ip())),
        limit().key(extension::<String>()),
        limit().key(peer_ip()),
        limit().key(key_fn(|_| Some(Key::secret(ADDRESS)))),
        limit().key(key_fn(cookie)),
    ];
    for (name, limit) in NAMES.into_iter().zip(limits) {
        for mood in [Mood::Now, Mood::Later, Mood::FailsNow, Mood::FailsLater] {
            for policy in [OnStoreFailure::Local, OnStoreFailure::Allow, OnStoreFailure::Deny] {
                let store =
                    Spy { inner: TestStore::new(mood).on_failure(policy), seen: Arc::clone(&seen) };
                let limit = limit.clone().name(name);
                tracing::trace!(?limit, "made");
                let limiter = limit.store(store);
                let layer = FixedWindowLayer::new(&limiter).expose_decision();
                tracing::trace!(?layer, ?limiter, "made");
                let service = layer.layer(service_fn(handler));
                tracing::trace!(?service, "made");
                for _ in 0..4 {
                    let request = Request::from_parts(secretive(), Body::empty());
                    let Ok(response) = service.clone().oneshot(request).await;
                    tracing::trace!(headers = ?response.headers(), "answered");
                    tracing::trace!(body = text_of(response).await, "said");
                }
            }
        }
    }
    overflow_and_by_hand(&seen).await;

    let text = log.text();
    assert!(text.lines().count() > 200, "the log was on");
    assert!(text.contains("the memory store is full"), "the run was one in which much happens");
    assert!(!text.to_lowercase().contains(SECRET), "{text}");
    let own: Vec<_> = text.lines().filter(|line| line.contains(" tower_fixed_window: ")).collect();
    for event in ["a request is refused", "the store fails", "the memory store is full"] {
        assert!(own.iter().any(|line| line.contains(event)), "{event:?} is among what happens");
    }
    assert!(!own.iter().any(|line| line.contains(ADDRESS)), "{own:#?}");
    let metrics = metrics.render().to_lowercase();
    assert!(metrics.lines().count() > 50, "much was counted: {metrics}");
    assert!(!metrics.contains(SECRET) && !metrics.contains(ADDRESS), "{metrics}");
    let seen = seen.lock().expect("no panic").to_ascii_lowercase();
    assert!(seen.len() > 1_000, "the store was asked");
    assert!(!seen.windows(SECRET.len()).any(|part| part == SECRET.as_bytes()));
}

/// What an app names is readable for the app alone: in the list of who is refused, and in warnings.
#[tokio::test]
async fn keys_that_are_refused_or_warned_of_are_in_no_debug_text_log_or_metric() {
    let (log, (metrics, _guard)) = (Log::start(), recorder());
    let near = Arc::new(Mutex::new(String::new()));
    let shown = Arc::clone(&near);
    let limit = Quota::per_hour(2).name("api").key_fn(|_| Some(Key::from(SECRET)));
    let limit = limit.track_refused(9).warn_at(50, move |near| {
        *shown.lock().expect("no panic") = format!("{near:?}");
    });
    let api = Limiter::new(limit.clone());
    let layer = FixedWindowLayer::new(&api);
    for status in [200, 200, 429] {
        let Ok(response) = limited(&layer).oneshot(get("/")).await;
        assert_eq!(response.status(), status);
    }
    let list = api.refused().expect("they are counted");
    assert_eq!(list.keys[0].key.readable(), format!("t{SECRET}"));
    tracing::trace!(?limit, ?list, ?api, ?layer, "asked");
    let (text, metrics) = (log.text(), metrics.render());
    assert!(text.contains("asked") && !text.contains(SECRET), "{text}");
    assert!(metrics.contains(r#"warnings_total{scope="api"} 1"#), "{metrics}");
    assert!(!metrics.contains(SECRET), "{metrics}");
    let near = near.lock().expect("no panic");
    assert!(near.contains("percent: 50") && !near.contains(SECRET), "{near}");
}

fn limit() -> Limit {
    Limit::new(Quota::per_minute(3)).settled()
}

/// A request with a secret in every place.
fn secretive() -> Parts {
    let mut parts = request(
        ADDRESS,
        &[
            ("authorization", b"Bearer hunter2"),
            ("x-api-key", b"hunter2"),
            ("cookie", b"session=hunter2"),
            ("x-forwarded-for", b"hunter2"),
        ],
    );
    parts.uri = "/reset?token=hunter2".parse().expect("a path");
    parts.extensions.insert(Session(SECRET.into()));
    parts
}

/// Without HTTP, and in a store that is full of secrets.
async fn overflow_and_by_hand(seen: &Arc<Mutex<Vec<u8>>>) {
    let store = MemoryStore::with_max_keys(10);
    let limiter = Quota::per_minute(3).name("hand").store(store.clone());
    for i in 0..500 {
        let key = Key::secret(format!("{SECRET}-{i}"));
        tracing::trace!(?key, readable = %key.readable(), "made");
        let charged = limiter.charge(key, 1).await.expect("memory answers");
        tracing::trace!(?charged, "charged");
    }
    tracing::trace!(?limiter, ?store, "full");

    let spy = Spy { inner: TestStore::new(Mood::Now), seen: Arc::clone(seen) };
    let limiter = Quota::per_minute(3).name("hand").store(spy);
    let mail = Key::hmac("a secret of the app's", format!("{SECRET}@example.com"));
    let receipt = limiter.charge(&mail, 1).await.expect("it answers").expect("it passes");
    tracing::trace!(?receipt, "charged");
    limiter.refund(receipt).await.expect("it answers");
    limiter.reset(&mail).await.expect("it answers");
    let mut key = Key::default();
    let error = header("x-missing").extract(&secretive(), &mut key).expect_err("missing");
    tracing::trace!(?error, %error, "missing");
}
