//! Three limits in one charge, compared with three charges of one limit each, one after the other.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use tower_fixed_window::{Limits, Line, OnStoreFailure, Quota};
use tower_fixed_window_redis::RedisStore;

use super::{PATIENCE, Server, connect, cpu, info, median};

/// Enough keys that no refusal is remembered when a key comes again, a second later.
const KEYS: u64 = 100_000;
const LIMIT: u64 = 1_000_000_000;
const NAMES: [&str; 3] = ["requests", "tokens", "cents"];

#[derive(Clone, Copy)]
enum Asks {
    One,
    Three,
    Group,
}

#[derive(Clone, Copy)]
struct Contestant {
    name: &'static str,
    asks: Asks,
    /// The cost for each limit. A cost of `LIMIT` is refused, since some tokens are used.
    costs: [u64; 3],
}

const ALLOWED: [u64; 3] = [1; 3];
const REFUSED: [u64; 3] = [LIMIT; 3];
const CONTESTANTS: [Contestant; 7] = [
    Contestant { name: "one, allowed", asks: Asks::One, costs: ALLOWED },
    Contestant { name: "three, allowed", asks: Asks::Three, costs: ALLOWED },
    Contestant { name: "group, allowed", asks: Asks::Group, costs: ALLOWED },
    Contestant { name: "one, refused", asks: Asks::One, costs: REFUSED },
    Contestant { name: "three, refused", asks: Asks::Three, costs: REFUSED },
    Contestant { name: "group, refused by all", asks: Asks::Group, costs: REFUSED },
    Contestant { name: "group, refused by one", asks: Asks::Group, costs: [1, 1, LIMIT] },
];
impl Contestant {
    async fn ask(&self, limits: &Limits, key: u64) {
        let passed = match self.asks {
            Asks::Group => {
                let line = |i: usize| Line::new(NAMES[i], key, self.costs[i]);
                let decision = limits.check([line(0), line(1), line(2)]).await;
                decision.expect("it answers").is_allowed()
            }
            Asks::One | Asks::Three => {
                let count = if matches!(self.asks, Asks::One) { 1 } else { 3 };
                let mut passed = true;
                for (name, cost) in NAMES.into_iter().zip(self.costs).take(count) {
                    let charged = limits.limiter(name).charge(key, cost).await;
                    passed &= charged.expect("it answers").is_ok();
                }
                passed
            }
        };
        assert_ne!(passed, self.is_refused());
    }

    fn is_refused(&self) -> bool {
        self.costs[2] == LIMIT
    }
}

/// Microseconds of a request: its limits one after the other, or in one charge.
struct Measured {
    median: f64,
    calls: f64,
    server: f64,
    script: f64,
    node: f64,
}

/// The server's work so far: script calls, their time, and its CPU, in microseconds.
async fn work(connection: &MultiplexedConnection) -> [f64; 3] {
    let stats = info(connection, "commandstats").await;
    let script = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:"));
    let of = |name: &str| {
        let mut fields = script.unwrap_or_default().split(',');
        let value = fields.find_map(|field| field.strip_prefix(name)?.strip_prefix('='));
        value.map_or(0.0, |value| value.parse().expect("a number"))
    };
    [of("calls"), of("usec"), cpu(connection).await * 1e6]
}

/// The CPU time of this process's threads, in microseconds.
fn node_cpu() -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let times = tasks.filter_map(|task| {
        let times = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        times.split(' ').next()?.parse::<f64>().ok()
    });
    times.sum::<f64>() / 1e3
}

pub(crate) async fn together(server: &Server, quick: bool) {
    let (rounds, span) = if quick { (1, 20) } else { (9, 400) };
    let client = redis::Client::open(server.url());
    let client = client.expect("an address");
    let connection = connect(&client).await;
    let store = RedisStore::from_client(client).on_failure(OnStoreFailure::Deny);
    let store = store.deadline(PATIENCE);
    // A window that began in a run would forget the tokens that refusals depend on.
    let limits = NAMES.map(|name| Quota::new(LIMIT, Quota::MAX_WINDOW).name(name));
    let limits = Limits::new(limits).store(store);
    // All counters exist, as those of returning users do.
    run(&limits, CONTESTANTS[2], 256, |key, _| key >= KEYS).await;

    println!(
        "\nthree limits of a request; us of one request, and as a part of three charges' us\n"
    );
    println!(
        "| at once | | calls | median us | of it | server CPU us | of it | script us | of it | node CPU us | of it |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    for at_once in [1, 64, 256] {
        let mut measured = CONTESTANTS.map(|_| Vec::new());
        for _ in 0..rounds {
            for (contestant, measured) in CONTESTANTS.into_iter().zip(&mut measured) {
                let span = Duration::from_millis(span);
                measured.push(measure(&connection, &limits, contestant, at_once, span).await);
            }
        }
        for (i, contestant) in CONTESTANTS.iter().enumerate() {
            let three = if contestant.is_refused() { 4 } else { 1 };
            let of = |of: fn(&Measured) -> f64| {
                let this = median(&measured[i], of);
                format!("{this:.2} | {:.2}", this / median(&measured[three], of))
            };
            println!(
                "| {at_once} | {} | {:.3} | {} | {} | {} | {} |",
                contestant.name,
                median(&measured[i], |m| m.calls),
                of(|m| m.median),
                of(|m| m.server),
                of(|m| m.script),
                of(|m| m.node),
            );
        }
    }
}

/// The time of each request, of callers that send the next one as soon as they have the answer.
async fn run(
    limits: &Limits,
    contestant: Contestant,
    at_once: u64,
    is_over: impl Fn(u64, Duration) -> bool + Copy + Send + 'static,
) -> Vec<Duration> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let begin = Instant::now();
    let callers = (0..at_once).map(|_| {
        let limits = limits.clone();
        tokio::spawn(async move {
            let mut took = Vec::new();
            loop {
                let (key, start) = (NEXT.fetch_add(1, Ordering::Relaxed), Instant::now());
                if is_over(key, start - begin) {
                    return took;
                }
                contestant.ask(&limits, key % KEYS).await;
                took.push(start.elapsed());
            }
        })
    });
    let mut took = Vec::new();
    for caller in callers.collect::<Vec<_>>() {
        took.extend(caller.await.expect("no panic"));
    }
    took
}

async fn measure(
    connection: &MultiplexedConnection,
    limits: &Limits,
    contestant: Contestant,
    at_once: u64,
    span: Duration,
) -> Measured {
    let (before, node) = (work(connection).await, node_cpu());
    let mut took = run(limits, contestant, at_once, move |_, passed| passed > span).await;
    let (node, after) = (node_cpu() - node, work(connection).await);
    took.sort_unstable();
    let each = |of: f64| of / took.len() as f64;
    let [calls, script, server] = [0, 1, 2].map(|i| each(after[i] - before[i]));
    let median = took[took.len() / 2].as_secs_f64() * 1e6;
    Measured { median, calls, server, script, node: each(node) }
}
