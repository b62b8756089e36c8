//! Random programs over HTTP that combine the options of layers, against a small model of the
//! rules: several limits in a layer, composite keys, plans, costs, shadow mode, limits that are
//! lifted, the queue, true costs, stacked layers with slow ones, time-outs and retries between
//! them, changes that end, uploads, clients that disconnect, services that panic, fail, or ask a
//! limited client of their own, counts in a file, clocks that step or panic, receipts of another
//! store, a store that is far, full, or charges in order.
//!
//! After each step, each request has got as far as the model says, with its status and its headers,
//! and each count is the model's. When a request in a queue goes is the layer's to say, within
//! bounds; what it may take then is the model's.
//!
//! Ten seconds, or `PROGRAMS_SECONDS`. A failure prints its seed, and `PROGRAMS_SEED` runs that
//! program alone.

mod model;
mod program;
#[allow(dead_code, reason = "it is made for more tests than this one")]
#[path = "../core/reference.rs"]
mod reference;
mod requests;
mod setup;
mod world;

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, available_parallelism};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::program::Program;

const SECONDS: u64 = 10;

fn instant(ms: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(ms)
}

/// A number in the environment.
fn number(name: &str) -> Option<u64> {
    Some(std::env::var(name).ok()?.parse().expect("a number"))
}

/// Prints how to run a program again that has failed.
struct Run(u64);

impl Drop for Run {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("to run it again: PROGRAMS_SEED={}", self.0);
        }
    }
}

fn run(seed: u64, prints: bool) -> u64 {
    let _run = Run(seed);
    let runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = { runtime }.enable_time().start_paused(true).build().expect("a runtime");
    runtime.block_on(async { Program::new(seed, prints).run().await })
}

#[test]
fn random_programs_do_what_the_rules_say() {
    if let (Some(seed), None) = (number("PROGRAMS_SEED"), number("PROGRAMS_SECONDS")) {
        run(seed, true);
        return;
    }
    let first = number("PROGRAMS_SEED").unwrap_or(0);
    let end = Instant::now() + Duration::from_secs(number("PROGRAMS_SECONDS").unwrap_or(SECONDS));
    let (next, steps) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        for _ in 0..available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while Instant::now() < end {
                    let seed = first.wrapping_add(next.fetch_add(1, Ordering::Relaxed));
                    steps.fetch_add(run(seed, false), Ordering::Relaxed);
                }
            });
        }
    });
    println!("{next:?} programs of {steps:?} steps, from PROGRAMS_SEED={first} on");
}
