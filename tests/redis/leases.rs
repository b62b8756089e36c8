//! Leases over real servers and processes: never above the limit, whoever is killed in the middle.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant, UNIX_EPOCH};

use fastrand::Rng;
use harness::{ALONE, Server};
use tower_fixed_window::{Limiter, OnStoreFailure, Quota};

use crate::shared_count;

const LIMITS: [u64; 4] = [50, 300, 2_000, 20_000];
const WINDOW: Duration = Duration::from_secs(2);
const LEASES: &str = "100";
/// Redis writes each answered command to the disk first.
pub(crate) const DURABLE: [&str; 4] = ["--appendonly", "yes", "--appendfsync", "always"];

/// The most tokens of a limit that may be leased by other nodes.
fn most_leased_elsewhere(limit: u64) -> u64 {
    2 * (limit / 16).min(100).saturating_sub(1)
}

#[test]
fn three_processes_with_leases_share_a_count() {
    let _alone = ALONE.blocking_lock();
    let Some(server) = Server::start() else { return };
    run(&server.url());
}

/// The same as [`shared_count::run`], with leases.
pub(crate) fn run(urls: &str) {
    let early = shared_count::run_early(urls, most_leased_elsewhere, |_, mut node| {
        node.env("NODE_LEASES", LEASES);
        node
    });
    println!("at worst {early} tokens were not to be had");
}

#[test]
fn killed_nodes_and_servers_never_let_more_than_the_limit_pass() {
    let _alone = ALONE.blocking_lock();
    let Some(server) = Server::with(&DURABLE) else { return };
    kill_while_leases_are_held(vec![server], 4);
}

/// Kills nodes at random, and every few nodes a server instead.
pub(crate) fn kill_while_leases_are_held(mut servers: Vec<Server>, every: usize) {
    let dir = tempfile::tempdir().expect("a directory");
    let log = |i: usize| dir.path().join(i.to_string());
    let urls: Vec<String> = servers.iter().map(Server::url).collect();
    let start = |i: usize| Node::start(&urls.join(","), &log(i));
    let mut nodes: Vec<Node> = (0..3).map(start).collect();
    let (mut rng, began) = (Rng::new(), Instant::now());
    let mut killed = 0;
    while began.elapsed() < WINDOW * 10 {
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
            // `kill -9`: the node's leases are lost.
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
    assert!(full >= 15, "only {full} of {} key-windows were asked for much", passed.len());
}

/// A node, ended with this value.
struct Node(Child);

impl Node {
    fn start(urls: &str, log: &Path) -> Self {
        let node = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "leases::node", "--ignored", "--nocapture"])
            .env("NODE_URLS", urls)
            .env("NODE_REPORT", log)
            .stdout(std::process::Stdio::null())
            .spawn();
        Self(node.expect("it starts"))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Writes each pass to a log at once, until the node is killed.
#[test]
#[ignore = "started by other tests"]
fn node() {
    let (Ok(urls), Some(log)) = (std::env::var("NODE_URLS"), std::env::var_os("NODE_REPORT"))
    else {
        return;
    };
    let log = OpenOptions::new().create(true).append(true).open(log).expect("a file");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let store = shared_count::store(&urls);
        for limit in LIMITS {
            for _ in 0..4 {
                let limiter = Quota::new(limit, WINDOW).name("leases").store(
                    store
                        .clone()
                        .on_failure(OnStoreFailure::Deny)
                        .leases(LEASES.parse().expect("a number")),
                );
                tokio::spawn(ask(limiter, limit, log.try_clone().expect("a file")));
            }
        }
        tokio::time::sleep(WINDOW * 100).await;
    });
}

async fn ask(limiter: Limiter, limit: u64, mut log: File) {
    loop {
        match limiter.check(limit).await {
            Ok(decision) if decision.allowed() => {
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
