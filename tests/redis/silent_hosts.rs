//! A single host that is silent or gone is not an outage. Frozen servers stand for silent hosts,
//! such as those without power.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use harness::{ALONE, Server, ask, wait_for};
use redis::sentinel::{SentinelClient, SentinelServerType};
use tower_fixed_window::{Limiter, OnStoreFailure};
use tower_fixed_window_redis::RedisStore;

use crate::cluster_and_sentinel::{cluster_with, urls};
use crate::outage::{By, Load, limiter};

/// The time until Redis answers.
async fn time_to_join(limiter: &Limiter) -> Duration {
    let start = Instant::now();
    while limiter.check(1).await.expect("it answers").is_local() {
        assert!(start.elapsed() < Duration::from_secs(10), "it does not join");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    println!("joined after {:?}", start.elapsed());
    start.elapsed()
}

/// A name has two addresses in a hosts file that only a child process sees, which takes root. The
/// system tells 127.0.0.1 first, in any order.
#[test]
fn the_store_connects_to_a_name_whose_first_address_is_silent() {
    let Some(server) = Server::start() else { return };
    let way = TcpListener::bind("127.0.0.2:0").expect("a free port");
    let port = way.local_addr().expect("it is bound").port();
    let _silent = TcpListener::bind(("127.0.0.1", port)).expect("a free port");
    std::thread::spawn(move || {
        for from in way.incoming().flatten() {
            let to = TcpStream::connect(("127.0.0.1", server.port)).expect("the server");
            for (mut from, mut to) in [(from.try_clone(), to.try_clone()), (Ok(to), Ok(from))]
                .map(|(from, to)| (from.expect("a socket"), to.expect("a socket")))
            {
                std::thread::spawn(move || std::io::copy(&mut from, &mut to));
            }
        }
    });
    let mut hosts = tempfile::NamedTempFile::new().expect("a file");
    writeln!(hosts, "127.0.0.1 two.test\n127.0.0.2 two.test").expect("it is written");
    let node = Command::new("unshare")
        .args(["-m", "sh", "-c", "mount --bind \"$0\" /etc/hosts || exit 77; exec \"$@\""])
        .arg(hosts.path())
        .arg(std::env::current_exe().expect("this program"))
        .args(["--exact", "silent_hosts::node_of_a_name", "--ignored", "--nocapture"])
        .env("NODE_URL", format!("redis://two.test:{port}/"))
        .status();
    match node.map(|status| status.code()) {
        Ok(Some(0)) => {}
        // Without `unshare`, or not as root.
        Ok(Some(1 | 77)) | Err(_) if !is_root() => println!("skipped: it takes root"),
        failed => panic!("{failed:?}"),
    }
}

fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output();
    id.is_ok_and(|id| id.stdout.trim_ascii() == b"0")
}

#[tokio::test]
#[ignore = "a child process of the test above"]
async fn node_of_a_name() {
    let store =
        RedisStore::new(std::env::var("NODE_URL").expect("an address")).expect("an address");
    let took = time_to_join(&limiter(store, 1_000_000)).await;
    assert!(took < Duration::from_secs(3), "{took:?}");
}

/// The name of a key in Redis.
pub(crate) fn name_of(key: u64) -> String {
    format!("tfw1:{{outage:u{key}}}")
}

/// Keys whose slots are on a node.
pub(crate) fn keys_on<const N: usize>(node: &Server) -> [u64; N] {
    let slots: Vec<Vec<redis::Value>> = node.ask(&["CLUSTER", "SLOTS"]);
    let own = slots.iter().find_map(|slots| {
        let [redis::Value::Int(first), redis::Value::Int(last), redis::Value::Array(of), ..] =
            &slots[..]
        else {
            return None;
        };
        (of[1] == redis::Value::Int(node.port.into())).then_some(*first..=*last)
    });
    let own = own.expect("it has slots");
    let mut keys =
        (0..).filter(|&key| own.contains(&node.ask::<i64>(&["CLUSTER", "KEYSLOT", &name_of(key)])));
    [(); N].map(|()| keys.next().expect("there is one"))
}

pub(crate) fn key_on(node: &Server) -> u64 {
    let [key] = keys_on(node);
    key
}

/// Three masters, and a replica of the first.
pub(crate) fn cluster_with_replica() -> Option<(Vec<Server>, Server)> {
    let nodes = cluster_with(&[])?;
    let options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000"];
    let replica = Server::with(&options)?;
    let first = nodes[0].port.to_string();
    replica.ask::<String>(&["CLUSTER", "MEET", "127.0.0.1", &first]);
    let id: String = nodes[0].ask(&["CLUSTER", "MYID"]);
    wait_for("the replica to know its master", || {
        ask::<String>(&replica.url(), &["CLUSTER", "REPLICATE", &id]).is_ok()
    });
    wait_for("the replica", || {
        let info: String = replica.ask(&["INFO", "replication"]);
        let known = |node: &Server| {
            node.ask::<String>(&["CLUSTER", "INFO"]).contains("cluster_known_nodes:4")
        };
        info.contains("master_link_status:up") && nodes.iter().all(known)
    });
    Some((nodes, replica))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_cluster_master_is_replaced_by_its_replica() {
    let _alone = ALONE.lock().await;
    let Some((nodes, replica)) = cluster_with_replica() else { return };
    let store = RedisStore::cluster(urls(&nodes)).expect("addresses");
    let load = Load::start(&[limiter(store, 1_000_000)], 12, 12);
    load.answered_by(By::Redis, Instant::now()).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    nodes[0].freeze();
    load.answered_by(By::Memory, Instant::now()).await;
    let over = taken_over(&nodes, &replica);
    tokio::time::sleep(Duration::from_secs(3)).await;
    load.finish_by_redis(over, "a cluster's master frozen").await;
}

/// Waits until the replica of the first master has taken over, and the others know it.
pub(crate) fn taken_over(nodes: &[Server], replica: &Server) -> Instant {
    wait_for("the failover", || {
        let is_known = |node: &Server| {
            let slots: Vec<Vec<redis::Value>> = node.ask(&["CLUSTER", "SLOTS"]);
            format!("{slots:?}").contains(&format!("int({})", replica.port))
        };
        ask::<String>(&replica.url(), &["SET", "b", "1"]).is_ok() && nodes[1..].iter().all(is_known)
    });
    Instant::now()
}

/// A master, its replica, and three Sentinels of which two have to agree.
pub(crate) struct Watched {
    pub(crate) master: Server,
    pub(crate) replica: Server,
    pub(crate) sentinels: Vec<Server>,
}

pub(crate) fn watched() -> Option<Watched> {
    let master = Server::start()?;
    let replica = Server::with(&["--replicaof", "127.0.0.1", &master.port.to_string()])?;
    wait_for("the replica", || {
        replica.ask::<String>(&["INFO", "replication"]).contains("link_status:up")
    });
    let sentinels: Vec<Server> =
        (0..3).map(|_| Server::with(&["--sentinel"])).collect::<Option<_>>()?;
    let port = master.port.to_string();
    for sentinel in &sentinels {
        sentinel.ask::<String>(&["SENTINEL", "MONITOR", "mymaster", "127.0.0.1", &port, "2"]);
        for (option, value) in [("down-after-milliseconds", "500"), ("failover-timeout", "2000")] {
            sentinel.ask::<String>(&["SENTINEL", "SET", "mymaster", option, value]);
        }
    }
    for sentinel in &sentinels {
        wait_for("Sentinels to know the replica and each other", || {
            let replicas: Vec<redis::Value> = sentinel.ask(&["SENTINEL", "REPLICAS", "mymaster"]);
            let others: Vec<redis::Value> = sentinel.ask(&["SENTINEL", "SENTINELS", "mymaster"]);
            (replicas.len(), others.len()) == (1, 2)
        });
    }
    Some(Watched { master, replica, sentinels })
}

impl Watched {
    pub(crate) fn store(&self) -> RedisStore {
        let client =
            |url| SentinelClient::build(vec![url], "mymaster", None, SentinelServerType::Master);
        RedisStore::sentinel(urls(&self.sentinels), client).expect("addresses")
    }

    /// Waits until the former replica takes writes, and one of these Sentinels names it.
    pub(crate) fn failed_over(&self, sentinels: &[Server]) -> Instant {
        let replica = self.replica.port.to_string();
        let names_it = |sentinel: &Server| {
            let address = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster"];
            sentinel.ask::<Vec<String>>(&address)[1] == replica
        };
        wait_for("the failover", || {
            sentinels.iter().any(names_it)
                && ask::<String>(&self.replica.url(), &["SET", "a", "1"]).is_ok()
        });
        Instant::now()
    }
}

/// A node that has lost its scripts gets them with the next charge, whatever the others do.
#[tokio::test(flavor = "multi_thread")]
async fn a_healthy_shard_without_scripts_answers_while_another_is_dead() {
    let _alone = ALONE.lock().await;
    for freezes in [false, true] {
        let options = ["--cluster-require-full-coverage", "no"];
        let Some(mut nodes) = cluster_with(&options) else { return };
        let store = RedisStore::cluster(urls(&nodes)).expect("addresses");
        let store = store.deadline(Duration::from_secs(2)).on_failure(OnStoreFailure::Deny);
        let (limiter, start) = (limiter(store, 1_000_000), Instant::now());
        let keys: Vec<u64> = nodes.iter().map(key_on).collect();
        for key in &keys {
            while let Err(error) = limiter.check(*key).await {
                assert!(start.elapsed() < Duration::from_secs(30), "{error:?}");
            }
        }
        match freezes {
            true => nodes[1].freeze(),
            false => nodes[1].kill(),
        }
        for _ in 0..3 {
            nodes[0].ask::<String>(&["SCRIPT", "FLUSH"]);
            let answer = limiter.check(keys[0]).await;
            assert!(answer.is_ok(), "frozen: {freezes}: {answer:?}");
        }
    }
}
