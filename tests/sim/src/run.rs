//! A run plays a seed: the real stores of several nodes over a simulated network, from a seed.

use std::cell::RefCell;
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::panic;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, Once};
use std::task::{Context, Poll};
use std::thread;
use std::time::Duration;

use fastrand::Rng;
use http::{Request, Response};
use tokio::runtime::{Builder, Handle, RngSeed};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tower_fixed_window::store::Reply;
use tower_fixed_window::{
    Decision, EmptyBody, FixedWindow, FixedWindowLayer, Key, Limiter, Limits, OnStoreFailure,
    RateLimited, Receipt, StoreError,
};
use tower_fixed_window_conformance::InOrder;
use tower_fixed_window_redis::RedisStore;
use tower_layer::Layer;
use tower_service::Service;

use crate::cluster::{self, Cluster};
use crate::history::{Entry, Event, History};
use crate::net::{Net, Weather, own_deadlines};
use crate::plan::{Ask, Door, Fault, Kind, Limit, Line, Plan, SCOPE, Servers, What};
use crate::sentinel::{self, Sentinel};

/// So long after all has been mended everything is shared again.
const JOINS_WITHIN: Duration = Duration::from_secs(3);
/// So long that is looked at.
const LOOKED_AT: Duration = Duration::from_secs(2);
/// So long after the last request all have ended; and so long after the stores were dropped nothing of
/// them is left.
const ENDS_WITHIN: Duration = Duration::from_secs(5);


/// Calls of a hasty handle for each request: enough of them to outlast its answer.
const HASTY: usize = 50;

pub struct Run {
    pub plan: Plan,
    pub history: Vec<Entry>,
}

thread_local! {
    static PANICS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Panics of tasks are part of the history.
fn catch_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let tell = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let note = |panics: &RefCell<Vec<String>>| panics.borrow_mut().push(info.to_string());
            let _ = PANICS.try_with(note);
            // The panic may be that of a test, which has no history.
            tell(info);
        }));
    });
}

pub fn run(seed: u64) -> Run {
    catch_panics();
    // The hash maps of a thread differ from each other, and by how many there were before.
    match plan(seed).servers {
        Servers::Cluster { .. } => thread::spawn(move || play(seed)).join().expect("no panic"),
        _ => play(seed),
    }
}

/// Returns the plan of a seed.
pub fn plan(seed: u64) -> Plan {
    plan_by(&mut Rng::with_seed(seed), seed)
}

fn plan_by(rng: &mut Rng, seed: u64) -> Plan {
    Plan::new(rng, &mut Rng::with_seed(!seed), &mut Rng::with_seed(seed.rotate_left(32)))
}

fn play(seed: u64) -> Run {
    let runtime = Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .rng_seed(RngSeed::from_bytes(&seed.to_le_bytes()))
        .build()
        .expect("a runtime");
    let mut rng = Rng::with_seed(seed);
    let plan = plan_by(&mut rng, seed);
    let (history, plan) = runtime.block_on(async {
        let history = History::began_now();
        let sim = Arc::new(Sim::new(plan, rng.fork(), history.clone()));
        Arc::clone(&sim).play(rng).await;
        let sim = Arc::into_inner(sim).expect("all that used it has ended");
        (history, sim.plan)
    });
    drop(runtime);
    PANICS.take().into_iter().for_each(|message| history.add(Event::Panicked(message)));
    Run { plan, history: history.take() }
}

struct Sim {
    plan: Plan,
    net: Net,
    history: History,
}

impl Sim {
    fn new(plan: Plan, rng: Rng, history: History) -> Self {
        let weather = Weather {
            delay: plan.delay,
            jitter: plan.jitter,
            closes_idle: plan.closes_idle,
            forgets_idle: plan.forgets_idle,
            lookup: plan.lookup,
            stalled: vec![None; plan.nodes.len()],
        };
        let net = Net::new(rng, weather, plan.epoch, history.clone());
        let net = match &plan.servers {
            Servers::One => net,
            Servers::Watched(all) => net
                .watched(all.iter().map(|health| Sentinel { names: 0, health: *health }).collect()),
            Servers::Cluster { masters, victim, .. } => net.clustered(*masters, *victim),
        };
        Self { net, plan, history }
    }

    async fn play(self: Arc<Self>, mut rng: Rng) {
        let began = Instant::now();
        let heals = began + self.plan.heals;
        let settles = heals + JOINS_WITHIN;
        let ends = settles + LOOKED_AT;
        let mut others = JoinSet::new();
        let fails_over = |(_, fault): &(_, Fault)| matches!(fault, Fault::Failover { .. });
        if self.plan.faults.iter().any(fails_over) {
            others.spawn(Arc::clone(&self).replicate());
        }
        others.spawn(Arc::clone(&self).spoil(began));
        let ids = Arc::new(Mutex::new(0));
        let callers: Vec<_> = (0..self.plan.nodes.len())
            .map(|index| {
                let (sim, rng) = (Arc::clone(&self), rng.fork());
                tokio::spawn(sim.call(index, rng, Arc::clone(&ids), settles, ends))
            })
            .collect();

        sleep_until(heals).await;
        self.history.add(Event::Healed);
        sleep_until(settles).await;
        self.history.add(Event::Settled);
        for mut caller in callers {
            if timeout_at(ends + ENDS_WITHIN, &mut caller).await.is_err() {
                // A request without an end is found by that.
                caller.abort();
            }
        }
        others.shutdown().await;
        self.history.add(Event::Over);
        sleep(ENDS_WITHIN).await;
        let tasks = Handle::current().metrics().num_alive_tasks();
        self.history.add(Event::Left { sockets: self.net.held(), tasks });
        // Connections that are left must not keep the simulation.
        self.net.close(true, |_| true);
        sleep(Duration::from_secs(1)).await;
    }

    /// The replica follows the master.
    async fn replicate(self: Arc<Self>) {
        loop {
            sleep(self.plan.lag).await;
            let master = self.net.master();
            let data = self.net.data(master);
            self.net.host(self.net.other(), |host| {
                if host.server.is_replica() {
                    host.server.replace_data(data);
                }
            });
        }
    }

    /// Lets go wrong what the plan says.
    async fn spoil(self: Arc<Self>, began: Instant) {
        let mut running = JoinSet::new();
        for (at, fault) in self.plan.faults.clone() {
            sleep_until(began + at).await;
            self.history.add(Event::Fault(fault.clone()));
            running.spawn(Arc::clone(&self).fault(fault));
        }
        while running.join_next().await.is_some() {}
    }

    async fn fault(self: Arc<Self>, fault: Fault) {
        let (net, now) = (&self.net, Instant::now());
        let ms = Duration::from_millis;
        let hits = |node: Option<usize>| move |of: usize| node.is_none_or(|node| node == of);
        let master = net.master();
        match fault {
            Fault::Close { node, answers } => net.close(answers, |pipe| hits(node)(pipe.node)),
            Fault::Silence { node } => net.silence(|pipe| hits(node)(pipe.node)),
            Fault::Partition { node, lasts, forgets } => {
                let until = Some(now + ms(lasts));
                net.weather(|weather| {
                    for (i, stalled) in weather.stalled.iter_mut().enumerate() {
                        *stalled = if hits(node)(i) { until.max(*stalled) } else { *stalled };
                    }
                });
                if forgets {
                    net.silence(|pipe| hits(node)(pipe.node));
                }
            }
            Fault::Kill { lasts, keeps, loading } => {
                net.host(master, |host| host.up = false);
                net.close(true, |pipe| pipe.host == master);
                sleep(ms(lasts)).await;
                net.host(master, |host| {
                    host.up = true;
                    host.frozen = None;
                    host.server.forget_scripts();
                    if loading > 0 {
                        let error = "LOADING Redis is loading the dataset in memory";
                        host.refusing = Some((Instant::now() + ms(loading), error));
                    }
                    if !keeps {
                        host.server.replace_data(Default::default());
                    }
                });
                if !keeps {
                    self.history.add(Event::Lost);
                }
            }
            Fault::Freeze { lasts } => net.host(master, |host| {
                host.frozen = host.frozen.max(Some(now + ms(lasts)));
            }),
            Fault::Failover { leads, split } => {
                let next = net.other();
                net.host(next, |host| host.server.set_replica(false));
                net.cluster(|cluster| cluster.take_over(master, next));
                net.set_master(next);
                // Every second Sentinel hears of it at once.
                (0..net.sentinels()).step_by(2).for_each(|sentinel| net.tell(sentinel, next));
                self.history.add(Event::Lost);
                if split > 0 {
                    sleep(ms(split)).await;
                    self.history.add(Event::Lost);
                }
                // Another failover may have made it the master again.
                if net.master() == next {
                    net.host(master, |host| host.server.set_replica(true));
                    net.cluster(|cluster| cluster.learn(master));
                }
                if leads > split {
                    sleep(ms(leads - split)).await;
                }
                net.leads_to(net.master());
                (0..net.sentinels()).for_each(|sentinel| net.tell(sentinel, net.master()));
                net.cluster(Cluster::gossip);
            }
            Fault::Step { by } => net.step(by),
            Fault::FlushScripts => net.host(master, |host| host.server.forget_scripts()),
            Fault::FlushAll => {
                net.host(master, |host| host.server.replace_data(Default::default()));
                self.history.add(Event::Lost);
            }
            Fault::Refuse { lasts, error } => {
                net.host(master, |host| host.refusing = Some((now + ms(lasts), error)));
            }
            Fault::Slow { lasts, delay } => {
                net.weather(|weather| weather.delay = delay);
                sleep(ms(lasts)).await;
                net.weather(|weather| weather.delay = self.plan.delay);
            }
            Fault::Poison { key } => {
                let key = format!("tfw1:{{{SCOPE}:{}}}", Key::from(key).readable());
                let set = [b"SET".to_vec(), key.into_bytes(), b"somebody else's".to_vec()];
                let micros = net.micros();
                let owner = net.cluster(|cluster| cluster.owner(&set[1])).unwrap_or(master);
                net.host(owner, |host| _ = host.server.call(&set, micros));
            }
            Fault::Reshard { parts, to, lasts } => {
                let parts = net.cluster(|cluster| cluster.begin(&parts, to)).unwrap_or_default();
                for _ in 0..4 {
                    sleep(ms(lasts / 4)).await;
                    net.migrate(&parts, false);
                }
                net.migrate(&parts, true);
                net.cluster(|cluster| cluster.settle(&parts));
                if let Servers::Cluster { gossip, .. } = self.plan.servers {
                    sleep(ms(gossip)).await;
                }
                net.cluster(Cluster::gossip);
            }
        }
    }

    /// A node and its callers.
    async fn call(
        self: Arc<Self>,
        index: usize,
        mut rng: Rng,
        ids: Arc<Mutex<usize>>,
        settles: Instant,
        ends: Instant,
    ) {
        let plan = &self.plan.nodes[index];
        // Its wall clock begins with it: this is what it is off by.
        sleep(plan.starts).await;
        let node = Node::new(&self, index);
        let mut under_way = JoinSet::new();
        // Some apps are busy from the first moment on, others not.
        if rng.bool() {
            sleep(Duration::from_millis(rng.u64(..1_500))).await;
        }
        loop {
            let strict = Instant::now() >= settles;
            // Enough of them for a breaker to try, and for two to find out about a silence.
            let probing =
                Instant::now() >= settles - JOINS_WITHIN && self.plan.kind.harms_servers();
            let gap = if probing { plan.gap.min(100) } else { plan.gap };
            sleep(Duration::from_millis(rng.u64(..=2 * gap))).await;
            if Instant::now() >= ends {
                break;
            }
            let crowd = if rng.u64(..plan.crowd) == 0 { rng.usize(2..40) } else { 1 };
            for _ in 0..crowd {
                let id = {
                    let mut ids = ids.lock().expect("one thread");
                    *ids += 1;
                    *ids
                };
                let ask = plan.ask(&mut rng, &self.plan, id, strict);
                under_way.spawn(node.clone().request(self.history.clone(), id, ask));
                if let Some(hasty) = node.hasty.clone() {
                    under_way.spawn(async move {
                        for _ in 0..HASTY {
                            let _ = hasty.peek("hasty").await;
                        }
                    });
                }
            }
            while under_way.try_join_next().is_some() {}
        }
        while under_way.join_next().await.is_some() {}
    }
}

/// A node: a store of its own, and what requests come through.
#[derive(Clone)]
struct Node {
    index: usize,
    limiter: Limiter,
    /// A handle of the same store that waits for less than a round trip.
    hasty: Option<Limiter>,
    layer: Option<FixedWindow<Work, EmptyBody>>,
    refund_dropped: bool,
    /// For several limits in one charge.
    limits: Option<Limits>,
    plan: Arc<Vec<Limit>>,
}

impl Node {
    fn new(sim: &Arc<Sim>, index: usize) -> Self {
        let plan = &sim.plan.nodes[index];
        let net = sim.net.clone();
        let redis = match sim.plan.servers {
            Servers::One => RedisStore::connecting(move || net.clone().connect(index)),
            Servers::Watched(ref all) => {
                let open = move |sentinel| sentinel::open_master(net.clone(), index, sentinel);
                RedisStore::sentinels_asked_by(all.len(), open)
            }
            Servers::Cluster { masters, .. } => {
                let open = move |address: String| {
                    net.clone().connect_to(index, cluster::host(&address), own_deadlines())
                };
                RedisStore::cluster_opened_by((0..masters).map(cluster::address).collect(), open)
            }
        };
        let redis = if plan.one_by_one { redis.one_by_one() } else { redis };
        let hasty = redis.clone().deadline(Duration::from_millis(1));
        let redis = redis.deadline(plan.deadline);
        let redis = redis.remember_refusals(plan.remembers);
        // A node's limiters have their own policy beside its layer.
        let store = match plan.door {
            Door::Limiter { fallback: false } => redis.clone().on_failure(OnStoreFailure::Deny),
            _ => redis.clone(),
        };
        let named = |limit: &Limit| limit.quotas.name(limit.name);
        let limits = (sim.plan.limits.len() > 1).then(|| {
            let limits = Limits::new(sim.plan.limits.iter().map(named));
            match plan.in_order {
                true => limits.store(InOrder(store.clone())),
                false => limits.store(store.clone()),
            }
        });
        let quotas = sim.plan.limits[0].quotas;
        let is_healthy = sim.plan.kind == Kind::Healthy;
        let mut node = Self {
            index,
            limiter: named(&sim.plan.limits[0]).store(store),
            hasty: is_healthy.then(|| named(&sim.plan.limits[0]).store(hasty)),
            layer: None,
            refund_dropped: false,
            limits,
            plan: Arc::new(sim.plan.limits.clone()),
        };
        match plan.door {
            Door::Limiter { .. } => {}
            Door::Layer { policy, refund_dropped } => {
                let history = sim.history.clone();
                let caller =
                    |parts: &http::request::Parts| parts.extensions.get::<Caller>().cloned();
                let limit = quotas
                    .name(SCOPE)
                    .key_fn(move |parts| Some(Key::from(&caller(parts)?.key)))
                    .cost_fn(move |parts| caller(parts).map_or(1, |who| who.cost));
                let layer = FixedWindowLayer::new(limit.store(redis.on_failure(policy)))
                    .on_decision(move |parts, decision| {
                        let caller = parts.extensions.get::<Caller>().expect("it is put there");
                        caller.decided(&history, decision);
                    })
                    .reject(EmptyBody);
                let layer = if refund_dropped { layer.refund_dropped() } else { layer };
                node.refund_dropped = refund_dropped;
                node.layer = Some(layer.layer(Work(sim.history.clone())));
            }
        }
        node
    }

    async fn request(self, history: History, id: usize, ask: Ask) {
        history.add(Event::Asked { id, node: self.index, ask: ask.clone() });
        let taken = Arc::new(Mutex::new(None));
        let refund_dropped =
            self.refund_dropped && matches!(ask.what, What::Check { .. }) && self.layer.is_some();
        {
            let mut answer = pin!(self.answer(&history, id, &ask, Arc::clone(&taken)));
            if let Some(lazy) = ask.lazy {
                let first = poll_fn(|cx| Poll::Ready(answer.as_mut().poll(cx).is_ready())).await;
                if first {
                    return;
                }
                sleep(Duration::from_millis(lazy)).await;
            }
            match ask.patience {
                None => answer.await,
                Some(patience) => {
                    if timeout(Duration::from_millis(patience), answer).await.is_ok() {
                        return;
                    }
                    // The request is dropped when this block ends; its refund is of this moment.
                    let granted = taken.lock().expect("one thread").take();
                    if let Some(tokens) = granted.filter(|_| refund_dropped) {
                        history.add(Event::Returns { id, line: 0, tokens });
                    }
                    history.add(Event::GaveUp { id });
                }
            }
        }
    }

    async fn answer(
        &self,
        history: &History,
        id: usize,
        ask: &Ask,
        taken: Arc<Mutex<Option<u64>>>,
    ) {
        let decided = |decision: &Decision| {
            history.add(Event::Decided { id, decision: decision.clone() });
        };
        let failed = |error: StoreError| {
            let source = std::error::Error::source(&error);
            let source = source.map_or(String::new(), |source| format!(" ({source})"));
            history.add(Event::Failed { id, error: format!("{error}{source}") });
        };
        let Line { limit, key, cost, actual } = &ask.lines[0];
        if let Some(limits) = self.limits.as_ref().filter(|_| ask.lines.len() > 1 || *limit > 0) {
            match self.answer_several(history, id, ask, limits).await {
                Ok(Some(decision)) => decided(&decision),
                Ok(None) => history.add(Event::Done { id }),
                Err(error) => failed(error),
            }
            return;
        }
        match ask.what {
            What::Check { work } => match &self.layer {
                Some(layer) => {
                    let mut request = Request::new(());
                    let work = Duration::from_millis(work);
                    let (key, cost) = (key.clone(), *cost);
                    request.extensions_mut().insert(Caller { id, key, cost, work, taken });
                    let Ok(response) = layer.clone().call(request).await;
                    history.add(Event::Responded { id, status: response.status().as_u16() });
                }
                None => match self.limiter.charge(key, *cost).await {
                    Ok(Ok(receipt)) => decided(receipt.decision()),
                    Ok(Err(refused)) => decided(refused.decision()),
                    Err(error) => failed(error),
                },
            },
            What::Charge { work, reserves } => match self.charge(key, *cost, reserves).await {
                Ok(Ok(receipt)) => {
                    decided(receipt.decision());
                    if work > 0 {
                        sleep(Duration::from_millis(work)).await;
                    }
                    if let Some(actual) = *actual {
                        let tokens = receipt.decision().granted().saturating_sub(actual);
                        history.add(Event::Returns { id, line: 0, tokens });
                        let _ = self.limiter.settle(receipt, actual).await;
                    }
                }
                Ok(Err(refused)) => decided(refused.decision()),
                Err(error) => failed(error),
            },
            What::Peek => match self.limiter.peek(key).await {
                Ok(_) => history.add(Event::Done { id }),
                Err(error) => failed(error),
            },
            What::Reset => match self.limiter.reset(key).await {
                Ok(()) => history.add(Event::Done { id }),
                Err(error) => failed(error),
            },
        }
    }

    fn charge(&self, key: &str, cost: u64, reserves: bool) -> Reply<Result<Receipt, RateLimited>> {
        match reserves {
            true => self.limiter.reserve(key, cost),
            false => self.limiter.charge(key, cost),
        }
    }

    /// The same of several limits. A refusal's decision is returned, since it was not seen yet.
    async fn answer_several(
        &self,
        history: &History,
        id: usize,
        ask: &Ask,
        limits: &Limits,
    ) -> Result<Option<Decision>, StoreError> {
        let name = |line: &Line| self.plan[line.limit].name;
        let lines: Vec<_> = ask
            .lines
            .iter()
            .map(|of| {
                let line = tower_fixed_window::Line::new(name(of), &of.key, of.cost);
                let quotas = self.plan[of.limit].plan(&of.key);
                quotas.map_or(line.clone(), |quotas| line.with_quotas(quotas))
            })
            .collect();
        let work = match ask.what {
            What::Check { .. } => return limits.check(&lines).await.map(Some),
            What::Charge { work, .. } => work,
            What::Peek => return limits.peek(&lines).await.map(|_| None),
            What::Reset => {
                let Line { key, .. } = &ask.lines[0];
                return limits.limiter(name(&ask.lines[0])).reset(key).await.map(|()| None);
            }
        };
        let charge = match ask.what {
            What::Charge { reserves: true, .. } => limits.reserve(&lines),
            _ => limits.charge(&lines),
        };
        let receipts = match charge.await? {
            Ok(receipts) => receipts,
            Err(refused) => return Ok(Some(refused.decision().clone())),
        };
        history.add(Event::Decided { id, decision: receipts.decision().clone() });
        if work > 0 {
            sleep(Duration::from_millis(work)).await;
        }
        let mut costs = Vec::new();
        for (line, of) in ask.lines.iter().enumerate() {
            if let Some(actual) = of.actual {
                let tokens = of.cost.saturating_sub(actual);
                history.add(Event::Returns { id, line, tokens });
                costs.push((name(of), actual));
            }
        }
        let _ = match costs.iter().all(|(_, actual)| *actual == 0) {
            true if costs.len() == ask.lines.len() => limits.refund(receipts).await,
            _ => limits.settle(receipts, costs).await,
        };
        Ok(None)
    }
}

/// The caller of a request through a layer.
#[derive(Clone)]
struct Caller {
    id: usize,
    key: String,
    cost: u64,
    work: Duration,
    /// The tokens that the charge has taken, if they are known.
    taken: Arc<Mutex<Option<u64>>>,
}

impl Caller {
    fn decided(&self, history: &History, decision: &Decision) {
        if decision.is_allowed() {
            *self.taken.lock().expect("one thread") = Some(decision.granted());
        }
        history.add(Event::Decided { id: self.id, decision: decision.clone() });
    }
}

/// The service behind the layer.
#[derive(Clone)]
struct Work(History);

impl Service<Request<()>> for Work {
    type Response = Response<()>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<()>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<()>) -> Self::Future {
        let caller = request.extensions().get::<Caller>().expect("it is put there").clone();
        self.0.add(Event::Called { id: caller.id });
        Box::pin(async move {
            if !caller.work.is_zero() {
                sleep(caller.work).await;
            }
            Ok(Response::new(()))
        })
    }
}
