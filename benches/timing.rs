//! The times of functions that are too short to measure one call: each is called many times, in rounds in
//! which they take turns, so that a busy machine slows all of them down.

use std::time::{Duration, Instant};

const ROUNDS: usize = 15;
/// What a function takes in a round.
const SPAN: Duration = Duration::from_millis(40);

/// A function by its name.
pub(crate) struct Timed<'a>(String, Run<'a>);

/// Makes so many calls, and returns how long they took.
type Run<'a> = Box<dyn FnMut(u64) -> Duration + 'a>;

pub(crate) fn timed<'a>(
    name: impl Into<String>,
    run: impl FnMut(u64) -> Duration + 'a,
) -> Timed<'a> {
    Timed(name.into(), Box::new(run))
}

/// Calls a function again and again.
pub(crate) fn calls<T>(mut call: impl FnMut() -> T) -> impl FnMut(u64) -> Duration {
    move |times| {
        let start = Instant::now();
        (0..times).for_each(|_| _ = std::hint::black_box(call()));
        start.elapsed()
    }
}

/// Prints the nanoseconds of a call: the median of the rounds, and their range. With `-- --test` each
/// function is called once.
pub(crate) fn print(mut functions: Vec<Timed<'_>>) {
    if std::env::args().any(|arg| arg == "--test") {
        functions.iter_mut().for_each(|Timed(_, run)| _ = run(1));
        return println!("{} functions can be called", functions.len());
    }
    let calls: Vec<u64> = functions.iter_mut().map(|Timed(_, run)| calls_of(run)).collect();
    let mut nanos = vec![Vec::new(); functions.len()];
    for _ in 0..ROUNDS {
        for ((Timed(_, run), &calls), nanos) in functions.iter_mut().zip(&calls).zip(&mut nanos) {
            nanos.push(run(calls).as_nanos() as f64 / calls as f64);
        }
    }
    for (Timed(name, _), mut nanos) in functions.into_iter().zip(nanos) {
        nanos.sort_by(f64::total_cmp);
        let (least, median, most) = (nanos[0], nanos[ROUNDS / 2], nanos[ROUNDS - 1]);
        println!("{name:<46} {median:>8.1} ns ({least:.1} to {most:.1})");
    }
}

/// How many calls take a span. The first ones warm up.
fn calls_of(run: &mut dyn FnMut(u64) -> Duration) -> u64 {
    let mut calls = 1;
    while run(calls) < SPAN {
        calls *= 2;
    }
    calls
}
