//! The store in memory, driven by any operations: with room for every key it answers as the naive
//! reference does; without, no key gets more than its limit.
#![no_main]

#[allow(dead_code, reason = "it is made for more tests than this one")]
#[path = "../../tests/core/reference.rs"]
mod reference;

use std::collections::HashMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use reference::{Ask, Grid, Model, Taken, Terms, stagger};
use tower_fixed_window::store::Reply;
use tower_fixed_window::testing::block_on;
use tower_fixed_window::{
    Decision, Key, Limit, Limiter, Limits, Line, ManualClock, MemoryStore, Quota, Quotas, Receipt,
};

const NAMES: [&str; 2] = ["a", "b"];
const START_MS: u64 = 1_700_000_040_000;

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Spec {
    limit: u8,
    window: u8,
    grid: u8,
    more: u8,
    reserved: u8,
}

#[derive(Arbitrary, Debug)]
enum Op {
    Charge {
        who: u8,
        cost: u8,
        reserve: bool,
    },
    Peek {
        who: u8,
        cost: u8,
    },
    Refund(u8),
    Settle(u8, u8),
    Reset(u8),
    Limits(u8, [u8; 4]),
    /// As many new keys, each once.
    Flood(u8),
    Wait(u8),
    WaitLong(u16),
}

#[derive(Arbitrary, Debug)]
struct Input {
    specs: [Vec<Spec>; 2],
    ops: Vec<Op>,
}

impl Spec {
    fn window(self) -> u64 {
        [1, 7, 20, 20, 50, 100, 300, 1_000][usize::from(self.window) % 8]
    }

    fn grid(self) -> Grid {
        [Grid::Aligned, Grid::StartingAt(7), Grid::Staggered, Grid::FirstRequest]
            [usize::from(self.grid) % 4]
    }

    fn quota(self) -> Quota {
        let quota = Quota::new(self.limit.into(), Duration::from_millis(self.window()));
        let quota = match self.grid() {
            Grid::Aligned => quota,
            Grid::StartingAt(at) => quota.starting_at(Duration::from_millis(at as u64)),
            Grid::Staggered => quota.staggered(),
            Grid::FirstRequest => quota.from_first_request(),
        };
        let capacity = u64::from(self.limit) + u64::from(self.more % 8);
        quota.rollover_up_to(capacity).reserve_up_to(u64::from(self.reserved % 8))
    }

    fn terms(self) -> Terms {
        Terms {
            limit: self.limit.into(),
            window: self.window().into(),
            grid: self.grid(),
            capacity: i128::from(self.limit) + i128::from(self.more % 8),
            max_reserved: i128::from(self.reserved % 8),
        }
    }
}

/// The quotas that may be in one set, and the set.
fn set(specs: &[Spec]) -> Option<(Vec<Spec>, Quotas)> {
    let (first, rest) = specs.split_first()?;
    let (mut kept, mut set) = (vec![*first], Quotas::from(first.quota()));
    for spec in rest.iter().take(3) {
        if let Ok(more) = format!("{set}, {}", spec.quota()).parse() {
            set = more;
            kept.push(*spec);
        }
    }
    Some((kept, set))
}

fn answer<T>(reply: Reply<T>) -> T {
    block_on(reply).expect("memory does not fail")
}

fn charge(limiter: &Limiter, key: u64, cost: u64, reserve: bool) -> (Decision, Option<Receipt>) {
    let charged = answer(match reserve {
        true => limiter.reserve(key, cost),
        false => limiter.charge(key, cost),
    });
    match charged {
        Ok(receipt) => (receipt.decision().clone(), Some(receipt)),
        Err(refused) => (refused.decision().clone(), None),
    }
}

fn peek(limiter: &Limiter, key: u64, cost: u64) -> Decision {
    answer(Limits::from(limiter).peek([Line::new(limiter.name(), key, cost)]))
}

fn ms(at: SystemTime) -> i128 {
    at.duration_since(UNIX_EPOCH).expect("after 1970").as_millis() as i128
}

fn compare(decision: &Decision, expected: &reference::Answer) {
    let standings = decision.usage();
    let of = |f: fn(&tower_fixed_window::Usage) -> i128| -> Vec<i128> {
        standings.iter().map(f).collect()
    };
    assert_eq!(decision.is_allowed(), expected.allowed);
    assert_eq!(i128::from(decision.granted()), expected.granted);
    assert_eq!(of(|s| s.used().into()), expected.used);
    assert_eq!(of(|s| s.remaining().into()), expected.remaining);
    assert_eq!(of(|s| ms(s.reset_at())), expected.reset);
    assert_eq!(decision.refusing().collect::<Vec<_>>(), expected.refusing);
    let of = standings[expected.governing];
    assert_eq!((decision.limit(), decision.used()), (of.limit(), of.used()));
    assert_eq!((decision.remaining(), decision.reset_at()), (of.remaining(), of.reset_at()));
    assert_eq!(decision.retry_at().map(ms), expected.retry_at);
    assert_eq!(!decision.is_allowed() && decision.retry_at().is_none(), expected.for_good);
    assert_eq!(decision.ready_at().map(ms), expected.ready_at);
}

/// Both scopes, with the quotas that they have at the moment.
struct Scopes {
    limiters: Vec<Limiter>,
    specs: Vec<Vec<Spec>>,
}

impl Scopes {
    fn new(input: &Input, store: &MemoryStore) -> Option<Self> {
        let sets = [set(&input.specs[0])?, set(&input.specs[1])?];
        let limiters = sets
            .iter()
            .zip(NAMES)
            .map(|((_, set), name)| Limit::new(*set).name(name).store(store.clone()))
            .collect();
        Some(Self { limiters, specs: sets.map(|(specs, _)| specs).into() })
    }

    fn terms(&self, scope: usize) -> Vec<Terms> {
        self.specs[scope].iter().map(|spec| spec.terms()).collect()
    }
}

fn who(who: u8) -> (usize, u64) {
    (usize::from(who & 1), u64::from(who >> 1 & 3))
}

/// With room, every answer is the reference's.
fn exact(input: &Input) {
    let clock = ManualClock::at_ms(START_MS);
    let store = MemoryStore::with_max_keys(1_000).clock(clock.clone());
    let Some(mut scopes) = Scopes::new(input, &store) else { return };
    let mut models = HashMap::<(usize, u64), Model>::new();
    let mut receipts = Vec::<((usize, u64), Receipt, Taken, Option<Vec<Terms>>)>::new();
    let (mut now, mut has_other_quotas) = (START_MS, [false; 2]);
    for op in input.ops.iter().take(200) {
        let mut model = |(scope, key): (usize, u64), specs: &[Vec<Spec>]| {
            models.remove(&(scope, key)).unwrap_or_else(|| {
                let shift = stagger(NAMES[scope], Key::from(key).as_bytes());
                Model::new(specs[scope].len(), shift)
            })
        };
        match op {
            Op::Charge { who: w, cost, reserve } => {
                let (scope, key) = who(*w);
                let mut model = model((scope, key), &scopes.specs);
                let ask = if *reserve { Ask::Reserve } else { Ask::Charge };
                let (expected, taken) =
                    model.ask(&scopes.terms(scope), now.into(), (*cost).into(), ask);
                models.insert((scope, key), model);
                let (decision, receipt) =
                    charge(&scopes.limiters[scope], key, (*cost).into(), *reserve);
                compare(&decision, &expected);
                assert_eq!(receipt.is_some(), taken.is_some());
                if let (Some(receipt), Some(taken)) = (receipt, taken) {
                    // By quotas that are not the limit's own, it is corrected under these (S14).
                    let own = has_other_quotas[scope].then(|| scopes.terms(scope));
                    receipts.push(((scope, key), receipt, taken, own));
                }
            }
            Op::Peek { who: w, cost } => {
                let (scope, key) = who(*w);
                let mut model = model((scope, key), &scopes.specs);
                let (expected, _) =
                    model.ask(&scopes.terms(scope), now.into(), (*cost).into(), Ask::Peek);
                models.insert((scope, key), model);
                let decision = peek(&scopes.limiters[scope], key, (*cost).into());
                compare(&decision, &expected);
            }
            Op::Refund(of) | Op::Settle(of, _) if !receipts.is_empty() => {
                let of = usize::from(*of) % receipts.len();
                let (place, receipt, taken, own) = receipts.swap_remove(of);
                let actual = if let Op::Settle(_, actual) = op { *actual } else { 0 };
                let mut model = model(place, &scopes.specs);
                let terms = own.unwrap_or_else(|| scopes.terms(place.0));
                model.settle(&terms, taken, now.into(), actual.into());
                models.insert(place, model);
                let limiter = &scopes.limiters[place.0];
                answer(match op {
                    Op::Settle(..) => limiter.settle(receipt, actual.into()),
                    _ => limiter.refund(receipt),
                });
            }
            Op::Refund(_) | Op::Settle(..) | Op::Flood(_) => {}
            Op::Reset(w) => {
                let (scope, key) = who(*w);
                models.remove(&(scope, key));
                answer(scopes.limiters[scope].reset(key));
            }
            Op::Limits(w, limits) => {
                let (scope, _) = who(*w);
                let specs = scopes.specs[scope].iter_mut().zip(limits);
                specs.for_each(|(spec, limit)| spec.limit = *limit);
                let (kept, set) = set(&scopes.specs[scope]).expect("as before");
                assert_eq!(kept.len(), scopes.specs[scope].len());
                scopes.limiters[scope] = scopes.limiters[scope].with_quotas(set);
                has_other_quotas[scope] = true;
            }
            Op::Wait(ms) => now += u64::from(*ms),
            Op::WaitLong(ms) => now += u64::from(*ms),
        }
        clock.set_ms(now);
    }
    assert_eq!(store.overflowed(), 0);
    assert!(store.live_entries() <= 8 * 4);
}

/// Without room, nobody gets more than the limit in a window.
fn bounded(input: &Input) {
    let clock = ManualClock::at_ms(START_MS);
    let store = MemoryStore::with_max_keys(1).clock(clock.clone());
    let Some(scopes) = Scopes::new(input, &store) else { return };
    let mut books = HashMap::<(usize, u64, usize, i128), u64>::new();
    let mut receipts = Vec::<(usize, u64, Receipt, u64)>::new();
    // Returns the window of a quota's grid that a time is in. Without a grid, windows begin at any
    // time: `exact` checks those.
    let window = |spec: &Spec, scope: usize, key: u64, at: u64| {
        let through = match spec.grid() {
            Grid::Aligned => 0,
            Grid::StartingAt(at) => at,
            Grid::Staggered => stagger(NAMES[scope], Key::from(key).as_bytes()).into(),
            Grid::FirstRequest => return None,
        };
        Some((i128::from(at) - through).div_euclid(spec.window().into()))
    };
    let (mut now, mut newcomer) = (START_MS, 1_000_u64);
    for op in input.ops.iter().take(200) {
        match op {
            Op::Charge { who: w, cost, reserve } => {
                let (scope, key) = who(*w);
                let cost = u64::from(*cost);
                let (_, receipt) = charge(&scopes.limiters[scope], key, cost, *reserve);
                let Some(receipt) = receipt else { continue };
                receipts.push((scope, key, receipt, now));
                for (i, spec) in scopes.specs[scope].iter().enumerate() {
                    let Some(window) = window(spec, scope, key, now) else { continue };
                    let sum = books.entry((scope, key, i, window)).or_default();
                    *sum += cost;
                    let most = spec.quota().capacity() + spec.quota().max_reserved();
                    assert!(*sum <= most, "{sum} of {most} passed in a window of {spec:?}");
                }
            }
            Op::Refund(of) | Op::Settle(of, _) if !receipts.is_empty() => {
                let of = usize::from(*of) % receipts.len();
                let (scope, key, receipt, at) = receipts.swap_remove(of);
                // More than was taken would be debt, which has no bound.
                let actual = if let Op::Settle(_, actual) = op { u64::from(*actual) } else { 0 };
                let actual = actual.min(receipt.decision().granted());
                for (i, spec) in scopes.specs[scope].iter().enumerate() {
                    let Some(taken) = window(spec, scope, key, at) else { continue };
                    // Tokens that return to their window may pass there again.
                    if window(spec, scope, key, now) == Some(taken) {
                        *books.get_mut(&(scope, key, i, taken)).expect("it passed") -=
                            receipt.decision().granted() - actual;
                    }
                }
                answer(scopes.limiters[scope].settle(receipt, actual));
            }
            Op::Flood(keys) => {
                for _ in 0..*keys {
                    newcomer += 1;
                    let _ = answer(scopes.limiters[0].check(newcomer));
                }
            }
            Op::Wait(ms) => now += u64::from(*ms),
            Op::WaitLong(ms) => now += u64::from(*ms),
            _ => {}
        }
        clock.set_ms(now);
    }
    assert!(store.live_entries() <= store.max_bytes() / 32);
}

fuzz_target!(|input: Input| {
    exact(&input);
    bounded(&input);
});
