//! Connections that are cut while Redis is well: how many requests the policy decides.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use harness::{ALONE, Fate, Proxy, Server, gateway, wait_for};
use tokio::task::JoinHandle;
use tower_fixed_window::{Limiter, OnStoreFailure, Quota};
use tower_fixed_window_redis::RedisStore;

fn limiter(store: RedisStore) -> Limiter {
    Quota::per_day(1_000_000_000).from_first_request().name("cuts").store(store)
}

fn store(port: u16) -> RedisStore {
    RedisStore::new(format!("redis://127.0.0.1:{port}/")).expect("an address")
}

/// Callers that ask again as soon as they were answered.
struct Callers {
    stop: Arc<AtomicBool>,
    /// How many requests the policy has decided.
    local: Arc<AtomicUsize>,
    tasks: Vec<JoinHandle<()>>,
}

impl Callers {
    async fn start(limiter: &Limiter, load: usize) -> Self {
        while limiter.check(0_u64).await.expect("it answers").is_local() {}
        let (stop, local) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let tasks = (0..load as u64).map(|key| {
            let (limiter, stop, local) = (limiter.clone(), Arc::clone(&stop), Arc::clone(&local));
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let decision = limiter.check(key).await.expect("it answers");
                    local.fetch_add(usize::from(decision.is_local()), Ordering::Relaxed);
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            })
        });
        let tasks = tasks.collect();
        // On a busy machine the first of many may be late.
        tokio::time::sleep(Duration::from_millis(700)).await;
        local.store(0, Ordering::Relaxed);
        Self { stop, local, tasks }
    }

    /// Returns how many requests the policy has decided.
    async fn finish(self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.expect("no panic");
        }
        self.local.load(Ordering::Relaxed)
    }
}

/// All connections are closed once. With the breaker's pause after that, there were thousands.
#[tokio::test(flavor = "multi_thread")]
async fn a_cut_lets_the_policy_decide_at_most_the_requests_in_flight() {
    let _alone = ALONE.lock().await;
    let Some(server) = Server::start() else { return };
    for (distance, load) in [0, 1, 20].into_iter().flat_map(|ms| [1, 32, 1_000].map(|n| (ms, n))) {
        let far = Proxy::to(server.port).delay(Duration::from_millis(distance));
        // A busy machine is late now and then.
        let limiter = limiter(store(far.port).deadline(Duration::from_secs(5)));
        let callers = Callers::start(&limiter, load).await;
        let cut: u64 = server.ask(&["CLIENT", "KILL", "TYPE", "normal"]);
        assert!(cut > 0, "there was a connection");
        tokio::time::sleep(Duration::from_secs(1)).await;
        let decided = callers.finish().await;
        println!("{distance} ms, {load} in flight: {decided} decided by the policy");
        assert!(decided <= load, "{distance} ms, {load} in flight: {decided}");
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
    breaks.store(true, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let decided = callers.finish().await;
    assert!(!breaks.load(Ordering::SeqCst) && decided <= 8, "{decided}");
    let limiter = limiter(store(way).on_failure(OnStoreFailure::Deny));
    assert!(limiter.check(1_u64).await.expect("it answers").is_allowed());
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
