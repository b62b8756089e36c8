//! Slots of a cluster that move to another node.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use harness::{ALONE, Server};
use tower_fixed_window::Limiter;
use tower_fixed_window_redis::RedisStore;

use crate::cluster_and_sentinel::{cluster_with, urls};
use crate::outage::limiter;
use crate::silent_hosts::{keys_on, name_of};

/// Moves the slot of a key.
fn move_slot(nodes: &[Server], key: u64, from: &Server, to: &Server) {
    let name = name_of(key);
    let slot = from.ask::<u16>(&["CLUSTER", "KEYSLOT", &name]).to_string();
    let [source, target] = [from, to].map(|node| node.ask::<String>(&["CLUSTER", "MYID"]));
    to.ask::<String>(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &source]);
    from.ask::<String>(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &target]);
    let port = to.port.to_string();
    from.ask::<String>(&["MIGRATE", "127.0.0.1", &port, &name, "0", "1000"]);
    give_slot(nodes, &slot, to);
}

/// Tells all nodes that a slot is another one's, whose keys have moved, if there were any.
fn give_slot(nodes: &[Server], slot: &str, to: &Server) {
    let target = to.ask::<String>(&["CLUSTER", "MYID"]);
    for node in nodes {
        node.ask::<String>(&["CLUSTER", "SETSLOT", slot, "NODE", &target]);
    }
}

/// Asks for keys, many times at once for the second one, and counts what Redis did not answer of
/// each.
async fn ask(limiter: &Limiter, keys: &[u64], time: Duration) -> Vec<[u32; 2]> {
    let stop = Arc::new(AtomicBool::new(false));
    let tasks = keys.iter().zip([4, 32, 4]).map(|(&key, tasks)| {
        let (limiter, stop) = (limiter.clone(), Arc::clone(&stop));
        let tasks = (0..tasks).map(move |_| {
            let (limiter, stop) = (limiter.clone(), Arc::clone(&stop));
            tokio::spawn(async move {
                let [mut asked, mut local] = [0; 2];
                while !stop.load(Ordering::Relaxed) {
                    asked += 1;
                    let decision = limiter.check(key).await.expect("it answers");
                    local += u32::from(decision.is_local());
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                [asked, local]
            })
        });
        tasks.collect::<Vec<_>>()
    });
    let tasks: Vec<_> = tasks.collect();
    tokio::time::sleep(time).await;
    stop.store(true, Ordering::Relaxed);
    let mut all = Vec::new();
    for tasks in tasks {
        let mut sum = [0; 2];
        for task in tasks {
            let of_task = task.await.expect("no panic");
            sum = [sum[0] + of_task[0], sum[1] + of_task[1]];
        }
        all.push(sum);
    }
    println!("asked, and not answered by Redis, of each key: {all:?}");
    all
}

/// The node that they left is none of theirs any more.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_fails_after_slots_left_it_fails_no_keys_of_theirs() {
    let _alone = ALONE.lock().await;
    let Some(nodes) = cluster_with(&["--cluster-require-full-coverage", "no"]) else { return };
    let store = RedisStore::cluster(urls(&nodes)).expect("addresses");
    let limiter = limiter(store.deadline(Duration::from_secs(1)), 1_000_000_000);
    let [stays, moves] = keys_on(&nodes[0]);
    let keys = [moves, stays];
    while ask(&limiter, &keys, Duration::from_millis(200)).await.iter().any(|[_, local]| *local > 0)
    {
    }
    move_slot(&nodes, moves, &nodes[0], &nodes[2]);
    let _ = ask(&limiter, &keys, Duration::from_millis(500)).await;
    nodes[0].freeze();
    let [moves, stays] = ask(&limiter, &keys, Duration::from_secs(4)).await[..] else {
        unreachable!("two keys")
    };
    assert!(stays[1] > 0, "its node is frozen: {stays:?}");
    assert_eq!(moves[1], 0, "of {moves:?}");
}

/// Redirections are followed, and nothing is known of the slots until the node fails.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_refuses_calls_after_slots_left_it_fails_no_keys_of_theirs() {
    let _alone = ALONE.lock().await;
    let Some(nodes) = cluster_with(&["--cluster-require-full-coverage", "no"]) else { return };
    let store = RedisStore::cluster(urls(&nodes)).expect("addresses");
    let limiter = limiter(store, 1_000_000_000);
    let [stays, moves] = keys_on(&nodes[0]);
    while ask(&limiter, &[stays, moves], Duration::from_millis(200))
        .await
        .iter()
        .any(|[_, local]| *local > 0)
    {}
    move_slot(&nodes, moves, &nodes[0], &nodes[2]);
    let _ = ask(&limiter, &[stays, moves], Duration::from_millis(500)).await;
    nodes[0].ask::<String>(&["CONFIG", "SET", "maxmemory", "1"]);
    let stays = ask(&limiter, &[stays], Duration::from_millis(300)).await;
    assert!(stays[0][1] > 5, "its node has no memory: {stays:?}");
    let moves = ask(&limiter, &[moves], Duration::from_millis(200)).await;
    assert_eq!(moves[0][1], 0, "of {moves:?}");
}
