//! What a program runs on: a clock that steps, a store that may be far, layers around a service, and
//! the log of what happens there.

use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::{Body, to_bytes};
use harness::{Operation, forward_to_memory};
use http::request::Parts;
use http::{Request, Response, StatusCode};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};
use tower::util::BoxCloneSyncService;
use tower::{Layer, service_fn};
use tower_fixed_window::CostMeter;
use tower_fixed_window::store::{Remote, Reply, Store};
use tower_fixed_window::{
    Clock, FixedWindowLayer, Key, Limit, Limits, MemoryStore, Quotas, TrueCost,
};

use crate::setup::{Ask, Ends, LayerSetup, LimitSetup, Setup, built};

pub(crate) type Service = BoxCloneSyncService<Request<Body>, Response<Body>, Infallible>;

/// Wall time that goes with tokio's, and steps.
#[derive(Clone)]
pub(crate) struct SteppingClock {
    start: Instant,
    elapsed: Arc<AtomicU64>,
    offset: Arc<AtomicU64>,
}

/// An instant by the store's clock, and since the start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    pub(crate) at: u64,
    pub(crate) elapsed: u64,
}

impl SteppingClock {
    pub(crate) fn now(&self) -> Moment {
        Moment { at: self.now_ms(), elapsed: self.elapsed() }
    }

    pub(crate) fn at_ms(ms: u64) -> Self {
        Self { start: Instant::now(), elapsed: Arc::default(), offset: Arc::new(ms.into()) }
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
        self.offset.load(Ordering::SeqCst) + self.elapsed()
    }
}

/// A store that is some milliseconds away in each direction. What was sent to it happens, whether
/// or not anybody waits for the answer.
#[derive(Clone)]
struct FarStore {
    memory: MemoryStore,
    delay: Duration,
}

impl FarStore {
    fn forward<T: Send + 'static>(
        &self,
        _: Operation,
        ask: impl FnOnce(&MemoryStore) -> Reply<T> + Send + 'static,
    ) -> Reply<T> {
        let Self { memory, delay } = self.clone();
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
        true
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
    Called,
    Panics,
    Answers(Option<CostMeter>),
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
fn asked(parts: &Parts) -> &Ask {
    parts.extensions.get::<Arc<Ask>>().expect("each request has one")
}

impl World {
    pub(crate) fn note(&self, number: u64, what: What) {
        let now = self.clock.now();
        self.log.lock().expect("no panic").push(Event { number, what, now });
    }

    /// The layers around the service, and their limits.
    pub(crate) fn build(&self, setup: &Setup, memory: &MemoryStore) -> (Service, Vec<Limits>) {
        let this = self.clone();
        let inner = service_fn(move |request| this.clone().serve(request));
        let (mut service, mut all) = (BoxCloneSyncService::new(inner), Vec::new());
        for (i, of) in setup.layers.iter().enumerate().rev() {
            let limits = match setup.far {
                0 => of.limits(memory.clone()),
                far => {
                    let (memory, delay) = (memory.clone(), Duration::from_millis(far));
                    let store = Remote::around(FarStore { memory, delay });
                    of.limits(store.deadline(Duration::MAX).remember_refusals(Duration::ZERO))
                }
            };
            let this = self.clone();
            let mut layer = FixedWindowLayer::new(&limits).on_decision(move |parts, decision| {
                let (name, allowed) = (decision.governing_limit().to_owned(), decision.allowed());
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

    async fn serve(self, request: Request<Body>) -> Result<Response<Body>, Infallible> {
        let (parts, body) = request.into_parts();
        let ask = asked(&parts);
        self.note(ask.number, What::Called);
        let _ = to_bytes(body, usize::MAX).await;
        if let Some(held) = &ask.held {
            held.notified().await;
        }
        let mut response = Response::new(Body::empty());
        let (mut report, mut meter) = (None, None);
        match ask.ends {
            Ends::Panics => {
                self.note(ask.number, What::Panics);
                // As a panic does, but for what it prints.
                std::panic::resume_unwind(Box::new("on purpose"));
            }
            Ends::Teapot => *response.status_mut() = StatusCode::IM_A_TEAPOT,
            Ends::Metered => {
                let (later, of) = TrueCost::metered();
                (report, meter) = (Some(later), Some(of));
            }
            Ends::Answered => {}
        }
        if meter.is_none() {
            for &(name, cost) in &ask.costs {
                report = Some(match report {
                    None => TrueCost::of(name, cost),
                    Some(report) => report.and(name, cost),
                });
            }
        }
        report.map(|report| response.extensions_mut().insert(report));
        self.note(ask.number, What::Answers(meter));
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
    let (users, has_costs) = (of.users, of.has_costs);
    let limit = limit
        .name(of.name)
        .key_fn(move |parts| asked(parts).key(users).map(Key::from))
        .cost_fn(move |parts| if has_costs { asked(parts).cost } else { 1 });
    let limit = if of.settled { limit.settled() } else { limit };
    if of.shadow { limit.shadow() } else { limit }
}
