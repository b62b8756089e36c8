//! Hosts that fall silent, when an app starts and under load: whatever has taken over answers within a
//! second.

use std::time::{Duration, Instant};

use harness::{ALONE, Server, ask, wait_for};
use tower_fixed_window_redis::RedisStore;

use crate::cluster_and_sentinel::urls;
use crate::outage::{By, Load, limiter};
use crate::silent_hosts::{SECOND, Watched, cluster_with_replica, watched};

/// The frozen parts of a master, its replica and three Sentinels.
#[derive(Clone, Copy, Debug)]
struct Silent {
    sentinel: bool,
    master: bool,
}

impl Silent {
    fn freeze(self, watched: &Watched) {
        if self.sentinel {
            watched.sentinels[0].freeze();
        }
        if self.master {
            watched.master.freeze();
        }
    }

    /// Until the replica is the master for a Sentinel that is left, and takes writes.
    fn wait_for_the_failover(self, watched: &Watched) {
        let replica = watched.replica.port.to_string();
        let is_master = |sentinel: &Server| {
            let address: Vec<String> =
                sentinel.ask(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster"]);
            address[1] == replica
        };
        wait_for("the failover", || {
            !self.master
                || watched.sentinels[1..].iter().any(is_master)
                    && ask::<String>(&watched.replica.url(), &["SET", "a", "1"]).is_ok()
        });
    }
}

const CASES: [Silent; 3] = [
    Silent { sentinel: true, master: false },
    Silent { sentinel: false, master: true },
    Silent { sentinel: true, master: true },
];

#[tokio::test(flavor = "multi_thread")]
async fn an_app_that_starts_beside_a_silent_master_or_sentinel_joins() {
    let _alone = ALONE.lock().await;
    for silent in CASES {
        let Some(watched) = watched() else { return };
        silent.freeze(&watched);
        let load = Load::start(&[limiter(watched.store(), 1_000_000)], 1, 8);
        silent.wait_for_the_failover(&watched);
        let joined = load.answered_by(By::Redis, Instant::now()).await;
        println!("{silent:?}: joined after {joined:?}");
        assert!(joined < SECOND, "{silent:?}: {joined:?}");
        load.finish("started beside silent hosts").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_app_whose_master_or_sentinel_falls_silent_joins_again() {
    let _alone = ALONE.lock().await;
    for silent in CASES {
        let Some(watched) = watched() else { return };
        let load = Load::start(&[limiter(watched.store(), 1_000_000)], 1, 8);
        load.answered_by(By::Redis, Instant::now()).await;
        silent.freeze(&watched);
        if silent.master {
            load.answered_by(By::Memory, Instant::now()).await;
        } else {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        silent.wait_for_the_failover(&watched);
        let over = Instant::now();
        let joined = load.answered_by(By::Redis, over).await;
        println!("{silent:?}: joined again after {joined:?}");
        assert!(joined < SECOND, "{silent:?}: {joined:?}");
        tokio::time::sleep(Duration::from_secs(2)).await;
        let answers = load.finish("hosts fell silent under load").await;
        let late = answers.iter().filter(|answer| answer.is_by(By::Memory));
        let last = late.map(|answer| answer.asked().saturating_duration_since(over)).max();
        assert!(last.unwrap_or_default() < SECOND, "{silent:?}: memory answered after {last:?}");
        if !silent.master {
            assert!(answers.iter().all(|answer| answer.is_by(By::Redis)), "the master was there");
        }
    }
}

/// The first seed of a cluster, which is a master, too.
#[tokio::test(flavor = "multi_thread")]
async fn an_app_that_starts_beside_a_silent_master_of_a_cluster_joins() {
    let _alone = ALONE.lock().await;
    let Some((nodes, replica)) = cluster_with_replica() else { return };
    nodes[0].freeze();
    let store = RedisStore::cluster(urls(&nodes)).expect("addresses");
    let load = Load::start(&[limiter(store, 1_000_000)], 12, 12);
    wait_for("the failover", || {
        let is_known = |node: &Server| {
            let slots: Vec<Vec<redis::Value>> = node.ask(&["CLUSTER", "SLOTS"]);
            format!("{slots:?}").contains(&format!("int({})", replica.port))
        };
        ask::<String>(&replica.url(), &["SET", "b", "1"]).is_ok() && nodes[1..].iter().all(is_known)
    });
    let over = Instant::now();
    tokio::time::sleep(Duration::from_secs(3)).await;
    let answers = load.finish("started beside a silent master of a cluster").await;
    assert!(answers.iter().any(|answer| answer.is_by(By::Redis)), "it joins");
    let late = answers.iter().filter(|answer| answer.is_by(By::Memory));
    let last = late.map(|answer| answer.asked().saturating_duration_since(over)).max();
    println!("the last by memory {last:?} after the failover");
    assert!(last.unwrap_or_default() < SECOND, "{last:?}");
}
