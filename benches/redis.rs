//! Decisions in Redis, compared with the least that Redis can do: a bare `INCR`, and the smallest
//! script that counts in a window (`TIME`, `INCRBY`, `PEXPIREAT`), over one connection, in turns.
//! Concurrent decisions share calls, except in the rows "one by one". The last row is a single hot
//! key: a command counts all its decisions of a call.
//!
//! Then decisions at a distance, which a proxy in this process makes: in shared calls and one by
//! one, in turns, and 100,000 at once.
//!
//! `cargo bench -p benches --bench redis` starts its own server (`REDIS_SERVER=valkey-server`:
//! another server). `-- near`, `-- far`, `-- crowd` and `-- together` print one of the four tables;
//! the last one has three limits in one charge. The server's CPU is that of its main thread.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[path = "redis/together.rs"]
mod together;

use harness::{Proxy, Server};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Script, cmd};
use tower_fixed_window::store::{Account, Charge, Scope, Store};
use tower_fixed_window::{Key, Limit, Limiter, OnStoreFailure, Quota, Quotas};
use tower_fixed_window_redis::RedisStore;

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
    Hot(Limiter),
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
                assert!(decision.is_allowed());
            }
            Self::Hot(limiter) => {
                let decision = limiter.check("hot").await.expect("it answers");
                assert!(decision.is_allowed());
                // Yields, as a server does between two requests.
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
    let args: Vec<String> = std::env::args().collect();
    let has = |name: &str| args.iter().any(|arg| arg == name);
    if let Some(i) = args.iter().position(|arg| arg == "--crowd-of-one-round") {
        return crowd_of_one_round(&args[i + 1..]).await;
    }
    let Some(server) = Server::start() else { return };
    let quick = has("--test");
    let all = !["near", "far", "crowd", "together"].into_iter().any(has);
    if all || has("near") {
        near(&server, quick).await;
    }
    if all || has("far") {
        distances(&server, quick).await;
    }
    if all || has("crowd") {
        crowd(&server, quick);
    }
    if all || has("together") {
        together::together(&server, quick).await;
    }
}

/// A machine that stands still for a while is no failure of the store, nor of the client library.
const PATIENCE: Duration = Duration::from_secs(20);

async fn connect(client: &redis::Client) -> MultiplexedConnection {
    let config = AsyncConnectionConfig::new().set_response_timeout(Some(PATIENCE));
    client.get_multiplexed_async_connection_with_config(&config).await.expect("it connects")
}

async fn near(server: &Server, quick: bool) {
    let (rounds, span) = if quick { (1, 20) } else { (7, 500) };
    let client = redis::Client::open(server.url()).expect("an address");
    let info = client.get_connection_info().clone();
    // The store sets this, too.
    let settings = info.tcp_settings().clone().set_nodelay(true);
    let client = redis::Client::open(info.set_tcp_settings(settings)).expect("an address");
    let connection = connect(&client).await;

    let store = RedisStore::from(connection.clone()).on_failure(OnStoreFailure::Deny);
    let store = store.deadline(PATIENCE);
    let of = |name, quotas| Contestant::Store(store.clone(), Scope::named(name), quotas);
    let alone =
        |name, quotas| Contestant::Store(store.clone().one_by_one(), Scope::named(name), quotas);
    let one = Quota::per_hour(1_000_000_000);
    let hot = Limit::new(one).name("hot").store(store.clone());
    let contestants = [
        ("INCR", Contestant::Incr),
        ("smallest script", Contestant::Minimal(Arc::new(Script::new(MINIMAL)))),
        ("one quota", of("one", one.into())),
        ("one by one", alone("alone", one.into())),
        ("two quotas", of("two", one.and(Quota::per_day(1_000_000_000)))),
        ("one with rollover", of("rollover", one.rollover_up_to(2_000_000_000).into())),
        ("one hot key", Contestant::Hot(hot)),
    ];
    println!(
        "| at once | | decisions/s | of INCR | median us | in one call | server us | of the smallest script |"
    );
    println!("|---|---|---|---|---|---|---|---|");
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
                "| {in_flight} | {name} | {:.0} | {:.2} | {:.1} | {:.1} | {cpu:.2} | {:.2} |",
                median(measured, |m| m.per_second),
                median(measured, |m| m.per_second) / incr,
                median(measured, |m| m.median),
                median(measured, |m| m.together),
                cpu / smallest,
            );
        }
    }
}

/// The results of the callers.
struct Seen {
    per_second: f64,
    /// Milliseconds.
    median: f64,
    late: f64,
    /// Decisions without Redis.
    local: f64,
}

fn limiter(url: &str, one_by_one: bool) -> Limiter {
    let store = RedisStore::new(url).expect("an address");
    let store = if one_by_one { store.one_by_one() } else { store };
    Quota::per_hour(1_000_000_000).name("far").store(store)
}

async fn distances(server: &Server, quick: bool) {
    let (rounds, warm, span) = if quick { (1, 20, 5) } else { (7, 250, 750) };
    println!(
        "\n| one way | at once | decisions/s | one by one | of it | median ms | one by one | of it | 99th ms | one by one | of it | local | one by one |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    let only = std::env::var("ONLY").ok();
    for distance in [0, 1, 5, 20] {
        let far = Proxy::to(server.port).delay(Duration::from_millis(distance));
        let url = if distance == 0 { server.url() } else { far.url() };
        let contestants = [limiter(&url, false), limiter(&url, true)];
        let crowds: &[u64] = if quick { &[1, 256] } else { &[1, 16, 256, 2_000, 10_000] };
        for &at_once in crowds {
            if only.as_ref().is_some_and(|only| *only != format!("{distance}/{at_once}")) {
                continue;
            }
            let mut seen = [Vec::new(), Vec::new()];
            for _ in 0..rounds {
                for (contestant, seen) in contestants.iter().zip(&mut seen) {
                    let [warm, span] = [warm, span].map(Duration::from_millis);
                    seen.push(see(contestant, at_once, warm, span).await);
                }
            }
            let of = |of: fn(&Seen) -> f64| seen.each_ref().map(|seen| median(seen, of));
            let [[calls, calls_of], [middle, middle_of], [late, late_of], [local, local_of]] =
                [of(|s| s.per_second), of(|s| s.median), of(|s| s.late), of(|s| s.local)];
            println!(
                "| {distance} ms | {at_once} | {calls:.0} | {calls_of:.0} | {:.2} | {middle:.2} | {middle_of:.2} | {:.2} | {late:.2} | {late_of:.2} | {:.2} | {local} | {local_of} |",
                calls / calls_of,
                middle / middle_of,
                late / late_of,
            );
        }
    }
}

/// Runs callers that send the next request as soon as they have the answer.
async fn see(limiter: &Limiter, at_once: u64, warm: Duration, span: Duration) -> Seen {
    let stop = Arc::new(AtomicBool::new(false));
    let since = Instant::now() + warm;
    let tasks: Vec<_> = (0..at_once)
        .map(|task| {
            let (stop, limiter) = (Arc::clone(&stop), limiter.clone());
            tokio::spawn(async move {
                let (mut key, mut took, mut local) = (task * 7, Vec::new(), 0);
                while !stop.load(Ordering::Relaxed) {
                    key += 1;
                    let start = Instant::now();
                    let decision = limiter.check(key % KEYS).await.expect("memory answers");
                    let now = Instant::now();
                    // Requests that began before count as well, so that slow requests are not left
                    // out.
                    if now > since && now < since + span {
                        took.push(now - start);
                        local += u32::from(decision.is_local());
                    }
                }
                (took, local)
            })
        })
        .collect();
    tokio::time::sleep_until((since + span).into()).await;
    stop.store(true, Ordering::Relaxed);
    let (mut took, mut local) = (Vec::new(), 0);
    for task in tasks {
        let (task_took, task_local) = task.await.expect("no panic");
        took.extend(task_took);
        local += task_local;
    }
    took.sort_unstable();
    let at =
        |part: usize| took.get(took.len() * part / 100).map_or(f64::NAN, Duration::as_secs_f64);
    Seen {
        per_second: took.len() as f64 / span.as_secs_f64(),
        median: at(50) * 1e3,
        late: at(99) * 1e3,
        local: f64::from(local),
    }
}

/// Each round is a process of its own, so that its memory is the crowd's.
fn crowd(server: &Server, quick: bool) {
    let (rounds, at_once) = if quick { (1, 1_000) } else { (7, 100_000) };
    println!("\n{at_once} at once, each a single time, 1 ms one way; medians of {rounds}\n");
    println!("| | done in ms | median ms | 99th ms | local | bytes each | shared again after ms |");
    println!("|---|---|---|---|---|---|---|");
    let mut seen = [Vec::new(), Vec::new()];
    for _ in 0..rounds {
        for (who, seen) in ["gathered", "one-by-one"].iter().zip(&mut seen) {
            let this = std::env::current_exe().expect("this program");
            let out = Command::new(this)
                .args(["--crowd-of-one-round", who])
                .args([server.port.to_string(), at_once.to_string()])
                .output()
                .expect("it runs");
            let out = String::from_utf8(out.stdout).expect("text");
            let numbers = out.split_whitespace().map(|n| n.parse().expect("a number"));
            seen.push(numbers.collect::<Vec<f64>>());
        }
    }
    for (who, seen) in ["gathered", "one by one"].iter().zip(&seen) {
        let of = |i: usize| median(seen, |seen| seen[i]);
        println!(
            "| {who} | {:.0} | {:.0} | {:.0} | {} | {:.0} | {:.1} |",
            of(0),
            of(1),
            of(2),
            of(3),
            of(4),
            of(5)
        );
    }
}

async fn crowd_of_one_round(args: &[String]) {
    let [who, port, at_once] = args else { panic!("who, port, how many") };
    let far = Proxy::to(port.parse().expect("a port")).delay(Duration::from_millis(1));
    let limiter = limiter(&far.url(), who == "one-by-one");
    let at_once: u64 = at_once.parse().expect("a number");
    while limiter.check(0).await.expect("memory answers").is_local() {}
    let before = memory();
    let start = Instant::now();
    let tasks: Vec<_> = (0..at_once)
        .map(|key| {
            let limiter = limiter.clone();
            tokio::spawn(async move {
                let start = Instant::now();
                let decision = limiter.check(key % KEYS).await.expect("memory answers");
                (start.elapsed(), decision.is_local())
            })
        })
        .collect();
    let (mut took, mut local) = (Vec::new(), 0);
    let mut most = memory();
    for task in tasks {
        let (task_took, is_local) = task.await.expect("no panic");
        if took.len() % 1_000 == 0 {
            most = most.max(memory());
        }
        took.push(task_took);
        local += u32::from(is_local);
    }
    let (done, burst) = (start.elapsed(), Instant::now());
    // Waits for ten shared decisions in a row.
    let (mut shared, mut again) = (0, Duration::ZERO);
    while shared < 10 {
        match limiter.check(0).await.expect("memory answers").is_local() {
            true => shared = 0,
            false if shared == 0 => (shared, again) = (1, burst.elapsed()),
            false => shared += 1,
        }
    }
    took.sort_unstable();
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let at = |part: usize| ms(took[(took.len() - 1) * part / 100]);
    let each = most.saturating_sub(before) as f64 / at_once as f64;
    println!("{} {} {} {local} {each} {}", ms(done), at(50), at(99), ms(again));
}

/// Bytes of this process that are in memory.
fn memory() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0) * 4_096
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

fn median<T>(measured: &[T], of: impl Fn(&T) -> f64) -> f64 {
    let mut numbers: Vec<f64> = measured.iter().map(of).collect();
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

/// Seconds of processor time that the server's main thread has used.
async fn cpu(connection: &MultiplexedConnection) -> f64 {
    let of_main_thread = |line: &str| {
        let (name, value) = line.split_once(':')?;
        name.ends_with("_main_thread").then(|| value.trim().parse::<f64>().expect("a number"))
    };
    info(connection, "cpu").await.lines().filter_map(of_main_thread).sum()
}

/// The number of script and `INCR` calls.
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
