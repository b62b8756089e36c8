//! The demonstration: three nodes of the `redis` example under load, on a Redis to which everything
//! happens. `scripts/unplug` runs it.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};

use crate::server::{ALONE, Server, free_port};

const LIMIT: u64 = 100;
const KEYS: usize = 8;
const CLIENTS: usize = 8;

/// An address behind which one server takes the place of another, as failovers of managed services
/// do it: connections that stand are left as they are.
struct Address {
    port: u16,
    target: Arc<AtomicU16>,
}

impl Address {
    async fn of(server: &Server) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("it").port();
        let target = Arc::new(AtomicU16::new(server.port));
        let current = Arc::clone(&target);
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let port = current.load(Ordering::SeqCst);
                tokio::spawn(async move {
                    let Ok(mut server) = TcpStream::connect(("127.0.0.1", port)).await else {
                        return;
                    };
                    let _ = copy_bidirectional(&mut client, &mut server).await;
                });
            }
        });
        Self { port, target }
    }
}

/// A node, ended with this value.
struct Node(Child);

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Node {
    fn start(port: u16, redis: u16, limit: &str, leases: &str) -> Self {
        let node = Command::new(example())
            .env("ADDR", format!("127.0.0.1:{port}"))
            .env("REDIS_URL", format!("redis://127.0.0.1:{redis}/"))
            .env("LIMIT", limit)
            .env("LEASES", leases)
            .stdout(Stdio::null())
            .spawn();
        Self(node.expect("cargo build --example redis has made it"))
    }
}

fn example() -> PathBuf {
    // target/release/deps/redis-... and target/release/examples/redis.
    let this = std::env::current_exe().expect("this program");
    this.parent().and_then(|deps| deps.parent()).expect("a target").join("examples/redis")
}

#[derive(Default)]
struct Seen {
    requests: u64,
    passed: u64,
    refused: u64,
    errors: u64,
    slowest: Duration,
    /// By key and window.
    windows: HashMap<(usize, u64), u64>,
}

async fn client(nodes: Vec<u16>, first: usize, seen: Arc<Mutex<Seen>>) {
    let http = reqwest::Client::new();
    for turn in first.. {
        let (node, key) = (nodes[turn % nodes.len()], turn / nodes.len() % KEYS);
        let asked = Instant::now();
        let request = http.get(format!("http://127.0.0.1:{node}/")).header("x-api-key", key);
        let answer = request.timeout(Duration::from_secs(5)).send().await;
        let took = asked.elapsed();
        let status = answer.as_ref().map_or(0, |answer| answer.status().as_u16());
        let reset = answer.ok().and_then(|answer| {
            answer.headers().get("x-ratelimit-reset")?.to_str().ok()?.parse().ok()
        });
        {
            let mut seen = seen.lock().expect("no panic");
            seen.requests += 1;
            seen.slowest = seen.slowest.max(took);
            match (status, reset) {
                (200, Some(reset)) => {
                    seen.passed += 1;
                    *seen.windows.entry((key, reset)).or_default() += 1;
                }
                (429, _) => seen.refused += 1,
                _ => seen.errors += 1,
            }
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "scripts/unplug runs it"]
async fn demonstration() {
    let _alone = ALONE.lock().await;
    // The day counts all requests.
    unplug(&format!("{LIMIT}/2s, 1000000000/day"), "0").await;
    unplug(&format!("{LIMIT}/2s"), "100").await;
}

async fn unplug(limit: &str, leases: &str) {
    let Some(mut first) = Server::start() else { return };
    let Some(second) = Server::start() else { return };
    let address = Address::of(&first).await;
    let ports: Vec<u16> = (0..3).map(|_| free_port()).collect();
    let _nodes: Vec<Node> =
        ports.iter().map(|&port| Node::start(port, address.port, limit, leases)).collect();
    for &port in &ports {
        while TcpStream::connect(("127.0.0.1", port)).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    let seen = Arc::<Mutex<Seen>>::default();
    let clients: Vec<_> = (0..CLIENTS)
        .map(|i| tokio::spawn(client(ports.clone(), i * 5, Arc::clone(&seen))))
        .collect();

    println!("\n{limit}, leases of up to {leases}, refusals are remembered\n");
    println!(
        "| what happens to Redis | requests | passed | refused | errors | slowest | passed per limit |"
    );
    println!("|---|---|---|---|---|---|---|");
    let mut requests = 0;
    let pause = |s| tokio::time::sleep(Duration::from_secs(s));
    let mut report = |what: &str| {
        let seen = std::mem::take(&mut *seen.lock().expect("no panic"));
        requests += seen.requests;
        let most = seen.windows.values().max().copied().unwrap_or(0);
        println!(
            "| {what} | {} | {} | {} | {} | {} ms | {:.2} |",
            seen.requests,
            seen.passed,
            seen.refused,
            seen.errors,
            seen.slowest.as_millis(),
            most as f64 / LIMIT as f64
        );
        assert_eq!(seen.errors, 0, "each request gets its answer");
        // A limit in Redis, one in a Redis that came back empty, and one for each node.
        assert!(most <= 5 * LIMIT, "{what}: {most} passed");
        most
    };

    pause(10).await;
    // Of a lease the last tokens may be on the wrong node.
    let nearly = LIMIT - if leases == "0" { 0 } else { 2 * (LIMIT / 16 - 1) };
    let exact = |passed: u64| assert!((nearly..=LIMIT).contains(&passed), "{passed} passed");
    exact(report("nothing"));
    first.kill();
    pause(6).await;
    report("killed (`kill -9`), gone for 6 s");
    first.restart();
    pause(10).await;
    report("started again, empty");
    first.freeze();
    pause(6).await;
    report("frozen (`SIGSTOP`) for 6 s");
    first.thaw();
    pause(10).await;
    report("thawed");
    for _ in 0..100 {
        first.ask::<String>(&["SCRIPT", "FLUSH"]);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    exact(report("100 x `SCRIPT FLUSH`"));
    second.ask::<String>(&["REPLICAOF", "127.0.0.1", &first.port.to_string()]);
    pause(5).await;
    second.ask::<String>(&["REPLICAOF", "NO", "ONE"]);
    first.ask::<String>(&["REPLICAOF", "127.0.0.1", &second.port.to_string()]);
    pause(1).await;
    address.target.store(second.port, Ordering::SeqCst);
    pause(9).await;
    report("failed over to its replica, within 1 s");
    pause(10).await;
    exact(report("nothing"));
    for client in clients {
        client.abort();
    }

    if leases != "0" {
        return;
    }
    let counted: u64 = second
        .ask::<Vec<String>>(&["KEYS", "tfw1:*"])
        .iter()
        .filter_map(|key| second.ask::<Option<u64>>(&["HGET", key, "86400000+0"]))
        // Added to the start of the day, in microseconds.
        .map(|value| value % 86_400_000_000)
        .sum();
    println!(
        "\n{counted} counted by Redis of {requests} requests, {} twice.",
        counted.saturating_sub(requests)
    );
    assert!(counted <= requests);
}
