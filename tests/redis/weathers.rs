//! Three nodes in bad weather, and an account of each token: what the server counted is what passed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use fastrand::Rng;
use futures_util::future::join_all;
use harness::{Proxy, Server};
use tokio::runtime::Runtime;
use tokio::time::timeout;
use tower_fixed_window::{Limits, Line, OnStoreFailure, Quota};
use tower_fixed_window_redis::RedisStore;

use crate::random::env;

const USERS: u64 = 5;
/// All users together reach the limit of their organization before their own, or after it.
const USER: u64 = 120;
const ORG: u64 = 450;

/// What a key's requests know of its tokens.
#[derive(Clone, Copy, Default, Debug)]
struct Account {
    passed: u64,
    /// Of charges without an answer: counted, or not.
    perhaps_passed: u64,
    returned: u64,
    /// Of refunds without an answer.
    perhaps_returned: u64,
}

#[derive(Clone, Default)]
struct Accounts(Arc<Mutex<HashMap<String, Account>>>);

impl Accounts {
    fn note(&self, keys: [&str; 2], note: impl Fn(&mut Account)) {
        let mut accounts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = keys.map(|key| note(accounts.entry(key.to_owned()).or_default()));
    }
}

struct Node {
    way: Proxy,
    limits: Limits,
    runtime: Runtime,
}

fn limits(store: RedisStore) -> Limits {
    let quota = |limit| Quota::new(limit, Quota::MAX_WINDOW);
    Limits::new([quota(USER).name("user"), quota(ORG).name("org")]).store(store)
}

fn milliseconds(rng: &mut Rng, most: u64) -> Duration {
    Duration::from_millis(rng.u64(..=most))
}

/// Charges of both limits, which are kept, returned, settled, or not waited for.
async fn requests(limits: Limits, accounts: Accounts, round: u64, ends: Arc<AtomicBool>) {
    let (mut rng, org) = (Rng::new(), format!("org-{round}"));
    while !ends.load(SeqCst) {
        let user = format!("user-{round}-{}", rng.u64(..USERS));
        let keys = [user.as_str(), org.as_str()];
        let cost = rng.u64(1..5);
        let patience = match rng.u8(..4) {
            0 => milliseconds(&mut rng, 8),
            _ => Duration::from_secs(30),
        };
        let lines = [Line::new("user", user.as_str(), cost), Line::new("org", org.as_str(), cost)];
        let receipt = match timeout(patience, limits.charge(lines)).await {
            Ok(Ok(Ok(receipt))) => receipt,
            Ok(Ok(Err(_))) => {
                tokio::time::sleep(milliseconds(&mut rng, 20)).await;
                continue;
            }
            Ok(Err(_)) | Err(_) => {
                accounts.note(keys, |account| account.perhaps_passed += cost);
                tokio::time::sleep(milliseconds(&mut rng, 200)).await;
                continue;
            }
        };
        accounts.note(keys, |account| account.passed += cost);
        tokio::time::sleep(milliseconds(&mut rng, 30)).await;
        let kept = rng.u64(..=cost);
        let returned = cost - kept;
        let answer = match rng.bool() {
            true => {
                timeout(patience, limits.settle(receipt, [("user", kept), ("org", kept)])).await
            }
            false if kept == 0 => timeout(patience, limits.refund(receipt)).await,
            false => continue,
        };
        accounts.note(keys, |account| match answer {
            Ok(Ok(())) => account.returned += returned,
            Ok(Err(_)) | Err(_) => account.perhaps_returned += returned,
        });
    }
}

/// What happens to the network and the server, one thing after another.
fn weather(rng: &mut Rng, server: &mut Server, nodes: &[Node]) {
    let way = &rng.choice(nodes).expect("three").way;
    match rng.u8(..11) {
        0 | 1 => {
            let (most, mut rng) = (rng.u64(..60), rng.fork());
            way.set_delay(move || milliseconds(&mut rng, most));
        }
        2 => way.set_delay(|| Duration::ZERO),
        3 | 4 => way.cut(),
        5 => way.forget(),
        6 | 7 => way.cut_before("evalsha"),
        8 => {
            way.set_silent(true);
            sleep(milliseconds(rng, 400));
            way.set_silent(false);
        }
        9 => {
            server.freeze();
            sleep(milliseconds(rng, 400));
            server.thaw();
        }
        _ => {
            server.kill();
            sleep(milliseconds(rng, 100));
            server.restart();
        }
    }
}

/// `WEATHERS_SECONDS=3600` is an hour of it.
#[test]
fn in_all_weathers_what_the_server_counted_is_what_passed() {
    // No write is answered before it is on the disk.
    let durable = ["--save", "", "--appendonly", "yes", "--appendfsync", "always"];
    let Some(mut server) = Server::with(&durable) else { return };
    let nodes: Vec<_> = (0..3)
        .map(|node| {
            let way = Proxy::to(server.port);
            let store = RedisStore::new(way.url()).expect("an address");
            let store = store.deadline(Duration::from_millis(40 << (2 * node)));
            let limits = limits(store.on_failure(OnStoreFailure::Deny));
            Node { way, limits, runtime: Runtime::new().expect("a runtime") }
        })
        .collect();
    let (mut rng, start) = (Rng::new(), Instant::now());
    let (mut total, mut round) = (Account::default(), 0);
    while start.elapsed() < Duration::from_secs(env("WEATHERS_SECONDS", 5)) {
        round += 1;
        let (accounts, ends) = (Accounts::default(), Arc::new(AtomicBool::new(false)));
        let tasks: Vec<_> = nodes
            .iter()
            .flat_map(|node| std::iter::repeat_n(node, 8))
            .map(|node| {
                let limits = node.limits.clone();
                node.runtime.spawn(requests(limits, accounts.clone(), round, ends.clone()))
            })
            .collect();
        for _ in 0..10 {
            sleep(milliseconds(&mut rng, 200));
            weather(&mut rng, &mut server, &nodes);
        }
        ends.store(true, SeqCst);
        nodes[0].runtime.block_on(join_all(tasks)).into_iter().for_each(|task| {
            task.expect("no panic");
        });
        nodes.iter().for_each(|node| node.way.set_delay(|| Duration::ZERO));
        // What is under way arrives, or is lost with its connection.
        sleep(Duration::from_millis(100));
        let store = RedisStore::new(server.url()).expect("an address");
        let direct =
            limits(store.deadline(Duration::from_secs(20)).on_failure(OnStoreFailure::Deny));
        for (key, account) in accounts.0.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let (name, limit) = if key.starts_with("org") { ("org", ORG) } else { ("user", USER) };
            let peek = direct.limiter(name).peek(key.as_str());
            let used = nodes[0].runtime.block_on(peek).expect("it answers").used();
            let least = account.passed.saturating_sub(account.returned + account.perhaps_returned);
            let most = account.passed + account.perhaps_passed - account.returned;
            assert!((least..=most).contains(&used), "{key}: {used} used, {account:?}");
            assert!(used <= limit, "{key}: {used} used of {limit}");
            if name == "org" {
                total.passed += account.passed;
                total.perhaps_passed += account.perhaps_passed;
                total.returned += account.returned;
                total.perhaps_returned += account.perhaps_returned;
            }
        }
        // Its log would take ever longer to load. The rewriting of the round before may still run.
        server.ask::<String>(&["FLUSHALL"]);
        let _ = harness::ask::<String>(&server.url(), &["BGREWRITEAOF"]);
    }
    println!("{round} rounds: {total:?}");
    assert!(total.passed > 20 * round, "the weather was too bad: {total:?}");
}
