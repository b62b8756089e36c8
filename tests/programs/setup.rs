//! Random layers and requests.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use tokio::sync::Notify;
use tower_fixed_window::{Quota, Quotas};

use crate::reference::{Grid, Terms};

/// The limits of up to three layers, from the outside in.
const NAMES: [[&str; 3]; 3] =
    [["outer-a", "outer-b", "outer-c"], ["mid-a", "mid-b", "mid-c"], ["in-a", "in-b", "in-c"]];
pub(crate) const USERS: u64 = 4;
/// In milliseconds.
const WINDOWS: [i128; 4] = [1_000, 2_000, 10_000, 60_000];

#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) layers: Vec<LayerSetup>,
    /// The milliseconds to the store in each direction; 0: it answers at once.
    pub(crate) far: u64,
    pub(crate) saved: bool,
}

#[derive(Debug)]
pub(crate) struct LayerSetup {
    pub(crate) limits: Vec<LimitSetup>,
    /// How many requests may wait, and for how many milliseconds.
    pub(crate) queue: Option<(u64, u64)>,
    pub(crate) counts_teapots: bool,
    pub(crate) refunds_dropped: bool,
}

#[derive(Debug)]
pub(crate) struct LimitSetup {
    pub(crate) name: &'static str,
    /// So many users share a key.
    pub(crate) users: u64,
    /// Several: a request chooses. `None` is unlimited.
    pub(crate) plans: Vec<Option<Vec<Terms>>>,
    pub(crate) has_costs: bool,
    pub(crate) settled: bool,
    pub(crate) shadow: bool,
}

/// A request, and what the service does with it.
#[derive(Debug)]
pub(crate) struct Ask {
    pub(crate) number: u64,
    pub(crate) user: Option<u64>,
    pub(crate) plan: usize,
    pub(crate) cost: u64,
    pub(crate) uploads: bool,
    /// The service works until it is told to go on.
    pub(crate) held: Option<Arc<Notify>>,
    pub(crate) ends: Ends,
    /// By the names of limits.
    pub(crate) costs: Vec<(&'static str, u64)>,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Ends {
    Answered,
    /// With a status that some layers don't count.
    Teapot,
    /// The costs are known when the body ends.
    Metered,
    Panics,
}

fn one_in(rng: &mut Rng, n: u64) -> bool {
    rng.u64(..n) == 0
}

/// A key of a limit in which so many users share one: some more often than others, so that steps
/// meet.
pub(crate) fn some_key(rng: &mut Rng, users: u64) -> u64 {
    rng.u64(..USERS).min(rng.u64(..USERS)) / users
}

fn limit(rng: &mut Rng) -> i128 {
    if one_in(rng, 25) { 0 } else { rng.i128(1..=8) }
}

pub(crate) fn quotas(rng: &mut Rng) -> Vec<Terms> {
    let mut windows = WINDOWS;
    rng.shuffle(&mut windows);
    let count = rng.usize(1..=2);
    let of = |window: i128| {
        let grid = match rng.u64(..8) {
            0 => Grid::FirstRequest,
            1 => Grid::StartingAt(1_700_000_000_777),
            _ => Grid::Aligned,
        };
        let limit = limit(rng);
        Terms { limit, window, grid, capacity: limit, max_reserved: 0 }
    };
    windows.into_iter().take(count).map(of).collect()
}

/// The same counters, with other limits.
pub(crate) fn with_limits(rng: &mut Rng, quotas: &[Terms]) -> Vec<Terms> {
    let of = |terms: &Terms| {
        let limit = limit(rng);
        Terms { limit, capacity: limit, ..*terms }
    };
    quotas.iter().map(of).collect()
}

pub(crate) fn built(quotas: &[Terms]) -> Quotas {
    let quota = |terms: &Terms| {
        let window = Duration::from_millis(terms.window as u64);
        let quota = Quota::new(terms.limit as u64, window);
        match terms.grid {
            Grid::FirstRequest => quota.from_first_request(),
            Grid::StartingAt(at) => quota.starting_at(Duration::from_millis(at as u64)),
            _ => quota,
        }
    };
    let others = quotas[1..].iter().map(quota);
    others.fold(quota(&quotas[0]).into(), |all, more| all.try_and(more).expect("windows differ"))
}

impl Setup {
    pub(crate) fn new(rng: &mut Rng) -> Self {
        let far = if one_in(rng, 4) { rng.u64(1..30) } else { 0 };
        let count = [1, 1, 2, 3][rng.usize(..4)];
        let layers = NAMES[..count].iter().map(|names| LayerSetup::new(rng, names, far)).collect();
        Self { layers, far, saved: one_in(rng, 8) }
    }

    pub(crate) fn ask(&self, rng: &mut Rng, number: u64) -> Ask {
        let cost = if one_in(rng, 20) { 12 } else { [0, 1, 1, 1, 2, 3][rng.usize(..6)] };
        let ends = match rng.u64(..10) {
            0 => Ends::Panics,
            1..=2 => Ends::Teapot,
            3..=4 => Ends::Metered,
            _ => Ends::Answered,
        };
        let mut costs = Vec::new();
        for limit in self.layers.iter().flat_map(|layer| &layer.limits) {
            if one_in(rng, 2) {
                costs.push((limit.name, if one_in(rng, 10) { 20 } else { rng.u64(..5) }));
            }
        }
        Ask {
            number,
            user: (!one_in(rng, 20)).then(|| some_key(rng, 1)),
            plan: rng.usize(..2),
            cost,
            uploads: one_in(rng, 5),
            held: one_in(rng, 3).then(Arc::default),
            ends,
            costs: if one_in(rng, 2) { costs } else { Vec::new() },
        }
    }
}

impl LayerSetup {
    fn new(rng: &mut Rng, names: &[&'static str; 3], far: u64) -> Self {
        let count = rng.usize(1..=3);
        let limits = names[..count].iter().map(|name| LimitSetup::new(rng, name)).collect();
        let waits = far == 0 && one_in(rng, 2);
        let queue = waits.then(|| (rng.u64(..4), [400, 1_500, 5_000, 30_000][rng.usize(..4)]));
        Self { limits, queue, counts_teapots: rng.bool(), refunds_dropped: rng.bool() }
    }
}

impl LimitSetup {
    fn new(rng: &mut Rng, name: &'static str) -> Self {
        let first = quotas(rng);
        let mut plans = vec![Some(first.clone())];
        if one_in(rng, 3) {
            plans.push(match rng.u64(..3) {
                0 => None,
                1 => Some(quotas(rng)),
                _ => Some(with_limits(rng, &first)),
            });
        }
        Self {
            name,
            users: [1, 1, 2, USERS][rng.usize(..4)],
            plans,
            has_costs: rng.bool(),
            settled: rng.bool(),
            shadow: one_in(rng, 5),
        }
    }
}

impl Ask {
    /// The key of a limit in which so many users share one.
    pub(crate) fn key(&self, users: u64) -> Option<u64> {
        self.user.map(|user| user / users)
    }
}
