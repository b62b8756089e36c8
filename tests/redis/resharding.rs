//! Slots of a cluster that move to another node.

use std::time::Duration;

use harness::{ALONE, Server};
use tower_fixed_window::Limiter;
use tower_fixed_window_redis::RedisStore;

use crate::cluster_and_sentinel::{cluster_with, urls};
use crate::outage::{Answer, By, Load, limiter};
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

/// Asks for keys, many times at once for the second one. Returns how many requests for each Redis
/// did not answer.
async fn ask(limiter: &Limiter, keys: [u64; 2], time: Duration) -> [usize; 2] {
    let of = |(key, tasks)| Load::of_keys(std::slice::from_ref(limiter), vec![key], tasks);
    let [one, other] = [(keys[0], 4), (keys[1], 32)].map(of);
    tokio::time::sleep(time).await;
    let local = |answers: Vec<Answer>| answers.iter().filter(|of| of.is_by(By::Memory)).count();
    let local = [local(one.stop().await), local(other.stop().await)];
    println!("not answered by Redis, of each key: {local:?}");
    local
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
    while ask(&limiter, keys, Duration::from_millis(200)).await != [0, 0] {}
    move_slot(&nodes, moves, &nodes[0], &nodes[2]);
    let _ = ask(&limiter, keys, Duration::from_millis(500)).await;
    nodes[0].freeze();
    let [moves, stays] = ask(&limiter, keys, Duration::from_secs(4)).await;
    assert!(stays > 0, "its node is frozen");
    assert_eq!(moves, 0);
}
