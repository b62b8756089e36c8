//! The longest single decision after all windows have ended at once, beside a calm moment, and
//! beside a loop that only looks at its watch: the machine's own noise.

use std::hint::black_box;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use governor::RateLimiter;
use governor::clock::FakeRelativeClock;
use governor::middleware::NoOpMiddleware;
use governor::nanos::Nanos;
use governor::state::keyed::DashMapStateStore;
use tower_fixed_window::{Limiter, ManualClock, MemoryStore, Quota};
use tower_rate_limiter::FixedWindowStore;

use crate::batch::address;
use crate::keys::Keys;

/// Nanoseconds of single decisions, in one round.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    pub median: f64,
    /// One in a thousand takes longer.
    pub p999: f64,
    pub longest: f64,
}

impl Spread {
    fn of(nanoseconds: &mut [u64]) -> Self {
        nanoseconds.sort_unstable();
        let at = |share: f64| nanoseconds[(nanoseconds.len() as f64 * share) as usize] as f64;
        let longest = nanoseconds.last().copied().expect("there are some");
        Self { median: at(0.5), p999: at(0.999), longest: longest as f64 }
    }
}

/// A moment of a contestant, and what was seen in each round.
pub struct Moment {
    pub who: &'static str,
    pub when: &'static str,
    pub rounds: Vec<Spread>,
}

pub const NOTHING: &str = "a loop that does nothing";

/// The time that each call takes.
fn each(took: &mut [u64], mut call: impl FnMut(usize)) -> Spread {
    for (i, took) in took.iter_mut().enumerate() {
        let start = Instant::now();
        call(i);
        *took = start.elapsed().as_nanos() as u64;
    }
    Spread::of(took)
}

/// This crate's store, and doing nothing, in turns.
pub fn ours(keys: u32, rounds: usize) -> [Moment; 3] {
    let clock = ManualClock::at_ms(1_700_000_040_000);
    // With room enough for each key to have an entry of its own.
    let store = MemoryStore::with_max_keys(keys as usize * 5 / 4).clock(clock.clone());
    let limiter = Limiter::new(Quota::per_minute(1_000_000_000)).store(store);
    let requests = Keys::Uniform(keys).requests(keys as usize);
    let mut took = vec![1; requests.len()];
    let check = |client| {
        let decision = limiter.check(address(client)).into_now();
        let Ok(Ok(decision)) = decision else { panic!("memory answers now") };
        assert!(black_box(decision).allowed());
    };
    let fill = || Keys::Uniform(keys).all().into_iter().for_each(check);
    fill();
    let who = crate::stores::OURS;
    let moment = |who, when| Moment { who, when, rounds: vec![] };
    let mut moments = [moment(NOTHING, ""), moment(who, "calm"), moment(who, "at the edge")];
    for _ in 0..rounds {
        // For about as long as decisions take: a loop that is done sooner sees less of the machine.
        moments[0].rounds.push(each(&mut took, |i| {
            (0..500).for_each(|_| {
                black_box(requests[i]);
            });
        }));
        moments[1].rounds.push(each(&mut took, |i| check(requests[i])));
        fill();
        // All windows end.
        clock.advance(Duration::from_secs(60));
        moments[2].rounds.push(each(&mut took, |i| check(requests[i])));
    }
    moments
}

/// governor keeps what has expired until `retain_recent` is called: decisions while another thread
/// does that.
pub fn governor(keys: u32, rounds: usize) -> [Moment; 2] {
    let quota = governor::Quota::per_minute(NonZeroU32::MAX);
    let clock = FakeRelativeClock::default();
    let store = DashMapStateStore::<IpAddr>::default();
    let limiter: RateLimiter<IpAddr, _, FakeRelativeClock, NoOpMiddleware<Nanos>> =
        RateLimiter::new(quota, store, clock.clone());
    let all = Keys::Uniform(keys).all();
    let requests = Keys::Uniform(keys).requests(keys as usize);
    let mut took = vec![1; requests.len()];
    let check = |client| assert!(limiter.check_key(&address(client)).is_ok());
    let moment = |when| Moment { who: crate::stores::GOVERNOR, when, rounds: vec![] };
    let mut moments = [moment("calm"), moment("during `retain_recent`")];
    for _ in 0..rounds {
        all.iter().copied().for_each(check);
        moments[0].rounds.push(each(&mut took, |i| check(requests[i])));
        clock.advance(Duration::from_secs(120));
        let swept = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                limiter.retain_recent();
                swept.store(true, Ordering::Relaxed);
            });
            let mut count = 0;
            while count < took.len() && !swept.load(Ordering::Relaxed) {
                let start = Instant::now();
                check(requests[count]);
                took[count] = start.elapsed().as_nanos() as u64;
                count += 1;
            }
            moments[1].rounds.push(Spread::of(&mut took[..count.max(1)]));
        });
    }
    moments
}

/// tower-rate-limiter's cache expires entries by the real time, some of them with each call.
pub fn tower_rate_limiter(keys: u32, rounds: usize) -> [Moment; 2] {
    let requests = Keys::Uniform(keys).requests(keys as usize);
    let all = Keys::Uniform(keys).all();
    let mut took = vec![1; requests.len()];
    let moment = |when| Moment { who: "tower-rate-limiter", when, rounds: vec![] };
    let mut moments = [moment("calm"), moment("at the edge")];
    for _ in 0..rounds {
        let store = tower_rate_limiter::MemoryStore::new();
        let window = Duration::from_millis(u64::from(keys) / 100 + 100);
        let check = |client| {
            let key = format!("default:{}", address(client));
            assert!(store.increment(&key, window).into_inner().is_ok());
        };
        let start = Instant::now();
        all.iter().copied().for_each(check);
        let filled = start.elapsed();
        moments[0].rounds.push(each(&mut took[..all.len() / 10], |i| check(requests[i])));
        sleep((filled + window).saturating_sub(start.elapsed()));
        moments[1].rounds.push(each(&mut took, |i| check(requests[i])));
    }
    moments
}
