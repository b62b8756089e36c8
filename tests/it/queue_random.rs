//! Random requests in lines, on tokio's paused clock: one to three quotas, a second limit over all
//! keys, costs, plans, live changes, disconnects, services that are late, one to three nodes near and
//! far. Never does more pass than a quota grants in any of its windows (that in which the store has
//! charged a request), requests of a key pass in order of arrival where the store answers at once, none
//! waits for too long, and no token is lost. Where nothing but time decides, each goes when it is due.
//!
//! A million requests with `FULL_SIZE=1`, from another seed each time.

use std::collections::BTreeMap;

use fastrand::Rng;
use tokio::time::{Instant, sleep_until};
use tower_fixed_window::{Store, Usage};

use crate::prelude::*;

const LINES: &str = "random-lines";
const ALL: &str = "all";
const REQUESTS: u64 = 10_000;
const FULL_SIZE: u64 = 1_000_000;
/// Seconds. The windows of a run all begin at its start.
const WINDOWS: [u64; 4] = [1, 2, 5, 20];

/// A call of the service.
#[derive(Clone, Debug)]
struct Call {
    node: usize,
    number: u64,
    key: u64,
    cost: u64,
    at: u64,
    /// When the windows end in which it is counted, by the limit's name.
    ends: BTreeMap<&'static str, Vec<u64>>,
}

impl Call {
    /// Returns the number of the window of a quota in which it is counted.
    fn window(&self, name: &str, quota: usize, seconds: u64) -> u64 {
        self.ends[name][quota] / (seconds * 1_000) - 1
    }
}

#[derive(Default)]
struct World {
    calls: Vec<Call>,
    /// The services are not ready.
    busy: bool,
    wakers: Vec<Waker>,
}

fn number(request: &http::HeaderMap, name: &str) -> u64 {
    request[name].to_str().expect("text").parse().expect("a number")
}

/// Ready unless the world is busy, and notes each call.
fn inner_of(
    world: &Arc<Mutex<World>>,
    node: usize,
    start: Instant,
) -> impl Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send>
+ Clone
+ Send
+ 'static {
    let (of_ready, of_call) = (Arc::clone(world), Arc::clone(world));
    let ready = ReadyIf::new(move |cx, _| {
        let mut world = of_ready.lock().unwrap();
        if world.busy {
            world.wakers.push(cx.waker().clone());
        }
        !world.busy
    });
    ready.map_request(move |request: Request<Body>| {
        let headers = request.headers();
        let [number, key, cost] = ["x-number", "x-key", "x-cost"].map(|name| number(headers, name));
        let at = start.elapsed().as_millis() as u64;
        let decision: &Decision = request.extensions().get().expect("it was charged");
        let ends_of = |decision: Decision| {
            let end = |usage: &Usage| {
                let end = usage.reset_at().duration_since(UNIX_EPOCH).expect("later");
                end.as_millis() as u64 - MINUTE_MS
            };
            decision.usage().iter().map(end).collect()
        };
        let one = decision.of(LINES).unwrap_or_else(|| decision.clone());
        let all = decision.of(ALL).map(|of| (ALL, ends_of(of)));
        let ends = [(LINES, ends_of(one))].into_iter().chain(all).collect();
        of_call.lock().unwrap().calls.push(Call { node, number, key, cost, at, ends });
        request
    })
}

/// The parameters of a run.
#[derive(Debug)]
struct Setup {
    /// With their factors under other plans.
    quotas: Vec<(u64, u64)>,
    /// The limit over all keys, which is decided together with each key's.
    all: Option<(u64, u64)>,
    /// The one-way distance of each node; `None`: one node with the store in memory.
    nodes: Vec<Option<u64>>,
    max_wait: u64,
    most: u64,
    costs: bool,
    plans: bool,
    changes: bool,
    disconnects: bool,
    late: bool,
    /// Calls take a random time, up to the distance.
    jitter: bool,
    /// Some requests are not polled for a while.
    stalls: bool,
    /// The hook panics for some.
    panics: bool,
    requests: u64,
    /// Milliseconds in which they arrive.
    within: u64,
    /// Nothing but time decides who passes when.
    exact: bool,
}

impl Setup {
    fn new(rng: &mut Rng) -> Self {
        let mut windows = WINDOWS;
        rng.shuffle(&mut windows);
        // Some are the tightest at one time, some at another.
        let windows = &windows[..rng.usize(1..=3)];
        let quotas = windows.iter().map(|&window| (rng.u64(1..=4 + 3 * window), window)).collect();
        let nodes = match rng.u64(..4) {
            0 => vec![None],
            n => std::iter::repeat_with(|| Some(rng.u64(1..=90))).take(n as usize).collect(),
        };
        let all = (rng.u64(..3) == 0).then(|| (rng.u64(6..=20), WINDOWS[rng.usize(..3)]));
        let exact = rng.u64(..4) == 0;
        let mut is = |one_in: u64| rng.u64(..one_in) == 0 && !exact;
        let [costs, disconnects] = [is(2), is(2)];
        let [plans, changes, stalls, panics, late, jitter] = [4, 4, 4, 4, 3, 3].map(is);
        Self {
            quotas,
            all: all.filter(|_| !exact),
            nodes: if exact { vec![None] } else { nodes },
            max_wait: [500, 3_000, 10_000, 60_000][rng.usize(..4)],
            most: if exact { 1_000 } else { [2, 20, 1_000][rng.usize(..3)] },
            costs,
            plans,
            changes,
            disconnects,
            late,
            jitter,
            stalls,
            panics,
            requests: rng.u64(5..120),
            within: [0, 300, 3_000, 20_000][rng.usize(..4)],
            exact,
        }
    }

    fn quotas(&self, factor: u64) -> Quotas {
        let quota = |&(limit, window): &(u64, u64)| Quota::new(limit * factor, secs(window));
        let quotas = self.quotas[1..].iter().map(quota);
        quotas.fold(quota(&self.quotas[0]).into(), Quotas::and)
    }
}

async fn run(setup: &Setup, rng: &mut Rng) -> u64 {
    let start = Instant::now();
    let memory = paused_memory();
    let world: Arc<Mutex<World>> = Arc::default();
    let max_wait = ms(setup.max_wait);
    let layers: Vec<_> = setup
        .nodes
        .iter()
        .map(|&delay| {
            let plans = [setup.quotas(1), setup.quotas(2)];
            let limit = if setup.plans {
                Limit::by_plan(move |parts, _| plans[number(&parts.headers, "x-plan") as usize])
            } else {
                plans[0].into()
            };
            let cost = |parts: &Parts| number(&parts.headers, "x-cost");
            let limit = limit.name(LINES).key(header("x-key")).cost_fn(cost);
            let all = setup.all.map(|(limit, window)| {
                Quota::new(limit, secs(window)).name(ALL).key(Key::global()).cost_fn(cost)
            });
            let limits: Vec<_> = [limit].into_iter().chain(all).collect();
            let layer = match delay {
                None => in_store(limits, memory.clone()),
                Some(delay) if setup.jitter => {
                    let rng = Mutex::new(Rng::with_seed(delay));
                    let delay = move || rng.lock().unwrap().u64(1..=delay);
                    in_store(limits, far_from(memory.clone(), delay))
                }
                Some(delay) => in_store(limits, far_from(memory.clone(), move || delay)),
            };
            let layer = layer.queue(setup.most, max_wait).expose_decision().on_decision(|of, _| {
                assert!(!of.headers.contains_key("x-panics"), "on purpose");
            });
            if setup.panics { layer.refund_dropped() } else { layer }
        })
        .collect();
    let services: Vec<_> = layers
        .iter()
        .enumerate()
        .map(|(node, layer)| layer.layer(inner_of(&world, node, start)))
        .collect();
    let mut arrivals: Vec<_> =
        (0..setup.requests).map(|_| (rng.u64(..=setup.within), rng.u64(..2))).collect();
    arrivals.sort_unstable();
    let mut tasks = Vec::new();
    let arrived = Arc::new(AtomicU64::new(0));
    for (at, key) in &arrivals {
        let node = rng.usize(..services.len());
        let cost = if setup.costs { rng.u64(..=6) } else { 1 };
        let plan = u64::from(setup.plans && rng.bool());
        let mut request = Request::get("/")
            .header("x-key", *key)
            .header("x-cost", cost)
            .header("x-plan", plan)
            .body(Body::empty())
            .expect("a request");
        let (mut service, arrived) = (services[node].clone(), Arc::clone(&arrived));
        let gone = ms(rng.u64(..setup.max_wait.min(20_000)));
        let gone = (setup.disconnects && rng.u64(..4) == 0).then_some(gone);
        let mut some = |yes: bool| yes && rng.u64(..5) == 0;
        let (panics, stall) = (some(setup.panics), some(setup.stalls));
        let stall = stall.then(|| (ms(rng.u64(..500)), ms(rng.u64(..3_000))));
        let at = start + ms(*at);
        tasks.push(async move {
            sleep_until(at).await;
            let Ok(service) = service.ready().await;
            let number = arrived.fetch_add(1, Ordering::Relaxed);
            request.headers_mut().insert("x-number", number.into());
            if panics {
                request.headers_mut().insert("x-panics", 1.into());
            }
            let (at, mut answer) = (Instant::now(), Box::pin(service.call(request)));
            if let Some((after, pause)) = stall {
                if let Ok(answer) = tokio::time::timeout(after, &mut answer).await {
                    let Ok(response) = answer;
                    return Some((response.status().as_u16(), at.elapsed()));
                }
                sleep(pause).await;
            }
            let answer = match gone {
                Some(gone) => tokio::time::timeout(gone, answer).await.ok(),
                None => Some(answer.await),
            };
            answer.map(|answer| {
                let Ok(response) = answer;
                (response.status().as_u16(), at.elapsed())
            })
        });
    }
    // In the order of their numbers, also where they arrive at once.
    let mut requests = Vec::new();
    for task in tasks {
        requests.push(tokio::spawn(task));
        tokio::task::yield_now().await;
    }
    let set_busy = |busy| {
        let mut world = world.lock().unwrap();
        world.busy = busy;
        std::mem::take(&mut world.wakers).into_iter().for_each(Waker::wake);
    };
    let others = if setup.late || setup.changes { 12 } else { 0 };
    for _ in 0..others {
        sleep(ms(rng.u64(..4_000))).await;
        if setup.late {
            let is_busy = world.lock().unwrap().busy;
            set_busy(!is_busy);
        }
        if setup.changes {
            let quotas = setup.quotas(rng.u64(1..=2));
            layers.iter().for_each(|layer| Limits::from(layer).limiter(LINES).set_quotas(quotas));
        }
    }
    set_busy(false);
    for (number, request) in requests.into_iter().enumerate() {
        let answer = tokio::time::timeout(secs(200), request).await;
        let answer = answer.expect("it hangs");
        assert!(setup.panics || answer.is_ok());
        let Ok(Some((status, took))) = answer else { continue };
        // Several limits in that store are charged one after the other.
        let trips = if setup.all.is_some() { 1_000 } else { 500 };
        let stalled = if setup.stalls { 3_500 } else { 0 };
        let bound = max_wait + ms(trips + stalled);
        assert!(took <= bound, "{number} took {took:?}: {status}");
    }
    let calls = world.lock().unwrap().calls.clone();
    check(setup, &calls);
    if setup.exact {
        exact(setup, &arrivals, &calls);
    }
    // Tokens taken for requests that are gone were returned.
    sleep(ms(400)).await;
    let now = start.elapsed().as_millis() as u64;
    let limiter = Limit::new(setup.quotas(2)).name(LINES).store(memory.clone());
    for key in 0..2 {
        let standing = limiter.peek(Key::secret(key.to_string())).await.expect("memory");
        for (i, usage) in standing.usage().iter().enumerate() {
            let window = setup.quotas[i].1;
            let is_now = |call: &&Call| {
                call.key == key && call.window(LINES, i, window) == now / 1_000 / window
            };
            let passed: u64 = calls.iter().filter(is_now).map(|call| call.cost).sum();
            assert_eq!(usage.used(), passed, "of {window} s, of key {key} at {now}: {calls:?}");
        }
    }
    if let Some((limit, window)) = setup.all {
        let limiter = Quota::new(limit, secs(window)).name(ALL).store(memory);
        let used = limiter.peek(Key::global()).await.expect("memory").used();
        let is_now = |call: &&Call| call.window(ALL, 0, window) == now / 1_000 / window;
        let passed: u64 = calls.iter().filter(is_now).map(|call| call.cost).sum();
        assert_eq!(used, passed, "of all, in {window} s, at {now}: {calls:?}");
    }
    calls.len() as u64
}

fn in_store(limits: Vec<Limit>, store: impl Store) -> FixedWindowLayer {
    FixedWindowLayer::new(Limits::new(limits).store(store))
}

fn check(setup: &Setup, calls: &[Call]) {
    let factor = if setup.plans || setup.changes { 2 } else { 1 };
    let quotas = setup.quotas.iter().enumerate();
    let of_key = quotas.map(|(i, (limit, window))| (LINES, i, limit * factor, *window));
    let all = setup.all.map(|(limit, window)| (ALL, 0, limit, window));
    for (name, i, limit, window) in of_key.chain(all) {
        let mut counts = BTreeMap::new();
        for call in calls {
            let key = (call.key * u64::from(name == LINES), call.window(name, i, window));
            let count: &mut u64 = counts.entry(key).or_default();
            *count += call.cost;
            assert!(*count <= limit, "{limit} of {name} in {window} s: {call:?} of {calls:?}");
        }
    }
    // Of several charges in flight, whoever is granted goes.
    if setup.stalls || setup.nodes != [None] {
        return;
    }
    let mut last = BTreeMap::new();
    for call in calls.iter().filter(|call| call.cost > 0) {
        let before = last.insert((call.key, call.node), call.number);
        assert!(before.is_none_or(|before| before < call.number), "{call:?} of {calls:?}");
    }
}

/// Each is served as soon as those before it and all quotas let it, or refused if that is too late.
fn exact(setup: &Setup, arrivals: &[(u64, u64)], calls: &[Call]) {
    let mut counts: BTreeMap<_, u64> = BTreeMap::new();
    let mut last = BTreeMap::new();
    let calls: BTreeMap<_, _> = calls.iter().map(|call| (call.number, call.at)).collect();
    for (number, &(at, key)) in arrivals.iter().enumerate() {
        let mut due = at.max(*last.get(&key).unwrap_or(&0));
        while let Some((_, window)) = setup.quotas.iter().find(|&&(limit, window)| {
            counts.get(&(key, window, due / window / 1_000)).is_some_and(|&n| n >= limit)
        }) {
            due = (due / window / 1_000 + 1) * window * 1_000;
        }
        let Some(called) = calls.get(&(number as u64)) else {
            assert!(due >= at + setup.max_wait, "{number} was refused, and due at {due}");
            continue;
        };
        for (_, window) in &setup.quotas {
            *counts.entry((key, *window, due / window / 1_000)).or_default() += 1;
        }
        assert!((due..=due + 3).contains(called), "{number} was due at {due}, not {called}");
        last.insert(key, due);
    }
}

#[tokio::test(start_paused = true)]
async fn random_requests_in_lines_keep_to_every_quota_and_to_their_order() {
    let full = std::env::var_os("FULL_SIZE").is_some();
    let (requests, first) = if full { (FULL_SIZE, fastrand::u64(..)) } else { (REQUESTS, 34) };
    let first = std::env::var("SEED").map_or(first, |seed| seed.parse().expect("a number"));
    let (mut sent, mut passed, mut seed) = (0, 0, first);
    while sent < requests {
        let mut rng = Rng::with_seed(seed);
        let setup = Setup::new(&mut rng);
        println!("SEED={seed} {setup:?}");
        passed += run(&setup, &mut rng).await;
        (sent, seed) = (sent + setup.requests, seed.wrapping_add(1));
    }
    println!("{sent} requests, {passed} passed");
}

/// Requests are dropped, or kept and not polled any more, after so many polls. The others use each
/// window up, but for a tenth of a second for each that is kept.
#[tokio::test(start_paused = true)]
async fn those_that_wait_use_each_window_up_whatever_happens_to_others() {
    let full = std::env::var_os("FULL_SIZE").is_some();
    let (seeds, first) = if full { (600, fastrand::u64(..1 << 60)) } else { (60, 0) };
    let first = std::env::var("SEED").map_or(first, |seed| seed.parse().expect("a number"));
    for seed in first..first + seeds {
        println!("SEED={seed}");
        let mut rng = Rng::with_seed(seed);
        let (limit, window) = (rng.u64(1..=6), [500, 2_000, 5_000][rng.usize(..3)]);
        let way = [0, 5, 40][rng.usize(..3)];
        let quota = Quota::new(limit, ms(window)).name("used-up");
        let memory = paused_memory();
        let own = quota.clone().store(memory.clone());
        let start = Instant::now();
        let in_queue = quota.key(Key::global());
        let layer = FixedWindowLayer::new(match way {
            0 => in_queue.store(memory),
            way => in_queue.store(far_from(memory, move || way)),
        });
        let layer = layer.queue(1_000, secs(600));
        let service = layer.layer(service_fn(inner));
        let (mut live, mut kept) = (Vec::new(), Vec::new());
        for _ in 0..rng.u64(10..60) {
            let call = service.clone().oneshot(Request::get("/").body(Body::empty()).unwrap());
            match rng.u64(..3) {
                0 => {
                    // It is polled when it is woken, so many times.
                    let (mut call, mut left, drops) = (Box::pin(call), rng.u64(1..4), rng.bool());
                    kept.push(tokio::spawn(async move {
                        let some = std::future::poll_fn(|cx| {
                            left -= 1;
                            let is_done = call.as_mut().poll(cx).is_ready();
                            if is_done || left == 0 { Poll::Ready(()) } else { Poll::Pending }
                        });
                        some.await;
                        if !drops {
                            sleep(secs(1_000)).await;
                        }
                    }));
                }
                _ => live.push(tokio::spawn(call)),
            }
            if rng.bool() {
                sleep(ms(rng.u64(..300))).await;
            }
        }
        let mut idle = 0;
        while live.iter().any(|request| !request.is_finished()) {
            sleep(ms(10)).await;
            let used = own.peek(Key::global()).await.expect("memory").used();
            idle = if used < limit { idle + 10 } else { 0 };
            let patience = 200 + 110 * kept.len() as u64 + 4 * way;
            assert!(idle <= patience, "{idle} ms, at {:?}", start.elapsed());
        }
        kept.iter().for_each(tokio::task::JoinHandle::abort);
    }
}
