//! Connections that were closed or forgotten while nobody asked: nodes share one count all the same.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use harness::{Proxy, Server};
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{
    AsyncConnectionConfig, Cmd, ErrorKind, Pipeline, RedisError, RedisFuture, RedisResult,
    ServerErrorKind, Value,
};
use tower_fixed_window::{Decision, Limiter, Quota};
use tower_fixed_window_redis::RedisStore;

fn node(store: RedisStore) -> Limiter {
    Quota::per_day(1_000).from_first_request().name("idle").store(store)
}

fn new(url: &str) -> Limiter {
    node(RedisStore::new(url).expect("an address"))
}

/// Sends `n` requests to the nodes in turn, with a pause after each, and returns the decisions.
pub(crate) async fn in_turns(nodes: &[Limiter], n: usize, pause: Duration) -> Vec<Decision> {
    let mut decisions = Vec::new();
    for node in nodes.iter().cycle().take(n) {
        let asked = Instant::now();
        let decision = node.check("ann").await.expect("it answers");
        println!("{} after {:?}, local: {}", decision.used(), asked.elapsed(), decision.is_local());
        decisions.push(decision);
        tokio::time::sleep(pause).await;
    }
    decisions
}

pub(crate) fn assert_one_count(decisions: &[Decision]) {
    let used: Vec<_> = decisions.iter().map(Decision::used).collect();
    assert!(decisions.iter().all(|decision| !decision.is_local()), "counted locally: {used:?}");
    let one: Vec<u64> = (1..=decisions.len() as u64).collect();
    assert_eq!(used, one, "one count");
}

#[tokio::test]
async fn nodes_share_a_count_on_a_server_that_closes_idle_connections() {
    let Some(server) = Server::with(&["--save", "", "--timeout", "1"]) else { return };
    let nodes = [new(&server.url()), new(&server.url())];
    assert_one_count(&in_turns(&nodes, 6, Duration::from_millis(2_500)).await);
}

/// The connection was silent, other attempts to connect failed, and then it answered again. Those
/// failures don't matter when it is checked later, as any idle connection.
#[tokio::test]
async fn a_connection_that_answers_again_is_checked_like_any_other() {
    let Some(server) = Server::start() else { return };
    let (url, made) = (server.url(), Arc::new(AtomicU32::new(0)));
    let store = RedisStore::connecting(move || {
        let (url, first) = (url.clone(), made.fetch_add(1, Ordering::Relaxed) == 0);
        async move {
            match first {
                true => redis::Client::open(url)?.get_multiplexed_async_connection().await,
                false => Err(io::Error::from(io::ErrorKind::ConnectionRefused).into()),
            }
        }
    });
    let node = node(store);
    let is_local = async || node.check("ann").await.expect("it answers").is_local();
    assert!(!is_local().await);
    server.freeze();
    while !is_local().await {}
    server.thaw();
    while is_local().await {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    tokio::time::sleep(Duration::from_millis(1_200)).await;
    assert!(!is_local().await, "its check was not waited for");
}

/// Connects as the store does by itself, without deadlines of the library.
async fn open(url: &str) -> RedisResult<MultiplexedConnection> {
    let config = AsyncConnectionConfig::new();
    let config = config.set_connection_timeout(None).set_response_timeout(None);
    redis::Client::open(url)?.get_multiplexed_async_connection_with_config(&config).await
}

pub(crate) type Answer = RedisFuture<'static, Value>;

/// A connection made by the app. A function may answer in place of the server, and gets the
/// connection's number.
#[derive(Clone)]
struct Answering(MultiplexedConnection, u32, Arc<dyn Instead>);

pub(crate) trait Instead: Fn(u32, &Cmd) -> Option<Answer> + Send + Sync + 'static {}

impl<F: Fn(u32, &Cmd) -> Option<Answer> + Send + Sync + 'static> Instead for F {}

impl ConnectionLike for Answering {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        let answer = (self.2)(self.1, cmd);
        answer.unwrap_or_else(|| self.0.req_packed_command(cmd))
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        self.0.req_packed_commands(pipeline, offset, count)
    }

    fn get_db(&self) -> i64 {
        self.0.get_db()
    }
}

fn fails(error: impl Into<RedisError>) -> Answer {
    Box::pin(std::future::ready(Err(error.into())))
}

/// Refuses all commands, as a replica does.
fn refuses_if(demoted: &Arc<AtomicBool>) -> impl Instead + use<> {
    let demoted = Arc::clone(demoted);
    let error = (ErrorKind::Server(ServerErrorKind::ReadOnly), "it is a replica");
    move |_, _: &Cmd| demoted.load(Ordering::Relaxed).then(|| fails(error))
}

/// A store over such connections, and how many were made.
pub(crate) fn answering(server: &Server, answer: impl Instead) -> (RedisStore, Arc<AtomicU32>) {
    let (url, answer, made) = (server.url(), Arc::new(answer), Arc::new(AtomicU32::new(0)));
    let counted = Arc::clone(&made);
    let store = RedisStore::connecting(move || {
        let (url, answer) = (url.clone(), Arc::clone(&answer));
        let number = counted.fetch_add(1, Ordering::SeqCst);
        async move { Ok(Answering(open(&url).await?, number, answer)) }
    });
    (store, made)
}

/// The result of an old call says nothing about the connection now.
#[tokio::test]
async fn a_connection_of_the_app_that_has_failed_once_is_checked_before_it_is_given_up() {
    let Some(server) = Server::start() else { return };
    let client = redis::Client::open(server.url()).expect("an address");
    let connection = client.get_multiplexed_async_connection().await.expect("it connects");
    let demoted = Arc::new(AtomicBool::new(false));
    let connection = Answering(connection, 0, Arc::new(refuses_if(&demoted)));
    let node = node(RedisStore::from(connection));
    let is_local = async || node.check("ann").await.expect("it answers").is_local();
    assert!(!is_local().await);
    demoted.store(true, Ordering::Relaxed);
    assert!(is_local().await);
    demoted.store(false, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_millis(1_200)).await;
    assert!(!is_local().await, "its check was not waited for");
}

/// The pauses between connections double while none of them answers a call.
#[tokio::test]
async fn connections_that_end_at_once_are_not_made_as_fast_as_they_end() {
    let Some(server) = Server::start() else { return };
    let ended = |_, _: &Cmd| Some(fails(io::Error::from(io::ErrorKind::BrokenPipe)));
    let (store, made) = answering(&server, ended);
    let node = node(store.deadline(Duration::from_secs(1)));
    assert!(node.check("ann").await.expect("memory answers").is_local());
    let made = made.load(Ordering::SeqCst);
    assert!((1..12).contains(&made), "{made} connections");
}

#[tokio::test]
async fn a_late_call_between_calls_that_are_answered_is_no_sign_of_a_lost_connection() {
    let Some(server) = Server::start() else { return };
    let pings = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&pings);
    let (store, made) = answering(&server, move |_, cmd: &Cmd| {
        let sent = cmd.get_packed_command();
        let has = |text: &[u8]| sent.windows(text.len()).any(|part| part == text);
        // Its answer is waited for.
        if has(b"PING") && !cmd.is_no_response() {
            counted.fetch_add(1, Ordering::SeqCst);
        }
        has(b":tlate").then(|| -> Answer { Box::pin(std::future::pending()) })
    });
    let node = node(store.one_by_one().deadline(Duration::from_secs(1)));
    let is_local = async |key: &str| node.check(key).await.expect("it answers").is_local();
    assert!(!is_local("ann").await);
    let before = made.load(Ordering::SeqCst);
    let others = async {
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(1_500) {
            assert!(!is_local("ann").await, "after {:?}", start.elapsed());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let (late, ()) = tokio::join!(is_local("late"), others);
    assert!(late, "the call has no answer");
    assert_eq!((made.load(Ordering::SeqCst), pings.load(Ordering::SeqCst)), (before, 0));
}

/// The client library would send again after this error, but not connect again.
#[tokio::test]
async fn an_idle_connection_whose_check_times_out_is_replaced() {
    let Some(server) = Server::start() else { return };
    let ends = Arc::new(AtomicBool::new(false));
    let has_ended = Arc::clone(&ends);
    let (store, _) = answering(&server, move |number, _: &Cmd| {
        let ends = number == 0 && has_ended.load(Ordering::Relaxed);
        ends.then(|| fails(io::Error::from(io::ErrorKind::TimedOut)))
    });
    let node = node(store.deadline(Duration::from_secs(5)));
    assert!(!node.check("ann").await.expect("it answers").is_local());
    ends.store(true, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_millis(1_200)).await;
    assert!(!node.check("ann").await.expect("it answers").is_local());
}

/// Concurrent requests wait for a single check.
#[tokio::test]
async fn concurrent_calls_on_a_dropped_connection_wait_for_one_check() {
    let Some(server) = Server::start() else { return };
    let proxy = Proxy::to(server.port);
    let node = new(&proxy.url());
    assert_one_count(&in_turns(std::slice::from_ref(&node), 1, Duration::ZERO).await);
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    proxy.forget();
    let crowd = (0..200).map(|_| node.check("ann"));
    let mut used: Vec<u64> = futures_util::future::join_all(crowd)
        .await
        .into_iter()
        .map(|answer| answer.expect("it answers"))
        .inspect(|decision| assert!(!decision.is_local()))
        .map(|decision| decision.used())
        .collect();
    used.sort_unstable();
    assert!(used.iter().copied().eq(2..=201), "{used:?}");
    assert_eq!(proxy.made(), 2);
}

#[tokio::test]
async fn an_idle_store_sends_no_commands() {
    let Some(server) = Server::start() else { return };
    let node = new(&server.url());
    assert_one_count(&in_turns(std::slice::from_ref(&node), 1, Duration::ZERO).await);
    let commands = || {
        let info: String = server.ask(&["INFO", "stats"]);
        let count = |line: &str| line.strip_prefix("total_commands_processed:")?.parse().ok();
        info.lines().find_map(count).expect("it is there")
    };
    let before: u64 = commands();
    tokio::time::sleep(Duration::from_secs(3)).await;
    // The few commands are those of the client that reads the statistics.
    let sent = commands() - before;
    assert!(sent <= 5, "{sent} commands");
}

#[tokio::test]
async fn a_connection_made_by_the_caller_is_checked_before_use() {
    let Some(server) = Server::with(&["--save", "", "--timeout", "1"]) else { return };
    let client = redis::Client::open(server.url()).expect("an address");
    let manager = client.get_connection_manager().await.expect("it connects");
    let nodes = [node(RedisStore::from(manager)), new(&server.url())];
    assert_one_count(&in_turns(&nodes, 6, Duration::from_millis(1_600)).await);
}

#[tokio::test]
async fn a_store_that_is_not_used_does_not_reconnect() {
    let attempts = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&attempts);
    let store = RedisStore::connecting(move || {
        counted.fetch_add(1, Ordering::SeqCst);
        async {
            redis::Client::open("redis://127.0.0.1:1/")?.get_multiplexed_async_connection().await
        }
    });
    let node = node(store);
    assert!(node.check("ann").await.expect("memory answers").is_local());
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    let before = attempts.load(Ordering::SeqCst);
    assert!((1..10).contains(&before), "{before}");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(attempts.load(Ordering::SeqCst), before);
    drop(node);
}

/// The system sends keepalive probes on an idle connection, which a network would otherwise forget.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn connections_have_tcp_keepalive() {
    let Some(server) = Server::start() else { return };
    let node = new(&server.url());
    assert_one_count(&in_turns(std::slice::from_ref(&node), 1, Duration::ZERO).await);
    // Unacknowledged data has another timer.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let connections = std::fs::read_to_string("/proc/net/tcp").expect("it is Linux");
    let server = format!("0100007F:{:04X}", server.port);
    let timers: Vec<&str> = connections
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .filter(|fields| fields[2] == server && fields[3] == "01")
        .map(|fields| fields[5])
        .collect();
    assert_eq!(timers.len(), 1, "{connections}");
    // In hundredths of a second, in hexadecimal digits.
    let due = timers[0].strip_prefix("02:").expect("a keepalive timer");
    assert!(u32::from_str_radix(due, 16).expect("a number") <= 3_000, "{due}");
}
