//! Commands for `scripts/peers`: each prints lines of numbers that begin with their name.

mod edge;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::response::Response;
use axum::routing::get;
use tower::layer::util::Identity;
use tower::service_fn;
use tower::util::MapResponseLayer;
use tower_fixed_window_peers::{
    ALLOWED, Case, REFUSED, four_headers, ours, refusal, tower_governor,
};
use tower_layer::layer_fn;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["count", requests, case] => count(number(requests), case),
        ["time", rounds, span_ms, threads, ref cases @ ..] => {
            let threads: Vec<usize> = threads.split(',').map(number).collect();
            time(number(rounds), number(span_ms), &threads, cases);
        }
        ["edge", keys, rounds, seconds, ref names @ ..] => {
            let window = Duration::from_secs(number(seconds) as u64);
            edge::edge(number(keys) as u32, number(rounds), window, names);
        }
        ["serve", name, case] => serve(name, if case == "refused" { REFUSED } else { ALLOWED }),
        _ => panic!("see scripts/peers"),
    }
}

fn number(text: &str) -> usize {
    text.parse().expect("a number")
}

/// Under callgrind, which counts what `counted_batch` does.
fn count(requests: usize, id: &str) {
    #[inline(never)]
    fn counted_batch(worker: &mut dyn FnMut(&[u32]), clients: &[u32]) {
        worker(clients);
    }
    let case = Case::prepared(id);
    // Past the tick of the system's clock in which the case was prepared: until the next one, the
    // store reads the exact time.
    std::thread::sleep(Duration::from_millis(50));
    counted_batch(&mut case.worker(), &case.requests(requests));
}

/// Nanoseconds of a request in each round. The cases take turns in batches of `span_ms`, so that a
/// busy machine is as busy for the one as for the other. Of several threads, the mean. NaN stands for
/// a round in which a thread waited for a core.
fn time(rounds: usize, span_ms: usize, threads: &[usize], ids: &[&str]) {
    let cases: Vec<Case> = ids.iter().map(|id| Case::prepared(id)).collect();
    let requests = cases[0].requests(1 << 20);
    let most = requests.len() / threads.iter().max().expect("a number of threads");
    let size = |case| span_ms as f64 * 1e6 / run(case, 1, &case.renewed(&requests[..500])).0;
    let sizes: Vec<_> = cases.iter().map(|case| (size(case) as usize).clamp(500, most)).collect();
    let mut times = vec![vec![Vec::new(); threads.len()]; cases.len()];
    for round in 0..rounds {
        for i in 0..cases.len() {
            // No case always follows the same one.
            let i = (i + round) % cases.len();
            for (&threads, times) in threads.iter().zip(&mut times[i]) {
                let start = round * 7_919 % (requests.len() - sizes[i] * threads + 1);
                let requests = cases[i].renewed(&requests[start..][..sizes[i] * threads]);
                let (nanoseconds, ran) = run(&cases[i], threads, &requests);
                times.push(format!("{:.2}", if ran { nanoseconds } else { f64::NAN }));
            }
        }
    }
    for (id, times) in ids.iter().zip(&times) {
        for (threads, times) in threads.iter().zip(times) {
            println!("{id}:{threads}\t{}", times.join("\t"));
        }
    }
}

/// The nanoseconds that a thread needs for each of its requests, and whether each thread had a core.
fn run(case: &Case, threads: usize, requests: &[u32]) -> (f64, bool) {
    // They spin, so that each has a core when they start.
    let missing = AtomicUsize::new(threads);
    let begin = Instant::now();
    let spans: Vec<(f64, f64, f64)> = std::thread::scope(|scope| {
        let spawn = |share| {
            let (mut worker, missing) = (case.worker(), &missing);
            scope.spawn(move || {
                missing.fetch_sub(1, Ordering::AcqRel);
                while missing.load(Ordering::Acquire) > 0 {
                    std::hint::spin_loop();
                }
                let (waited, start) = (waited_for_a_core(), Instant::now());
                worker(share);
                let span = start.elapsed().as_nanos() as f64;
                ((start - begin).as_nanos() as f64, span, waited_for_a_core() - waited)
            })
        };
        let threads: Vec<_> = requests.chunks(requests.len() / threads).map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    let nanoseconds = spans.iter().map(|(_, span, _)| span).sum::<f64>() / requests.len() as f64;
    let first = spans.iter().map(|(start, ..)| *start).fold(f64::MAX, f64::min);
    let ran = |(start, span, waited): &(f64, f64, f64)| start - first + waited < span * 0.05;
    (nanoseconds, spans.iter().all(ran))
}

/// The nanoseconds that this thread could have run but had no core, since its start. Sleeping for a
/// lock is not among them: that is a limiter's own time.
fn waited_for_a_core() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    stat.split(' ').nth(1).and_then(|waited| waited.parse().ok()).unwrap_or(0.0)
}

/// An axum server that prints its port and runs until it is killed.
fn serve(name: &str, limit: u32) {
    let app = Router::new().route("/", get(async || "hello\n"));
    let app = match name {
        "bare service" => app,
        "a layer that does nothing" => app.layer(Identity::new()),
        "by hand" if limit == REFUSED => {
            app.layer(layer_fn(|_| service_fn(async |_| Ok::<_, Infallible>(refusal()))))
        }
        "by hand" => app.layer(MapResponseLayer::new(|mut response: Response| {
            four_headers(response.headers_mut());
            response
        })),
        "tower-fixed-window" => app.layer(ours(limit)),
        "tower_governor" => app.layer(tower_governor(limit)),
        _ => panic!("there is no server {name}"),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        println!("{}", listener.local_addr().expect("it is bound").port());
        let app = app.into_make_service_with_connect_info::<SocketAddr>();
        axum::serve(listener, app).await.expect("it serves");
    });
}
