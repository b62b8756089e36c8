//! The keys and routes that a limit refused lately: [`Refused`]. Each quarter of an hour has its
//! counts. The current one and the one before are reported.
//!
//! The counts have a bound, since clients may invent keys, and decay when they reach it: all are
//! lowered by the median, and those at 0 make room (Misra and Gries, 1982). What was taken from all
//! so far is how much any count can be wrong. Space-Saving, which replaces the least count, has the
//! same bound in half the places, but needs an order of the counts.

use std::borrow::Borrow;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::Hash;
use std::mem;
use std::time::SystemTime;

use foldhash::quality::RandomState;

use crate::decision::{Decision, system_time};
use crate::key::Key;
use crate::quota::{Quota, Quotas};
use crate::sync::{self, Mutex};

/// In milliseconds.
const PERIOD: i64 = 15 * 60 * 1_000;

/// The refusals of a limit in this process, in the current quarter of an hour and the one before:
/// [`Limiter::refused`](crate::Limiter::refused).
///
/// Show it to support staff only: a key may be an address or an id. `Debug` shows no key.
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
    /// How often it was refused; too high by at most `error`.
    pub count: u64,
    /// By how much `count` can be too high: the key was refused at least `count - error` times.
    pub error: u64,
    /// `count` as a part of all refusals, from 0 to 1.
    pub share: f64,
    /// When it was first refused while in the list.
    pub first: SystemTime,
    /// When it was last refused.
    pub last: SystemTime,
    /// The quota that refused last.
    pub quota: Quota,
    /// When a retry can pass, as of the last refusal. `None` if the cost can never fit.
    pub retry_at: Option<SystemTime>,
}

/// A route whose requests were refused lately, in [`Refused::routes`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RefusedRoute {
    /// The path that axum matched (feature `axum`), such as `/users/{id}`, or else the path's first
    /// segment, cut to 64 characters.
    pub route: String,
    /// How many of its requests were refused; too high by at most `error`.
    pub count: u64,
    /// By how much `count` can be too high.
    pub error: u64,
    /// `count` as a part of all refusals, from 0 to 1.
    pub share: f64,
}

pub(crate) struct Tracker {
    most: usize,
    /// The current one first.
    quarters: Mutex<[Quarter; 2]>,
}

#[derive(Default)]
struct Quarter {
    number: i64,
    total: u64,
    keys: Counts<Key>,
    routes: Counts<String>,
}

impl Tracker {
    pub(super) fn new(most: usize) -> Self {
        Self { most, quarters: Mutex::default() }
    }

    #[inline(never)]
    pub(super) fn note(
        &self,
        key: &Key,
        quotas: &Quotas,
        decision: &Decision,
        route: Option<&str>,
    ) {
        let Some(mut quarters) = sync::try_lock(&self.quarters) else { return };
        let [current, before] = &mut *quarters;
        let number = decision.now_ms().div_euclid(PERIOD);
        // A clock that steps back over a boundary does not end the quarter that has begun.
        if number != current.number && number != current.number - 1 {
            mem::swap(current, before);
            *current = Quarter { number, ..Quarter::default() };
        }
        current.total += 1;
        let quota = decision.governing_quota(quotas);
        current.keys.note(key, self.most, quota, decision);
        if let Some(route) = route {
            current.routes.note(route, self.most, quota, decision);
        }
    }

    pub(super) fn refused(&self, now: i64) -> Refused {
        let quarters = sync::lock(&self.quarters);
        let number = now.div_euclid(PERIOD);
        // A clock that is a little behind that of the decisions hides nothing.
        let lately = |of: &&Quarter| (of.number - number).abs() <= 1;
        let lately: Vec<_> = quarters.iter().filter(lately).collect();
        let total = lately.iter().map(|quarter| quarter.total).sum();
        let share = |count: u64| count as f64 / u64::max(total, 1) as f64;
        let most = self.most.saturating_mul(lately.len());
        let (keys, error) = sum(most, lately.iter().map(|quarter| &quarter.keys));
        let keys = keys.into_iter().map(|(key, refusals)| RefusedKey {
            key,
            count: refusals.count,
            error,
            share: share(refusals.count),
            first: system_time(refusals.first),
            last: system_time(refusals.last),
            quota: refusals.quota,
            retry_at: refusals.retry_at.map(system_time),
        });
        let (routes, error) = sum(most, lately.iter().map(|quarter| &quarter.routes));
        let routes = routes.into_iter().map(|(route, Refusals { count, .. })| RefusedRoute {
            route,
            count,
            error,
            share: share(count),
        });
        Refused { total, keys: keys.collect(), routes: routes.collect() }
    }
}

#[derive(Default)]
struct Counts<T> {
    places: HashMap<T, Refusals, RandomState>,
    /// Each count was lowered by so much, which is at most a `most`th of all refusals.
    decayed: u64,
}

#[derive(Clone, Copy)]
struct Refusals {
    count: u64,
    first: i64,
    last: i64,
    retry_at: Option<i64>,
    quota: Quota,
}

impl<T: Hash + Eq> Counts<T> {
    fn note<Q>(&mut self, of: &Q, most: usize, quota: &Quota, decision: &Decision)
    where
        T: Borrow<Q>,
        Q: ?Sized + Hash + Eq + ToOwned<Owned = T>,
    {
        let (now, retry_at) = (decision.now_ms(), decision.retry_at_ms());
        let new = Refusals { count: 1, first: now, last: now, retry_at, quota: *quota };
        if let Some(place) = self.places.get_mut(of) {
            *place = Refusals { count: place.count + 1, first: place.first, ..new };
        } else if most > 0 {
            if self.places.len() / 2 >= most {
                self.decay(most);
            }
            self.places.insert(of.to_owned(), new);
        }
    }

    /// At least `most` counts are as high as the median, and at least as many leave.
    #[cold]
    fn decay(&mut self, most: usize) {
        let mut counts: Vec<_> = self.places.values().map(|place| place.count).collect();
        let (_, &mut median, _) = counts.select_nth_unstable(most);
        self.decayed += median;
        self.places.retain(|_, place| {
            place.count = place.count.saturating_sub(median);
            place.count > 0
        });
    }
}

/// The highest counts of all periods, the later period first, and by how much they can be too high.
fn sum<'a, T: Hash + Eq + Clone + 'a>(
    most: usize,
    periods: impl Iterator<Item = &'a Counts<T>>,
) -> (Vec<(T, Refusals)>, u64) {
    let (mut all, mut error) = (HashMap::<_, Refusals>::new(), 0);
    for period in periods {
        error += period.decayed;
        for (of, refusals) in &period.places {
            let earlier = |sum: &mut Refusals| {
                sum.count += refusals.count;
                sum.first = sum.first.min(refusals.first);
            };
            all.entry(of).and_modify(earlier).or_insert(*refusals);
        }
    }
    let mut all: Vec<_> = all.into_iter().collect();
    all.sort_by_key(|(_, refusals)| Reverse((refusals.count, refusals.last)));
    all.truncate(most);
    let count = |of: Refusals| Refusals { count: of.count + error, ..of };
    (all.into_iter().map(|(of, refusals)| (of.clone(), count(refusals))).collect(), error)
}
