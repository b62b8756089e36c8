//! Instructions per request, counted by callgrind: the same on a busy machine as on an idle one.
//! Fails if a path takes over 10% more than is committed here, so that a regression is seen when it
//! is made.
//!
//! `cargo bench -p benches --bench instructions`. Without valgrind it says so, and passes.
//!
//! With `--profile lto`, the program is compiled with fat link-time optimization, and compared with
//! counts of its own. `scripts/builds` does both, since compiling takes minutes. Incremental builds
//! (`CARGO_INCREMENTAL=1`) compile a crate in more parts, and take up to 30% more in both.

use std::array;
use std::convert::Infallible;
use std::env;
use std::future::Future;
use std::hint::black_box;
use std::net::SocketAddr;
use std::pin::pin;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::Full;
use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use tokio::runtime::Builder;
use tower::{Layer, Service, service_fn};
use tower_fixed_window::key::PeerAddr;
use tower_fixed_window::{FixedWindowLayer, Limit, Limiter, Limits, Line, Quota};

struct Path {
    name: &'static str,
    run: fn(u64),
    /// The path is a service: the instructions of the same service without a layer are subtracted.
    service: bool,
    /// The committed instructions, and those with link-time optimization. Lower them when a change
    /// has saved some.
    committed: [u64; 2],
}

impl Path {
    const fn new(name: &'static str, run: fn(u64), committed: [u64; 2]) -> Self {
        Self { name, run, service: false, committed }
    }

    const fn of_service(name: &'static str, run: fn(u64), committed: [u64; 2]) -> Self {
        Self { service: true, ..Self::new(name, run, committed) }
    }
}

const PATHS: [Path; 13] = [
    Path::of_service("a request that passes", allowed, [2_451, 2_394]),
    Path::of_service("a request that is refused", refused, [1_826, 1_643]),
    Path::new("a decision in memory", decision, [382, 379]),
    Path::new("the first one of a key", first, [1_230, 1_201]),
    Path::new("a decision of two quotas", two, [674, 651]),
    Path::new("a decision on a calendar", calendar, [456, 451]),
    Path::new("two limits in one charge", two_limits, [1_588, 1_445]),
    Path::new("three limits in one charge", three_limits, [2_137, 1_978]),
    Path::new("the same refused by one", one_refuses, [2_291, 2_034]),
    Path::new("a refusal of one limit", refusal, [398, 374]),
    Path::new("a limit of 0 refuses", zero, [709, 680]),
    Path::new(QUEUES[0], short_queue, [8_468, 7_159]),
    Path::new(QUEUES[1], long_queue, [10_586, 9_425]),
];

/// A request that joins a queue and leaves it, behind one other request and behind 40,000.
const QUEUES: [&str; 2] = ["into a short queue and out", "into a long queue and out"];

fn main() -> ExitCode {
    let args: Vec<String> = env::args().collect();
    if let [_, run, name, times] = &args[..]
        && run == "run"
    {
        metrics::set_global_recorder(Atomics(AtomicU64::new(0))).expect("the first");
        let times = times.parse().expect("a number");
        let path = PATHS.iter().find(|path| path.name == name);
        path.map_or(bare as fn(u64), |path| path.run)(times);
        return ExitCode::SUCCESS;
    }
    if args.iter().any(|arg| arg == "--test") {
        // `--test` only checks that the paths run.
        PATHS.iter().for_each(|path| (path.run)(10));
        return ExitCode::SUCCESS;
    }
    if Command::new("valgrind").arg("--version").output().is_err() {
        println!("instructions: skipped, there is no valgrind");
        return ExitCode::SUCCESS;
    }
    // Cargo compiles into target/lto/deps, by the name of the profile.
    let program = env::current_exe().expect("this program");
    let lto = program.ancestors().nth(2).is_some_and(|folder| folder.ends_with("lto"));
    let floor = per_call("bare");
    println!("{:<28} {floor:>6}", "the bare service");
    let (mut slipped, mut queues) = (false, vec![]);
    for Path { name, service, committed, .. } in PATHS {
        let added = per_call(name).saturating_sub(if service { floor } else { 0 });
        let committed = committed[usize::from(lto)];
        let slip = added > committed + committed / 10;
        slipped |= slip;
        let verdict = if slip { "TOO MANY" } else { "" };
        println!("{name:<28} {added:>6} added, {committed} committed {verdict}");
        if QUEUES.contains(&name) {
            queues.push(added);
        }
    }
    if queues[1] * 2 > queues[0] * 3 {
        println!("a long queue takes more than 1.5 times as much as a short one");
        slipped = true;
    }
    if slipped { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// The cheapest recorder that counts, so that `metrics` is on and in use.
struct Atomics(AtomicU64);

impl Recorder for Atomics {
    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(Arc::new(AtomicU64::new(self.0.load(Ordering::Relaxed))))
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }

    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
}

/// The difference of two runs, which excludes the set-up.
fn per_call(name: &str) -> u64 {
    const FEW: u64 = 1_000;
    const MANY: u64 = 3_000;
    (count(name, MANY) - count(name, FEW)) / (MANY - FEW)
}

fn count(name: &str, times: u64) -> u64 {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(env::current_exe().expect("this program"))
        .args(["run", name, &times.to_string()])
        .output()
        .expect("valgrind runs");
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text.lines().find(|line| line.contains("Collected :"));
    let number = line.and_then(|line| line.rsplit(' ').next()).and_then(|n| n.parse().ok());
    number.unwrap_or_else(|| panic!("no count in what valgrind says:\n{text}"))
}

async fn home(_: Request<()>) -> Result<Response<Full<Bytes>>, Infallible> {
    let mut response = Response::new(Full::from("hello"));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    Ok(response)
}

fn bare(times: u64) {
    drive(service_fn(home), times, StatusCode::OK);
}

fn allowed(times: u64) {
    // Header values below 10,000 come from a table, so the limit is below that.
    let layer = FixedWindowLayer::new(Quota::per_day(5_000));
    drive(layer.layer(service_fn(home)), times, StatusCode::OK);
}

fn refused(times: u64) {
    let layer = FixedWindowLayer::new(Quota::per_day(1));
    let mut service = layer.layer(service_fn(home));
    drive(&mut service, 1, StatusCode::OK);
    drive(service, times, StatusCode::TOO_MANY_REQUESTS);
}

fn decision(times: u64) {
    decide(Quota::per_day(5_000), times);
}

/// The store grows in the meantime.
fn first(times: u64) {
    let limiter = Limiter::new(Quota::per_day(5_000));
    for key in 0..times {
        assert!(at_once(limiter.check(black_box(key))).expect("memory answers").is_allowed());
    }
}

fn two(times: u64) {
    decide(Quota::per_day(5_000).and(Quota::per_hour(4_000)), times);
}

fn calendar(times: u64) {
    decide(Quota::per_month(5_000).in_zone("America/New_York"), times);
}

fn decide(quotas: impl Into<Limit>, times: u64) {
    let limit: Limit = quotas.into();
    let limiter = Limiter::new(limit);
    for _ in 0..times {
        let key = black_box(SocketAddr::from(([127, 0, 0, 1], 50_000)).ip());
        assert!(at_once(limiter.check(key)).expect("memory answers").is_allowed());
    }
}

fn refusal(times: u64) {
    refuse(Quota::per_day(1), times);
}

fn zero(times: u64) {
    refuse(Quota::per_day(0), times);
}

fn refuse(quota: Quota, times: u64) {
    let limiter = Limiter::new(quota);
    let mut key = black_box(SocketAddr::from(([127, 0, 0, 1], 50_000)).ip());
    _ = at_once(limiter.check(key));
    for _ in 0..times {
        key = black_box(key);
        assert!(!at_once(limiter.check(key)).expect("memory answers").is_allowed());
    }
}

fn short_queue(times: u64) {
    queue(1, times);
}

fn long_queue(times: u64) {
    queue(40_000, times);
}

/// Requests that each wait behind `others` and leave.
fn queue(others: u64, times: u64) {
    // Under valgrind seconds pass, and requests that nobody polls are out of the queue.
    let builder = &mut Builder::new_current_thread();
    let runtime = builder.enable_time().start_paused(true).build().expect("a runtime");
    let _entered = runtime.enter();
    let layer =
        FixedWindowLayer::new(Quota::per_day(1)).queue(50_000, Duration::from_secs(1 << 33));
    let mut service = layer.layer(service_fn(home));
    drive(&mut service, 1, StatusCode::OK);
    let mut wait = || {
        let mut request = Request::new(());
        request.extensions_mut().insert(PeerAddr(SocketAddr::from(([127, 0, 0, 1], 50_000))));
        let mut response = Box::pin(service.call(black_box(request)));
        assert!(response.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        response
    };
    let others: Vec<_> = (0..others).map(|_| wait()).collect();
    for _ in 0..times {
        drop(wait());
    }
    // The cost of dropping these is the same in both runs, so it cancels out.
    drop(others);
}

fn two_limits(times: u64) {
    limits::<2>([5_000, 4_000], times, true);
}

fn three_limits(times: u64) {
    limits::<3>([5_000, 4_000, 4_500], times, true);
}

fn one_refuses(times: u64) {
    limits::<3>([5_000, 1, 4_500], times, false);
}

const NAMES: [&str; 3] = ["requests", "tokens", "cents"];

/// Charges several limits, which each have an entry in the current window.
fn limits<const N: usize>(quotas: [u64; N], times: u64, allowed: bool) {
    let limiters = quotas.into_iter().zip(NAMES);
    let limits = Limits::new(limiters.map(|(n, name)| Quota::per_day(n).name(name)));
    for i in 0..times {
        let key = black_box(SocketAddr::from(([127, 0, 0, 1], 50_000)).ip());
        let lines: [Line<'_>; N] = array::from_fn(|i| Line::new(NAMES[i], key, 1));
        let decision = at_once(limits.check(lines)).expect("memory answers");
        assert_eq!(decision.is_allowed(), allowed || i == 0);
    }
}

fn drive<S>(mut service: S, times: u64, status: StatusCode)
where
    S: Service<Request<()>, Response = Response<Full<Bytes>>, Error = Infallible>,
{
    let peer = PeerAddr(SocketAddr::from(([127, 0, 0, 1], 50_000)));
    for _ in 0..times {
        let mut request = Request::new(());
        request.extensions_mut().insert(peer);
        let Ok(response) = at_once(service.call(black_box(request)));
        assert_eq!(black_box(response).status(), status);
    }
}

fn at_once<F: Future>(future: F) -> F::Output {
    let mut context = Context::from_waker(Waker::noop());
    match pin!(future).poll(&mut context) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("it has to wait"),
    }
}
