//! Exactly the limit passes, however many processes ask, and never more, whoever is killed.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use fastrand::Rng;
use harness::{ALONE, Server, ask};
use tower_fixed_window::{OnStoreFailure, Quota};
use tower_fixed_window_redis::RedisStore;

const PROCESSES: usize = 3;
/// Concurrent requests in each process.
pub(crate) const TASKS: usize = 32;
const KEYS: usize = 50;
const WINDOW: Duration = Duration::from_secs(2);

/// From 1 to 1,000.
fn limit(key: usize) -> u64 {
    [1, 2, 3, 5, 10, 33, 60, 100, 333, 1_000][key % 10]
}

#[test]
fn three_processes_share_a_count() {
    let _alone = ALONE.blocking_lock();
    let Some(server) = Server::start() else { return };
    run(&server.url(), TASKS);
}

/// All requests of a process over one connection, where they travel together.
#[test]
fn three_processes_share_a_count_with_gathered_calls() {
    let _alone = ALONE.blocking_lock();
    let Some(server) = Server::start() else { return };
    run(&server.url(), 1);
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
    run_with(&server.url(), TASKS, |i, node| {
        node.env("LD_PRELOAD", &faketime).env("FAKETIME", ["+1h", "-1h", "+0"][i]);
    });
}

pub(crate) fn run(urls: &str, connections: usize) {
    run_with(urls, connections, |_, _| {});
}

/// Runs the nodes against the servers at these addresses, each with so many connections, and counts
/// what passed.
fn run_with(urls: &str, connections: usize, prepare: impl Fn(usize, &mut Command)) {
    let dir = tempfile::tempdir().expect("a directory");
    let start = |i: usize| {
        let log = dir.path().join(i.to_string());
        Node::start(urls, connections, 4 * WINDOW, &log, |node| prepare(i, node))
    };
    for mut node in (0..PROCESSES).map(start).collect::<Vec<_>>() {
        assert!(node.0.wait().expect("it ends").success(), "a node failed");
    }
    let (counts, failed) = Counts::read(dir.path());
    assert_eq!(failed, 0, "requests without an answer");
    let mut full = 0;
    for ((key, window), (asked, passed)) in &counts.0 {
        let limit = limit(*key);
        assert_eq!(
            *passed,
            limit.min(*asked),
            "of {limit} for key {key} in window {window}: {asked} asked, {passed} passed"
        );
        full += usize::from(*asked > limit);
    }
    let all = counts.0.len();
    println!("{full} of {all} key-windows were asked for more than their limit");
    // On a busy machine, too, this much happens; otherwise the test would prove nothing.
    assert!(all >= 200 && full >= 40, "only {full} of {all} key-windows were asked for too much");
}

/// Redis writes each answered command to the disk first.
pub(crate) const DURABLE: [&str; 4] = ["--appendonly", "yes", "--appendfsync", "always"];

#[test]
fn killed_nodes_and_servers_never_let_more_than_the_limit_pass() {
    let _alone = ALONE.blocking_lock();
    let Some(server) = Server::with(&DURABLE) else { return };
    kill_some(vec![server], 4);
}

/// Kills nodes at random, and every few nodes a server instead.
pub(crate) fn kill_some(mut servers: Vec<Server>, every: usize) {
    let dir = tempfile::tempdir().expect("a directory");
    let urls: Vec<String> = servers.iter().map(Server::url).collect();
    let log = |i: usize| dir.path().join(i.to_string());
    let (urls, lives) = (urls.join(","), 100 * WINDOW);
    let start = |i: usize| Node::start(&urls, TASKS, lives, &log(i), |_| {});
    let mut nodes: Vec<Node> = (0..PROCESSES).map(start).collect();
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
            let i = rng.usize(..PROCESSES);
            // `kill -9`.
            drop(nodes.swap_remove(i));
            nodes.push(start(PROCESSES + killed));
        }
    }
    drop(nodes);
    let (counts, failed) = Counts::read(dir.path());
    let mut full = 0;
    for ((key, window), (_, passed)) in &counts.0 {
        let limit = limit(*key);
        assert!(*passed <= limit, "{passed} of {limit} for key {key} passed in window {window}");
        full += usize::from(*passed > limit / 2);
    }
    println!("{killed} killed, {failed} failed, {full} of {} more than half full", counts.0.len());
    assert!(full >= 40, "only {full} of {} key-windows were asked for much", counts.0.len());
}

/// Requests and passes, by key and window.
struct Counts(HashMap<(usize, u64), (u64, u64)>);

impl Counts {
    /// Reads the logs of all nodes. Returns also how many requests have failed.
    fn read(dir: &Path) -> (Self, u64) {
        let (mut counts, mut failed) = (HashMap::new(), 0);
        for entry in std::fs::read_dir(dir).expect("a directory") {
            let log = std::fs::read_to_string(entry.expect("an entry").path()).expect("a log");
            for line in log.lines() {
                let mut numbers = line.split(' ').map_while(|number| number.parse().ok());
                let [Some(key), Some(window), Some(passed)] = [(); 3].map(|()| numbers.next())
                else {
                    failed += 1;
                    continue;
                };
                let count: &mut (u64, u64) = counts.entry((key as usize, window)).or_default();
                *count = (count.0 + 1, count.1 + passed);
            }
        }
        (Self(counts), failed)
    }
}

/// A node: a process of its own, killed with this value.
struct Node(Child);

impl Node {
    fn start(
        urls: &str,
        connections: usize,
        lives: Duration,
        log: &Path,
        prepare: impl FnOnce(&mut Command),
    ) -> Self {
        let mut node = Command::new(std::env::current_exe().expect("this program"));
        node.args(["--exact", "shared_count::node", "--ignored", "--nocapture"])
            .env("NODE_URLS", urls)
            .env("NODE_CONNECTIONS", connections.to_string())
            .env("NODE_SECONDS", lives.as_secs().to_string())
            .env("NODE_LOG", log)
            .stdout(Stdio::null());
        prepare(&mut node);
        Self(node.spawn().expect("it starts"))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Started by the tests above. Writes each decision to a log at once, until its time is over or it is
/// killed.
#[test]
#[ignore = "started by other tests"]
fn node() {
    let Ok(urls) = std::env::var("NODE_URLS") else { return };
    if std::env::var("FAKETIME").is_ok_and(|lie| lie.contains('1')) {
        let (server, _): (u64, u64) = ask(&urls, &["TIME"]).expect("it answers");
        let here = SystemTime::now().duration_since(UNIX_EPOCH).expect("after it").as_secs();
        assert!(here.abs_diff(server) > 3_500, "the lie works");
    }
    let number = |name| std::env::var(name).ok()?.parse().ok();
    let connections: usize = number("NODE_CONNECTIONS").expect("a number");
    let seconds = number("NODE_SECONDS").expect("a number") as u64;
    let log = std::env::var_os("NODE_LOG").expect("where to");
    let log = OpenOptions::new().create(true).append(true).open(log).expect("a file");
    tokio::runtime::Runtime::new().expect("a runtime").block_on(async {
        let end = Instant::now() + Duration::from_secs(seconds);
        // Slow is not wrong here.
        let store = || store(&urls).deadline(Duration::from_secs(20));
        let stores: Vec<_> = (0..connections).map(|_| store()).collect();
        let task = |i: usize| {
            let (store, log) = (stores[i % connections].clone(), log.try_clone().expect("a file"));
            tokio::spawn(task(store, log, end))
        };
        for task in (0..TASKS).map(task).collect::<Vec<_>>() {
            task.await.expect("no panic");
        }
    });
}

/// Connects to a single server, or to a cluster if there are several addresses.
fn store(urls: &str) -> RedisStore {
    match urls.split(',').collect::<Vec<_>>()[..] {
        [url] => RedisStore::new(url).expect("an address"),
        ref urls => RedisStore::cluster(urls.to_vec()).expect("addresses"),
    }
}

async fn task(store: RedisStore, mut log: File, end: Instant) {
    let mut rng = Rng::new();
    let store = store.on_failure(OnStoreFailure::Deny);
    let limiter = |key| Quota::new(limit(key), WINDOW).name("exact").store(store.clone());
    let limiters: Vec<_> = (0..10).map(limiter).collect();
    let all: u64 = (0..KEYS).map(limit).sum();
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
        let line = match limiters[key % 10].check(key).await {
            Ok(decision) => {
                let reset = decision.reset_at().duration_since(UNIX_EPOCH).expect("after it");
                let passed = decision.is_allowed();
                if !passed {
                    // A remembered refusal is answered at once, so other tasks get a turn.
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                format!("{key} {} {}\n", reset.as_millis(), u8::from(passed))
            }
            Err(error) => {
                tokio::time::sleep(Duration::from_millis(20)).await;
                format!("{error}\n")
            }
        };
        // A single write, which a kill does not split.
        log.write_all(line.as_bytes()).expect("it is written");
    }
}
