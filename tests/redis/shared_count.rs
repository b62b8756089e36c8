//! Exactly the limit passes, however many processes ask.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use fastrand::Rng;
use harness::{ALONE, Server, ask};
use redis::cluster::ClusterClient;
use tower_fixed_window::store::RedisStore;
use tower_fixed_window::{OnStoreFailure, Quota};

const PROCESSES: usize = 3;
/// Concurrent requests in each process, each on its own connection unless set otherwise.
const TASKS: usize = 32;
const KEYS: usize = 50;
const WINDOW: Duration = Duration::from_secs(2);
const WINDOWS: u32 = 10;

/// Requests and passes, by key and window.
type Counts = HashMap<(usize, u64), (u64, u64)>;

/// From 1 to 1,000.
fn limit(key: usize) -> u64 {
    [1, 2, 3, 5, 10, 33, 60, 100, 333, 1_000][key % 10]
}

#[test]
fn three_processes_share_a_count() {
    let _alone = ALONE.blocking_lock();
    let Some(server) = Server::start() else { return };
    run(&server.url(), |_, node| node);
}

/// All requests of a process over one connection, where they travel together.
#[test]
fn three_processes_share_a_count_with_gathered_calls() {
    let _alone = ALONE.blocking_lock();
    let Some(server) = Server::start() else { return };
    run(&server.url(), |_, mut node| {
        node.env("NODE_CONNECTIONS", "1");
        node
    });
}

/// The clock of one process is an hour ahead, that of another an hour behind. Only the server's
/// clock counts.
#[test]
fn processes_whose_clocks_differ_by_an_hour_share_a_count() {
    let Some(faketime) = std::env::var_os("LIBFAKETIME") else {
        eprintln!("skipped: LIBFAKETIME is not set to where libfaketime.so.1 is");
        return;
    };
    let _alone = ALONE.blocking_lock();
    let Some(server) = Server::start() else { return };
    run(&server.url(), |i, mut node| {
        node.env("LD_PRELOAD", &faketime).env("FAKETIME", ["+1h", "-1h", "+0"][i % 3]);
        node
    });
}

/// Runs the nodes against the servers at these addresses, and counts what passed.
pub(crate) fn run(urls: &str, prepare: impl Fn(usize, Command) -> Command) {
    run_early(urls, |_| 0, prepare);
}

/// Does the same, but up to `most` tokens of each limit may be unused. Returns the most that were.
pub(crate) fn run_early(
    urls: &str,
    missing: impl Fn(u64) -> u64,
    prepare: impl Fn(usize, Command) -> Command,
) -> u64 {
    let dir = tempfile::tempdir().expect("a directory");
    let report = |i: usize| dir.path().join(i.to_string());
    let nodes: Vec<Child> = (0..PROCESSES)
        .map(|i| {
            let mut node = Command::new(std::env::current_exe().expect("this program"));
            node.args(["--exact", "shared_count::node", "--ignored", "--nocapture"])
                .env("NODE_URLS", urls)
                .env("NODE_REPORT", report(i));
            prepare(i, node).spawn().expect("it starts")
        })
        .collect();
    for mut node in nodes {
        assert!(node.wait().expect("it ends").success(), "a node failed");
    }
    let mut counts = Counts::new();
    for i in 0..PROCESSES {
        for line in std::fs::read_to_string(report(i)).expect("a report").lines() {
            let mut numbers = line.split(' ').map(|number| number.parse().expect("a number"));
            let mut next = || numbers.next().expect("four numbers");
            let count = counts.entry((next() as usize, next())).or_default();
            count.0 += next();
            count.1 += next();
        }
    }
    let (mut full, mut worst) = (0, 0);
    for ((key, window), (asked, passed)) in &counts {
        let limit = limit(*key);
        let least = (*asked).min(limit - missing(limit));
        assert!(
            (least..=limit.min(*asked)).contains(passed),
            "of {limit} for key {key} in window {window}: {asked} asked, {passed} passed"
        );
        full += usize::from(*asked > limit);
        worst = worst.max(limit.min(*asked) - passed);
    }
    let asked: u64 = counts.values().map(|(asked, _)| asked).sum();
    println!("{asked} asked in {} key-windows, {full} of them more than their limit", counts.len());
    assert!(counts.len() >= 500, "{} key-windows", counts.len());
    // On a busy machine, too, this much happens; otherwise the test would prove nothing.
    assert!(full >= 200, "only {full} of {} key-windows were asked for too much", counts.len());
    worst
}

/// A node: a process of its own, with connections of its own. Started by the tests above.
#[test]
#[ignore = "started by other tests"]
fn node() {
    let Ok(urls) = std::env::var("NODE_URLS") else { return };
    if std::env::var("FAKETIME").is_ok_and(|lie| lie.contains('1')) {
        let (server, _): (u64, u64) = ask(&urls, &["TIME"]).expect("it answers");
        let here = SystemTime::now().duration_since(UNIX_EPOCH).expect("after it").as_secs();
        assert!(here.abs_diff(server) > 3_500, "the lie works");
    }
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let counts = Arc::new(Mutex::new(Counts::new()));
    runtime.block_on(async {
        // Leases are a process's.
        let leases = std::env::var("NODE_LEASES").map(|max| max.parse().expect("a number"));
        let connections = std::env::var("NODE_CONNECTIONS").map(|n| n.parse().expect("a number"));
        let connections = connections.unwrap_or(if leases.is_ok() { 1 } else { TASKS });
        // Slow is not wrong here.
        let store = || store(&urls).deadline(Duration::from_secs(20));
        let stores: Vec<_> = (0..connections).map(|_| store()).collect();
        let leases = leases.unwrap_or(0);
        let tasks: Vec<_> = (0..TASKS)
            .map(|i| {
                let store = stores[i % connections].clone();
                tokio::spawn(task(store, leases, Arc::clone(&counts)))
            })
            .collect();
        for task in tasks {
            task.await.expect("no panic");
        }
    });
    let mut report = String::new();
    for ((key, window), (asked, passed)) in &*counts.lock().expect("no panic") {
        writeln!(report, "{key} {window} {asked} {passed}").expect("writing to a string");
    }
    std::fs::write(std::env::var("NODE_REPORT").expect("where to"), report).expect("it is written");
}

/// Connects to a single server, or to a cluster if there are several addresses.
pub(crate) fn store(urls: &str) -> RedisStore {
    match urls.split(',').collect::<Vec<_>>()[..] {
        [url] => RedisStore::new(url).expect("an address"),
        ref urls => RedisStore::cluster(ClusterClient::new(urls.to_vec()).expect("addresses")),
    }
}

async fn task(store: RedisStore, leases: u64, counts: Arc<Mutex<Counts>>) {
    let mut rng = Rng::new();
    let limiters: Vec<_> = (0..10)
        .map(|key| {
            Quota::new(limit(key), WINDOW)
                .name("exact")
                .store(store.clone().on_failure(OnStoreFailure::Deny).leases(leases))
        })
        .collect();
    let all: u64 = (0..KEYS).map(limit).sum();
    let end = Instant::now() + WINDOW * WINDOWS;
    while Instant::now() < end {
        // Requests are in proportion to limits, with a few more for small limits.
        let key = if rng.u8(..5) == 0 {
            rng.usize(..KEYS)
        } else {
            let mut token = rng.u64(..all);
            (0..KEYS)
                .find(|&key| token.checked_sub(limit(key)).map(|rest| token = rest).is_none())
                .expect("within the sum")
        };
        let decision = limiters[key % 10].check(key).await.expect("it answers");
        let window = decision.reset_at().duration_since(UNIX_EPOCH).expect("after it").as_secs();
        let mut counts = counts.lock().expect("no panic");
        let count = counts.entry((key, window)).or_default();
        count.0 += 1;
        count.1 += u64::from(decision.allowed());
    }
}
