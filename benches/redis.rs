//! Decisions in Redis beside what Redis can do at best: a bare `INCR`, and the smallest script that
//! counts in a window (`TIME`, `INCRBY`, `PEXPIREAT`), over one connection, in turns. Decisions that
//! are asked at the same time travel together, except one by one. The last one asks for a single hot
//! key, of which a process takes up to 100 tokens at once.
//!
//! `cargo bench -p benches --bench redis` starts a server of its own (`REDIS_SERVER=valkey-server` another).
//! The server's CPU is what it says of its main thread.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{Script, cmd};
use tower_fixed_window::store::{Account, Charge, RedisStore, Scope, Store};
use tower_fixed_window::{Key, Limiter, Quota, Quotas};

const KEYS: u64 = 1_000;
const MINIMAL: &str = "
    local time = redis.call('TIME')
    local now = time[1] * 1000 + math.floor(time[2] / 1000)
    local used = redis.call('INCRBY', KEYS[1], ARGV[1])
    redis.call('PEXPIREAT', KEYS[1], now - now % ARGV[2] + ARGV[2])
    return used
";

#[derive(Clone)]
#[allow(clippy::large_enum_variant, reason = "there are six of them")]
enum Contestant {
    Incr,
    Minimal(Arc<Script>),
    Store(RedisStore, Scope, Quotas),
    Leases(Limiter),
}

impl Contestant {
    async fn ask(&self, connection: &mut MultiplexedConnection, key: u64) {
        match self {
            Self::Incr => {
                let mut incr = cmd("INCR");
                incr.arg(format!("incr:{key}"))
                    .query_async::<u64>(connection)
                    .await
                    .expect("it answers");
            }
            Self::Minimal(script) => {
                let mut call = script.key(format!("minimal:{key}"));
                call.arg(1)
                    .arg(3_600_000)
                    .invoke_async::<u64>(connection)
                    .await
                    .expect("it answers");
            }
            Self::Store(store, scope, quotas) => {
                let key = Key::from(key);
                let account = Account::new(scope, quotas, &key);
                let decision = store.charge(Charge::new(account, 1)).await.expect("it answers");
                assert!(decision.allowed());
            }
            Self::Leases(limiter) => {
                let decision = limiter.check("hot").await.expect("it answers");
                assert!(decision.allowed());
                // As a server does between two requests.
                tokio::task::coop::consume_budget().await;
            }
        }
    }
}

struct Measured {
    per_second: f64,
    /// Microseconds.
    cpu: f64,
    median: f64,
    /// Decisions in one call.
    together: f64,
}

#[tokio::main]
async fn main() {
    let quick = std::env::args().any(|arg| arg == "--test");
    let (rounds, span) = if quick { (1, 20) } else { (7, 500) };
    let Some(server) = Server::start().await else { return };
    let client = redis::Client::open(("127.0.0.1", server.port)).expect("an address");
    let connection = client.get_multiplexed_async_connection().await.expect("it connects");

    let store = RedisStore::from(connection.clone());
    let of = |name, quotas| Contestant::Store(store.clone(), Scope::named(name), quotas);
    let alone =
        |name, quotas| Contestant::Store(store.clone().one_by_one(), Scope::named(name), quotas);
    let one = Quota::per_hour(1_000_000_000);
    let hot = Limiter::new(one).name("hot").store(store.clone()).leases(100).without_fallback();
    let contestants = [
        ("INCR", Contestant::Incr),
        ("smallest script", Contestant::Minimal(Arc::new(Script::new(MINIMAL)))),
        ("one quota", of("one", one.into())),
        ("one by one", alone("alone", one.into())),
        ("two quotas", of("two", one.and(Quota::per_day(1_000_000_000)))),
        ("one with rollover", of("rollover", one.rollover_up_to(2_000_000_000).into())),
        ("leases of 100", Contestant::Leases(hot)),
    ];
    println!(
        "in flight |              who | decisions/s | of INCR | median us | a call | server us/decision | of the smallest script"
    );
    for in_flight in [1, 16, 64, 256] {
        let mut measured: Vec<Vec<Measured>> = contestants.iter().map(|_| Vec::new()).collect();
        for _ in 0..rounds {
            for ((_, contestant), measured) in contestants.iter().zip(&mut measured) {
                let span = Duration::from_millis(span);
                measured.push(measure(&connection, contestant, in_flight, span).await);
            }
        }
        let incr = median(&measured[0], |m| m.per_second);
        let smallest = median(&measured[1], |m| m.cpu);
        for ((name, _), measured) in contestants.iter().zip(&measured) {
            let cpu = median(measured, |m| m.cpu);
            println!(
                "{in_flight:>9} | {name:>16} | {:>11.0} | {:>7.2} | {:>9.1} | {:>6.1} | {cpu:>18.2} | {:.2}",
                median(measured, |m| m.per_second),
                median(measured, |m| m.per_second) / incr,
                median(measured, |m| m.median),
                median(measured, |m| m.together),
                cpu / smallest,
            );
        }
    }
}

async fn measure(
    connection: &MultiplexedConnection,
    contestant: &Contestant,
    in_flight: u64,
    span: Duration,
) -> Measured {
    let stop = Arc::new(AtomicBool::new(false));
    let (cpu, calls) = (cpu(connection).await, calls(connection).await);
    let start = Instant::now();
    let tasks: Vec<_> = (0..in_flight)
        .map(|task| {
            let stop = Arc::clone(&stop);
            let (contestant, mut connection) = (contestant.clone(), connection.clone());
            tokio::spawn(async move {
                let (mut key, mut took) = (task * 7, Vec::new());
                while !stop.load(Ordering::Relaxed) {
                    key += 1;
                    let start = Instant::now();
                    contestant.ask(&mut connection, key % KEYS).await;
                    took.push(start.elapsed());
                }
                took
            })
        })
        .collect();
    tokio::time::sleep(span).await;
    stop.store(true, Ordering::Relaxed);
    let mut tasks_took = Vec::new();
    for task in tasks {
        tasks_took.push(task.await.expect("no panic"));
    }
    let elapsed = start.elapsed();
    let mut took = tasks_took.concat();
    let asked = took.len() as f64;
    took.sort_unstable();
    Measured {
        per_second: asked / elapsed.as_secs_f64(),
        cpu: (self::cpu(connection).await - cpu) * 1e6 / asked,
        together: asked / (self::calls(connection).await - calls),
        median: took[took.len() / 2].as_secs_f64() * 1e6,
    }
}

fn median(measured: &[Measured], of: impl Fn(&Measured) -> f64) -> f64 {
    let mut numbers: Vec<f64> = measured.iter().map(of).collect();
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

/// Seconds that the server's main thread has spent.
async fn cpu(connection: &MultiplexedConnection) -> f64 {
    let of_main_thread = |line: &str| {
        let (name, value) = line.split_once(':')?;
        name.ends_with("_main_thread").then(|| value.trim().parse::<f64>().expect("a number"))
    };
    info(connection, "cpu").await.lines().filter_map(of_main_thread).sum()
}

/// Calls of a script, and of `INCR`.
async fn calls(connection: &MultiplexedConnection) -> f64 {
    let calls = |line: &str| {
        let calls = line.strip_prefix("cmdstat_evalsha:calls=");
        let calls = calls.or_else(|| line.strip_prefix("cmdstat_incr:calls="))?;
        Some(calls.split_once(',')?.0.parse::<f64>().expect("a number"))
    };
    info(connection, "commandstats").await.lines().filter_map(calls).sum()
}

async fn info(connection: &MultiplexedConnection, section: &str) -> String {
    let mut info = cmd("INFO");
    info.arg(section).query_async(&mut connection.clone()).await.expect("it answers")
}

struct Server {
    child: Child,
    port: u16,
}

impl Server {
    async fn start() -> Option<Self> {
        let binary = std::env::var("REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned());
        let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = free.local_addr().expect("it").port();
        drop(free);
        let child = Command::new(&binary)
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""])
            .args(["--dir", &std::env::temp_dir().display().to_string()])
            .stdout(Stdio::null())
            .spawn();
        let Ok(child) = child else {
            println!("skipped: there is no {binary}");
            return None;
        };
        let server = Self { child, port };
        while tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Some(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
