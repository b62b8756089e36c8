//! Hosts that fall silent or are killed, when an app starts and under load: whatever has taken over
//! answers within a second.

use std::time::{Duration, Instant};

use harness::{ALONE, Server};
use tower_fixed_window_redis::RedisStore;

use crate::cluster_and_sentinel::urls;
use crate::outage::{By, Load, limiter};
use crate::silent_hosts::{Watched, cluster_with_replica, taken_over, watched};

/// What happens to a part of a master, its replica and three Sentinels.
#[derive(Clone, Copy, Debug)]
enum Harm {
    Frozen,
    Killed,
}

impl Harm {
    fn befalls(self, server: &mut Server) {
        match self {
            Self::Frozen => server.freeze(),
            Self::Killed => server.kill(),
        }
    }
}

/// To a Sentinel, and to the master.
const CASES: [[Option<Harm>; 2]; 5] = [
    [Some(Harm::Frozen), None],
    [Some(Harm::Killed), None],
    [None, Some(Harm::Frozen)],
    [None, Some(Harm::Killed)],
    [Some(Harm::Frozen), Some(Harm::Frozen)],
];

fn harm(watched: &mut Watched, [sentinel, master]: [Option<Harm>; 2]) {
    if let Some(harm) = sentinel {
        harm.befalls(&mut watched.sentinels[0]);
    }
    if let Some(harm) = master {
        harm.befalls(&mut watched.master);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_app_that_starts_beside_a_lost_master_or_sentinel_joins() {
    let _alone = ALONE.lock().await;
    for case in CASES {
        let Some(mut watched) = watched() else { return };
        harm(&mut watched, case);
        let load = Load::start(&[limiter(watched.store(), 1_000_000)], 1, 8);
        if case[1].is_some() {
            watched.failed_over(&watched.sentinels[1..]);
        }
        println!("{case:?}");
        load.joins(Instant::now()).await;
        load.finish("started beside lost hosts").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_app_whose_master_or_sentinel_is_lost_joins_again() {
    let _alone = ALONE.lock().await;
    for case in CASES {
        let Some(mut watched) = watched() else { return };
        let load = Load::start(&[limiter(watched.store(), 1_000_000)], 1, 8);
        load.answered_by(By::Redis, Instant::now()).await;
        harm(&mut watched, case);
        let lost = Instant::now();
        println!("{case:?}");
        if case[1].is_some() {
            load.answered_by(By::Memory, lost).await;
            let over = watched.failed_over(&watched.sentinels[1..]);
            load.joins(over).await;
            tokio::time::sleep(Duration::from_secs(2)).await;
            load.finish_by_redis(over, "a master was lost under load").await;
        } else {
            tokio::time::sleep(Duration::from_secs(3)).await;
            let answers = load.finish("a Sentinel was lost under load").await;
            let late = answers.iter().filter(|answer| answer.is_by(By::Memory)).count();
            // A busy machine may be late once with those in flight.
            assert!(late <= 8, "{late} without the master, which was there");
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
    let over = taken_over(&nodes, &replica);
    tokio::time::sleep(Duration::from_secs(3)).await;
    load.finish_by_redis(over, "started beside a silent master of a cluster").await;
}
