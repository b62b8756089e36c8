//! Connections that are cut while Redis is well, and other failures under load: how many requests
//! the policy decides, and for how long.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use harness::{ALONE, Fate, Proxy, Server, gateway, wait_for};
use tokio::task::JoinHandle;
use tower_fixed_window::{Limiter, OnStoreFailure, Quota};
use tower_fixed_window_redis::RedisStore;

use crate::silent_hosts::watched;

const DISTANCES: [u64; 3] = [0, 1, 20];
const LOADS: [usize; 3] = [1, 32, 1_000];

fn limiter(store: RedisStore) -> Limiter {
    Quota::per_day(1_000_000_000).from_first_request().name("cuts").store(store)
}

fn store(port: u16) -> RedisStore {
    RedisStore::new(format!("redis://127.0.0.1:{port}/")).expect("an address")
}

/// Callers that ask again as soon as they were answered.
struct Callers {
    stop: Arc<AtomicBool>,
    /// When requests were asked, and answered, that the policy has decided.
    local: Arc<Mutex<Vec<(Instant, Instant)>>>,
    tasks: Vec<JoinHandle<u64>>,
}

/// The decisions of the policy while the store fails.
#[derive(Debug)]
struct Policy {
    asked: u64,
    decided: usize,
    /// The time from the failure to the last decision by the policy.
    lasted: Duration,
    slowest: Duration,
}

impl Policy {
    fn row(&self, what: &str, distance: u64, load: usize) {
        let Self { asked, decided, lasted, slowest } = self;
        let (lasted, slowest) = (lasted.as_millis(), slowest.as_millis());
        println!(
            "| {what} | {distance} ms | {load} | {asked} | {decided} | {lasted} ms | {slowest} ms |"
        );
    }
}

impl Callers {
    async fn start(limiter: &Limiter, load: usize) -> Self {
        while limiter.check(0_u64).await.expect("it answers").is_local() {}
        let (stop, local) = (Arc::new(AtomicBool::new(false)), Arc::<Mutex<Vec<_>>>::default());
        let tasks = (0..load as u64).map(|key| {
            let (limiter, stop, local) = (limiter.clone(), Arc::clone(&stop), Arc::clone(&local));
            tokio::spawn(async move {
                let mut requests = 0;
                while !stop.load(Ordering::Relaxed) {
                    requests += 1;
                    let asked = Instant::now();
                    if limiter.check(key).await.expect("it answers").is_local() {
                        local.lock().expect("no panic").push((asked, Instant::now()));
                    }
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
                requests
            })
        });
        let tasks = tasks.collect();
        let callers = Self { stop, local, tasks };
        // On a busy machine the first of many may be late.
        tokio::time::sleep(Duration::from_millis(700)).await;
        callers.local.lock().expect("no panic").clear();
        callers
    }

    async fn finish(self, failed: Instant) -> Policy {
        self.stop.store(true, Ordering::Relaxed);
        let mut asked = 0;
        for task in self.tasks {
            asked += task.await.expect("no panic");
        }
        let local = self.local.lock().expect("no panic");
        let lasted = local.iter().map(|(_, answered)| answered.saturating_duration_since(failed));
        let took = local.iter().map(|(asked, answered)| *answered - *asked);
        Policy {
            asked,
            decided: local.len(),
            lasted: lasted.max().unwrap_or_default(),
            slowest: took.max().unwrap_or_default(),
        }
    }
}

/// All connections are closed once.
async fn cut(server: &Server, distance: u64, load: usize, deadline: Duration) -> Policy {
    let far = Proxy::to(server.port).delay(Duration::from_millis(distance));
    let callers = Callers::start(&limiter(store(far.port).deadline(deadline)), load).await;
    let failed = Instant::now();
    let cut: u64 = server.ask(&["CLIENT", "KILL", "TYPE", "normal"]);
    assert!(cut > 0, "there was a connection");
    tokio::time::sleep(Duration::from_secs(1)).await;
    callers.finish(failed).await
}

/// With the breaker's pause after them, there were thousands.
#[tokio::test(flavor = "multi_thread")]
async fn a_cut_lets_the_policy_decide_at_most_the_requests_in_flight() {
    let _alone = ALONE.lock().await;
    let Some(server) = Server::start() else { return };
    for distance in DISTANCES {
        for load in LOADS {
            // A busy machine is late now and then.
            let policy = cut(&server, distance, load, Duration::from_secs(5)).await;
            println!("{distance} ms, {load} in flight: {policy:?}");
            assert!(policy.decided <= load, "{distance} ms, {load} in flight: {policy:?}");
        }
    }
}

/// Such an answer can't be read, and is no answer of another kind of server.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_ends_inside_an_answer_is_a_cut_one() {
    let _alone = ALONE.lock().await;
    let Some(server) = Server::start() else { return };
    let (port, breaks) = (server.port, Arc::new(AtomicBool::new(false)));
    let next = Arc::clone(&breaks);
    let way = gateway(move |command| {
        match command[0].starts_with(b"EVAL") && next.swap(false, Ordering::SeqCst) {
            true => Fate::Break(port),
            false => Fate::To(port),
        }
    });
    let network = Proxy::to(way).delay(Duration::from_millis(20));
    let far = limiter(store(network.port).deadline(Duration::from_secs(5)));
    let callers = Callers::start(&far, 8).await;
    let failed = Instant::now();
    breaks.store(true, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let policy = callers.finish(failed).await;
    println!("{policy:?}");
    assert!(!breaks.load(Ordering::SeqCst) && policy.decided <= 8, "{policy:?}");
    let limiter = limiter(store(way).on_failure(OnStoreFailure::Deny));
    assert!(limiter.check(1_u64).await.expect("it answers").allowed());
    breaks.store(true, Ordering::SeqCst);
    let error = limiter.check(1_u64).await.expect_err("its answer is lost").to_string();
    assert_eq!(error, "Redis can't be reached (unexpected end of file)");
}

/// Calls in flight fail when their connection is closed. All others succeed: those that met a
/// missing script, and those that were not sent yet.
#[tokio::test(flavor = "multi_thread")]
async fn flushed_scripts_and_cut_connections_fail_only_requests_in_flight() {
    let _alone = ALONE.lock().await;
    let Some(server) = Server::start() else { return };
    let limiter = limiter(
        store(server.port).deadline(Duration::from_secs(5)).on_failure(OnStoreFailure::Deny),
    );
    let stop = Arc::new(AtomicBool::new(false));
    // How many cuts there had been when the last of the answered requests was asked.
    let (cuts, answered) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let tasks = (0..32_u64).map(|key| {
        let (limiter, stop) = (limiter.clone(), Arc::clone(&stop));
        let (cuts, answered) = (Arc::clone(&cuts), Arc::clone(&answered));
        tokio::spawn(async move {
            let mut answers = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let asked_after = cuts.load(Ordering::SeqCst);
                let answer = limiter.check(key).await.map(|_| ());
                if answer.is_ok() {
                    answered.fetch_max(asked_after, Ordering::SeqCst);
                }
                answers.push(answer);
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            answers
        })
    });
    let tasks: Vec<_> = tasks.collect();
    for cut in 1..=200 {
        server.ask::<String>(&["SCRIPT", "FLUSH"]);
        server.ask::<u64>(&["CLIENT", "KILL", "TYPE", "normal"]);
        // A node that can't connect between two cuts opens its breaker, and is right. An answer to
        // a request from before the cut, counted late, does not show that it has connected.
        cuts.store(cut, Ordering::SeqCst);
        wait_for("an answer", || answered.load(Ordering::SeqCst) == cut);
        tokio::time::sleep(Duration::from_millis(15)).await;
    }
    stop.store(true, Ordering::Relaxed);
    let (mut asked, mut failed) = (0, 0);
    for task in tasks {
        for answer in task.await.expect("no panic") {
            asked += 1;
            let Err(error) = answer else { continue };
            failed += 1;
            let why = error.to_string();
            // The client library may lose a call that it is handed as the connection ends.
            let lost = ["Redis can't be reached", "Redis did not answer in time"];
            assert!(lost.iter().any(|lost| why.starts_with(lost)), "{why}");
        }
    }
    println!("{failed} of {asked} failed");
}

/// The last table in `benches/results/unplug.md`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "scripts/unplug runs it"]
async fn table() {
    let _alone = ALONE.lock().await;
    let Some(mut server) = Server::start() else { return };
    let pause = |ms| tokio::time::sleep(Duration::from_millis(ms));
    let deadline = Duration::from_millis(250);
    println!(
        "\n| what happens | one way | in flight | requests | decided by the policy | until | slowest of these |"
    );
    println!("|---|---|---|---|---|---|---|");
    for distance in DISTANCES {
        for load in LOADS {
            cut(&server, distance, load, deadline).await.row("cut", distance, load);
        }
    }
    for distance in DISTANCES {
        for load in [1, 32, 128] {
            let far = Proxy::to(server.port).delay(Duration::from_millis(distance));
            let callers = Callers::start(&limiter(store(far.port)), load).await;
            let failed = Instant::now();
            server.freeze();
            pause(1_000).await;
            server.thaw();
            pause(1_000).await;
            callers.finish(failed).await.row("frozen for 1 s", distance, load);
        }
    }
    for distance in DISTANCES {
        for load in [1, 32, 128] {
            let far = Proxy::to(server.port).delay(Duration::from_millis(distance));
            let callers = Callers::start(&limiter(store(far.port)), load).await;
            let failed = Instant::now();
            server.kill();
            pause(500).await;
            server.restart();
            pause(1_500).await;
            callers.finish(failed).await.row("killed for 0.5 s", distance, load);
        }
    }
    for load in [1, 32, 128] {
        let Some(mut watched) = watched() else { return };
        let callers = Callers::start(&limiter(watched.store()), load).await;
        watched.master.kill();
        let over = watched.failed_over(&watched.sentinels[..1]);
        pause(2_000).await;
        callers.finish(over).await.row("failed over; time after the failover", 0, load);
    }
}
