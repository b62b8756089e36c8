//! What a program runs on: a clock that steps, a store that may be far, layers around a service, and
//! the log of what happens there.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::{Body, to_bytes};
use harness::{Operation, forward_to_memory};
use http::request::Parts;
use http::{Request, Response, StatusCode};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};
use tower::util::BoxCloneSyncService;
use tower::{BoxError, Layer, Service as _, ServiceExt, service_fn};
use tower_fixed_window::CostMeter;
use tower_fixed_window::key::key_fn;
use tower_fixed_window::store::{Remote, Reply, Store};
use tower_fixed_window::{
    Clock, FixedWindowLayer, Key, KeyExtractor, Limit, Limits, MemoryStore, Quota, Quotas, TrueCost,
};

use crate::requests::Expected;
use crate::setup::{
    Ask, BASE, Client, Ends, Inside, LayerSetup, LimitSetup, Setup, built, long_text, name,
};

pub(crate) type Service = BoxCloneSyncService<Request<Body>, Response<Body>, BoxError>;

/// Wall time that goes with tokio's, and steps.
#[derive(Clone)]
pub(crate) struct SteppingClock {
    start: Instant,
    elapsed: Arc<AtomicU64>,
    offset: Arc<AtomicU64>,
    /// At the next time that it is asked.
    pub(crate) panics: Arc<AtomicBool>,
}

/// An instant by the store's clock, and since the start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    pub(crate) at: u64,
    pub(crate) elapsed: u64,
}

impl SteppingClock {
    pub(crate) fn now(&self) -> Moment {
        let elapsed = self.elapsed();
        Moment { at: self.offset.load(Ordering::SeqCst) + elapsed, elapsed }
    }

    pub(crate) fn at_ms(ms: u64) -> Self {
        let (elapsed, panics) = Default::default();
        Self { start: Instant::now(), elapsed, offset: Arc::new(ms.into()), panics }
    }

    /// The milliseconds since the start, which no step changes.
    pub(crate) fn elapsed(&self) -> u64 {
        // Outside of the runtime, as in the thread that saves counts, tokio's time is real.
        if Handle::try_current().is_ok() {
            self.elapsed.store(self.start.elapsed().as_millis() as u64, Ordering::SeqCst);
        }
        self.elapsed.load(Ordering::SeqCst)
    }

    pub(crate) fn step_to(&self, ms: u64) {
        self.offset.store(ms - self.elapsed(), Ordering::SeqCst);
    }
}

impl Clock for SteppingClock {
    fn now_ms(&self) -> u64 {
        if self.panics.swap(false, Ordering::SeqCst) {
            panic();
        }
        self.now().at
    }
}

/// As a panic does, but for what it prints.
fn panic() {
    std::panic::resume_unwind(Box::new("on purpose"));
}

/// A store that is some milliseconds away in each direction. What was sent to it happens, whether
/// or not anybody waits for the answer.
#[derive(Clone)]
struct FarStore {
    memory: MemoryStore,
    delay: Duration,
    in_order: bool,
}

impl FarStore {
    fn forward<T: Send + 'static>(
        &self,
        _: Operation,
        ask: impl FnOnce(&MemoryStore) -> Reply<T> + Send + 'static,
    ) -> Reply<T> {
        let Self { memory, delay, .. } = self.clone();
        if delay.is_zero() {
            return ask(&memory);
        }
        Reply::later(async move {
            let (answer, answered) = oneshot::channel();
            tokio::spawn(async move {
                sleep(delay).await;
                let decided = ask(&memory).await;
                sleep(delay).await;
                let _nobody_waits = answer.send(decided);
            });
            answered.await.expect("an answer")
        })
    }
}

forward_to_memory!(FarStore, {
    fn charges_together(&self) -> bool {
        !self.in_order
    }

    fn now_ms(&self) -> u64 {
        self.memory.now_ms()
    }
});

/// The course of a request.
#[derive(Debug)]
pub(crate) enum What {
    /// A layer has decided, by the limit of this name.
    Decided {
        layer: usize,
        name: String,
        allowed: bool,
    },
    /// A layer passes the request on.
    Passes(usize),
    /// What works inside of this layer passes the request on, asks once more, or answers instead.
    GoesOn(usize),
    Again(usize),
    TimesOut(usize),
    Called,
    Panics,
    Fails,
    /// With the fields that the handler has from a client of its own.
    Answers(Option<CostMeter>, Expected),
    Done(Response<Body>),
}

#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) number: u64,
    pub(crate) what: What,
    pub(crate) now: Moment,
}

#[derive(Clone)]
pub(crate) struct World {
    pub(crate) clock: SteppingClock,
    pub(crate) log: Arc<Mutex<Vec<Event>>>,
}

/// The request, as its extensions carry it.
fn asked(parts: &Parts) -> &Arc<Ask> {
    parts.extensions.get().expect("each request has one")
}

pub(crate) fn request(ask: &Arc<Ask>, body: Body) -> Request<Body> {
    Request::post("/").extension(Arc::clone(ask)).body(body).expect("a request")
}

pub(crate) fn response(status: u16) -> Response<Body> {
    Response::builder().status(status).body(Body::empty()).expect("a response")
}

impl World {
    pub(crate) fn note(&self, number: u64, what: What) {
        let now = self.clock.now();
        self.log.lock().expect("no panic").push(Event { number, what, now });
    }

    /// The layers around the service, and their limits.
    pub(crate) fn build(&self, setup: &Setup, memory: &MemoryStore) -> (Service, Vec<Limits>) {
        let used_up = Limit::new(Quota::per_minute(0)).name("client").key(Key::global());
        let used_up = Limits::new([used_up]).store(memory.clone());
        let client = FixedWindowLayer::new(&used_up).layer(service_fn(async |_| Ok(response(200))));
        let client = BoxCloneSyncService::new(client);
        let (this, base) = (self.clone(), TrueCost::of(BASE.0, BASE.1));
        let inner =
            service_fn(move |request| this.clone().serve(request, client.clone(), base.clone()));
        let (mut service, mut all) = (BoxCloneSyncService::new(inner), Vec::new());
        for (i, of) in setup.layers.iter().enumerate().rev() {
            let (memory, delay) = (memory.clone(), Duration::from_millis(setup.far));
            let store = FarStore { memory: memory.clone(), delay, in_order: setup.in_order };
            let limits = match setup.far {
                0 if setup.in_order => of.limits(store),
                0 => of.limits(memory),
                _ => {
                    let store = Remote::around(store).deadline(Duration::MAX);
                    of.limits(store.remember_refusals(Duration::ZERO))
                }
            };
            service = self.inside(i, of.inside, service);
            let this = self.clone();
            let mut layer = FixedWindowLayer::new(&limits).on_decision(move |parts, decision| {
                let (name, allowed) = (decision.name().to_owned(), decision.is_allowed());
                this.note(asked(parts).number, What::Decided { layer: i, name, allowed });
            });
            if let Some((most, max_wait)) = of.queue {
                layer = layer.queue(most, Duration::from_millis(max_wait));
            }
            if !of.counts_teapots {
                layer = layer.count_if(|response| response.status != StatusCode::IM_A_TEAPOT);
            }
            if of.refunds_dropped {
                layer = layer.refund_dropped();
            }
            service = BoxCloneSyncService::new(layer.layer(service));
            all.insert(0, limits);
        }
        (service, all)
    }

    fn inside(&self, layer: usize, of: Inside, service: Service) -> Service {
        let this = self.clone();
        Service::new(service_fn(move |asked: Request<Body>| {
            let (this, service) = (this.clone(), service.clone());
            let ask = asked.extensions().get::<Arc<Ask>>().expect("each request has one").clone();
            this.note(ask.number, What::Passes(layer));
            let answer = service.clone().oneshot(asked);
            async move {
                let is_bad = |answer: &Result<Response<Body>, _>| {
                    !answer.as_ref().is_ok_and(|response| response.status() == 200)
                };
                match of {
                    Inside::Nothing => answer.await,
                    Inside::Slow(ms) => {
                        sleep(Duration::from_millis(ms)).await;
                        this.note(ask.number, What::GoesOn(layer));
                        answer.await
                    }
                    Inside::TimesOut(ms) => {
                        let answer = timeout(Duration::from_millis(ms), answer).await;
                        answer.unwrap_or_else(|_| {
                            this.note(ask.number, What::TimesOut(layer));
                            Ok(response(504))
                        })
                    }
                    Inside::Retries => {
                        let first = answer.await;
                        if !is_bad(&first) {
                            return first;
                        }
                        this.note(ask.number, What::Again(layer));
                        service.oneshot(request(&ask, Body::empty())).await
                    }
                    Inside::Replaces(status) => {
                        let answer = answer.await;
                        if is_bad(&answer) { Ok(response(status)) } else { answer }
                    }
                }
            }
        }))
    }

    async fn serve(
        self,
        request: Request<Body>,
        mut client: Service,
        base: TrueCost,
    ) -> Result<Response<Body>, BoxError> {
        let (parts, body) = request.into_parts();
        let ask = asked(&parts);
        self.note(ask.number, What::Called);
        let asked = match ask.client {
            Some(of) => Some((of, client.ready().await?.call(Request::default()))),
            None => None,
        };
        let _ = to_bytes(body, usize::MAX).await;
        if let Some(held) = &ask.held {
            held.notified().await;
        }
        let mut response = Response::default();
        if let Some((of, asked)) = asked {
            let theirs = asked.await?;
            match of {
                Client::Ignored => {}
                Client::Copied => response.headers_mut().clone_from(theirs.headers()),
                Client::Returned => response = theirs,
            }
        }
        let (mut report, mut meter) = (base, None);
        match ask.ends {
            Ends::Panics => {
                self.note(ask.number, What::Panics);
                panic();
            }
            Ends::Fails => {
                self.note(ask.number, What::Fails);
                return Err("on purpose".into());
            }
            Ends::Teapot => *response.status_mut() = StatusCode::IM_A_TEAPOT,
            Ends::Metered => {
                let (later, of) = TrueCost::metered();
                (report, meter) = (later, Some(of));
            }
            Ends::Answered => {}
        }
        let [costs, by_meter] = &ask.costs;
        let more = if meter.is_none() { &by_meter[..] } else { &[] };
        for (name, cost) in costs.iter().chain(more) {
            report = report.and(name, *cost);
        }
        if !costs.is_empty() || meter.is_some() {
            response.extensions_mut().insert(report);
        }
        let expected = Expected::of(&response);
        let panics = ask.clock_panics && expected.status == 200;
        self.note(ask.number, What::Answers(meter, expected));
        self.clock.panics.store(panics, Ordering::SeqCst);
        Ok(response)
    }
}

impl LayerSetup {
    pub(crate) fn limits(&self, store: impl Store) -> Limits {
        Limits::new(self.limits.iter().map(limit)).store(store)
    }
}

fn limit(of: &LimitSetup) -> Limit {
    let plans: Vec<Option<Quotas>> =
        of.plans.iter().map(|plan| plan.as_deref().map(built)).collect();
    let limit = match plans[..] {
        [Some(only)] => Limit::new(only),
        _ => Limit::by_plan(move |parts, _| plans[asked(parts).plan]),
    };
    let (users, has_composites, has_costs) = (of.users, of.has_composites, of.has_costs);
    let user = move |parts: &Parts| asked(parts).user.map(|user| name(user / users));
    let composite = (
        Key::secret("part"),
        key_fn(|_| Some(Key::from(long_text()))),
        key_fn(move |parts| user(parts).filter(|_| has_composites && asked(parts).is_composite())),
    );
    let limit = limit
        .name(of.name)
        .key(composite.or(key_fn(user)))
        .cost_fn(move |parts| if has_costs { asked(parts).cost } else { 1 });
    let limit = if of.settled { limit.settled() } else { limit };
    if of.shadow { limit.shadow() } else { limit }
}
