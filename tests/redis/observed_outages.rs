//! The operator's view of a Redis that is stopped, frozen or partly down: the metrics of
//! docs/observing.md and the log. docs/operations/alerts-test.yml has the alerts that such metrics
//! trigger.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use harness::{ALONE, Server, free_port};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::time::sleep;
use tower_fixed_window::{Limiter, OnStoreFailure, Quota};
use tower_fixed_window_redis::RedisStore;

use crate::cluster_and_sentinel::{cluster_with, urls};
use crate::log::Log;
use crate::outage::Load;
use crate::silent_hosts::watched;

/// Requests that are in flight at a time, of one node.
const TASKS: u64 = 8;
const CALM: Duration = Duration::from_secs(1);
const OUTAGE: Duration = Duration::from_secs(2);

type Series = BTreeMap<String, f64>;

/// The metrics and the log of this thread.
struct Operator {
    handle: PrometheusHandle,
    log: Log,
    _recorder: metrics::LocalRecorderGuard<'static>,
}

impl Operator {
    fn start() -> Self {
        // The buckets are those of docs/observing.md.
        let buckets = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25];
        let recorder = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix("store_seconds".into()), &buckets)
            .expect("buckets")
            .build_recorder();
        Self {
            handle: recorder.handle(),
            log: Log::start(),
            _recorder: metrics::set_default_local_recorder(Box::leak(Box::new(recorder))),
        }
    }

    fn series(&self) -> Series {
        let text = self.handle.render();
        let series = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        let pairs = series.map(|line| line.rsplit_once(' ').expect("a name and a value"));
        pairs.map(|(name, value)| (name.to_owned(), value.parse().expect("a number"))).collect()
    }

    fn numbers(&self) -> Numbers {
        let series = self.series();
        METRICS.map(|(metric, label)| {
            let metric = format!("tower_fixed_window_{metric}");
            let is = |name: &str| name.split('{').next() == Some(&metric) && name.contains(label);
            series.iter().filter(|(name, _)| is(name)).map(|(_, value)| *value).sum::<f64>() as u64
        })
    }

    /// The lines of the log that report the beginning of a failure.
    fn failures(&self) -> Vec<String> {
        let text = self.log.warnings();
        let fails = text.lines().filter(|line| line.contains("the store fails"));
        fails.map(str::to_owned).collect()
    }
}

/// Decisions, those without the store, calls that were sent, those that took less than 0.1 s, those
/// that failed, and new connections.
type Numbers = [u64; 6];

/// The metrics, each with a part of its labels.
const METRICS: [(&str, &str); 6] = [
    ("decisions_total", ""),
    ("without_store_total", ""),
    ("store_seconds_count", ""),
    ("store_seconds_bucket", "le=\"0.1\""),
    ("store_failures_total", ""),
    ("store_connections_total", ""),
];

fn rise(before: Numbers, after: Numbers) -> Numbers {
    std::array::from_fn(|i| after[i] - before[i])
}

/// Sends requests to a limiter, all in this thread, while an outage begins after a calm second.
/// Returns by how much the metrics rise in the outage's first second, and later.
async fn measure(
    operator: &Operator,
    limiter: &Limiter,
    keys: &[u64],
    begin: impl FnOnce(),
) -> [Numbers; 2] {
    let load = Load::of_keys(std::slice::from_ref(limiter), keys.to_vec(), TASKS as usize);
    sleep(Duration::from_millis(500)).await;
    let first = operator.numbers();
    sleep(CALM).await;
    let calm = operator.numbers();
    begin();
    sleep(CALM).await;
    let onset = operator.numbers();
    sleep(OUTAGE).await;
    let later = operator.numbers();
    load.stop().await;
    let calm_rise = rise(first, calm);
    let [decisions, without, calls, _, failed, _] = calm_rise;
    assert!(decisions > 100 && calls > 100 && (without, failed) == (0, 0), "{calm_rise:?}");
    let rises = [rise(calm, onset), rise(onset, later)];
    println!("{rises:?}");
    rises
}

fn limiter(store: RedisStore) -> Limiter {
    Quota::per_hour(1_000_000_000).name("api").store(store)
}

fn redis_at(url: &str) -> Limiter {
    limiter(RedisStore::new(url).expect("an address"))
}

#[tokio::test]
async fn a_server_that_is_gone_or_silent_fails_the_calls_in_flight_and_gets_no_others() {
    let _alone = ALONE.lock().await;
    for freezes in [false, true] {
        let Some(mut server) = Server::start() else { return };
        let operator = Operator::start();
        let (limiter, name) = (redis_at(&server.url()), format!("\"127.0.0.1:{}\"", server.port));
        let ends = || if freezes { server.freeze() } else { server.kill() };
        let [onset, later] = measure(&operator, &limiter, &[1], ends).await;
        let [_, _, calls, quick, failed, _] = onset;
        if freezes {
            server.thaw();
            assert!((1..=2 * TASKS).contains(&failed), "{failed} failed");
            // Their time is that of the deadline, and no sample near zero hides it.
            assert!(calls - quick >= failed, "{failed} failed");
        }
        assert!(freezes || failed <= TASKS, "{failed} failed");
        let [decisions, without, calls, _, failed, connections] = later;
        assert_eq!((calls, failed, connections), (0, 0, 0));
        assert!(without > 0 && without == decisions, "{without} of {decisions} without the store");
        let lines = operator.failures();
        assert!(!lines.is_empty() && lines.iter().all(|line| line.contains(&name)), "{lines:?}");
        assert!(!freezes || lines[0].contains("did not answer"), "{lines:?}");
        // After the time.
        let causes = lines.iter().filter_map(|line| line.split_once("the store fails"));
        let causes: BTreeSet<_> = causes.map(|(_, cause)| cause).collect();
        assert_eq!(causes.len(), lines.len(), "each is told once: {lines:?}");
    }
}

/// The first call after a pause checks the connection, and those beside or after it don't.
#[tokio::test]
async fn a_check_of_an_idle_connection_is_counted() {
    let Some(server) = Server::start() else { return };
    let operator = Operator::start();
    let store = RedisStore::new(server.url()).expect("an address").deadline(Duration::from_secs(5));
    let limiter = limiter(store);
    for pauses in 0..3 {
        for _ in 0..3 {
            let _ = limiter.check("ann").await.expect("it answers");
        }
        let counted = |name: &str| operator.series()[&format!("tower_fixed_window_store_{name}")];
        let checks = counted("checks_total") as u64;
        // A busy machine may pause once more, and may be late with an answer once.
        assert!((pauses..pauses + 2).contains(&checks), "{checks} checks, {pauses} pauses");
        assert!(counted("connections_total") <= 2.0);
        sleep(Duration::from_millis(1_200)).await;
    }
}

#[tokio::test]
async fn a_shard_that_is_down_is_named_and_the_others_are_called() {
    let _alone = ALONE.lock().await;
    // Else the other shards refuse, too, as soon as they have noticed.
    let options = ["--cluster-require-full-coverage", "no"];
    let Some(mut nodes) = cluster_with(&options) else { return };
    let operator = Operator::start();
    let limiter = limiter(RedisStore::cluster(urls(&nodes)).expect("addresses"));
    // On all shards.
    let keys: Vec<_> = (0..30).collect();
    let names: Vec<_> =
        nodes.iter().map(|node| format!("server=\"127.0.0.1:{}\"", node.port)).collect();
    let [onset, later] = measure(&operator, &limiter, &keys, || nodes[1].kill()).await;
    assert!(onset[4] <= 3 * TASKS, "{} failed", onset[4]);
    let [decisions, without, calls, _, failed, _] = later;
    assert!(without > 0 && calls > 0 && decisions.abs_diff(without + calls) <= 2 * TASKS);
    assert!(failed <= 8, "only tests of the shard: {failed} failed");
    let lines = operator.failures();
    assert!(lines[0].contains(&names[1]), "{lines:?}");
    assert!(lines.iter().all(|line| !line.contains(&names[0]) && !line.contains(&names[2])));
}

#[tokio::test]
async fn log_and_metrics_say_what_the_policy_does_and_never_a_credential() {
    use OnStoreFailure::{Allow, Deny, Local};
    let port = free_port();
    let Some(mut server) = Server::on(port, &["--save", "", "--requirepass", "hunter2"]) else {
        return;
    };
    for (policy, label, meanwhile) in [
        (Local, "local", "requests are counted in this process"),
        (Allow, "allow", "requests pass uncounted"),
        (Deny, "deny", "requests are refused with 503"),
    ] {
        let operator = Operator::start();
        let url = format!("redis://default:hunter2@127.0.0.1:{port}/");
        let store = RedisStore::new(url).expect("an address").on_failure(policy);
        let limiter = limiter(store);
        assert!(limiter.check(1).await.expect("it answers").is_allowed());
        server.kill();
        for _ in 0..3 {
            assert_eq!(limiter.check(1).await.is_ok(), policy == Local);
        }
        let lines = operator.failures();
        let line = format!(
            "the store fails scope=\"api\" meanwhile=\"{meanwhile}\" \
             server=\"127.0.0.1:{port}\" error=Redis can't be reached"
        );
        assert!(!lines.is_empty() && lines.iter().all(|of| of.contains(&line)), "{lines:?}");
        let series = operator.series();
        assert!(!operator.log.text().contains("hunter2"));
        for of in ["local", "allow", "deny"] {
            let name =
                format!("tower_fixed_window_without_store_total{{scope=\"api\",policy=\"{of}\"}}");
            assert_eq!(series.get(&name), Some(&if of == label { 3.0 } else { 0.0 }), "{of}");
        }
        server.restart();
    }
}

#[tokio::test]
async fn behind_sentinel_the_log_names_the_master() {
    let Some(mut watched) = watched() else { return };
    let operator = Operator::start();
    let limiter = limiter(watched.store());
    assert!(limiter.check(1).await.expect("it answers").is_allowed());
    // Without Sentinels, there is no failover.
    watched.sentinels.iter_mut().for_each(Server::kill);
    let name = format!("server=\"127.0.0.1:{}\"", watched.master.port);
    watched.master.kill();
    assert!(limiter.check(1).await.expect("memory answers").is_local());
    let lines = operator.failures();
    assert!(!lines.is_empty() && lines.iter().all(|line| line.contains(&name)), "{lines:?}");
}
