//! Four processes on a hot key and a few others, of which some are killed, beside transactions that
//! hold rows and connections that end: never more than the limit, and what the table says is what
//! passed.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use harness::Postgres;
use tower_fixed_window::{Limit, Quota};
use tower_fixed_window_postgres::PostgresStore;

const LIMIT: u64 = 20_000;
const CALLERS: u64 = 16;
const YEARS: Duration = Duration::from_secs(10 * 365 * 86_400);
/// Of the limit with two quotas.
const KEYS: u64 = 8;

/// What a process of the tests does, until it is killed, or its time is over, or everything is used
/// up. It prints a line before it asks, and one when it has passed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a process of the tests below"]
async fn node() {
    let Ok(url) = std::env::var("TFW_NODE_OF") else { return };
    let seconds = std::env::var("TFW_NODE_FOR").expect("a time").parse().expect("a number");
    let store = PostgresStore::new(&url).expect("an address").deadline(Duration::from_secs(30));
    let limit = if seconds == 0 { LIMIT } else { 1_000_000_000 };
    let hot = Limit::new(Quota::new(limit, YEARS)).name("hot").store(store.clone());
    let two = Quota::new(limit, YEARS).and(Quota::new(limit, YEARS / 2));
    let two = Limit::new(two).name("two").store(store);
    let start = Instant::now();
    let callers = (0..CALLERS).map(|caller| {
        let (hot, two) = (hot.clone(), two.clone());
        tokio::spawn(async move {
            let mut random = u64::from(std::process::id()) * CALLERS + caller;
            while seconds == 0 || start.elapsed() < Duration::from_secs(seconds) {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let (key, cost) = ((random >> 33) % KEYS, 1 + (random >> 43) % 3);
                let is_hot = seconds == 0 || !(random >> 53).is_multiple_of(3);
                let name = if is_hot { "hot 0 1".to_owned() } else { format!("two {key} {cost}") };
                println!("asks {name}");
                let answer = match is_hot {
                    true => hot.check(0_u64).await,
                    false => two.charge(key, cost).await.map(|charged| match charged {
                        Ok(receipt) => receipt.decision().clone(),
                        Err(refused) => refused.decision().clone(),
                    }),
                };
                match answer {
                    Ok(decision) if decision.is_local() => println!("local {name}"),
                    Ok(decision) if decision.is_allowed() => println!("passed {name}"),
                    Ok(_) => {
                        println!("refused {name}");
                        return;
                    }
                    Err(error) => println!("failed {name} {error}"),
                }
            }
        })
    });
    for caller in callers.collect::<Vec<_>>() {
        caller.await.expect("no panic");
    }
}

fn start(url: &str, seconds: u64) -> Child {
    Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "nodes::node", "--ignored", "--nocapture"])
        .env("TFW_NODE_OF", url)
        .env("TFW_NODE_FOR", seconds.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts")
}

/// The tokens that passed of each counter, and those of which nobody knows if they passed.
#[derive(Default)]
struct Seen {
    passed: HashMap<(String, String), u64>,
    unknown: HashMap<(String, String), u64>,
}

impl Seen {
    fn note(&mut self, line: &str) {
        let mut words = line
            .split(' ')
            .skip_while(|word| !["asks", "passed", "local", "refused", "failed"].contains(word));
        let [Some(what), Some(name), Some(key), Some(cost)] = [(); 4].map(|()| words.next()) else {
            return;
        };
        // A process that is killed may print half a line.
        let Ok(cost) = cost.parse::<u64>() else { return };
        let of = (name.to_owned(), key.to_owned());
        match what {
            "asks" => *self.unknown.entry(of).or_default() += cost,
            // It may be counted there, too.
            "local" | "failed" => {}
            _ => {
                *self.unknown.get_mut(&of).expect("it asked") -= cost;
                *self.passed.entry(of).or_default() += if what == "passed" { cost } else { 0 };
            }
        }
    }

    /// The table has what passed, and at most what may have passed.
    fn agrees_with(&self, server: &Postgres) {
        let table = server.run("SELECT name, key, used FROM tfw");
        assert!(!table.is_empty());
        let mut rows = 0;
        for row in table.lines() {
            let [name, key, used] = row.split('|').collect::<Vec<_>>()[..] else {
                panic!("three columns: {row}")
            };
            let (of, used) = ((name.to_owned(), key.to_owned()), used.parse().expect("a number"));
            let passed = self.passed.get(&of).copied().unwrap_or_default();
            let unknown = self.unknown.get(&of).copied().unwrap_or_default();
            assert!(
                (passed..=passed + unknown).contains(&used),
                "{of:?}: {passed} passed, of {unknown} nobody knows, and {used} are counted"
            );
            rows += usize::from(passed > 0);
        }
        let two = self.passed.iter().filter(|((name, _), n)| name == "two" && **n > 0).count();
        let hot = self.passed.iter().filter(|((name, _), n)| name == "hot" && **n > 0).count();
        assert_eq!(rows, 2 * two + hot, "each row that passed is there");
        let passed: u64 = self.passed.values().sum();
        let unknown: u64 = self.unknown.values().sum();
        println!("{passed} passed, of {unknown} nobody knows");
    }
}

/// Reads what a process prints, until it ends.
fn watch(node: &mut Child, seen: &Mutex<Seen>, mut each: impl FnMut(&str, &mut Child)) {
    let lines = BufReader::new(node.stdout.take().expect("piped")).lines();
    for line in lines.map_while(Result::ok) {
        seen.lock().expect("no panic").note(&line);
        each(&line, node);
    }
    node.wait().expect("it ends");
}

#[tokio::test]
async fn four_processes_never_pass_more_than_the_limit() {
    let Some((server, _)) = crate::start().await else { return };
    let seen = Mutex::new(Seen::default());
    std::thread::scope(|scope| {
        for i in 0..4 {
            let (mut node, seen) = (start(&server.url(), 0), &seen);
            scope.spawn(move || {
                let mut passed = 0;
                watch(&mut node, seen, |line, node| {
                    passed += usize::from(line.contains("passed"));
                    // Two are killed while the others go on.
                    if i < 2 && passed == 500 {
                        node.kill().expect("it runs");
                    }
                });
            });
        }
    });
    let seen = seen.into_inner().expect("no panic");
    seen.agrees_with(&server);
    assert_eq!(server.run("SELECT used FROM tfw"), LIMIT.to_string(), "all of it was used");
}

/// Processes that are killed and started again, connections that end, rows that are locked, and
/// counters that have ended being deleted.
#[tokio::test]
async fn what_the_table_says_is_what_passed() {
    let seconds: u64 = if std::env::var_os("FULL_SIZE").is_some() { 60 } else { 4 };
    let Some(server) = Postgres::with(&["max_connections=50"]) else { return };
    let store = PostgresStore::new(&server.url()).expect("an address");
    let store = store.deadline(Duration::from_secs(20));
    store.create_tables().await.expect("it is created");
    let (seen, is_over) = (Mutex::new(Seen::default()), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let nodes = (0..4).map(|i| {
            let (server, seen) = (&server, &seen);
            scope.spawn(move || {
                let start_of_all = Instant::now();
                let left = || seconds.saturating_sub(start_of_all.elapsed().as_secs());
                loop {
                    let mut node = start(&server.url(), left().max(1));
                    let lives = Duration::from_millis(700 + 400 * i);
                    let (since, mut is_killed) = (Instant::now(), false);
                    watch(&mut node, seen, |_, node| {
                        // Two live to the end.
                        if i < 2 && since.elapsed() > lives && !is_killed && left() > 1 {
                            node.kill().expect("it runs");
                            is_killed = true;
                        }
                    });
                    if left() <= 1 {
                        return;
                    }
                }
            })
        });
        let nodes: Vec<_> = nodes.collect();
        let (server, is_over) = (&server, &is_over);
        scope.spawn(move || {
            let mut round = 0;
            while !is_over.load(Relaxed) {
                round += 1;
                std::thread::sleep(Duration::from_millis(100));
                match round % 5 {
                    0 => server.run(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                         WHERE application_name = 'tower-fixed-window' ORDER BY random() LIMIT 1",
                    ),
                    1 => server.run(
                        "BEGIN; SELECT FROM tfw_counters WHERE scope = 'hot' FOR UPDATE; \
                         SELECT pg_sleep(0.05); COMMIT",
                    ),
                    2 => server.run("VACUUM ANALYZE tfw_counters"),
                    3 => server.run("VACUUM FULL tfw_counters"),
                    _ => server.run(
                        "BEGIN; SELECT FROM tfw_counters WHERE scope = 'two' AND key < 'u4' \
                         ORDER BY random() LIMIT 5 FOR UPDATE SKIP LOCKED; \
                         SELECT pg_sleep(0.03); COMMIT",
                    ),
                };
            }
        });
        nodes.into_iter().for_each(|node| node.join().expect("no panic"));
        is_over.store(true, Relaxed);
    });
    seen.into_inner().expect("no panic").agrees_with(&server);
}
