//! Exactly the limit passes, however many processes ask, and never more, whoever is killed.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use fastrand::Rng;
use harness::{ALONE, Server, ask};
use tower_fixed_window::{Limiter, OnStoreFailure, Quota};
use tower_fixed_window_redis::RedisStore;

const PROCESSES: usize = 3;
/// Concurrent requests in each process, each on its own connection unless set otherwise.
const TASKS: usize = 32;
const KEYS: usize = 50;
const WINDOW: Duration = Duration::from_secs(2);
const WINDOWS: u32 = 4;

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
    let mut full = 0;
    for ((key, window), (asked, passed)) in &counts {
        let limit = limit(*key);
        assert_eq!(
            *passed,
            limit.min(*asked),
            "of {limit} for key {key} in window {window}: {asked} asked, {passed} passed"
        );
        full += usize::from(*asked > limit);
    }
    let asked: u64 = counts.values().map(|(asked, _)| asked).sum();
    println!("{asked} asked in {} key-windows, {full} of them more than their limit", counts.len());
    assert!(counts.len() >= 200, "{} key-windows", counts.len());
    // On a busy machine, too, this much happens; otherwise the test would prove nothing.
    assert!(full >= 40, "only {full} of {} key-windows were asked for too much", counts.len());
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
        let connections = std::env::var("NODE_CONNECTIONS").map(|n| n.parse().expect("a number"));
        let connections = connections.unwrap_or(TASKS);
        // Slow is not wrong here.
        let store = || store(&urls).deadline(Duration::from_secs(20));
        let stores: Vec<_> = (0..connections).map(|_| store()).collect();
        let tasks: Vec<_> = (0..TASKS)
            .map(|i| {
                let store = stores[i % connections].clone();
                tokio::spawn(task(store, Arc::clone(&counts)))
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
        ref urls => RedisStore::cluster(urls.to_vec()).expect("addresses"),
    }
}

async fn task(store: RedisStore, counts: Arc<Mutex<Counts>>) {
    let mut rng = Rng::new();
    let limiters: Vec<_> = (0..10)
        .map(|key| {
            Quota::new(limit(key), WINDOW)
                .name("exact")
                .store(store.clone().on_failure(OnStoreFailure::Deny))
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
        {
            let mut counts = counts.lock().expect("no panic");
            let count = counts.entry((key, window)).or_default();
            count.0 += 1;
            count.1 += u64::from(decision.is_allowed());
        }
        if !decision.is_allowed() {
            // A remembered refusal is answered at once.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// Redis writes each answered command to the disk first.
pub(crate) const DURABLE: [&str; 4] = ["--appendonly", "yes", "--appendfsync", "always"];
/// Each is of a key of its own.
const LIMITS: [u64; 4] = [50, 300, 2_000, 20_000];

#[test]
fn killed_nodes_and_servers_never_let_more_than_the_limit_pass() {
    let _alone = ALONE.blocking_lock();
    let Some(server) = Server::with(&DURABLE) else { return };
    kill_some(vec![server], 4);
}

/// Kills nodes at random, and every few nodes a server instead.
pub(crate) fn kill_some(mut servers: Vec<Server>, every: usize) {
    let dir = tempfile::tempdir().expect("a directory");
    let log = |i: usize| dir.path().join(i.to_string());
    let urls: Vec<String> = servers.iter().map(Server::url).collect();
    let start = |i: usize| MortalNode::start(&urls.join(","), &log(i));
    let mut nodes: Vec<MortalNode> = (0..3).map(start).collect();
    let (mut rng, began) = (Rng::new(), Instant::now());
    let mut killed = 0;
    while began.elapsed() < WINDOW * 6 {
        sleep(Duration::from_millis(rng.u64(100..700)));
        killed += 1;
        if killed % every == 0 {
            let i = rng.usize(..servers.len());
            let server = &mut servers[i];
            server.kill();
            sleep(Duration::from_millis(rng.u64(..300)));
            server.restart();
        } else {
            let i = rng.usize(..3);
            // `kill -9`.
            drop(nodes.swap_remove(i));
            nodes.push(start(3 + killed));
        }
    }
    drop(nodes);
    let mut passed = HashMap::<(String, String), u64>::new();
    for entry in std::fs::read_dir(dir.path()).expect("a directory") {
        let log = std::fs::read_to_string(entry.expect("an entry").path()).expect("a log");
        for line in log.lines() {
            if let [limit, window, "."] = line.split(' ').collect::<Vec<_>>()[..] {
                *passed.entry((limit.to_owned(), window.to_owned())).or_default() += 1;
            }
        }
    }
    let mut full = 0;
    for ((limit, window), passed) in &passed {
        let limit: u64 = limit.parse().expect("a number");
        assert!(*passed <= limit, "{passed} of {limit} passed in window {window}");
        full += usize::from(*passed > limit / 2);
    }
    println!("{killed} killed, {full} of {} key-windows more than half full", passed.len());
    assert!(full >= 9, "only {full} of {} key-windows were asked for much", passed.len());
}

/// A node, killed with this value.
struct MortalNode(Child);

impl MortalNode {
    fn start(urls: &str, log: &Path) -> Self {
        let node = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "shared_count::mortal_node", "--ignored", "--nocapture"])
            .env("NODE_URLS", urls)
            .env("NODE_REPORT", log)
            .stdout(Stdio::null())
            .spawn();
        Self(node.expect("it starts"))
    }
}

impl Drop for MortalNode {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Writes each pass to a log at once, until the node is killed.
#[test]
#[ignore = "started by other tests"]
fn mortal_node() {
    let (Ok(urls), Some(log)) = (std::env::var("NODE_URLS"), std::env::var_os("NODE_REPORT"))
    else {
        return;
    };
    let log = OpenOptions::new().create(true).append(true).open(log).expect("a file");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let store = store(&urls).on_failure(OnStoreFailure::Deny);
        for limit in LIMITS {
            for _ in 0..4 {
                let limiter = Quota::new(limit, WINDOW).name("mortal").store(store.clone());
                tokio::spawn(log_passes(limiter, limit, log.try_clone().expect("a file")));
            }
        }
        tokio::time::sleep(WINDOW * 100).await;
    });
}

async fn log_passes(limiter: Limiter, limit: u64, mut log: File) {
    loop {
        match limiter.check(limit).await {
            Ok(decision) if decision.is_allowed() => {
                let reset = decision.reset_at().duration_since(UNIX_EPOCH).expect("after it");
                // A single write, which a kill does not split.
                let line = format!("{limit} {} .\n", reset.as_millis());
                log.write_all(line.as_bytes()).expect("it is written");
            }
            // A remembered refusal is answered at once, so other tasks get a turn.
            Ok(_) => tokio::time::sleep(Duration::from_millis(1)).await,
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}
