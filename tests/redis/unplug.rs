//! The demonstration: three nodes of the `redis` example under load, on a Redis to which everything
//! happens. `scripts/unplug` runs it.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use harness::{ALONE, Proxy, Server, free_port};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tower_fixed_window::{Limiter, Quota};
use tower_fixed_window_redis::RedisStore;

use crate::cluster_and_sentinel::{cluster_with, urls};
use crate::silent_hosts::key_on;

const LIMIT: u64 = 100;
const KEYS: usize = 8;
const CLIENTS: usize = 8;

/// A node, ended with this value.
struct Node(Child);

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Node {
    fn start(port: u16, redis: u16, limit: &str) -> Self {
        let node = Command::new(example())
            .env("ADDR", format!("127.0.0.1:{port}"))
            .env("REDIS_URL", format!("redis://127.0.0.1:{redis}/"))
            .env("LIMIT", limit)
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

impl Seen {
    /// The most that passed of one key in one window.
    fn most(&self) -> u64 {
        self.windows.values().max().copied().unwrap_or(0)
    }

    fn row(&self, what: &str) -> String {
        assert_eq!(self.errors, 0, "each request gets its answer");
        format!(
            "| {what} | {} | {} | {} | {} | {} ms | {:.2} |",
            self.requests,
            self.passed,
            self.refused,
            self.errors,
            self.slowest.as_millis(),
            self.most() as f64 / LIMIT as f64
        )
    }
}

/// Three nodes on the Redis behind a port, and their clients. They end with this value.
struct Run {
    _nodes: Vec<Node>,
    clients: Vec<JoinHandle<()>>,
    seen: Arc<Mutex<Seen>>,
}

impl Run {
    async fn start(redis: u16, limit: &str) -> Self {
        let ports: Vec<u16> = (0..3).map(|_| free_port()).collect();
        let nodes = ports.iter().map(|&port| Node::start(port, redis, limit)).collect();
        for &port in &ports {
            while TcpStream::connect(("127.0.0.1", port)).await.is_err() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        let seen = Arc::<Mutex<Seen>>::default();
        let clients = (0..CLIENTS)
            .map(|i| tokio::spawn(client(ports.clone(), i * 5, Arc::clone(&seen))))
            .collect();
        Self { _nodes: nodes, clients, seen }
    }

    /// The results of clients since the last call.
    fn seen(&self) -> Seen {
        std::mem::take(&mut *self.seen.lock().expect("no panic"))
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.clients.iter().for_each(JoinHandle::abort);
    }
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
    let limit = &format!("{LIMIT}/2s, 1000000000/day");
    let Some(mut first) = Server::start() else { return };
    let Some(second) = Server::start() else { return };
    // Behind it, one server takes the place of another, as failovers of managed services do it.
    let address = Proxy::to(first.port);
    let run = Run::start(address.port, limit).await;

    println!("\n{limit}\n");
    println!(
        "| what happens to Redis | requests | passed | refused | errors | slowest | passed per limit |"
    );
    println!("|---|---|---|---|---|---|---|");
    let mut requests = 0;
    let pause = |s| tokio::time::sleep(Duration::from_secs(s));
    let mut report = |what: &str| {
        let seen = run.seen();
        requests += seen.requests;
        println!("{}", seen.row(what));
        let most = seen.most();
        // A limit in Redis, one in a Redis that came back empty, and one for each node.
        assert!(most <= 5 * LIMIT, "{what}: {most} passed");
        most
    };

    pause(10).await;
    assert_eq!(report("nothing"), LIMIT);
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
    assert_eq!(report("100 x `SCRIPT FLUSH`"), LIMIT);
    second.ask::<String>(&["REPLICAOF", "127.0.0.1", &first.port.to_string()]);
    pause(5).await;
    second.ask::<String>(&["REPLICAOF", "NO", "ONE"]);
    first.ask::<String>(&["REPLICAOF", "127.0.0.1", &second.port.to_string()]);
    pause(1).await;
    address.set_target(second.port);
    pause(9).await;
    report("failed over to its replica, within 1 s");
    pause(10).await;
    assert_eq!(report("nothing"), LIMIT);
    drop(run);

    let counted = counted(&second);
    println!(
        "\n{counted} counted by Redis of {requests} requests, {} twice.",
        counted.saturating_sub(requests)
    );
    assert!(counted <= requests);
}

/// A Redis that does not fail, but takes its time.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "scripts/unplug runs it"]
async fn slow() {
    let _alone = ALONE.lock().await;
    // The day counts all requests.
    let limit = &format!("{LIMIT}/2s, 1000000000/day");
    let Some(server) = Server::start() else { return };
    let far = Proxy::to(server.port);
    let run = Run::start(far.port, limit).await;
    println!("\n{limit}, Redis is slow\n");
    println!(
        "| how Redis answers | requests | passed | refused | errors | slowest | passed per limit | passed without Redis |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    let mut before = 0;
    let mut report = |what: &str| {
        let counted = counted(&server);
        let seen = run.seen();
        // Requests in flight may be counted already.
        let local = seen.passed.saturating_sub(counted - before);
        before = counted;
        println!("{} {local} |", seen.row(what));
        let most = seen.most();
        assert!(most <= 4 * LIMIT, "{what}: {most} passed");
        (most, local)
    };
    let pause = |s| tokio::time::sleep(Duration::from_secs(s));
    let shared =
        |(most, local)| assert!(most <= LIMIT && local <= CLIENTS as u64, "{most} {local}");
    pause(6).await;
    shared(report("at once"));
    far.set_delay(|| Duration::from_millis(100));
    pause(10).await;
    shared(report("round trips of 200 ms"));
    far.set_delay(|| Duration::ZERO);
    pause(4).await;
    report("at once");
    let mut last = Instant::now();
    far.set_delay(move || {
        if last.elapsed() < Duration::from_secs(3) {
            return Duration::ZERO;
        }
        last = Instant::now();
        Duration::from_millis(400)
    });
    pause(12).await;
    report("spikes of 400 ms, every 3 s");
    let mut packets = 0;
    far.set_delay(move || {
        packets += 1;
        Duration::from_millis(if packets % 100 == 0 { 200 } else { 0 })
    });
    pause(10).await;
    report("1% of packets stall for 200 ms");
    far.set_delay(|| Duration::ZERO);
    pause(3).await;
    report("at once");
    pause(6).await;
    shared(report("at once"));
}

/// All requests that passed, as the day counts them.
fn counted(server: &Server) -> u64 {
    server
        .ask::<Vec<String>>(&["KEYS", "tfw1:*"])
        .iter()
        .filter_map(|key| server.ask::<Option<u64>>(&["HGET", key, "86400000+0"]))
        // Added to the start of the day, in microseconds.
        .map(|value| value % 86_400_000_000)
        .sum()
}

/// The results of callers while the network or a part of Redis fails.
async fn callers(
    what: &str,
    limiters: &[Limiter],
    keys: &[u64],
    tasks: usize,
    pause: Duration,
    patience: Duration,
    time: Duration,
) {
    let start = Instant::now();
    let asking: Vec<_> = (0..tasks)
        .map(|task| {
            let (limiters, keys) = (limiters.to_vec(), keys.to_vec());
            tokio::spawn(async move {
                let (mut seen, mut slowest) = ([0; 3], Duration::ZERO);
                for turn in task.. {
                    if start.elapsed() >= time {
                        return (seen, slowest);
                    }
                    let asked = Instant::now();
                    let limiter = &limiters[turn % limiters.len()];
                    let answer = limiter.check(keys[turn % keys.len()]);
                    let by = match tokio::time::timeout(patience, answer).await {
                        Ok(Ok(decision)) if !decision.is_local() => 0,
                        Ok(_) => 1,
                        Err(_) => 2,
                    };
                    seen[by] += 1;
                    slowest = slowest.max(asked.elapsed());
                    tokio::time::sleep(pause).await;
                }
                unreachable!("turns have no end")
            })
        })
        .collect();
    let (mut seen, mut slowest) = ([0; 3], Duration::ZERO);
    for task in asking {
        let (of_task, longest) = task.await.expect("no panic");
        seen.iter_mut().zip(of_task).for_each(|(all, one)| *all += one);
        slowest = slowest.max(longest);
    }
    let [redis, memory, gave_up] = seen;
    let all = redis + memory + gave_up;
    println!("| {what} | {all} | {redis} | {memory} | {gave_up} | {} ms |", slowest.as_millis());
}

/// The network between nodes and Redis, and a cluster of which a part is gone.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "scripts/unplug runs it"]
async fn network() {
    let _alone = ALONE.lock().await;
    let (ms, s, long) = (Duration::from_millis, Duration::from_secs, Duration::from_secs(60));
    let limiter =
        |store| Quota::per_day(1_000_000_000).from_first_request().name("outage").store(store);
    println!("\n| what happens | requests | by Redis | by memory | given up | slowest |");
    println!("|---|---|---|---|---|---|");
    {
        let Some(server) = Server::with(&["--save", "", "--timeout", "1"]) else { return };
        let nodes = nodes_of(&server.url(), &limiter);
        let what = "the server closes connections after 1 s; two nodes, a request every 2.5 s";
        callers(what, &nodes, &[1], 1, ms(2_500), long, s(15)).await;
    }
    let Some(server) = Server::start() else { return };
    {
        let proxy = Proxy::to(server.port).forgets_after(s(2));
        let nodes = nodes_of(&proxy.url(), &limiter);
        let what = "the network forgets connections after 2 s; two nodes, a request every 3 s";
        callers(what, &nodes, &[1], 1, s(3), long, s(15)).await;
        let proxy = Proxy::to(server.port).forgets_after(s(2)).delay(ms(20));
        let nodes = nodes_of(&proxy.url(), &limiter);
        let what = "the same, 20 ms away";
        callers(what, &nodes, &[1], 1, s(3), long, s(15)).await;
    }
    let proxy = Proxy::to(server.port);
    let far = nodes_of(&proxy.url(), &limiter);
    callers("nothing", &far, &[1, 2], 8, ms(5), long, s(5)).await;
    proxy.forget();
    callers("all connections are forgotten under load", &far, &[1, 2], 8, ms(5), long, s(5)).await;
    proxy.forget();
    let what = "the same, for callers that give up after 100 ms";
    callers(what, &far, &[1, 2], 8, ms(5), ms(100), s(5)).await;
    proxy.set_silent(true);
    callers("the master falls silent", &far, &[1, 2], 8, ms(5), long, s(5)).await;
    let what = "it is still silent, for callers that give up after 100 ms";
    callers(what, &far, &[1, 2], 8, ms(5), ms(100), s(5)).await;
    proxy.set_silent(false);
    callers("it answers again", &far, &[1, 2], 8, ms(5), long, s(5)).await;

    let options = ["--cluster-require-full-coverage", "no"];
    let Some(mut shards) = cluster_with(&options) else { return };
    let keys: Vec<u64> = shards.iter().map(key_on).collect();
    let cluster = [limiter(RedisStore::cluster(urls(&shards)).expect("addresses"))];
    callers("a cluster: nothing", &cluster, &keys, 8, ms(5), long, s(5)).await;
    shards[1].kill();
    let healthy = [keys[0], keys[2]];
    tokio::join!(
        callers(
            "one of its three shards is killed: its keys",
            &cluster,
            &keys[1..2],
            4,
            ms(5),
            long,
            s(5)
        ),
        callers("the keys of the others", &cluster, &healthy, 4, ms(5), long, s(5)),
    );
}

fn nodes_of(url: &str, limiter: &impl Fn(RedisStore) -> Limiter) -> [Limiter; 2] {
    [(); 2].map(|()| limiter(RedisStore::new(url).expect("an address")))
}
