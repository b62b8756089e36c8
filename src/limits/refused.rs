//! The keys and routes that a limit refused lately: [`Refused`]. Each quarter of an hour has its
//! counts, by the Space-Saving algorithm (Metwally, Agrawal and El Abbadi, 2005). The current one
//! and the one before are reported.

use std::borrow::Borrow;
use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::Hash;
use std::mem;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::SystemTime;

use foldhash::quality::RandomState;

use crate::decision::{Decision, system_time};
use crate::key::Key;
use crate::quota::{Quota, Quotas};
use crate::sync::{self, Mutex};

/// In milliseconds.
const PERIOD: i64 = 15 * 60 * 1_000;
/// The number of refusals in a period that are all counted. If there are more, it is a flood, and
/// one in `SAMPLE` counts for as many.
const ALL: u64 = 1_000;
const SAMPLE: u64 = 8;

/// The refusals of a limit in this process, in the current quarter of an hour and the one before:
/// [`Limiter::refused`](crate::Limiter::refused).
///
/// For the app's own routes: a key may be an address or an id. `Debug` shows no key.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Refused {
    /// The number of refusals that were counted.
    pub total: u64,
    /// The keys that were refused, most often first.
    pub keys: Vec<RefusedKey>,
    /// The routes of requests that a layer refused, most often first.
    pub routes: Vec<RefusedRoute>,
}

/// A key that was refused lately, in [`Refused::keys`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RefusedKey {
    /// The key: [`Key::readable`] shows it.
    pub key: Key,
    /// How often it was refused, at most.
    pub count: u64,
    /// By how much `count` can be too high: it was refused `count - error` times, at least.
    pub error: u64,
    /// The part of all refusals that `count` is, from 0 to 1.
    pub share: f64,
    /// When it was first refused, since it is in the list.
    pub first: SystemTime,
    /// When it was last refused.
    pub last: SystemTime,
    /// The quota that refused last.
    pub quota: Quota,
    /// Until when it was refused last. `None`: the cost can never fit.
    pub retry_at: Option<SystemTime>,
}

/// A route whose requests were refused lately, in [`Refused::routes`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RefusedRoute {
    /// The path that axum matched (feature `axum`), such as `/users/{id}`, or else the path's first
    /// segment, cut to 64 characters.
    pub route: String,
    /// How many of its requests were refused, at most.
    pub count: u64,
    /// By how much `count` can be too high.
    pub error: u64,
    /// The part of all refusals that `count` is, from 0 to 1.
    pub share: f64,
}

pub(crate) struct Tracker {
    /// Until when a flood is sampled.
    samples_until: AtomicI64,
    quarters: Mutex<[Quarter; 2]>,
}

struct Quarter {
    number: i64,
    keys: Hitters<Key>,
    routes: Hitters<String>,
}

impl Tracker {
    pub(super) fn new(most: usize) -> Self {
        let quarter =
            || Quarter { number: i64::MIN, keys: Hitters::new(most), routes: Hitters::new(most) };
        let quarters = Mutex::new([quarter(), quarter()]);
        Self { samples_until: AtomicI64::new(i64::MIN), quarters }
    }

    /// How much a refusal counts for, if it is counted.
    #[inline]
    pub(super) fn weight(&self, decision: &Decision) -> Option<u64> {
        if decision.now_ms() >= self.samples_until.load(Ordering::Relaxed) {
            return Some(1);
        }
        thread_local! {
            static RANDOM: Cell<u64> = const { Cell::new(1) };
        }
        // Random, as refusals may come in turns. By Knuth.
        let random = RANDOM.get().wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        RANDOM.set(random);
        (random >> 32 & (SAMPLE - 1) == 0).then_some(SAMPLE)
    }

    #[inline(never)]
    pub(super) fn note(
        &self,
        weight: u64,
        key: &Key,
        quotas: &Quotas,
        decision: &Decision,
        route: Option<&str>,
    ) {
        let Some(mut quarters) = sync::try_lock(&self.quarters) else { return };
        let [current, before] = &mut *quarters;
        let number = decision.now_ms().div_euclid(PERIOD);
        // A clock that steps back over a boundary does not end the quarter that has begun.
        if number != current.number && number != current.number.saturating_sub(1) {
            mem::swap(current, before);
            current.begin(number);
            self.samples_until.store(i64::MIN, Ordering::Relaxed);
        }
        let quota = decision.governing_of(quotas);
        current.keys.note(key, weight, quota, decision);
        if current.keys.total >= ALL && weight == 1 {
            let end = current.number.saturating_add(1).saturating_mul(PERIOD);
            self.samples_until.store(end, Ordering::Relaxed);
        }
        if let Some(route) = route {
            current.routes.note(route, weight, quota, decision);
        }
    }

    pub(super) fn refused(&self, now: i64) -> Refused {
        let quarters = sync::lock(&self.quarters);
        let number = now.div_euclid(PERIOD);
        // A clock that is a little behind that of the decisions hides nothing.
        let lately = number.saturating_sub(1)..=number.saturating_add(1);
        let lately = quarters.iter().filter(|quarter| lately.contains(&quarter.number));
        let (keys, routes): (Vec<_>, Vec<_>) =
            lately.map(|quarter| (&quarter.keys, &quarter.routes)).unzip();
        let total = keys.iter().map(|keys| keys.total).sum();
        let share = |count: u64| count as f64 / u64::max(total, 1) as f64;
        let keys = merged(&keys).into_iter().map(|hitter| RefusedKey {
            share: share(hitter.count),
            count: hitter.count,
            error: hitter.error,
            first: system_time(hitter.first),
            last: system_time(hitter.last),
            quota: hitter.quota,
            retry_at: hitter.retry_at.map(system_time),
            key: hitter.of,
        });
        let routes = merged(&routes).into_iter().map(|hitter| RefusedRoute {
            share: share(hitter.count),
            count: hitter.count,
            error: hitter.error,
            route: hitter.of,
        });
        Refused { total, keys: keys.collect(), routes: routes.collect() }
    }
}

impl Quarter {
    #[cold]
    fn begin(&mut self, number: i64) {
        self.number = number;
        self.keys.clear();
        self.routes.clear();
    }
}

/// The most frequent, by Space-Saving: what is new takes the place of the least frequent one, and
/// its count. With `n` places and `total` refusals, a count is too high by at most `total / n`, and
/// what was refused more often than that is there.
struct Hitters<T> {
    most: usize,
    total: u64,
    places: HashMap<T, usize, RandomState>,
    hitters: Vec<Hitter<T>>,
    /// No count is lower.
    least: u64,
    /// No place before this one has that count.
    next: usize,
}

#[derive(Clone)]
struct Hitter<T> {
    of: T,
    count: u64,
    error: u64,
    first: i64,
    last: i64,
    retry_at: Option<i64>,
    quota: Quota,
}

impl<T: Hash + Eq + Clone> Hitters<T> {
    fn new(most: usize) -> Self {
        let (places, hitters) = (HashMap::default(), Vec::new());
        Self { most, total: 0, places, hitters, least: 0, next: 0 }
    }

    fn clear(&mut self) {
        (self.total, self.least, self.next) = (0, 0, 0);
        self.places.clear();
        self.hitters.clear();
    }

    #[inline(always)]
    fn note<Q>(&mut self, of: &Q, weight: u64, quota: &Quota, decision: &Decision)
    where
        T: Borrow<Q>,
        Q: ?Sized + Hash + Eq + ToOwned<Owned = T>,
    {
        self.total += weight;
        match self.places.get(of) {
            Some(&place) => self.hitters[place].add(weight, quota, decision),
            None => self.admit(of.to_owned(), weight, quota, decision),
        }
    }

    #[cold]
    fn admit(&mut self, of: T, weight: u64, quota: &Quota, decision: &Decision) {
        let (at, retry_at) = (decision.now_ms(), decision.retry_at_ms());
        let new = |error| {
            let (of, quota) = (of.clone(), *quota);
            Hitter { of, count: error + weight, error, first: at, last: at, retry_at, quota }
        };
        let place = if self.hitters.len() < self.most {
            self.hitters.push(new(0));
            self.hitters.len() - 1
        } else if let Some(place) = self.least() {
            let old = mem::replace(&mut self.hitters[place], new(self.least));
            self.places.remove(&old.of);
            place
        } else {
            return;
        };
        self.places.insert(of, place);
    }

    /// Counts only grow: each place is looked at twice for each value that the least count has had,
    /// at most `total / most`. So this takes a constant time for each refusal, on average.
    fn least(&mut self) -> Option<usize> {
        loop {
            while let Some(hitter) = self.hitters.get(self.next) {
                self.next += 1;
                if hitter.count == self.least {
                    return Some(self.next - 1);
                }
            }
            self.least = self.hitters.iter().map(|hitter| hitter.count).min()?;
            self.next = 0;
        }
    }

    /// The count of what is not there, at most.
    fn unseen(&self) -> u64 {
        let is_full = self.hitters.len() == self.most;
        let least = self.hitters.iter().map(|hitter| hitter.count).min();
        least.filter(|_| is_full).unwrap_or(0)
    }
}

impl<T> Hitter<T> {
    #[inline(always)]
    fn add(&mut self, weight: u64, quota: &Quota, decision: &Decision) {
        self.count += weight;
        self.last = decision.now_ms();
        self.retry_at = decision.retry_at_ms();
        self.quota = *quota;
    }
}

/// The later period first. Sorts by count.
fn merged<T: Hash + Eq + Clone>(periods: &[&Hitters<T>]) -> Vec<Hitter<T>> {
    let mut merged: Vec<Hitter<T>> = Vec::new();
    for (i, period) in periods.iter().enumerate() {
        let other = periods.get(1 - i);
        let unseen = other.map_or(0, |other| other.unseen());
        for hitter in &period.hitters {
            let there = other.and_then(|other| Some((other, *other.places.get(&hitter.of)?)));
            let mut hitter = hitter.clone();
            match there {
                Some(_) if i == 1 => continue,
                Some((earlier, place)) => {
                    let earlier = &earlier.hitters[place];
                    hitter.count += earlier.count;
                    hitter.error += earlier.error;
                    hitter.first = hitter.first.min(earlier.first);
                }
                // The other period may have counted this one until it lost its place.
                None => {
                    hitter.count += unseen;
                    hitter.error += unseen;
                }
            }
            merged.push(hitter);
        }
    }
    merged.sort_by_key(|hitter| (Reverse(hitter.count), Reverse(hitter.last)));
    merged
}
