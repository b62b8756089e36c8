//! Servers and proxies that lack something that Redis has, or know less than they forward (S31).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use harness::{Command, Fate, Server, contains, gateway};
use tower_fixed_window::{Limiter, OnStoreFailure, Quota};
use tower_fixed_window_redis::RedisStore;

const DEADLINE: Duration = Duration::from_secs(20);
const NO_SCRIPT: &str = "-NOSCRIPT No matching script. Please use EVAL.";

/// No test sees the end of its window.
fn limiter(store: RedisStore) -> Limiter {
    let store = store.deadline(DEADLINE).on_failure(OnStoreFailure::Deny);
    Quota::new(3, Quota::MAX_WINDOW).name("api").store(store)
}

fn store(port: u16) -> RedisStore {
    RedisStore::new(format!("redis://127.0.0.1:{port}/")).expect("an address")
}

/// How many of six requests of a key pass, three at once over each node.
async fn passed(nodes: &[Limiter; 2], key: u64) -> usize {
    let mut passed = 0;
    for node in nodes {
        for answer in join_all((0..3).map(|_| node.check(key))).await {
            passed += usize::from(answer.expect("the server decides").is_allowed());
        }
    }
    passed
}

fn is(command: &Command, name: &str) -> bool {
    command[0] == name.as_bytes()
}

/// The error of a proxy that does not know a command.
fn unknown(command: &Command) -> Fate {
    let name = String::from_utf8_lossy(&command[0]).into_owned();
    Fate::Answer(format!("-ERR unknown command '{name}'"))
}

/// Twemproxy forwards commands that have a key. It closes the connection at others, but `PING`.
fn twemproxy(command: &Command) -> Option<Fate> {
    let has_key = match &command[0][..] {
        b"EVAL" | b"EVALSHA" => command.get(2).is_some_and(|keys| keys != b"0"),
        name => [&b"DEL"[..], b"HGETALL"].contains(&name),
    };
    if is(command, "PING") {
        return Some(Fate::Answer("+PONG".to_owned()));
    }
    (!has_key).then_some(Fate::Close)
}

/// Tair's proxy takes scripts with a key, and no other way to say it than `KEYS[1]`.
fn tair(command: &Command) -> Option<Fate> {
    let says = if is(command, "SCRIPT") {
        "unknown command 'SCRIPT'"
    } else if !command[0].starts_with(b"EVAL") {
        return None;
    } else if command.get(2).is_some_and(|keys| keys == b"0") {
        "for redis cluster, eval/evalsha number of keys can't be negative or zero"
    } else if contains(&command[..2].to_vec(), "KEYS[place]") {
        "bad lua script for redis cluster, all the keys that the script uses should be passed using \
         the KEYS array"
    } else if command.get(2).is_some_and(|keys| keys != b"1") {
        "eval/evalsha command keys must be in same slot"
    } else {
        return None;
    };
    Some(Fate::Answer(format!("-ERR {says}")))
}

type Way = fn(&Command) -> Option<Fate>;

#[tokio::test]
async fn nodes_share_their_counts_where_there_is_no_script_command() {
    let ways: [(&str, Way); 5] = [
        ("SCRIPT is unknown", |command| is(command, "SCRIPT").then(|| unknown(command))),
        ("SCRIPT reaches another server", |command| {
            let hash = || format!("+{}", "a".repeat(40));
            is(command, "SCRIPT").then(|| Fate::Answer(hash()))
        }),
        ("no server keeps scripts", |command| {
            is(command, "EVALSHA").then(|| Fate::Answer(NO_SCRIPT.to_owned()))
        }),
        ("Tair", tair),
        ("Twemproxy", twemproxy),
    ];
    for (what, fate) in ways {
        let Some(server) = Server::start() else { return };
        let port = server.port;
        let port = gateway(move |command| fate(command).unwrap_or(Fate::To(port)));
        let nodes = [limiter(store(port)), limiter(store(port))];
        assert_eq!(passed(&nodes, 1).await, 3, "{what}");
        assert_eq!(passed(&nodes, 2).await, 3, "{what}");
    }
}

/// The proxy chooses between two servers by the first key. All other commands go to one of them.
#[tokio::test]
async fn each_server_behind_a_proxy_gets_the_script_with_a_charge() {
    let (Some(one), Some(other)) = (Server::start(), Server::start()) else { return };
    let ports = [one.port, other.port];
    let port = gateway(move |command| {
        let key = command.get(3).filter(|_| is(command, "EVAL") || is(command, "EVALSHA"));
        Fate::To(
            ports[key.and_then(|key| key.iter().rev().nth(1)).map_or(0, |at| *at as usize % 2)],
        )
    });
    let nodes = [(); 2].map(|()| limiter(store(port).one_by_one()));
    let mut all = 0;
    for key in 0..4 {
        all += passed(&nodes, key).await;
    }
    assert_eq!(all, 12);
    for server in [&one, &other] {
        assert_eq!(server.ask::<u64>(&["DBSIZE"]), 2, "the keys are spread");
    }
}

/// A server whose scripts have other texts in place of these. Returns its port.
fn with_other_scripts(server: &Server, texts: &'static [(&str, &str)]) -> u16 {
    let port = server.port;
    gateway(move |command| {
        let mut changed = command.clone();
        if is(command, "EVAL") {
            let script = String::from_utf8(changed[1].clone()).expect("text");
            let replace =
                |script: String, (text, other): &(&str, &str)| script.replace(text, other);
            changed[1] = texts.iter().fold(script, replace).into_bytes();
        }
        Fate::Instead(port, changed)
    })
}

/// A script asks for a function of Redis 7 that is `nil` on older servers and on others.
const CHECK: &str = "redis.acl_check_cmd";

#[tokio::test]
async fn a_server_that_can_not_check_commands_counts() {
    let Some(server) = Server::start() else { return };
    let port = with_other_scripts(&server, &[(CHECK, "redis.no_such_function")]);
    let nodes = [limiter(store(port)), limiter(store(port))];
    for key in 0..3 {
        assert_eq!(passed(&nodes, key).await, 3);
    }
    // The first key of a call is another value, and fails alone.
    server.ask::<String>(&["SET", "tfw1:{api:u9}", "text"]);
    for _ in 0..2 {
        let answers = join_all([9_u64, 9, 8, 7].map(|key| nodes[0].check(key))).await;
        let [Err(_), Err(why), Ok(_), Ok(_)] = &answers[..] else { panic!("{answers:?}") };
        assert!(why.to_string().contains("another value"), "{why}");
    }
    // Several quotas take another way through the script.
    let quotas = Quota::new(3, Quota::MAX_WINDOW).and(Quota::new(9, Quota::MAX_WINDOW / 2));
    let nodes = nodes.map(|node| node.with_quotas(quotas));
    assert_eq!(passed(&nodes, 4).await, 3);
}

#[tokio::test]
async fn what_an_older_server_lacks_is_named_and_nothing_is_written() {
    let options = "Redis lacks options that are needed, as of Redis 7.0";
    let Some(server) = Server::start() else { return };
    let older = &[(CHECK, "redis.no_such"), ("KEYS[1], 1, 'GT'", "KEYS[1]")];
    let port = with_other_scripts(&server, older);
    let error = limiter(store(port)).check(1_u64).await.expect_err("it can't");
    assert_eq!(error.to_string(), options);
    assert_eq!(server.ask::<u64>(&["DBSIZE"]), 0);
}

/// For the table in `redis/README.md`.
#[tokio::test]
#[ignore = "TRY_REDIS has the address of a server to try"]
async fn a_server_is_tried() {
    let url = std::env::var("TRY_REDIS").expect("an address");
    let node = || limiter(RedisStore::new(&*url).expect("an address").one_by_one());
    let nodes = [node(), node()];
    for key in 0..20 {
        nodes[0].reset(key).await.expect("it deletes");
        assert_eq!(passed(&nodes, key).await, 3, "of key {key}");
    }
}

/// A charge that found no script is sent once more, with the script, and never again.
#[tokio::test]
async fn a_charge_takes_its_script_along_at_most_once() {
    let sent = Arc::<AtomicU64>::default();
    let counted = Arc::clone(&sent);
    let port = gateway(move |command| {
        if contains(command, "tfw1:{api") {
            counted.fetch_add(1, Ordering::Relaxed);
        }
        Fate::Answer(NO_SCRIPT.to_owned())
    });
    let error = limiter(store(port)).check(1_u64).await.expect_err("nothing is decided");
    assert_eq!(error.to_string(), "Redis refused the command (NOSCRIPT)");
    assert_eq!(sent.load(Ordering::Relaxed), 2);
}
