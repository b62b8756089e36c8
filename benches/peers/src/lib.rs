//! This crate beside its peers: see README.md. A [`Case`] is a limiter and the requests that it gets.

use std::borrow::Cow;
use std::future::Future;
use std::net::{IpAddr, Ipv4Addr};
use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

mod layers;
mod stores;

pub use layers::{four_headers, ours, refusal, tower_governor};
pub use stores::governor_quota;

pub const DAY: Duration = Duration::from_secs(86_400);
/// The limits: one that no run spends, one that none of 100,000 clients spends, or one that every
/// client spends with its first request.
pub const ALLOWED: u32 = 1_000_000_000;
pub const USUAL: u32 = 5_000;
pub const REFUSED: u32 = 1;

/// Answers a request from each of these clients, and returns how many of them passed.
pub type Worker = Box<dyn FnMut(&[u32]) -> usize + Send>;
/// Makes workers that share a limiter, one for each thread.
type Limiter = Box<dyn Fn() -> Worker>;

/// A limiter by what it does with a client's request: `true` if that passes. The loop is inside, so
/// that limiters are called as their users call them.
fn each(passes: impl FnMut(u32) -> bool + Clone + Send + 'static) -> Limiter {
    Box::new(move || {
        let mut passes = passes.clone();
        Box::new(move |clients| clients.iter().filter(|&&client| passes(client)).count())
    })
}

/// Written as `layer:tower_governor:refused:uniform:100000`.
pub struct Case {
    limiter: Limiter,
    refuses: bool,
    /// All requests are their clients' first.
    first: bool,
    zipf: bool,
    /// A third of the requests are their clients' first.
    new: bool,
    pub keys: u32,
}

impl Case {
    pub fn new(id: &str, window: Duration) -> Self {
        let parts: Vec<&str> = id.split(':').collect();
        let &[subject, name, case, shape, keys] = &parts[..] else { panic!("no case: {id}") };
        let (refuses, new) = (case == "refused", shape == "new");
        let keys: u32 = keys.parse().expect("a number of keys");
        let limit = match case {
            "refused" => REFUSED,
            "allowed of 5,000" => USUAL,
            _ => ALLOWED,
        };
        let limiter = match subject {
            "layer" => layers::limiter(name, limit),
            _ => stores::limiter(name, limit, window, if new { 50 * keys } else { keys }),
        };
        Self { limiter, refuses, first: case == "first", zipf: shape == "zipf", new, keys }
    }

    /// With a limiter that has had a request from every client, except where each request is a first.
    pub fn prepared(id: &str) -> Self {
        let case = Self::new(id, DAY);
        if case.first {
            return case;
        }
        let mut worker = (case.limiter)();
        // No list of keys: its hole in the heap would cost the limiters that allocate.
        (0..case.keys).for_each(|n| _ = worker(&[client(n)]));
        case
    }

    /// A worker that checks the outcome of its requests.
    pub fn worker(&self) -> impl FnMut(&[u32]) + Send + use<> {
        let (mut worker, refuses, new) = ((self.limiter)(), self.refuses, self.new);
        move |clients| {
            let (all, passed) = (clients.len(), worker(clients));
            let expected = match (refuses, new) {
                (false, _) => all..=all,
                (true, false) => 0..=0,
                (true, true) => all / 3..=all / 3 + 1,
            };
            assert!(expected.contains(&passed), "{passed} of {all}");
        }
    }

    /// Each client once.
    pub fn clients(&self) -> Vec<u32> {
        (0..self.keys).map(client).collect()
    }

    /// These requests, of which a third come from clients that were never seen, if the case has any.
    pub fn renewed<'a>(&self, requests: &'a [u32]) -> Cow<'a, [u32]> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        if !self.new {
            return requests.into();
        }
        let mut requests = requests.to_vec();
        for request in requests.iter_mut().step_by(3) {
            *request = client(self.keys + NEXT.fetch_add(1, Ordering::Relaxed));
        }
        requests.into()
    }

    /// The clients of `n` requests, the same in each call: equally often in random order, or the
    /// n-th of them about 1/n as often as the first.
    pub fn requests(&self, n: usize) -> Vec<u32> {
        if self.first {
            return (0..n as u32).map(client).collect();
        }
        let (mut random, keys) = (fastrand::Rng::with_seed(7), f64::from(self.keys));
        let mut next = || match (self.zipf, random.f64()) {
            (true, share) => keys.powf(share) - 1.0,
            (false, share) => keys * share,
        };
        (0..n).map(|_| client(next() as u32)).collect()
    }
}

/// What a future is ready with: limits in memory don't wait.
fn now<F: Future>(future: F) -> F::Output {
    let Poll::Ready(output) = pin!(future).poll(&mut Context::from_waker(Waker::noop())) else {
        panic!("these limits are in memory, and the service answers at once");
    };
    output
}

/// Another one for each number, spread over all addresses.
fn client(n: u32) -> u32 {
    (n + 1).wrapping_mul(0x9e37_79b1)
}

pub fn address(client: u32) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from(client))
}
