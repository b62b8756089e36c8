//! Lines of several nodes that share a store, near and far, on tokio's paused clock.

use tokio::time::Instant;

use crate::prelude::*;

const SECONDS: u64 = 12;

/// How many requests of each node pass in each window of a second. The nodes are so many milliseconds
/// away, one way, and send so many requests a second.
async fn passed(nodes: &[(u64, u64)], max_wait: Duration) -> Vec<Vec<usize>> {
    let memory = paused_memory();
    let start = Instant::now();
    let mut tasks = Vec::new();
    let passed = Arc::new(Mutex::new(vec![vec![0; nodes.len()]; 200]));
    for (node, &(delay, rate)) in nodes.iter().enumerate() {
        let store = far_from(memory.clone(), move || delay);
        let limit = Quota::per_second(100).name("near-and-far").key(Key::global());
        let layer = FixedWindowLayer::new(limit.store(store)).queue(100_000, max_wait);
        let passed = Arc::clone(&passed);
        let service = layer.layer(service_fn(move |_: Request<Body>| {
            let second = start.elapsed().as_secs() as usize;
            passed.lock().unwrap()[second][node] += 1;
            async { Ok::<_, Infallible>(Response::new(Body::empty())) }
        }));
        tasks.push(tokio::spawn(async move {
            for _ in 0..rate * SECONDS {
                drop(tokio::spawn(service.clone().oneshot(get("/"))));
                sleep(Duration::from_micros(1_000_000 / rate)).await;
            }
        }));
    }
    sleep(secs(SECONDS)).await;
    tasks.iter().for_each(|task| task.abort());
    let passed = passed.lock().unwrap();
    passed[..SECONDS as usize].to_vec()
}

/// Each with half the limit's load or more. The lines of all nodes together are nearly in order of
/// arrival, so a node's share is that of its load.
#[tokio::test(start_paused = true)]
async fn each_node_gets_at_least_half_of_its_share() {
    let even = [([50; 3], 3), ([50; 3], 60), ([100; 3], 60)];
    let uneven = [([300, 50, 50], 3), ([50, 300, 50], 60), ([50, 50, 300], 3)];
    for (loads, max_wait) in even.into_iter().chain(uneven) {
        let nodes = [1, 10, 40].into_iter().zip(loads).collect::<Vec<_>>();
        let windows = passed(&nodes, secs(max_wait)).await;
        assert!(windows.iter().all(|window| window.iter().sum::<usize>() <= 100), "{windows:?}");
        // The first one goes to who comes first, and the last one is not over for all.
        let total = |node: usize| windows[1..11].iter().map(|of| of[node]).sum::<usize>();
        let totals = [0, 1, 2].map(total);
        assert!(totals.iter().sum::<usize>() >= 990, "the windows are full: {totals:?}");
        let all = loads.iter().sum::<u64>() as usize;
        let gets_half = |(&total, load)| 2 * total * all >= 1_000 * load as usize;
        let is_fair = totals.iter().zip(loads).all(gets_half);
        assert!(is_fair, "{loads:?}, {max_wait} s: {totals:?} of {windows:?}");
    }
}
