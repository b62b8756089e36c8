//! Over real sockets exactly the limit passes, however many connections there are.

use std::collections::BTreeMap;

use tokio::sync::Barrier;
use tokio::task::JoinSet;

use crate::prelude::*;

const REQUESTS: usize = 2_000;
const CONNECTIONS: usize = 64;
const LIMIT: usize = 100;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn exactly_the_limit_passes_of_2000_requests_over_64_connections() {
    for mood in ANSWERS {
        let store = TestStore::new(mood);
        let limit = Limit::new(Quota::per_minute(LIMIT as u64)).store(store.clone());
        let app = Router::new().route("/", on_get(async || "hello"));
        let (addr, accepted) = serve_hyper(FixedWindowLayer::new(limit).layer(app)).await;
        let answers = flood(addr).await;
        assert_eq!(answers, BTreeMap::from([(200, LIMIT), (429, REQUESTS - LIMIT)]));
        assert_eq!(accepted.load(Ordering::SeqCst), CONNECTIONS);

        let again = || client().get(format!("http://{addr}/")).send();
        assert_eq!(again().await.expect("an answer").status(), 429, "the window still runs");
        store.clock.advance(secs(60));
        assert_eq!(again().await.expect("an answer").status(), 200, "the next window");
    }
}

/// Sends all requests, and counts the answers by their status.
async fn flood(addr: SocketAddr) -> BTreeMap<u16, usize> {
    let all_connected = Arc::new(Barrier::new(CONNECTIONS));
    let mut clients = JoinSet::new();
    for i in 0..CONNECTIONS {
        let all_connected = Arc::clone(&all_connected);
        clients.spawn(async move {
            // A client has a single connection, since its requests come one by one.
            let client = client();
            all_connected.wait().await;
            let mut answers = BTreeMap::<u16, usize>::new();
            for _ in (i..REQUESTS).step_by(CONNECTIONS) {
                let response = client.get(format!("http://{addr}/")).send().await.expect("sent");
                *answers.entry(response.status().as_u16()).or_default() += 1;
                response.bytes().await.expect("a body");
            }
            answers
        });
    }
    let mut sum = BTreeMap::<u16, usize>::new();
    while let Some(answers) = clients.join_next().await {
        for (status, count) in answers.expect("no panic") {
            *sum.entry(status).or_default() += count;
        }
    }
    sum
}
