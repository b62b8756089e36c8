//! Time: contestants answer batches in turns, round by round, so that a busy machine is as busy for
//! the one as for the other.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use crate::batch::{Batch, Verdict, check};
use crate::keys::Keys;

pub struct Contestant {
    pub who: &'static str,
    pub verdict: Verdict,
    pub batch: Box<dyn Batch>,
}

/// Nanoseconds of a request: for each contestant, those of each round.
pub type Rounds = Vec<Vec<f64>>;

pub fn time(
    contestants: &mut [Contestant],
    keys: Keys,
    threads: usize,
    rounds: usize,
    span: Duration,
) -> Rounds {
    let requests = keys.requests(if keys == Keys::Hot { 1 << 16 } else { 1 << 20 });
    let sizes: Vec<usize> = contestants
        .iter_mut()
        .map(|contestant| {
            let few = &requests[..500];
            let each = run(contestant, &[few]) / 500.0;
            ((span.as_nanos() as f64 / each) as usize).clamp(500, requests.len() / threads)
        })
        .collect();
    let mut times: Rounds = contestants.iter().map(|_| Vec::with_capacity(rounds)).collect();
    for round in 0..rounds {
        for i in 0..contestants.len() {
            // Nobody always comes after the same one.
            let i = (i + round) % contestants.len();
            let size = sizes[i];
            let last = requests.len() - size * threads;
            let start = if last == 0 { 0 } else { round * 7_919 % last };
            let shares: Vec<&[u32]> = requests[start..].chunks(size).take(threads).collect();
            times[i].push(run(&mut contestants[i], &shares) / size as f64);
        }
    }
    times
}

/// The nanoseconds that a share takes, where each is a thread's.
fn run(contestant: &mut Contestant, shares: &[&[u32]]) -> f64 {
    let verdict = contestant.verdict;
    let once = |batch: &mut dyn Batch, share: &[u32]| {
        let start = Instant::now();
        let refused = batch.run(share);
        let took = start.elapsed();
        check(verdict, share, refused);
        took.as_nanos() as f64
    };
    if let [share] = shares {
        return once(&mut *contestant.batch, share);
    }
    let barrier = Barrier::new(shares.len());
    let sum: f64 = std::thread::scope(|scope| {
        let threads: Vec<_> = shares
            .iter()
            .map(|share| {
                let mut batch = contestant.batch.fork();
                let (barrier, once) = (&barrier, &once);
                scope.spawn(move || {
                    barrier.wait();
                    once(&mut *batch, share)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).sum()
    });
    sum / shares.len() as f64
}

pub fn median(of: &[f64]) -> f64 {
    let mut of = of.to_vec();
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}
