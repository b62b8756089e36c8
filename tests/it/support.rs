//! Shared by the tests: a clock that stands still, stores that misbehave on demand, servers.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::{BoxError, Router};
use harness::{Counts, Operation, TokioClock, forward_to_memory};
use http::request::Parts;
use http::{HeaderName, HeaderValue, Request, Response};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};
use tokio::task::yield_now;
use tokio::time::sleep;
use tower::util::BoxCloneSyncService;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_fixed_window::key::{MissingKey, PeerAddr};
use tower_fixed_window::store::{Adjust, Charge, Remote, Reply, Scope, Store};
use tower_fixed_window::{
    Decision, FixedWindowLayer, Key, KeyExtractor, Limit, Limiter, Limits, ManualClock,
    MemoryStore, OnStoreFailure, Quota, StoreError, TrueCost,
};

pub(crate) use crate::log::Log;

pub(crate) const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub(crate) const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// 39.5 s before the top of a minute, so that rounding up shows.
pub(crate) const NOW_MS: u64 = 1_700_000_060_500;
/// The minute's end, as in `x-ratelimit-reset`.
pub(crate) const RESET: &str = "1700000100";
/// The seconds until then, as in `retry-after`.
pub(crate) const RETRY_AFTER: &str = "40";

/// The start of that minute.
pub(crate) const MINUTE_MS: u64 = 1_700_000_040_000;

/// Wall time that moves with tokio's, from the start of a minute on.
pub(crate) fn paused_clock() -> TokioClock {
    TokioClock::at_ms(MINUTE_MS)
}

/// A store in memory on that clock.
pub(crate) fn paused_memory() -> MemoryStore {
    MemoryStore::new().clock(paused_clock())
}

/// How a [`TestStore`] answers.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Mood {
    Now,
    Later,
    FailsNow,
    FailsLater,
    /// Not until the mood changes; then as that says.
    Hangs,
}

/// The ways to answer that must make no difference to anybody.
pub(crate) const ANSWERS: [Mood; 2] = [Mood::Now, Mood::Later];

/// A store in memory, on a clock that stands still, in a mood that can change.
#[derive(Clone)]
pub(crate) struct TestStore {
    moody: Moody,
    /// In place of memory, if refusals are remembered.
    counts: Counts,
    pub(crate) clock: ManualClock,
    pub(crate) remote: Remote,
    /// The store has always answered at once, and is called without a deadline.
    at_once: Arc<AtomicBool>,
}

/// The backend of a [`TestStore`].
#[derive(Clone)]
struct Moody {
    memory: Arc<dyn Store>,
    mood: watch::Sender<Mood>,
    shared: bool,
}

impl TestStore {
    pub(crate) fn new(mood: Mood) -> Self {
        let clock = ManualClock::at_ms(NOW_MS);
        let memory = Arc::new(MemoryStore::new().clock(clock.clone()));
        let moody = Moody { memory, mood: watch::Sender::new(mood), shared: false };
        // Nothing is remembered, since memories end by a clock that runs.
        let remote =
            Remote::around(moody.clone()).deadline(Duration::MAX).remember_refusals(Duration::ZERO);
        let counts = Counts::with_clock(clock.clone());
        let at_once = Arc::new(AtomicBool::new(mood == Mood::Now));
        let this = Self { moody, counts, clock, remote, at_once };
        if mood == Mood::Hangs { this.in_time() } else { this }
    }

    /// Makes a store whose counters other limiters find by name, and whose refusals are remembered.
    pub(crate) fn shared(mut self) -> Self {
        self.moody.shared = true;
        self.remembering()
    }

    /// Makes a store whose refusals are remembered.
    pub(crate) fn remembering(mut self) -> Self {
        self.at_once = Arc::default();
        self.moody.memory = Arc::new(self.counts.clone());
        self.remote = Remote::around(self.moody.clone()).deadline(Duration::MAX);
        let in_time = *self.moody.mood.borrow() == Mood::Hangs;
        if in_time { self.in_time() } else { self }
    }

    /// Adds a deadline, for tests in which the store misses it. Other tests have none: on a busy
    /// machine an answer may miss any deadline, and then another store counts.
    pub(crate) fn in_time(self) -> Self {
        Self { remote: self.remote.deadline(Duration::from_millis(250)), ..self }
    }

    pub(crate) fn set(&self, mood: Mood) {
        self.at_once.store(false, Ordering::SeqCst);
        self.moody.mood.send_replace(mood);
    }

    pub(crate) fn on_failure(self, policy: OnStoreFailure) -> Self {
        Self { remote: self.remote.on_failure(policy), ..self }
    }

    fn store(&self) -> &dyn Store {
        if self.at_once.load(Ordering::SeqCst) { &self.moody } else { &self.remote }
    }
}

impl Store for TestStore {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        self.store().charge(charge)
    }

    fn charges_together(&self) -> bool {
        self.store().charges_together()
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        self.store().adjust(adjust)
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        self.store().reset(scope, key)
    }

    fn is_shared(&self) -> bool {
        self.store().is_shared()
    }

    fn remote(&self) -> Option<Remote> {
        self.store().remote()
    }

    fn now_ms(&self) -> u64 {
        self.store().now_ms()
    }
}

impl Moody {
    fn forward<T: Send + 'static>(
        &self,
        _: Operation,
        ask: impl FnOnce(&dyn Store) -> Reply<T> + Send + 'static,
    ) -> Reply<T> {
        let failure = || StoreError::new("failed on demand");
        let mood = *self.mood.borrow();
        match mood {
            Mood::Now => ask(&*self.memory),
            Mood::FailsNow => Reply::from(Err(failure())),
            Mood::Later | Mood::FailsLater | Mood::Hangs => {
                let this = self.clone();
                Reply::later(async move {
                    let mut moods = this.mood.subscribe();
                    let mood =
                        *moods.wait_for(|&mood| mood != Mood::Hangs).await.expect("a sender");
                    for _ in 0..3 {
                        yield_now().await;
                    }
                    match mood {
                        Mood::FailsNow | Mood::FailsLater => Err(failure()),
                        _ => ask(&*this.memory).await,
                    }
                })
            }
        }
    }
}

forward_to_memory!(Moody, {
    fn is_shared(&self) -> bool {
        self.shared
    }

    fn now_ms(&self) -> u64 {
        self.memory.now_ms()
    }
});

/// A limit of this many requests a minute, with one count for all clients.
pub(crate) fn everyone(tokens: u64) -> Limit {
    Quota::per_minute(tokens).key(Key::global())
}

/// The name of the limit that a test is about, where there may be others.
const TESTED: &str = "tested";

/// This limit alone, beside another one, or between two: what holds for one limit holds beside
/// others (S37). The others have room for all requests, and say nothing in a response, since all of
/// their tokens are left, or nearly all, and their windows end first.
pub(crate) fn beside(limit: Limit, limits: usize) -> Limits {
    let limit = limit.name(TESTED);
    let other = |name| Quota::per_second(1 << 50).name(name).key(Key::global());
    match limits {
        1 => Limits::new([limit]),
        2 => Limits::new([limit, other("other")]),
        _ => Limits::new([other("other"), limit, other("another")]),
    }
}

/// How the store answers, and of how many limits the layer is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) mood: Mood,
    pub(crate) limits: Option<usize>,
}

/// All that must make no difference to anybody.
pub(crate) const CASES: [Case; 6] = [
    Case { mood: Mood::Now, limits: Some(1) },
    Case { mood: Mood::Now, limits: Some(2) },
    Case { mood: Mood::Now, limits: Some(3) },
    Case { mood: Mood::Later, limits: Some(1) },
    Case { mood: Mood::Later, limits: Some(2) },
    Case { mood: Mood::Later, limits: Some(3) },
];

/// One limit, by the name that it has.
impl From<Mood> for Case {
    fn from(mood: Mood) -> Self {
        Self { mood, limits: None }
    }
}

/// A layer that counts in a store of this mood.
pub(crate) fn layered(limit: Limit, case: impl Into<Case>) -> FixedWindowLayer {
    let Case { mood, limits } = case.into();
    let store = TestStore::new(mood);
    match limits {
        Some(limits) => FixedWindowLayer::new(beside(limit, limits).store(store)),
        None => FixedWindowLayer::new(limit.store(store)),
    }
}

/// A layer for this many requests a minute, with one count for all clients, in a store of this
/// mood.
pub(crate) fn per_minute(tokens: u64, case: impl Into<Case>) -> FixedWindowLayer {
    layered(everyone(tokens), case)
}

/// The same layer, with a name.
pub(crate) fn named(name: &str, tokens: u64, mood: Mood) -> FixedWindowLayer {
    layered(everyone(tokens).name(name), mood)
}

/// The limiter of the limit that a test is about: one without a name, or one that may be [`beside`]
/// others.
pub(crate) fn limiter_of(layer: &FixedWindowLayer) -> Limiter {
    let is_tested = |limiter: &&Limiter| ["", TESTED].contains(&limiter.name());
    (&Limits::from(layer)).into_iter().find(is_tested).expect("it is there").clone()
}

pub(crate) fn get(path: &str) -> Request<Body> {
    Request::get(path).body(Body::empty()).expect("a path")
}

/// An extractor of the app's.
pub(crate) struct Own<F>(pub(crate) F);

impl<F> KeyExtractor for Own<F>
where
    F: Fn(&Parts, &mut Key) -> Result<(), MissingKey> + Send + Sync + 'static,
{
    fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey> {
        (self.0)(parts, key)
    }
}

/// A user by number, as an app's authentication puts it into the extensions.
#[derive(Clone)]
pub(crate) struct User(pub(crate) u64);

impl From<&User> for Key {
    fn from(user: &User) -> Self {
        Key::from(user.0)
    }
}

/// A service under a limit, whatever their types are.
pub(crate) type Limited = BoxCloneSyncService<Request<Body>, Response<Body>, Infallible>;

/// A service that answers with an empty response, under a limit.
pub(crate) fn limited(layer: impl Borrow<FixedWindowLayer>) -> Limited {
    BoxCloneSyncService::new(layer.borrow().layer(service_fn(inner)))
}

/// A service whose responses have this report of true costs.
pub(crate) fn answering(cost: TrueCost) -> Limited {
    Limited::new(service_fn(move |_| {
        let mut response = Response::new(Body::empty());
        response.extensions_mut().insert(cost.clone());
        async { Ok(response) }
    }))
}

/// Answers with an empty response.
pub(crate) async fn inner(_: Request<Body>) -> Result<Response<Body>, Infallible> {
    Ok(Response::new(Body::empty()))
}

type IsReady = dyn Fn(&mut Context<'_>, usize) -> bool + Send + Sync;

/// An empty service that is ready when a closure says so, which gets the number of calls so far. It
/// takes calls all the same.
#[derive(Clone)]
pub(crate) struct ReadyIf {
    is_ready: Arc<IsReady>,
    calls: Arc<AtomicUsize>,
}

impl ReadyIf {
    pub(crate) fn new(
        is_ready: impl Fn(&mut Context<'_>, usize) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self { is_ready: Arc::new(is_ready), calls: Arc::default() }
    }

    pub(crate) fn never() -> Self {
        Self::new(|_, _| false)
    }
}

impl Service<Request<Body>> for ReadyIf {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        let is_ready = (self.is_ready)(cx, self.calls.load(Ordering::SeqCst));
        if is_ready { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        self.calls.fetch_add(1, Ordering::SeqCst);
        ready(Ok(Response::new(Body::empty())))
    }
}

/// Lets corrections and charges finish that are made in the background.
pub(crate) async fn corrected() {
    for _ in 0..50 {
        yield_now().await;
    }
}

/// The rate-limit headers of a response, without their prefix. None of them may come twice.
pub(crate) fn limit_headers<B>(response: &Response<B>) -> BTreeMap<&str, &str> {
    let mut headers = BTreeMap::new();
    for (name, value) in response.headers() {
        if let Some(field) = name.as_str().strip_prefix("x-ratelimit-") {
            let value = value.to_str().expect("ASCII");
            assert_eq!(headers.insert(field, value), None, "{name} comes twice");
        }
    }
    headers
}

/// The status and all headers, in order: `429 cache-control: no-store; retry-after: 40`.
pub(crate) fn shown<B>(response: &Response<B>) -> String {
    let header = |(name, value): (&HeaderName, &HeaderValue)| {
        format!("{name}: {}", value.to_str().expect("ASCII"))
    };
    let mut headers: Vec<_> = response.headers().iter().map(header).collect();
    headers.sort();
    let text = format!("{} {}", response.status().as_u16(), headers.join("; "));
    text.trim_end().to_owned()
}

/// The whole body.
pub(crate) async fn text_of(response: Response<Body>) -> String {
    let body = to_bytes(response.into_body(), 10_000).await.expect("a body");
    String::from_utf8(body.to_vec()).expect("text")
}

/// The value of `x-ratelimit-used`: if the limit is far away, the number of requests so far.
pub(crate) fn used<B>(response: &Response<B>) -> u64 {
    limit_headers(response)["used"].parse().expect("an integer")
}

/// Serves an app on a free port.
pub(crate) async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("bound");
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, app).await });
    addr
}

/// Serves any service by hyper alone, in HTTP/1 and HTTP/2, on a free port. Returns the number of
/// connections so far, too.
pub(crate) async fn serve_hyper<S, B>(service: S) -> (SocketAddr, Arc<AtomicUsize>)
where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible, Future: Send>
        + Clone
        + Send
        + 'static,
    B: http_body::Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("bound");
    let accepted = Arc::new(AtomicUsize::new(0));
    let connections = Arc::clone(&accepted);
    tokio::spawn(async move {
        loop {
            let (stream, peer) = listener.accept().await.expect("a connection");
            accepted.fetch_add(1, Ordering::SeqCst);
            let with_peer = move |mut request: Request<Incoming>| {
                request.extensions_mut().insert(PeerAddr(peer));
                request
            };
            let service = TowerToHyperService::new(service.clone().map_request(with_peer));
            tokio::spawn(async move {
                let server = auto::Builder::new(TokioExecutor::new());
                server.serve_connection(TokioIo::new(stream), service).await.map_err(drop)
            });
        }
    });
    (addr, connections)
}

/// A client that keeps its connections, and asks no proxy.
pub(crate) fn client() -> reqwest::Client {
    reqwest::Client::builder().no_proxy().build().expect("a client")
}

/// A store that is some milliseconds away in each direction, on wall time that goes with tokio's.
pub(crate) fn far_store(delay: impl Fn() -> u64 + Send + Sync + 'static) -> Remote {
    far_from(paused_memory(), delay)
}

/// The way to this memory. What was sent to it happens, whether or not anybody waits for the answer.
pub(crate) fn far_from(
    memory: MemoryStore,
    delay: impl Fn() -> u64 + Send + Sync + 'static,
) -> Remote {
    Remote::around(Distant { memory, delay: Arc::new(delay) }).deadline(Duration::MAX)
}

/// The backend of a store that is far.
struct Distant {
    memory: MemoryStore,
    delay: Arc<dyn Fn() -> u64 + Send + Sync>,
}

impl Distant {
    fn forward<T: Send + 'static>(
        &self,
        _: Operation,
        ask: impl FnOnce(&MemoryStore) -> Reply<T> + Send + 'static,
    ) -> Reply<T> {
        let (memory, delay) = (self.memory.clone(), Arc::clone(&self.delay));
        Reply::later(async move {
            let (answer, answered) = oneshot::channel();
            tokio::spawn(async move {
                sleep(Duration::from_millis(delay())).await;
                let decided = ask(&memory).await;
                sleep(Duration::from_millis(delay())).await;
                let _nobody_waits = answer.send(decided);
            });
            answered.await.expect("an answer")
        })
    }
}

forward_to_memory!(Distant, {
    fn now_ms(&self) -> u64 {
        self.memory.now_ms()
    }
});
