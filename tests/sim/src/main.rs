//! Runs seeds: `sim [SEEDS] [--from N]`, or prints the history of one: `sim --seed N`.

use std::collections::BTreeMap;
use std::process::{self, ExitCode};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tower_fixed_window_sim::check::{Finding, Time, check};
use tower_fixed_window_sim::plan::Servers;
use tower_fixed_window_sim::run::{plan, run};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber, subscriber};

/// Faster by a sixth than the system's.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Findings that are printed for each check.
const PRINTED: usize = 3;

/// How long a seed may take in real time, on a machine that is busy. Most take some 20 ms.
const PATIENCE: Duration = Duration::from_secs(1_000);

const USAGE: &str = "sim [SEEDS] [--from SEED] [--first] [--shared]
                                        runs that many seeds, 1000 unless said;
                                        --first: until one is found
                                        --shared: those with a cluster or Sentinels
sim --seed SEED                         prints the history of one";

/// Discards the logs of the nodes: without a subscriber they are printed.
struct Discard;

impl Subscriber for Discard {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

fn main() -> ExitCode {
    subscriber::set_global_default(Discard).expect("there is no other");
    let (mut seeds, mut from, mut first, mut shared, mut one) = (1_000, 1, false, false, None);
    let mut args = std::env::args().skip(1);
    let number = |text: Option<String>| text.and_then(|text| text.replace('_', "").parse().ok());
    while let Some(arg) = args.next() {
        let understood = match &arg[..] {
            "--seed" => number(args.next()).map(|seed| one = Some(seed)),
            "--from" => number(args.next()).map(|seed| from = seed),
            "--first" => {
                first = true;
                Some(())
            }
            "--shared" => {
                shared = true;
                Some(())
            }
            _ => number(Some(arg)).map(|count| seeds = count),
        };
        if understood.is_none() {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    }
    match one {
        Some(seed) => print(seed),
        None => search(from, seeds, first, shared),
    }
}

/// The history of one seed, and what was found in it.
fn print(seed: u64) -> ExitCode {
    let run = run(seed);
    println!("{:#?}\n", run.plan);
    for (at, event) in &run.history {
        println!("{:>12} {event}", Time(*at).to_string());
    }
    let findings = check(&run);
    println!("\nseed {seed}: {} found", findings.len());
    findings.iter().for_each(|finding| println!("  {finding}"));
    ExitCode::from(u8::from(!findings.is_empty()))
}

#[derive(Default)]
struct Found {
    /// Seeds, by check.
    seeds: BTreeMap<&'static str, u64>,
    examples: BTreeMap<&'static str, Vec<(u64, Finding)>>,
    events: usize,
    first: Option<u64>,
}

fn search(from: u64, seeds: u64, first: bool, shared: bool) -> ExitCode {
    let began = Instant::now();
    let (next, ran) = (AtomicU64::new(from), AtomicU64::new(0));
    let (found, running) = (Mutex::new(Found::default()), Mutex::new(BTreeMap::new()));
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let work = || loop {
        let seed = next.fetch_add(1, Ordering::Relaxed);
        let enough = first && found.lock().expect("no panic").first.is_some();
        if seed >= from + seeds || enough {
            break;
        }
        if shared && plan(seed).servers == Servers::One {
            continue;
        }
        running.lock().expect("no panic").insert(seed, Instant::now());
        let run = run(seed);
        let findings = check(&run);
        running.lock().expect("no panic").remove(&seed);
        ran.fetch_add(1, Ordering::Relaxed);
        found.lock().expect("no panic").add(seed, run.history.len(), findings);
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        while !workers.iter().all(|worker| worker.is_finished()) {
            thread::sleep(Duration::from_millis(20));
            let running = running.lock().expect("no panic");
            let endless = running.iter().find(|(_, began)| began.elapsed() > PATIENCE);
            if let Some((&seed, _)) = endless {
                let mut found = found.lock().expect("no panic");
                let what = "does not end".into();
                found.add(seed, 0, vec![Finding { check: "end", at: 0, what }]);
                found.print(from);
                // The thread of the seed can't be ended.
                process::exit(1);
            }
        }
    });
    let found = found.into_inner().expect("no panic");
    let ran = ran.into_inner();
    println!(
        "{ran} seeds from {from}, {} events, {:.1} s on {threads} threads",
        found.events,
        began.elapsed().as_secs_f64()
    );
    found.print(from);
    ExitCode::from(u8::from(!found.seeds.is_empty()))
}

impl Found {
    fn add(&mut self, seed: u64, events: usize, findings: Vec<Finding>) {
        self.events += events;
        let mut checks: Vec<_> = findings.iter().map(|finding| finding.check).collect();
        checks.sort_unstable();
        checks.dedup();
        checks.iter().for_each(|check| *self.seeds.entry(check).or_default() += 1);
        if !findings.is_empty() {
            self.first = Some(self.first.map_or(seed, |first| first.min(seed)));
        }
        for finding in findings {
            let examples = self.examples.entry(finding.check).or_default();
            // The lowest seeds, one finding of each: they come in any order.
            if !examples.iter().any(|(other, _)| *other == seed) {
                examples.push((seed, finding));
                examples.sort_by_key(|(seed, _)| *seed);
                examples.truncate(PRINTED);
            }
        }
    }

    fn print(&self, from: u64) {
        for (check, seeds) in &self.seeds {
            println!("\n{check}: in {seeds} seeds");
            let mut examples: Vec<_> = self.examples[check].iter().collect();
            examples.sort_by_key(|(seed, _)| *seed);
            for (seed, finding) in examples.into_iter().take(PRINTED) {
                println!("  --seed {seed}: {finding}");
            }
        }
        if let Some(seed) = self.first {
            println!("\nthe first is --seed {seed}, after {} seeds", seed - from + 1);
        }
    }
}
