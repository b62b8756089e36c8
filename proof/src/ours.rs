//! The limiters of this crate, each behind a few lines.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response, StatusCode};
use tower_fixed_window::{
    Decision, EmptyBody, FixedWindow, FixedWindowLayer, Key, Limits, Line, MemoryStore,
    OnStoreFailure, Quota, Quotas, Receipt, StoreError,
};
use tower_fixed_window_conformance::InOrder;
use tower_fixed_window_postgres::PostgresStore;
use tower_fixed_window_redis::RedisStore;
use tower_layer::Layer;
use tower_service::Service;

use crate::check::Windows;
use crate::history::Answer;
use crate::limiter::{Beside, Contestant, Later, Limiter, Setup, Store};

const OURS: Contestant = Contestant {
    name: "",
    version: "this one",
    store: Store::Redis,
    windows: Windows::Aligned,
    local: false,
};

pub(crate) const CONTESTANTS: [Contestant; 7] = [
    Contestant { name: "ours", store: Store::Memory, ..OURS },
    Contestant { name: "ours-on-demand", store: Store::Memory, windows: Windows::OnDemand, ..OURS },
    Contestant { name: "ours-redis", ..OURS },
    Contestant { name: "ours-redis-local", local: true, ..OURS },
    Contestant { name: "ours-redis-on-demand", windows: Windows::OnDemand, ..OURS },
    Contestant { name: "ours-redis-in-order", ..OURS },
    Contestant { name: "ours-postgres", store: Store::Postgres, ..OURS },
];

/// Makes the limiter of this crate that the setup names.
pub(crate) fn make(setup: &Setup) -> Box<dyn Limiter> {
    let quota = Quota::new(setup.limit, Duration::from_millis(setup.length));
    let quotas = setup.quotas();
    let memory = || match setup.clock_steps_from {
        Some(_) => MemoryStore::new().clock(setup.clone()),
        None => MemoryStore::with_max_keys(setup.max_keys),
    };
    let limit = |quotas: Quotas| quotas.name("proof");
    let redis = || RedisStore::new(setup.url.as_str()).expect("it is an address");
    // So that killing the server loses nothing.
    let postgres = || {
        let store = PostgresStore::new(&setup.url).expect("it is an address");
        store.wait_for_disk().on_failure(OnStoreFailure::Deny)
    };
    if setup.limits > 1 {
        let limits = Limits::new(LIMITS.map(|name| quotas.name(name)));
        return Box::new(match &setup.name[..] {
            "ours" => Several(limits.store(memory())),
            "ours-redis-local" => Several(limits.store(redis())),
            "ours-postgres" => Several(limits.store(postgres())),
            "ours-redis-in-order" => {
                Several(limits.store(InOrder(redis().on_failure(OnStoreFailure::Deny))))
            }
            _ => Several(limits.store(redis().on_failure(OnStoreFailure::Deny))),
        });
    }
    if let Beside::Line { places, max_wait } = setup.beside {
        let limit = limit(quotas)
            .key_fn(|parts| Some(Key::from(u64::from(parts.extensions.get::<Waiter>()?.key))))
            .cost_fn(|parts| parts.extensions.get::<Waiter>().map_or(1, |waiter| waiter.cost));
        let limit = match &setup.name[..] {
            "ours" => limit.store(memory()),
            _ => limit.store(redis().on_failure(OnStoreFailure::Deny)),
        };
        let layer = FixedWindowLayer::new(limit)
            .reject(EmptyBody)
            .queue(places, Duration::from_millis(max_wait));
        return Box::new(InLine(layer.layer(Serve)));
    }
    let first = || Quotas::from(quota.from_first_request());
    let ours = match &setup.name[..] {
        "ours" => limit(quotas).store(memory()),
        "ours-on-demand" => limit(first()).store(memory()),
        "ours-redis" => limit(quotas).store(redis().on_failure(OnStoreFailure::Deny)),
        "ours-redis-local" => limit(quotas).store(redis()),
        "ours-postgres" => limit(quotas).store(postgres()),
        "ours-redis-on-demand" => limit(first()).store(redis().on_failure(OnStoreFailure::Deny)),
        other => panic!("there is no {other}"),
    };
    let reserves = matches!(setup.beside, Beside::Reserved { .. });
    Box::new(Ours { limiter: ours, receipts: setup.receipts || reserves, reserves })
}

struct Ours {
    limiter: tower_fixed_window::Limiter,
    receipts: bool,
    reserves: bool,
}

impl Limiter for Ours {
    fn ask(&self, key: u32, cost: u64) -> Later<'_, (Answer, Option<Receipt>)> {
        let key = u64::from(key);
        let passed = |decision: &Decision| match decision.is_local() {
            true => Answer::PassedLocally,
            false => Answer::Passed,
        };
        let reply = match self.reserves {
            true => self.limiter.reserve(key, cost),
            false => self.limiter.charge(key, cost),
        };
        let receipts = self.receipts;
        Box::pin(async move {
            match reply.await {
                Ok(Ok(receipt)) => (passed(receipt.decision()), Some(receipt).filter(|_| receipts)),
                Ok(Err(_)) => (Answer::Refused, None),
                Err(_) => (Answer::Failed, None),
            }
        })
    }

    fn refund(&self, receipt: Receipt) -> Later<'_, ()> {
        let reply = self.limiter.refund(receipt);
        Box::pin(async move {
            let _lost_ones_stay_counted: Result<(), StoreError> = reply.await;
        })
    }
}

/// A layer whose requests wait in line.
struct InLine(FixedWindow<Serve, EmptyBody>);

impl Limiter for InLine {
    fn ask(&self, key: u32, cost: u64) -> Later<'_, (Answer, Option<Receipt>)> {
        Box::pin(async move {
            let mut request = Request::new(());
            request.extensions_mut().insert(Waiter { key, cost });
            let Ok(response) = self.0.clone().call(request).await;
            let answer = match response.status() {
                StatusCode::OK => Answer::Passed,
                StatusCode::TOO_MANY_REQUESTS => Answer::Refused,
                _ => Answer::Failed,
            };
            (answer, None)
        })
    }
}

#[derive(Clone, Copy)]
struct Waiter {
    key: u32,
    cost: u64,
}

/// The service that the layer limits.
#[derive(Clone, Copy)]
struct Serve;

impl Service<Request<()>> for Serve {
    type Response = Response<()>;
    type Error = Infallible;
    type Future = Ready<Result<Response<()>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        ready(Ok(Response::new(())))
    }
}

/// The names of limits that are charged together.
const LIMITS: [&str; 2] = ["requests", "tokens"];

struct Several(Limits);

impl Limiter for Several {
    fn ask(&self, _: u32, _: u64) -> Later<'_, (Answer, Option<Receipt>)> {
        unimplemented!("it is asked for several limits")
    }

    fn ask_several(&self, lines: Vec<(usize, u32, u64)>) -> Later<'_, Vec<Answer>> {
        Box::pin(async move {
            let charges = lines
                .iter()
                .map(|&(limit, key, cost)| Line::new(LIMITS[limit], u64::from(key), cost));
            let charges: Vec<_> = charges.collect();
            let Ok(decision) = self.0.check(&charges).await else {
                return vec![Answer::Failed; lines.len()];
            };
            let answer = |&(limit, _, cost): &(usize, u32, u64)| {
                // Nothing is known of a limit that is not in a refusal.
                let Some(of) = decision.of(LIMITS[limit]) else { return Answer::Undone };
                match (of.is_allowed(), of.granted() == cost) {
                    (true, true) if of.is_local() => Answer::PassedLocally,
                    (true, true) => Answer::Passed,
                    (true, false) => Answer::Undone,
                    (false, _) => Answer::Refused,
                }
            };
            lines.iter().map(answer).collect()
        })
    }
}
