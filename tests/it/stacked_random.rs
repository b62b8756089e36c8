//! Random requests through stacks of one to three layers, some of which have lines, on tokio's paused
//! clock: uploads that are slow, services that take a while, clients that disconnect, responses that
//! don't count, stores near and far. What is counted at the end is what each layer has promised to
//! count, no more of it than a limit in any window, and no request waits for too long.
//!
//! A million requests with `FULL_SIZE=1`, from another seed each time.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use fastrand::Rng;
use futures_util::{StreamExt, stream};
use http::{Request, StatusCode};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tower::util::BoxCloneSyncService;
use tower::{Layer, ServiceExt, service_fn};
use tower_fixed_window::{FixedWindowLayer, Key, Limiter, Quota};

use crate::support::{FarStore, paused_clock};

const REQUESTS: u64 = 8_000;
const FULL_SIZE: u64 = 1_000_000;
/// From the outside in.
const NAMES: [&str; 3] = ["layer-0", "layer-1", "layer-2"];

#[derive(Clone, Copy, Debug)]
struct Setup {
    limit: u64,
    window: u64,
    /// A second quota.
    longer: Option<(u64, u64)>,
    queue: Option<(u64, u64)>,
    counts_errors: bool,
    refunds_dropped: bool,
    shadow: bool,
    /// The one-way delay of the store; `None`: a store in memory.
    delay: Option<u64>,
}

impl Setup {
    fn new(rng: &mut Rng) -> Self {
        let window = [1, 2, 5, 30][rng.usize(..4)];
        Self {
            limit: rng.u64(1..12),
            window,
            longer: rng.bool().then(|| (rng.u64(5..30), window * rng.u64(2..20))),
            queue: (rng.u8(..3) == 0)
                .then(|| (rng.u64(1..20), [500, 3_000, 20_000][rng.usize(..3)])),
            counts_errors: rng.bool(),
            refunds_dropped: rng.bool(),
            shadow: rng.u8(..8) == 0,
            delay: (rng.u8(..3) == 0).then(|| rng.u64(1..200)),
        }
    }
}

/// A layer's decision on a request.
#[derive(Clone, Debug)]
struct Decided {
    allowed: bool,
    ends: Vec<SystemTime>,
}

type Log = Arc<Mutex<Vec<(usize, u64, Decided)>>>;

fn number(headers: &http::HeaderMap, name: &str) -> u64 {
    headers[name].to_str().expect("text").parse().expect("a number")
}

fn layer(i: usize, limit: Setup, log: &Log) -> FixedWindowLayer {
    let log = Arc::clone(log);
    let quota = |(limit, window)| Quota::new(limit, Duration::from_secs(window));
    let first = quota((limit.limit, limit.window));
    let quotas = limit.longer.map_or(first.into(), |longer| first.and(quota(longer)));
    let mut far = FarStore::new(move || limit.delay.unwrap_or(0));
    far.memory = tower_fixed_window::MemoryStore::new().clock(paused_clock());
    let memory = far.memory.clone();
    let counted = quotas.name(NAMES[i]).key(Key::global());
    let counted = if limit.shadow { counted.shadow() } else { counted };
    let mut layer = FixedWindowLayer::new(match limit.delay {
        Some(_) => counted.store(far),
        None => counted.store(memory),
    });
    if let Some((most, max_wait)) = limit.queue {
        layer = layer.queue(most, Duration::from_millis(max_wait));
    }
    if !limit.counts_errors {
        layer = layer.count_if(|response| response.status != StatusCode::IM_A_TEAPOT);
    }
    if limit.refunds_dropped {
        layer = layer.refund_dropped();
    }
    layer.on_decision(move |parts, decision| {
        let ends = decision.usage().iter().map(|usage| usage.reset_at()).collect();
        let decided = Decided { allowed: decision.allowed(), ends };
        log.lock().expect("no panic").push((i, number(&parts.headers, "x-number"), decided));
    })
}

/// Takes its time, and fails where it is told to.
async fn inner(request: Request<Body>) -> Result<Response, Infallible> {
    let (takes, fails) =
        (number(request.headers(), "x-takes"), number(request.headers(), "x-fails"));
    let _ = axum::body::to_bytes(request.into_body(), usize::MAX).await;
    sleep(Duration::from_millis(takes)).await;
    let status = if fails == 1 { StatusCode::IM_A_TEAPOT } else { StatusCode::OK };
    Ok(status.into_response())
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Dropped,
    Answered(u16),
}

async fn run(rng: &mut Rng) -> u64 {
    let start = Instant::now();
    let limits: Vec<Setup> = (0..rng.usize(1..=3)).map(|_| Setup::new(rng)).collect();
    println!("{limits:?}");
    let log = Log::default();
    let layers: Vec<_> =
        limits.iter().enumerate().map(|(i, limit)| layer(i, *limit, &log)).collect();
    let limiters: Vec<Limiter> =
        layers.iter().zip(NAMES).map(|(layer, name)| layer.limits().of(name).clone()).collect();
    let mut service = BoxCloneSyncService::new(service_fn(inner));
    for layer in layers.iter().rev() {
        service = BoxCloneSyncService::new(layer.layer(service));
    }
    let requests = rng.u64(5..60);
    let within = [0, 300, 3_000, 20_000][rng.usize(..4)];
    let mut arrivals: Vec<_> = (0..requests).map(|_| rng.u64(..=within)).collect();
    arrivals.sort_unstable();
    let waits: u64 = limits.iter().filter_map(|limit| Some(limit.queue?.1)).sum();
    let bound = Duration::from_millis(waits + 3_000 + 9_000 + 3 * 500 + 1_000);
    let mut tasks = Vec::new();
    for (i, at) in arrivals.into_iter().enumerate() {
        let frames = if rng.bool() { rng.usize(..20) } else { 0 };
        let body = stream::iter(0..frames).then(async |_| {
            sleep(Duration::from_millis(450)).await;
            Ok::<_, Infallible>("x")
        });
        let body = if frames == 0 { Body::empty() } else { Body::from_stream(body) };
        let request = Request::post("/")
            .header("x-number", i)
            .header("x-takes", if rng.bool() { 0 } else { rng.u64(..3_000) })
            .header("x-fails", u64::from(rng.u8(..4) == 0))
            .body(body)
            .expect("a request");
        let gone = (rng.u8(..4) == 0).then(|| Duration::from_millis(rng.u64(..6_000)));
        let service = service.clone();
        tasks.push(tokio::spawn(async move {
            sleep_until(start + Duration::from_millis(at)).await;
            let begun = Instant::now();
            let answer = service.oneshot(request);
            let answer = match gone {
                Some(gone) => timeout(gone, answer).await.ok(),
                None => Some(answer.await),
            };
            let end = answer.map_or(End::Dropped, |answer| {
                let Ok(response) = answer;
                End::Answered(response.status().as_u16())
            });
            (end, begun.elapsed())
        }));
        tokio::task::yield_now().await;
    }
    let mut ends = Vec::new();
    for (i, task) in tasks.into_iter().enumerate() {
        let end = timeout(Duration::from_secs(300), task).await.expect("it hangs");
        let (end, took) = end.expect("no panic");
        assert!(took <= bound, "{i} took {took:?} of {bound:?}: {end:?}");
        ends.push(end);
    }
    sleep(Duration::from_secs(1)).await;
    let log = log.lock().expect("no panic").clone();
    check(&limits, &limiters, &log, &ends).await;
    requests
}

async fn check(
    limits: &[Setup],
    limiters: &[Limiter],
    log: &[(usize, u64, Decided)],
    ends: &[End],
) {
    let mut decided: BTreeMap<(u64, usize), &Decided> = BTreeMap::new();
    for (layer, number, of) in log {
        let before = decided.insert((*number, *layer), of);
        assert!(before.is_none(), "{number} was reported twice by {layer}");
    }
    for (i, limit) in limits.iter().enumerate() {
        // The last line of those who have asked.
        let mut order: Vec<u64> = Vec::new();
        for (_, number, of) in log.iter().filter(|(layer, ..)| *layer == i) {
            if of.allowed {
                order.push(*number);
            }
        }
        if i == 0 && limit.queue.is_some() && !limit.shadow {
            assert!(order.is_sorted(), "{limit:?}: {order:?}");
        }
        let standing = limiters[i].peek(Key::global()).await.expect("the store answers");
        let quotas = [Some((limit.limit, limit.window)), limit.longer];
        for (q, (most, _)) in quotas.into_iter().flatten().enumerate() {
            let mut counts: BTreeMap<SystemTime, u64> = BTreeMap::new();
            let mut unknown = 0;
            for (number, end) in ends.iter().enumerate() {
                let number = number as u64;
                let Some(of) = decided.get(&(number, i)) else {
                    // The charge may have been sent when it was dropped.
                    unknown += u64::from(*end == End::Dropped);
                    continue;
                };
                let refused_inside = (i + 1..limits.len()).any(|j| {
                    !limits[j].shadow && decided.get(&(number, j)).is_some_and(|of| !of.allowed)
                });
                let counted = match end {
                    _ if !of.allowed || refused_inside => false,
                    End::Dropped => !limit.refunds_dropped,
                    End::Answered(418) => limit.counts_errors,
                    // Closed, or without an answer.
                    End::Answered(429 | 503) => false,
                    End::Answered(_) => true,
                };
                if counted {
                    *counts.entry(of.ends[q]).or_default() += 1;
                }
            }
            for (end, count) in &counts {
                assert!(count <= &most, "{count} of {most} until {end:?}, layer {i} {limit:?}");
            }
            let usage = &standing.usage()[q];
            let expected = counts.get(&usage.reset_at()).copied().unwrap_or(0);
            let may_be_more =
                if limit.refunds_dropped || limit.delay.is_none() { 0 } else { unknown };
            assert!(
                (expected..=expected + may_be_more).contains(&usage.used()),
                "{} used, {expected} expected, layer {i} {limit:?}, quota {q}: {decided:?} {ends:?}",
                usage.used()
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn random_requests_through_stacks_of_layers_cost_what_was_promised() {
    let full = std::env::var_os("FULL_SIZE").is_some();
    let (requests, first) = if full { (FULL_SIZE, fastrand::u64(..)) } else { (REQUESTS, 17) };
    let first = std::env::var("SEED").map_or(first, |seed| seed.parse().expect("a number"));
    let (mut sent, mut seed) = (0, first);
    while sent < requests {
        println!("SEED={seed}");
        sent += run(&mut Rng::with_seed(seed)).await;
        seed = seed.wrapping_add(1);
    }
}
