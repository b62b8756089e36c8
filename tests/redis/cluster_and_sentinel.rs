//! Cluster, Sentinel, TLS, an ACL user.

use std::time::{Duration, Instant};

use harness::{ALONE, Server, ask, free_port, wait_for};
use redis::cluster::ClusterClient;
use redis::sentinel::{SentinelClient, SentinelClientBuilder, SentinelServerType};
use redis::{Client, IntoConnectionInfo, TlsCertificates};
use tower_fixed_window::{OnStoreFailure, Quota};
use tower_fixed_window_redis::RedisStore;

use crate::outage::{By, Load, limiter};
use crate::shared_count::{self, DURABLE};
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
    shared_count::run(&urls(&nodes).join(","), |_, node| node);
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

/// The store detects the cluster by itself, and no request fails.
#[tokio::test]
async fn an_existing_cluster_connection_is_recognized() {
    let Some(nodes) = cluster() else { return };
    let client = ClusterClient::new(urls(&nodes)).expect("addresses");
    let store = RedisStore::from(client.get_async_connection().await.expect("it connects"));
    let store = store.deadline(Duration::from_secs(20)).on_failure(OnStoreFailure::Deny);
    let limiter = Quota::per_day(2).name("found").store(store);
    for passes in [true, true, false] {
        let crowd = (0..100_u64).map(|key| limiter.check(key));
        for answer in futures_util::future::join_all(crowd).await {
            assert_eq!(answer.expect("it answers").allowed(), passes);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_store_recovers_from_a_killed_cluster_node() {
    let _alone = ALONE.lock().await;
    let Some(mut nodes) = cluster() else { return };
    let store = RedisStore::cluster(urls(&nodes)).expect("addresses");
    // Keys on every node.
    let load = Load::start(&[limiter(store, 1_000_000)], 12, 12);
    load.answered_by(By::Redis, Instant::now()).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    nodes[1].kill();
    load.answered_by(By::Memory, Instant::now()).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    nodes[1].restart();
    // A master that comes back takes writes only after two seconds.
    wait_for("the node to take writes", || {
        let writes =
            |node: &Server, slot: &str| ask::<String>(&node.url(), &["SET", slot, "1"]).is_ok();
        // A key of each node's: `b` of the first, `c` of the second, `a` of the third.
        writes(&nodes[0], "b") && writes(&nodes[1], "c") && writes(&nodes[2], "a")
    });
    let back = Instant::now();
    load.answered_by(By::Redis, back).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let joined = Instant::now();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let answers = load.finish("a cluster's node killed").await;
    let late = answers.iter().filter(|answer| answer.is_by(By::Memory));
    let last = late.map(|answer| answer.asked()).max().expect("memory answered");
    println!(
        "the last by memory {:?} after the node took writes",
        last.saturating_duration_since(back)
    );
    assert!(last < joined, "all keys are in Redis again within a second");
}

/// A master, its replica, and a Sentinel that watches them.
pub(crate) struct Watched {
    pub(crate) master: Server,
    replica: Server,
    pub(crate) sentinel: Server,
}

pub(crate) fn watched() -> Option<Watched> {
    let master = Server::start()?;
    let replica = Server::with(&["--replicaof", "127.0.0.1", &master.port.to_string()])?;
    wait_for("the replica", || {
        replica.ask::<String>(&["INFO", "replication"]).contains("link_status:up")
    });
    let sentinel = Server::with(&["--sentinel"])?;
    let port = master.port.to_string();
    sentinel.ask::<String>(&["SENTINEL", "MONITOR", "mymaster", "127.0.0.1", &port, "1"]);
    for (option, value) in [("down-after-milliseconds", "500"), ("failover-timeout", "2000")] {
        sentinel.ask::<String>(&["SENTINEL", "SET", "mymaster", option, value]);
    }
    wait_for("Sentinel to know the replica", || {
        let known: Vec<redis::Value> = sentinel.ask(&["SENTINEL", "REPLICAS", "mymaster"]);
        known.len() == 1
    });
    Some(Watched { master, replica, sentinel })
}

impl Watched {
    pub(crate) fn store(&self) -> RedisStore {
        let client =
            |url| SentinelClient::build(vec![url], "mymaster", None, SentinelServerType::Master);
        RedisStore::sentinel([self.sentinel.url()], client).expect("addresses")
    }

    /// Waits until the former replica takes writes and Sentinel names it.
    fn failed_over(&self) -> Instant {
        wait_for("the failover", || {
            let master: Vec<String> =
                self.sentinel.ask(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster"]);
            master[1] == self.replica.port.to_string()
                && ask::<String>(&self.replica.url(), &["SET", "a", "1"]).is_ok()
        });
        Instant::now()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_store_follows_a_failover_of_a_killed_master() {
    let _alone = ALONE.lock().await;
    let Some(mut watched) = watched() else { return };
    let load = Load::start(&[limiter(watched.store(), 1_000_000)], 1, 8);
    load.answered_by(By::Redis, Instant::now()).await;
    watched.master.kill();
    load.answered_by(By::Memory, Instant::now()).await;
    let back = load.answered_by(By::Redis, watched.failed_over()).await;
    println!("joined {back:?} after the failover");
    assert!(back < Duration::from_secs(1), "{back:?}");
    load.finish("failed over from a killed master").await;
}

/// The frozen master stays silent, so no connection breaks.
#[tokio::test(flavor = "multi_thread")]
async fn the_store_follows_a_failover_of_a_frozen_master() {
    let _alone = ALONE.lock().await;
    let Some(watched) = watched() else { return };
    let load = Load::start(&[limiter(watched.store(), 1_000_000)], 1, 8);
    load.answered_by(By::Redis, Instant::now()).await;
    watched.master.freeze();
    load.answered_by(By::Memory, Instant::now()).await;
    let back = load.answered_by(By::Redis, watched.failed_over()).await;
    println!("joined {back:?} after the failover");
    assert!(back < Duration::from_secs(1), "{back:?}");
    load.finish("failed over from a frozen master").await;
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
        ask::<String>(&watched.sentinel.url(), &failover).is_ok()
    });
    watched.failed_over();
    // Valkey closes all connections at its demotion.
    wait_for("the old master to be demoted", || {
        ask::<String>(&watched.master.url(), &["INFO", "replication"])
            .is_ok_and(|info| info.contains("role:slave"))
    });
    let back = load.answered_by(By::Redis, Instant::now()).await;
    println!("joined {back:?} after the failover");
    assert!(back < Duration::from_secs(1), "{back:?}");
    load.finish("failed over by hand").await;
}

#[tokio::test]
async fn a_tls_server_is_used_only_if_its_certificate_is_trusted() {
    let dir = tempfile::tempdir().expect("a directory");
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    let (cert, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
    std::fs::write(&cert, made.cert.pem()).expect("it is written");
    std::fs::write(&key, made.signing_key.serialize_pem()).expect("it is written");
    let (port, cert, key) =
        (free_port().to_string(), cert.display().to_string(), key.display().to_string());
    let options = [
        ["--tls-port", &port],
        ["--tls-cert-file", &cert],
        ["--tls-key-file", &key],
        ["--tls-ca-cert-file", &cert],
        ["--tls-auth-clients", "no"],
    ];
    let Some(_server) = Server::on(0, &options.concat()) else { return };
    let url = format!("rediss://localhost:{port}/");
    let root_cert = Some(made.cert.pem().into_bytes());
    let trusting = TlsCertificates { client_tls: None, root_cert };
    let client = Client::build_with_tls(url.as_str(), trusting).expect("an address");
    let limiter = |store: RedisStore| {
        // A busy machine takes longer than the usual deadline to shake hands.
        let store = store.on_failure(OnStoreFailure::Deny).deadline(Duration::from_secs(10));
        Quota::per_day(5).name("tls").store(store)
    };
    let trusted = limiter(RedisStore::client(client));
    let deadline = Instant::now() + Duration::from_secs(10);
    let decision = loop {
        // The server may still be starting.
        match trusted.check("ann").await {
            Ok(decision) => break decision,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert_eq!(decision.remaining(), 4);
    // The certificate is signed by no trusted authority.
    let untrusted = limiter(RedisStore::new(url).expect("an address"));
    let error = untrusted.check("ann").await.expect_err("not trusted");
    assert_eq!(
        error.to_string(),
        "Redis can't be reached (its certificate is not signed by a trusted authority)"
    );
}

/// The rights that the guide says a user needs, from `begins` to the end of the code.
fn documented(begins: &str) -> String {
    let guide = include_str!("../../redis/README.md");
    let from = guide.find(begins).expect("it is documented");
    let rights = guide[from..].split('`').next().expect("it ends");
    rights.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A user with a password and these rights only.
fn add_user(server: &Server, rights: &str) {
    let mut command = vec!["ACL", "SETUSER", "limiter", "reset", "on", ">secret"];
    command.extend(rights.split_whitespace());
    server.ask::<String>(&command);
}

/// The least that the store needs.
#[tokio::test]
async fn the_documented_acl_rights_are_enough() {
    let Some(server) = Server::start() else { return };
    add_user(&server, &documented("~tfw1:*"));
    server.ask::<String>(&["ACL", "SETUSER", "default", "resetpass", "off"]);
    let url = |password| format!("redis://limiter:{password}@127.0.0.1:{}/", server.port);
    let limiter = |password| {
        let store = RedisStore::new(url(password)).expect("an address");
        let store = store.deadline(Duration::from_secs(20)).on_failure(OnStoreFailure::Deny);
        Quota::per_day(5).and(Quota::per_week(20)).name("acl").store(store)
    };
    let right = limiter("secret");
    let receipt = right.charge("ann", 2).await.expect("it answers").expect("it passed");
    assert_eq!(receipt.decision().remaining(), 3);
    right.refund(receipt).await.expect("it may");
    let one = right.with_quotas(Quota::per_hour(5));
    assert!(one.check("ann").await.expect("it may").allowed());
    right.reset("ann").await.expect("it may");
    let error = limiter("wrong").check("ann").await.expect_err("another password");
    assert_eq!(error.to_string(), "Redis refused the password");
}

/// On the master, and on the Sentinels.
#[tokio::test]
async fn the_documented_acl_rights_are_enough_with_sentinel() {
    let Some(watched) = watched() else { return };
    let (master, sentinel) = (documented("~tfw1:*"), documented("+sentinel|masters"));
    add_user(&watched.master, &format!("{master} {}", documented("+role")));
    add_user(&watched.sentinel, &sentinel);
    let store = RedisStore::sentinel([watched.sentinel.url()], |url| {
        let sentinel = url.into_connection_info()?.addr().clone();
        SentinelClientBuilder::new([sentinel], "mymaster", SentinelServerType::Master)?
            .set_client_to_sentinel_username("limiter")
            .set_client_to_sentinel_password("secret")
            .set_client_to_redis_username("limiter")
            .set_client_to_redis_password("secret")
            .build()
    });
    let store = store.expect("an address").deadline(Duration::from_secs(5));
    store.ping().await.expect("it may");
}
