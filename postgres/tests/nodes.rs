//! Four processes on one hot key, two of which are killed: never more than the limit, and what the
//! table says is what passed.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use harness::Postgres;
use tower_fixed_window::{Limit, Quota};
use tower_fixed_window_postgres::PostgresStore;

const LIMIT: u64 = 20_000;
const CALLERS: usize = 16;

/// What a process of the test does, until it is killed or everything is used up. It prints a line
/// before it asks, and one when it passed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a process of the test below"]
async fn node() {
    let Ok(url) = std::env::var("TFW_NODE_OF") else { return };
    let store = PostgresStore::new(&url).expect("an address").deadline(Duration::from_secs(30));
    let quota = Quota::new(LIMIT, Duration::from_secs(10 * 365 * 86_400));
    let limiter = Limit::new(quota).name("nodes").store(store);
    let callers = (0..CALLERS).map(|_| {
        let limiter = limiter.clone();
        tokio::spawn(async move {
            loop {
                println!("asks");
                let decision = limiter.check("hot").await.expect("Postgres answers");
                assert!(!decision.is_local());
                if !decision.allowed() {
                    return;
                }
                println!("passed");
            }
        })
    });
    for caller in callers.collect::<Vec<_>>() {
        caller.await.expect("no panic");
    }
}

fn start(url: &str) -> Child {
    Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "nodes::node", "--ignored", "--nocapture"])
        .env("TFW_NODE_OF", url)
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts")
}

#[tokio::test]
async fn four_processes_never_pass_more_than_the_limit() {
    let Some(server) = Postgres::start() else { return };
    let store = PostgresStore::new(&server.url()).expect("an address");
    let store = store.deadline(Duration::from_secs(20));
    store.create_schema().await.expect("it is created");
    let nodes: Vec<_> = (0..4).map(|i| (i, start(&server.url()))).collect();
    let counts = nodes.into_iter().map(|(i, mut node)| {
        std::thread::spawn(move || {
            let lines = BufReader::new(node.stdout.take().expect("piped")).lines();
            let (mut asked, mut passed) = (0_u64, 0_u64);
            for line in lines.map_while(Result::ok) {
                asked += u64::from(line.ends_with("asks"));
                passed += u64::from(line.ends_with("passed"));
                // Two are killed while the others go on.
                if i < 2 && passed == 500 {
                    node.kill().expect("it runs");
                }
            }
            node.wait().expect("it ends");
            (asked, passed)
        })
    });
    let counts: Vec<_> = counts.collect();
    let counts: Vec<_> = counts.into_iter().map(|of| of.join().expect("no panic")).collect();
    let passed: u64 = counts.iter().map(|(_, passed)| passed).sum();
    let used: u64 =
        server.run("SELECT used FROM tfw WHERE name = 'nodes'").parse().expect("a number");
    assert_eq!(used, LIMIT, "all of it was used");
    assert!(passed <= used, "{passed} passed, and {used} are counted");
    // A node that is killed takes with it what it was asked at that moment.
    let lost = 2 * CALLERS as u64 * 2;
    assert!(passed + lost >= used, "{passed} passed, and {used} are counted");
}
