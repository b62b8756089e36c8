//! The operator's view of a Redis that is stopped, frozen, slow, partly down, cut off, or refuses:
//! the metrics of docs/observing.md and the log. docs/operations/alerts-test.yml has the alerts that
//! such metrics trigger.

use std::collections::BTreeMap;
use std::time::Duration;

use harness::{ALONE, Proxy, Server, free_port};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::time::sleep;
use tower_fixed_window::{Limiter, OnStoreFailure, Quota};
use tower_fixed_window_redis::RedisStore;
use tracing::subscriber::DefaultGuard;

use crate::cluster_and_sentinel::{cluster_with, urls};
use crate::outage::Log;
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
    _subscriber: DefaultGuard,
}

impl Operator {
    fn start() -> Self {
        // The buckets are those of docs/observing.md.
        let buckets = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25];
        let recorder = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix("store_seconds".into()), &buckets)
            .expect("buckets")
            .build_recorder();
        let (handle, log) = (recorder.handle(), Log::default());
        Self {
            handle,
            _subscriber: log.start(),
            log,
            _recorder: metrics::set_default_local_recorder(Box::leak(Box::new(recorder))),
        }
    }

    fn series(&self) -> Series {
        let text = self.handle.render();
        let series = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        let pairs = series.map(|line| line.rsplit_once(' ').expect("a name and a value"));
        pairs.map(|(name, value)| (name.to_owned(), value.parse().expect("a number"))).collect()
    }

    /// The lines of the log that report the beginning of a failure.
    fn failures(&self) -> Vec<String> {
        let text = self.log.text();
        let fails = text.lines().filter(|line| line.contains("the store fails"));
        fails.map(str::to_owned).collect()
    }
}

/// By how much each series has risen.
#[derive(Clone, Default)]
struct Rise(Series);

impl Rise {
    fn between(before: &Series, after: &Series) -> Self {
        let rise = |(name, value): (&String, &f64)| {
            (name.clone(), value - before.get(name).copied().unwrap_or_default())
        };
        Self(after.iter().map(rise).collect())
    }

    fn of(&self, metric: &str) -> u64 {
        let named = |name: &str| name.split('{').next() == Some(metric);
        let of = self.0.iter().filter(|(name, _)| named(name));
        of.map(|(_, value)| *value).sum::<f64>() as u64
    }

    fn decisions(&self) -> u64 {
        self.of("tower_fixed_window_decisions_total")
    }

    /// Calls that were sent.
    fn calls(&self) -> u64 {
        self.of("tower_fixed_window_store_seconds_count")
    }

    fn failures(&self) -> u64 {
        self.of("tower_fixed_window_store_failures_total")
    }

    fn without_store(&self) -> u64 {
        self.of("tower_fixed_window_without_store_total")
    }

    fn connections(&self) -> u64 {
        self.of("tower_fixed_window_store_connections_total")
    }

    /// Calls within so many seconds.
    fn within(&self, seconds: &str) -> u64 {
        let (start, le) = ("tower_fixed_window_store_seconds_bucket", format!("le=\"{seconds}\""));
        let of = self.0.iter().filter(|(name, _)| name.starts_with(start) && name.contains(&le));
        of.map(|(_, value)| *value).sum::<f64>() as u64
    }
}

/// The metrics of a second without an outage, of the outage's first second, and of a later second.
struct Measured {
    calm: Rise,
    onset: Rise,
    later: Rise,
}

/// Sends requests to a limiter, all in this thread, while an outage begins.
async fn measure(
    operator: &Operator,
    limiter: &Limiter,
    keys: &[u64],
    begin: impl FnOnce(),
) -> Measured {
    let tasks: Vec<_> = (0..TASKS)
        .map(|_| {
            let (limiter, keys) = (limiter.clone(), keys.to_vec());
            tokio::spawn(async move {
                for key in keys.iter().cycle() {
                    // Without a fallback, an error is the answer.
                    let _ = limiter.check(*key).await;
                    sleep(Duration::from_millis(5)).await;
                }
            })
        })
        .collect();
    sleep(Duration::from_millis(500)).await;
    let first = operator.series();
    sleep(CALM).await;
    let calm = operator.series();
    begin();
    sleep(CALM).await;
    let onset = operator.series();
    sleep(OUTAGE).await;
    let later = operator.series();
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
    Measured {
        calm: Rise::between(&first, &calm),
        onset: Rise::between(&calm, &onset),
        later: Rise::between(&onset, &later),
    }
}

impl Measured {
    fn show(&self, what: &str) {
        for (when, rise) in [("calm", &self.calm), ("onset", &self.onset), ("later", &self.later)] {
            println!(
                "{what}, {when}: {} decisions, {} without the store, {} calls, {} within 0.1 s, \
                 {} failed, {} connections",
                rise.decisions(),
                rise.without_store(),
                rise.calls(),
                rise.within("0.1"),
                rise.failures(),
                rise.connections()
            );
        }
    }

    fn begins_calm(&self, what: &str) {
        self.show(what);
        let calm = &self.calm;
        assert!(calm.decisions() > 100 && calm.calls() > 100, "{} decisions", calm.decisions());
        assert_eq!((calm.without_store(), calm.failures()), (0, 0));
    }

    /// Returns whether an outage of an instant failed no other calls, and nothing in later seconds.
    fn fails_only_calls_in_flight(&self) -> bool {
        let Self { calm, onset, later } = self;
        calm.failures() == 0
            && onset.failures() <= TASKS
            && onset.without_store() <= 8 * TASKS
            && (later.without_store(), later.failures(), later.connections()) == (0, 0, 0)
    }
}

fn limiter(store: RedisStore) -> Limiter {
    Quota::per_hour(1_000_000_000).name("api").store(store)
}

fn redis_at(url: &str) -> Limiter {
    limiter(RedisStore::new(url).expect("an address"))
}

#[tokio::test]
async fn a_stopped_server_has_no_calls_and_each_request_is_answered_without_it() {
    let _alone = ALONE.lock().await;
    let Some(mut server) = Server::start() else { return };
    let operator = Operator::start();
    let limiter = redis_at(&server.url());
    let name = format!("server=\"127.0.0.1:{}\"", server.port);
    let measured = measure(&operator, &limiter, &[1], || server.kill()).await;
    measured.begins_calm("stopped");
    let Measured { onset, later, .. } = &measured;
    // Only calls in flight fail when the server stops.
    assert!(onset.failures() <= TASKS, "{} failed", onset.failures());
    assert_eq!((later.calls(), later.failures(), later.connections()), (0, 0, 0));
    assert!(later.without_store() > 0);
    assert_eq!(later.without_store(), later.decisions());
    let lines = operator.failures();
    assert!(!lines.is_empty() && lines.iter().all(|line| line.contains(&name)), "{lines:?}");
}

#[tokio::test]
async fn a_frozen_server_fails_the_calls_that_were_in_flight_and_gets_no_others() {
    let _alone = ALONE.lock().await;
    let Some(server) = Server::start() else { return };
    let operator = Operator::start();
    let limiter = redis_at(&server.url());
    let measured = measure(&operator, &limiter, &[1], || server.freeze()).await;
    server.thaw();
    measured.begins_calm("frozen");
    let Measured { onset, later, .. } = &measured;
    let failed = onset.failures();
    assert!((1..=2 * TASKS).contains(&failed), "{failed} failed");
    // Their time is that of the deadline, and no sample near zero hides it.
    assert!(onset.calls() - onset.within("0.1") >= failed, "{failed} failed");
    assert_eq!((later.calls(), later.failures(), later.connections()), (0, 0, 0));
    assert!(later.without_store() > 0);
    assert_eq!(later.without_store(), later.decisions());
    let lines = operator.failures();
    let name = format!("server=\"127.0.0.1:{}\"", server.port);
    assert!(lines[0].contains(&name) && lines[0].contains("did not answer"), "{lines:?}");
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
        // A busy machine may pause once more.
        assert!((pauses..pauses + 2).contains(&checks), "{checks} checks, {pauses} pauses");
        assert_eq!(counted("connections_total"), 1.0);
        sleep(Duration::from_millis(1_200)).await;
    }
}

#[tokio::test]
async fn a_slow_server_decides_and_is_seen_in_the_histogram() {
    let _alone = ALONE.lock().await;
    let Some(server) = Server::start() else { return };
    let operator = Operator::start();
    let proxy = Proxy::to(server.port);
    // The delay, and the pauses of a loaded machine.
    let patient = RedisStore::new(proxy.url()).expect("an address").deadline(CALM);
    let limiter = limiter(patient);
    let measured = measure(&operator, &limiter, &[1], || {
        proxy.set_delay(|| Duration::from_millis(65));
    });
    let measured = measured.await;
    measured.begins_calm("slow");
    let later = &measured.later;
    assert_eq!((later.without_store(), later.failures(), later.within("0.1")), (0, 0, 0));
    assert!(later.calls() > 0 && later.decisions() > 0);
    assert!(operator.failures().is_empty(), "{:?}", operator.failures());
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
    let measured = measure(&operator, &limiter, &keys, || nodes[1].kill()).await;
    measured.begins_calm("one shard");
    let Measured { onset, later, .. } = &measured;
    assert!(onset.failures() <= 3 * TASKS, "{} failed", onset.failures());
    let (without, calls) = (later.without_store(), later.calls());
    assert!(without > 0 && calls > 0 && later.decisions().abs_diff(without + calls) <= 2 * TASKS);
    assert!(later.failures() <= 8, "only tests of the shard: {} failed", later.failures());
    let lines = operator.failures();
    assert!(lines[0].contains(&names[1]), "{lines:?}");
    assert!(lines.iter().all(|line| !line.contains(&names[0]) && !line.contains(&names[2])));
}

#[tokio::test]
async fn cut_connections_fail_the_calls_in_flight_and_are_made_again() {
    let _alone = ALONE.lock().await;
    let Some(server) = Server::start() else { return };
    let operator = Operator::start();
    // Far enough for calls to be in flight. They are lost without a word.
    let proxy = Proxy::to(server.port).delay(Duration::from_millis(3));
    let limiter = redis_at(&proxy.url());
    let mut measured = measure(&operator, &limiter, &[1], || proxy.forget()).await;
    // A machine that stands still also fails calls over the new connection. It does not each time.
    for _ in 0..4 {
        if measured.fails_only_calls_in_flight() {
            break;
        }
        measured.show("cut, again");
        measured = measure(&operator, &limiter, &[1], || proxy.forget()).await;
    }
    measured.begins_calm("cut");
    assert!(measured.fails_only_calls_in_flight());
    let Measured { onset, later, .. } = &measured;
    assert!((1..=3).contains(&onset.connections()), "{} connections", onset.connections());
    assert!(later.calls() > 0);
}

#[tokio::test]
async fn a_server_that_refuses_is_called_now_and_then_and_all_of_these_calls_fail() {
    let _alone = ALONE.lock().await;
    let Some(server) = Server::start() else { return };
    let operator = Operator::start();
    let limiter = redis_at(&server.url());
    let measured = measure(&operator, &limiter, &[1], || {
        server.ask::<String>(&["CONFIG", "SET", "maxmemory", "1"]);
    });
    let measured = measured.await;
    measured.begins_calm("refuses");
    let later = &measured.later;
    assert!((1..=12).contains(&later.failures()), "{} failed", later.failures());
    assert_eq!(later.calls(), later.failures());
    assert_eq!(later.without_store(), later.decisions());
    let lines = operator.failures();
    assert!(lines[0].contains("Redis refused the command (OOM)"), "{lines:?}");
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
