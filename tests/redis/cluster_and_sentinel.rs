//! Cluster and Sentinel.

use std::time::Instant;

use harness::{ALONE, Server, ask, wait_for};

use crate::outage::{By, Load, limiter};
use crate::shared_count::{self, DURABLE};
use crate::silent_hosts::watched;
use crate::traffic;

/// Three masters that share the slots.
pub(crate) fn cluster() -> Option<Vec<Server>> {
    cluster_with(&[])
}

/// A cluster of three masters with further options.
pub(crate) fn cluster_with(options: &[&str]) -> Option<Vec<Server>> {
    let cluster = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000"];
    let options = [&cluster, options].concat();
    let nodes: Vec<Server> = (0..3).map(|_| Server::with(&options)).collect::<Option<_>>()?;
    for (node, (first, last)) in nodes.iter().zip([(0, 5460), (5461, 10922), (10923, 16383)]) {
        let (first, last) = (first.to_string(), last.to_string());
        node.ask::<String>(&["CLUSTER", "ADDSLOTSRANGE", &first, &last]);
        node.ask::<String>(&["CLUSTER", "MEET", "127.0.0.1", &nodes[0].port.to_string()]);
    }
    for node in &nodes {
        wait_for("the cluster", || {
            let info: String = node.ask(&["CLUSTER", "INFO"]);
            info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:3")
        });
    }
    Some(nodes)
}

pub(crate) fn urls(nodes: &[Server]) -> Vec<String> {
    nodes.iter().map(Server::url).collect()
}

#[test]
fn three_processes_share_a_count_on_a_cluster() {
    let _alone = ALONE.blocking_lock();
    let Some(nodes) = cluster() else { return };
    shared_count::run(&urls(&nodes).join(","), shared_count::TASKS);
    // The number of keys proves nothing, since they may have expired.
    assert!(nodes.iter().all(|node| traffic::scripts(node) > 0), "each has its share");
}

/// A master that comes back takes no writes for a while.
#[test]
fn killed_nodes_and_cluster_masters_never_let_more_than_the_limit_pass() {
    let _alone = ALONE.blocking_lock();
    let Some(nodes) = cluster_with(&DURABLE) else { return };
    shared_count::kill_some(nodes, 12);
}

/// The old master becomes a replica, and refuses writes.
#[tokio::test(flavor = "multi_thread")]
async fn the_store_follows_a_manual_failover() {
    let _alone = ALONE.lock().await;
    let Some(watched) = watched() else { return };
    let load = Load::start(&[limiter(watched.store(), 1_000_000)], 1, 8);
    load.answered_by(By::Redis, Instant::now()).await;
    // Sentinel refuses at first, until it considers the replica good enough.
    wait_for("Sentinel to fail over", || {
        let failover = ["SENTINEL", "FAILOVER", "mymaster"];
        ask::<String>(&watched.sentinels[0].url(), &failover).is_ok()
    });
    watched.failed_over(&watched.sentinels);
    // Valkey closes all connections at its demotion.
    wait_for("the old master to be demoted", || {
        ask::<String>(&watched.master.url(), &["INFO", "replication"])
            .is_ok_and(|info| info.contains("role:slave"))
    });
    load.joins(Instant::now()).await;
    load.finish("failed over by hand").await;
}
