//! Redis and Postgres beside each other: decisions a second by two handles of each store with the
//! same callers, on one hot key and on 10,000 keys, near and a millisecond away each way; and the
//! times of answers at half of that load, and of 20 callers who ask 1,000 times a second on one key.
//! Each decision passes. On a busy machine the processor's time says more than the clock: that of
//! the server and that of the callers, who carry the bytes of the distance, too. "Of it" is what
//! Postgres has of Redis' decisions, by the clock and for the same time of the processor.
//!
//! `cargo bench -p benches --bench stores`, on an idle machine with both servers; with `-- 1` for a
//! second each, with `-- --test` for a moment.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use harness::{Postgres, Proxy, Server};
use tower_fixed_window::{Limiter, Quota};
use tower_fixed_window_postgres::PostgresStore;
use tower_fixed_window_redis::RedisStore;

const PATIENT: Duration = Duration::from_secs(20);
const FAR: Duration = Duration::from_millis(1);

fn main() {
    let seconds = std::env::args().find_map(|arg| arg.parse().ok()).unwrap_or(5.0);
    let lasts = match std::env::args().any(|arg| arg == "--test") {
        true => Duration::from_millis(300),
        false => Duration::from_secs_f64(seconds),
    };
    let (Some(redis), Some(postgres)) = (Server::start(), Postgres::start()) else { return };
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("The machine's load was {}.\n", load.split(' ').next().unwrap_or_default());
    println!(
        "| away | keys | callers | Redis/s | Postgres/s | of it | p50, p99 ms at half, Redis | Postgres | CPU us, Redis | Postgres | of it |"
    );
    println!("|---|---:|---|---:|---:|---:|---|---|---|---|---:|");
    for (away, keys, callers, rate) in [
        (Duration::ZERO, 1, 128, None),
        (Duration::ZERO, 10_000, 128, None),
        (FAR, 1, 128, None),
        (FAR, 10_000, 128, None),
        (FAR, 1, 2_000, None),
        (FAR, 10_000, 2_000, None),
        (Duration::ZERO, 1, 20, Some(1_000.0)),
    ] {
        let of = ["Redis", "Postgres"].map(|name| {
            let (limiters, _proxies) = limiters(name, &redis, &postgres, away);
            let server = if name == "Redis" { redis.id() } else { postgres.id() };
            let cpu = || [server, std::process::id()].map(cpu_of);
            let before = cpu();
            let all = measure(&limiters, keys, callers, rate, lasts);
            let after = cpu();
            let cpu = [0, 1].map(|of| (after[of] - before[of]) * 1e6 / all.decisions as f64);
            let half = rate.is_none().then_some(all.a_second / 2.0);
            let half = half.map(|half| measure(&limiters, keys, callers, Some(half), lasts));
            (all.a_second, half.unwrap_or(all), cpu)
        });
        let callers = match rate {
            None => callers.to_string(),
            Some(rate) => format!("{callers}, {rate}/s"),
        };
        let [times_of_redis, times] =
            of.each_ref().map(|(_, half, _)| format!("{:.2}, {:.2}", half.p50, half.p99));
        let [cpu_of_redis, cpu] =
            of.each_ref().map(|(_, _, [server, callers])| format!("{server:.1} + {callers:.1}"));
        let [all_of_redis, all] = of.each_ref().map(|(_, _, cpu)| cpu[0] + cpu[1]);
        println!(
            "| {} ms | {keys} | {callers} | {:.0} | {:.0} | {:.2} | {times_of_redis} | {times} | {cpu_of_redis} | {cpu} | {:.2} |",
            away.as_millis(),
            of[0].0,
            of[1].0,
            of[1].0 / of[0].0,
            all_of_redis / all
        );
    }
}

/// Two nodes, with counters of their own.
fn limiters(
    name: &str,
    redis: &Server,
    postgres: &Postgres,
    away: Duration,
) -> ([Limiter; 2], Vec<Proxy>) {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let space = format!("s{}", NEXT.fetch_add(1, Relaxed));
    let mut proxies = Vec::new();
    let mut port = |port| {
        if away.is_zero() {
            return port;
        }
        proxies.push(Proxy::to(port).delay(away));
        proxies[proxies.len() - 1].port
    };
    let limit = || Quota::per_hour(1_000_000_000).name("bench");
    let limiters = [(); 2].map(|()| match name {
        "Redis" => {
            let url = format!("redis://127.0.0.1:{}/", port(redis.port));
            let store = RedisStore::new(url).expect("an address").prefix(&space);
            limit().store(store.deadline(PATIENT))
        }
        _ => {
            let url = format!("postgres://postgres@127.0.0.1:{}/postgres", port(postgres.port));
            let store = PostgresStore::new(&url).expect("an address").schema(&space);
            let store = store.deadline(PATIENT);
            let runtime = tokio::runtime::Runtime::new().expect("a runtime");
            runtime.block_on(store.create_tables()).expect("it is created");
            limit().store(store)
        }
    });
    (limiters, proxies)
}

/// Seconds of the processor that a process has taken, and those that it has started.
fn cpu_of(id: u32) -> f64 {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let of = |path: std::path::PathBuf| {
        let text = std::fs::read_to_string(path.join("stat")).ok()?;
        // After the name: the parent is the second, the times are the 12th and the 13th, and those of
        // children that have ended follow them.
        let fields: Vec<_> = text.rsplit_once(')')?.1.split_whitespace().collect();
        let number = |place: usize| fields.get(place).and_then(|text| text.parse::<u64>().ok());
        let is_this = path.ends_with(id.to_string());
        let parts = if is_this { 11..15 } else { 11..13 };
        let server = id != std::process::id() && number(1) == Some(u64::from(id));
        (is_this || server).then(|| parts.filter_map(number).sum::<u64>())
    };
    processes.filter_map(|process| of(process.path())).sum::<u64>() as f64 / 100.0
}

struct Measured {
    decisions: usize,
    a_second: f64,
    p50: f64,
    p99: f64,
}

/// `rate`: of all callers together, a second.
fn measure(
    limiters: &[Limiter; 2],
    keys: u64,
    callers: u64,
    rate: Option<f64>,
    lasts: Duration,
) -> Measured {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let (is_over, times) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
    let start = Instant::now();
    runtime.block_on(async {
        let callers: Vec<_> = (0..callers)
            .map(|caller| {
                let limiter = limiters[caller as usize % 2].clone();
                let (is_over, times) = (Arc::clone(&is_over), Arc::clone(&times));
                let pause = rate.map(|rate| Duration::from_secs_f64(callers as f64 / rate));
                tokio::spawn(async move {
                    let (mut random, mut took) = (caller, Vec::new());
                    let first =
                        start + pause.unwrap_or_default().mul_f64(caller as f64 / callers as f64);
                    let mut due = first;
                    while !is_over.load(Relaxed) {
                        if let Some(pause) = pause {
                            tokio::time::sleep_until(due.into()).await;
                            due += pause;
                        }
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let asked = Instant::now();
                        let decision = limiter.check((random >> 33) % keys).await;
                        let decision = decision.expect("the store answers");
                        assert!(decision.is_allowed() && !decision.is_local());
                        took.push(asked.elapsed().as_secs_f32());
                    }
                    times.lock().expect("no panic").append(&mut took);
                })
            })
            .collect();
        tokio::time::sleep(lasts).await;
        is_over.store(true, Relaxed);
        for caller in callers {
            caller.await.expect("no panic");
        }
    });
    let mut times = Arc::into_inner(times).expect("alone").into_inner().expect("no panic");
    times.sort_by(f32::total_cmp);
    let at = |share: f64| 1_000.0 * f64::from(times[(times.len() as f64 * share) as usize]);
    Measured {
        decisions: times.len(),
        a_second: times.len() as f64 / start.elapsed().as_secs_f64(),
        p50: at(0.5),
        p99: at(0.99),
    }
}
