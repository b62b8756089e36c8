//! Four processes share a limit of 600,000 a second on one key: how many decisions pass in each
//! window, and their cost. Requests that wait together share a call, and a command counts them all.
//! People run `INCR` without a script for this, where a check and a later count let more pass. Here,
//! at most the limit passes.
//!
//! `cargo bench -p benches --bench hot` starts a server and the nodes
//! (`REDIS_SERVER=valkey-server`: another server). Slightly more requests are offered than may pass.

use std::collections::BTreeMap;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, UNIX_EPOCH};

use harness::Server;
use tower_fixed_window::Quota;
use tower_fixed_window_redis::RedisStore;

const NODES: u64 = 4;
const LIMIT: u64 = 600_000;
/// Requests per second, of all nodes together.
const OFFERED: u64 = 640_000;
const TASKS: u64 = 512;
const TICK: Duration = Duration::from_millis(20);

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if let Some(i) = args.iter().position(|arg| arg == "--node") {
        return node(&args[i + 1..]);
    }
    let quick = args.iter().any(|arg| arg == "--test");
    let (limit, offered, seconds) = if quick { (4_000, 4_400, 3) } else { (LIMIT, OFFERED, 10) };
    println!(
        "{NODES} nodes, a limit of {limit} a second, {offered} asked for a second, {} cores\n",
        std::thread::available_parallelism().map_or(0, usize::from)
    );
    println!(
        "| allowed a second | windows: least | most | counted locally | calls a second | CPU of the nodes | of the server |"
    );
    println!("|---|---|---|---|---|---|---|");
    let Some(server) = Server::start() else { return };
    let seen = run(&server, limit, offered, seconds);
    // The first and the last window are incomplete.
    let whole: Vec<u64> = seen.windows.values().copied().collect();
    let whole = &whole[1..whole.len().saturating_sub(1).max(1)];
    let (least, most) = (whole.iter().min().unwrap_or(&0), whole.iter().max().unwrap_or(&0));
    let all: u64 = whole.iter().sum();
    println!(
        "| {:.0} | {least} | {most} | {} | {:.0} | {:.2} | {:.2} |",
        all as f64 / whole.len() as f64,
        seen.local,
        seen.calls,
        seen.cpu_of_nodes,
        seen.cpu_of_server,
    );
    assert!(*most <= limit || seen.local > 0, "{most} passed of {limit}");
    println!("\nCPU is in cores.");
}

struct Seen {
    /// Decisions that passed in each window.
    windows: BTreeMap<u64, u64>,
    local: u64,
    calls: f64,
    cpu_of_nodes: f64,
    cpu_of_server: f64,
}

fn run(server: &Server, limit: u64, offered: u64, seconds: u64) -> Seen {
    let this = std::env::current_exe().expect("this program");
    let (start, calls, cpu) = (Instant::now(), calls_of(server), cpu_of(server));
    let nodes: Vec<Child> = (0..NODES)
        .map(|_| {
            let numbers = [u64::from(server.port), limit, offered / NODES, seconds];
            Command::new(&this)
                .arg("--node")
                .args(numbers.map(|n| n.to_string()))
                .stdout(Stdio::piped())
                .spawn()
                .expect("it runs")
        })
        .collect();
    let (mut windows, mut local, mut cpu_of_nodes) = (BTreeMap::new(), 0, 0.0);
    for node in nodes {
        let out = node.wait_with_output().expect("it ends").stdout;
        for line in String::from_utf8(out).expect("text").lines() {
            match line.split_whitespace().collect::<Vec<_>>()[..] {
                ["cpu", cpu] => cpu_of_nodes += cpu.parse::<f64>().expect("a number"),
                ["local", n] => local += n.parse::<u64>().expect("a number"),
                [window, n] => {
                    *windows.entry(window.parse().expect("a number")).or_default() +=
                        n.parse::<u64>().expect("a number");
                }
                _ => {}
            }
        }
    }
    let took = start.elapsed().as_secs_f64();
    Seen {
        windows,
        local,
        calls: (calls_of(server) - calls) / took,
        cpu_of_nodes: cpu_of_nodes / took,
        cpu_of_server: (cpu_of(server) - cpu) / took,
    }
}

/// A node: prints how many decisions passed in each window.
#[tokio::main(flavor = "current_thread")]
async fn node(args: &[String]) {
    let number = |i: usize| args[i].parse::<u64>().expect("a number");
    let (port, limit, offered, seconds) = (number(0), number(1), number(2), number(3));
    let store = RedisStore::new(format!("redis://127.0.0.1:{port}/")).expect("an address");
    let limiter = Quota::per_second(limit).name("hot").store(store);
    let seen = Arc::new(Mutex::new((BTreeMap::<u64, u64>::new(), 0_u64)));
    while limiter.check("cold").await.expect("memory answers").is_local() {}
    let start = tokio::time::Instant::now();
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let (limiter, seen) = (limiter.clone(), Arc::clone(&seen));
            tokio::spawn(async move {
                let mut asked = 0;
                // Tasks start at different times within a tick.
                let mut at = start + TICK * task as u32 / TASKS as u32;
                while start.elapsed() < Duration::from_secs(seconds) {
                    tokio::time::sleep_until(at).await;
                    let due = (at - start).as_secs_f64() * offered as f64 / TASKS as f64;
                    while asked < due as u64 {
                        asked += 1;
                        let decision = limiter.check("hot").await.expect("memory answers");
                        let mut seen = seen.lock().expect("no panic");
                        if decision.is_local() {
                            seen.1 += 1;
                        } else if decision.is_allowed() {
                            let end = decision.reset_at().duration_since(UNIX_EPOCH);
                            let window = end.expect("a time").as_secs();
                            *seen.0.entry(window).or_default() += 1;
                        }
                    }
                    at += TICK;
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("no panic");
    }
    let seen = seen.lock().expect("no panic");
    seen.0.iter().for_each(|(window, passed)| println!("{window} {passed}"));
    println!("local {}\ncpu {}", seen.1, cpu_of_this_process());
}

/// Seconds of processor time that this process has used.
fn cpu_of_this_process() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks = after_name.split_whitespace().skip(11).take(2);
    ticks.map(|ticks| ticks.parse::<f64>().expect("a number")).sum::<f64>() / 100.0
}

/// The number of script calls.
fn calls_of(server: &Server) -> f64 {
    let info: String = server.ask(&["INFO", "commandstats"]);
    let calls = info.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
    let calls = calls.and_then(|calls| calls.split(',').next());
    calls.map_or(0.0, |calls| calls.parse().expect("a number"))
}

/// Seconds of processor time that the server has used.
fn cpu_of(server: &Server) -> f64 {
    let info: String = server.ask(&["INFO", "cpu"]);
    let of = |name: &str| {
        info.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok())
    };
    of("used_cpu_sys:").unwrap_or(0.0) + of("used_cpu_user:").unwrap_or(0.0)
}
