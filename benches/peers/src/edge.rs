//! Single decisions while a store grows, in a calm moment, and when all windows have ended at once;
//! beside a loop that only looks at its watch: the machine's own noise.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tower_fixed_window_peers::{ALLOWED, Case, address, governor_quota};

/// The parts of all decisions that are done within the printed nanoseconds: the last is the longest.
const PARTS: [f64; 6] = [0.5, 0.9, 0.99, 0.999, 0.9999, 1.0];

fn print(moment: &str, clients: &[u32], done: &AtomicBool, mut call: impl FnMut(u32)) {
    // Written once before, so that the system does not have to bring its pages meanwhile.
    let mut took = vec![1; clients.len()];
    let mut count = 0;
    while count < took.len() && (count == 0 || !done.load(Ordering::Relaxed)) {
        let start = Instant::now();
        call(clients[count]);
        took[count] = start.elapsed().as_nanos() as u64;
        count += 1;
    }
    took.truncate(count);
    took.sort_unstable();
    let within = PARTS.map(|part| took[((count - 1) as f64 * part) as usize].to_string());
    println!("{moment}\t{}", within.join("\t"));
}

/// Each round begins with new stores and a window.
pub fn edge(keys: u32, rounds: usize, window: Duration, names: &[&str]) {
    let never = AtomicBool::new(false);
    for _ in 0..rounds {
        let id = |name| format!("store:{name}:allowed:uniform:{keys}");
        let cases: Vec<_> = names.iter().map(|name| Case::new(&id(name), window)).collect();
        let (clients, requests) = (cases[0].clients(), cases[0].requests(keys as usize));
        let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
        sleep(window - Duration::from_nanos((since.as_nanos() % window.as_nanos()) as u64));
        let start = Instant::now();
        for (name, case) in names.iter().zip(&cases) {
            let mut worker = case.worker();
            print(&format!("{name}:growing"), &clients, &never, |client| worker(&[client]));
            print(&format!("{name}:calm"), &requests, &never, |client| worker(&[client]));
        }
        // About as long as a decision: a loop that is done sooner sees less of the machine.
        let idle = |client| (0..500).for_each(|_| _ = black_box(client));
        print("a loop that does nothing:", &requests, &never, idle);
        // Some peers' windows begin with the first request.
        sleep((window * 2).saturating_sub(start.elapsed()));
        for (name, case) in names.iter().zip(&cases) {
            let mut worker = case.worker();
            print(&format!("{name}:at the edge"), &requests, &never, |client| worker(&[client]));
        }
        if !names.contains(&"governor") {
            continue;
        }
        // governor keeps what has expired until this is called, here by another thread.
        let limiter = governor::RateLimiter::keyed(governor_quota(ALLOWED, window));
        let check = |client| assert!(limiter.check_key(&address(client)).is_ok());
        clients.iter().copied().for_each(check);
        let swept = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                limiter.retain_recent();
                swept.store(true, Ordering::Relaxed);
            });
            print("governor:during retain_recent", &requests, &swept, check);
        });
    }
}
