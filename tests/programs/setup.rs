//! Random layers and requests.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use tokio::sync::Notify;
use tower_fixed_window::{Key, Quota, Quotas};

use crate::reference::{Grid, Terms};

/// The limits of up to three layers, from the outside in. The first two have one hash by FNV-1a.
const NAMES: [[&str; 3]; 3] = [
    ["rk4qisfchb53c", "7ounphphekkik", "outer-c"],
    ["mid-a", "mid-b", "mid-c"],
    ["in-a", "in-b", "in-c"],
];
/// What each report of a true cost begins with.
pub(crate) const BASE: (&str, u64) = (NAMES[0][0], 3);
const USERS: u64 = 4;
/// Added to the number of a key that is a composite.
const COMPOSITE: u64 = 100;
/// In milliseconds.
const WINDOWS: [i128; 4] = [1_000, 2_000, 10_000, 60_000];
/// For a full store, whose overflow has room for a few. They differ in their lowest bits.
const FEW_WINDOWS: [i128; 3] = [2_000, 2_001, 2_003];

#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) layers: Vec<LayerSetup>,
    /// The milliseconds to the store in each direction; 0: it answers at once.
    pub(crate) far: u64,
    /// The store charges limits one after the other. Only so far as its counts don't differ, which
    /// are written where a charge is returned: no clock steps back, no limit changes, and no window
    /// begins with the first request.
    pub(crate) in_order: bool,
    /// All entries are taken for long, so that keys share those of the overflow: of one limit, since
    /// the overflow is small, and without steps back.
    pub(crate) is_full: bool,
    pub(crate) saved: bool,
}

/// What quotas there may be.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Windows {
    Any,
    /// They end at known times.
    OnGrids,
    Few,
}

#[derive(Debug)]
pub(crate) struct LayerSetup {
    pub(crate) limits: Vec<LimitSetup>,
    /// How many requests may wait, and for how many milliseconds.
    pub(crate) queue: Option<(u64, u64)>,
    pub(crate) counts_teapots: bool,
    pub(crate) refunds_dropped: bool,
    pub(crate) inside: Inside,
}

/// What stands between a layer and the next one, or the service. Times are in milliseconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Inside {
    Nothing,
    /// Works before it passes a request on.
    Slow(u64),
    /// Answers 504 after this time.
    TimesOut(u64),
    /// Asks once more after an error, or a response other than 200.
    Retries,
    /// Answers by this status instead.
    Replaces(u16),
}

#[derive(Debug)]
pub(crate) struct LimitSetup {
    pub(crate) name: &'static str,
    /// So many users share a key.
    pub(crate) users: u64,
    /// The keys of some requests have several parts; those of others lack the last one.
    pub(crate) has_composites: bool,
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
    /// The service asks another one, which always refuses, when it begins, and reads the answer when
    /// it ends.
    pub(crate) client: Option<Client>,
    /// By the names of limits: what the report says, and what its meter says, if it has one.
    pub(crate) costs: [Vec<(&'static str, u64)>; 2],
    /// The app's clock panics at its next use, once the service has answered.
    pub(crate) clock_panics: bool,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Client {
    Ignored,
    Copied,
    Returned,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Ends {
    Answered,
    /// With a status that some layers don't count.
    Teapot,
    /// The costs are known when the body ends.
    Metered,
    Panics,
    Fails,
}

fn one_in(rng: &mut Rng, n: u64) -> bool {
    rng.u64(..n) == 0
}

/// Some users more often than others, so that steps meet.
fn some_user(rng: &mut Rng) -> u64 {
    rng.u64(..USERS).min(rng.u64(..USERS))
}

/// A part of a composite key.
pub(crate) fn long_text() -> String {
    "a long part ".repeat(8)
}

/// The key of so many users, or its last part: short enough for each way to hash a key.
pub(crate) fn name(number: u64) -> Key {
    Key::from(format!("u{number}"))
}

/// A key, by another way than a request's.
pub(crate) fn key(number: u64) -> Key {
    match number.checked_sub(COMPOSITE) {
        Some(number) => Key::from((Key::secret("part"), long_text(), name(number))),
        None => name(number),
    }
}

fn limit(rng: &mut Rng) -> i128 {
    if one_in(rng, 25) { 0 } else { rng.i128(1..=8) }
}

pub(crate) fn quotas(rng: &mut Rng, windows: Windows) -> Vec<Terms> {
    let mut lengths = if windows == Windows::Few { FEW_WINDOWS.to_vec() } else { WINDOWS.to_vec() };
    rng.shuffle(&mut lengths);
    let count = rng.usize(1..=2);
    let of = |window: i128| {
        let grid = match rng.u64(..8) {
            0 if windows == Windows::Any => Grid::FirstRequest,
            1 if windows != Windows::Few => Grid::StartingAt(1_700_000_000_777),
            _ => Grid::Aligned,
        };
        let limit = limit(rng);
        Terms { limit, window, grid, capacity: limit, max_reserved: 0 }
    };
    lengths.into_iter().take(count).map(of).collect()
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
    others.fold(quota(&quotas[0]).into(), |all, more| all.and(more))
}

impl Setup {
    pub(crate) fn new(rng: &mut Rng) -> Self {
        let far = if one_in(rng, 4) { rng.u64(1..30) } else { 0 };
        let in_order = far == 0 && one_in(rng, 6);
        let is_full = far == 0 && !in_order && one_in(rng, 6);
        let count = if is_full { 1 } else { [1, 1, 2, 3][rng.usize(..4)] };
        let windows = match (is_full, in_order) {
            (true, _) => Windows::Few,
            (_, true) => Windows::OnGrids,
            _ => Windows::Any,
        };
        let of = |names| LayerSetup::new(rng, names, far, windows);
        let layers = NAMES[..count].iter().map(of).collect();
        Self { layers, far, in_order, is_full, saved: !is_full && one_in(rng, 8) }
    }

    pub(crate) fn windows(&self) -> Windows {
        if self.is_full { Windows::Few } else { Windows::Any }
    }

    pub(crate) fn ask(&self, rng: &mut Rng, number: u64) -> Ask {
        let cost = if one_in(rng, 20) { 12 } else { [0, 1, 1, 1, 2, 3][rng.usize(..6)] };
        let ends = match rng.u64(..20) {
            0..=1 => Ends::Panics,
            2..=5 => Ends::Teapot,
            6..=9 => Ends::Metered,
            10 => Ends::Fails,
            _ => Ends::Answered,
        };
        let mut costs = [Vec::new(), Vec::new()];
        let tells = one_in(rng, 2);
        for limit in self.layers.iter().flat_map(|layer| &layer.limits).filter(|_| tells) {
            for costs in &mut costs {
                if rng.bool() {
                    costs.push((limit.name, if one_in(rng, 10) { 20 } else { rng.u64(..5) }));
                }
            }
        }
        let metered = ends == Ends::Metered;
        let clients = [Client::Ignored, Client::Copied, Client::Returned];
        Ask {
            number,
            user: (!one_in(rng, 20)).then(|| some_user(rng)),
            plan: rng.usize(..2),
            cost,
            uploads: one_in(rng, 5),
            held: one_in(rng, 3).then(Arc::default),
            ends,
            // A response with a meter is the one that is answered.
            client: one_in(rng, 4).then(|| clients[rng.usize(..3 - usize::from(metered))]),
            costs,
            clock_panics: metered && one_in(rng, 4),
        }
    }
}

impl LayerSetup {
    fn new(rng: &mut Rng, names: &[&'static str; 3], far: u64, windows: Windows) -> Self {
        let count = if windows == Windows::Few { 1 } else { rng.usize(1..=3) };
        let of = |name: &&'static str| LimitSetup::new(rng, name, windows);
        let limits = names[..count].iter().map(of).collect();
        let waits = far == 0 && one_in(rng, 2);
        let queue = waits.then(|| (rng.u64(..4), [400, 1_500, 5_000, 30_000][rng.usize(..4)]));
        let time = [1, 100, 1_000, 5_000][rng.usize(..4)];
        let inside = match rng.u64(..10) {
            // The log has the order of a store that is far if requests meet nothing else that asks it.
            0 if far == 0 => Inside::Slow(time),
            1 if far == 0 => Inside::TimesOut(time),
            2..=3 if far == 0 => Inside::Retries,
            4 => Inside::Replaces([418, 502][rng.usize(..2)]),
            _ => Inside::Nothing,
        };
        let (counts_teapots, refunds_dropped) = (rng.bool(), rng.bool());
        Self { limits, queue, counts_teapots, refunds_dropped, inside }
    }
}

impl LimitSetup {
    fn new(rng: &mut Rng, name: &'static str, windows: Windows) -> Self {
        let first = quotas(rng, windows);
        let mut plans = vec![Some(first.clone())];
        if windows != Windows::OnGrids && one_in(rng, 3) {
            plans.push(match rng.u64(..3) {
                0 => None,
                1 => Some(quotas(rng, windows)),
                _ => Some(with_limits(rng, &first)),
            });
        }
        Self {
            name,
            users: [1, 1, 2, USERS][rng.usize(..4)],
            has_composites: one_in(rng, 3),
            plans,
            has_costs: rng.bool(),
            settled: rng.bool(),
            shadow: one_in(rng, 5),
        }
    }
}

impl LimitSetup {
    pub(crate) fn keys(&self) -> impl Iterator<Item = u64> {
        let composites = if self.has_composites { &[0, COMPOSITE][..] } else { &[0] };
        let users = 0..USERS / self.users;
        users.flat_map(|user| composites.iter().map(move |of| of + user))
    }

    pub(crate) fn some_key(&self, rng: &mut Rng) -> u64 {
        let composite = if self.has_composites && rng.bool() { COMPOSITE } else { 0 };
        composite + some_user(rng) / self.users
    }

    pub(crate) fn key(&self, ask: &Ask) -> Option<u64> {
        let composite = if self.has_composites && ask.is_composite() { COMPOSITE } else { 0 };
        ask.user.map(|user| composite + user / self.users)
    }
}

impl Ask {
    pub(crate) fn is_composite(&self) -> bool {
        self.number.is_multiple_of(2)
    }
}
