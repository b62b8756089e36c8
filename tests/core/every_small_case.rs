//! Every small case (S1 to S16): each quota up to a size, each of its possible states, each instant
//! around that state and each operation, compared with the reference, without random choice.
//!
//! With `FULL_SIZE=1` limits to 4, capacities to 6, 4 reserved tokens and windows to 4 ms; of two
//! quotas, limits and capacities to 2, one reserved token, windows to 3 ms, or to 2 ms with states
//! that last two of them:
//! `FULL_SIZE=1 cargo test --release -p tests --test core every_small_case -- --nocapture`.

use std::ptr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

use tower_fixed_window::store::{Account, Adjust, Charge, Scope, State};
use tower_fixed_window::{Decision, Key, Quota};

use crate::reference::{Ask, Counter, Grid, Model, Taken, Terms};
use crate::sized;
use crate::trace::{Spec, answer_of, set, terms};

/// The largest of each.
#[derive(Clone, Copy)]
struct Size {
    limit: u64,
    capacity: u64,
    reserved: u64,
    window: u64,
    /// How many windows a state lasts.
    lasts: i64,
}

/// A multiple of all windows.
const START: i64 = 1_200;

impl Size {
    fn specs(self) -> Vec<Spec> {
        let mut specs = vec![];
        for limit in 0..=self.limit {
            for capacity in limit..=self.capacity.max(limit) {
                for reserved in 0..=self.reserved {
                    for window_ms in 1..=self.window {
                        for grid in [Grid::Aligned, Grid::StartingAt(1), Grid::FirstRequest] {
                            let amounts = (limit, capacity - limit, reserved);
                            specs.push(Spec { amounts, window_ms, grid });
                        }
                    }
                }
            }
        }
        // Every millisecond begins a window.
        specs.retain(|spec| spec.window_ms > 1 || spec.grid != Grid::StartingAt(1));
        specs
    }

    /// No state, and those that begin in one window. Limits change, so that what is used may be
    /// more than they grant, or less.
    fn states(self, Spec { amounts: (limit, more, reserved), window_ms, grid }: &Spec) -> States {
        let start = START + i64::from(*grid == Grid::StartingAt(1));
        let least = -(*more as i64) - 1;
        let most = (limit + reserved + 2) as i64;
        let lengths = (1..=self.lasts).map(|n| n * *window_ms as i64);
        let states = lengths.flat_map(|length| {
            (least..=most).map(move |used| {
                let mut state = State::default();
                (state.start, state.used, state.until) = (start, used, start + length);
                Some(state)
            })
        });
        [None].into_iter().chain(states).collect()
    }
}

type States = Vec<Option<State>>;

/// Quotas of one key, with their states.
struct Case<'a> {
    account: Account<'a>,
    terms: &'a [Terms],
    states: &'a [Option<State>],
    now: i64,
}

impl Case<'_> {
    fn model(&self) -> Model {
        let mut model = Model::new(self.states.len(), 0);
        let counters = self.states.iter().map(|state| state.map(counter));
        model.counters = counters.collect();
        model
    }

    fn load(&self, quota: &Quota) -> Option<State> {
        let quotas = self.account.quotas.as_ref();
        let i = quotas.iter().position(|other| ptr::eq(other, quota)).expect("one of them");
        self.states[i]
    }

    /// Compares the written states with what the reference keeps.
    fn check_writes(&self, writes: &[(&Quota, State)], model: &Model, what: &str) {
        for (i, quota) in self.account.quotas.into_iter().enumerate() {
            let write = writes.iter().find(|(other, _)| ptr::eq(*other, quota));
            let kept = write.map(|(_, state)| *state).or(self.states[i]).map(counter);
            assert_eq!(kept, model.counters[i], "{}", self.at(what));
        }
    }

    fn at(&self, what: &str) -> String {
        let Self { account, states, now, .. } = self;
        format!("{what}: {} with {states:?} at {now}", account.quotas)
    }

    fn charge(&self, cost: u64, ask: Ask) {
        let charge = Charge::new(self.account, cost);
        let charge = match ask {
            Ask::Charge => charge,
            Ask::Reserve => charge.reserving(),
            Ask::Peek => charge.peeking(),
        };
        let (decision, writes) = charge.decide(self.now as u64, |_, quota| self.load(quota));
        let mut model = self.model();
        let (expected, _) = model.ask(self.terms, self.now.into(), cost.into(), ask);
        assert_eq!(answer_of(&decision), expected, "{}", self.at(&format!("{charge:?}")));
        let writes: Vec<_> = writes.into_iter().map(|(_, quota, state)| (quota, state)).collect();
        self.check_writes(&writes, &model, "charge");
    }

    fn adjust(&self, (decision, taken): &(Decision, Taken), tokens: u64, more: bool) {
        let adjust = match more {
            true => Adjust::take(self.account, tokens, decision),
            false => Adjust::refund(self.account, tokens, decision),
        };
        let writes = adjust.apply(self.now as u64, |quota| self.load(quota));
        let mut model = self.model();
        let (cost, actual) = if more { (0, tokens) } else { (tokens, 0) };
        let mut taken = taken.clone();
        taken.cost = cost.into();
        model.settle(self.terms, taken, self.now.into(), actual.into());
        self.check_writes(&writes, &model, "adjust");
    }
}

fn counter(State { start, used, until, .. }: State) -> Counter {
    Counter { start: start.into(), used: used.into(), until: until.into() }
}

/// Runs all cases of these quotas, and returns their number.
fn check(size: Size, specs: &[Spec]) -> u64 {
    let Some(quotas) = set(specs) else { return 0 };
    let (scope, key) = (Scope::named("small"), Key::global());
    let (account, terms) = (Account::new(&scope, &quotas, &key), all_terms(specs));
    let length = specs.iter().map(|spec| spec.window_ms).max().expect("a quota") as i64;
    let most = specs.iter().map(|Spec { amounts: (limit, more, reserved), .. }| {
        // This cost can never pass, and no larger one behaves differently.
        limit + more + reserved + 1
    });
    let most = most.max().expect("a quota");
    // Tokens taken in windows of their own: before this window, in it and after it.
    let taken: Vec<_> =
        (-1..=size.lasts).map(|n| taken(account, &terms, START + n * length)).collect();
    let mut cases = 0;
    let states: Vec<States> = specs.iter().map(|spec| size.states(spec)).collect();
    let others = states.get(1).map_or(&[None][..], |states| &states[..]);
    for (first, second) in states[0].iter().flat_map(|one| others.iter().map(move |two| (one, two)))
    {
        let states = &[*first, *second][..specs.len()];
        for now in START - 2 * length - 1..=START + (size.lasts + 1) * length + 1 {
            let case = Case { account, terms: &terms, states, now };
            for cost in 0..=most {
                for ask in [Ask::Charge, Ask::Reserve, Ask::Peek] {
                    case.charge(cost, ask);
                }
            }
            for taken in &taken {
                for tokens in [1, most] {
                    case.adjust(taken, tokens, false);
                }
            }
            for tokens in [1, most] {
                case.adjust(&taken[0], tokens, true);
            }
            cases += 3 * (most + 1) + 2 + 2 * taken.len() as u64 + 2;
        }
    }
    cases
}

fn all_terms(specs: &[Spec]) -> Vec<Terms> {
    specs.iter().map(terms).collect()
}

/// A charge of 0 tokens has a receipt, too.
fn taken(account: Account<'_>, terms: &[Terms], at: i64) -> (Decision, Taken) {
    let (decision, _) = Charge::new(account, 0).decide(at as u64, |_, _| None);
    let (_, taken) = Model::new(terms.len(), 0).ask(terms, at.into(), 0, Ask::Charge);
    (decision, taken.expect("it passes"))
}

/// Runs on all cores.
fn check_all(size: Size, sets: &[Vec<Spec>]) -> u64 {
    let (next, cases) = (AtomicUsize::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, |n| n.get()) {
            scope.spawn(|| {
                while let Some(specs) = sets.get(next.fetch_add(1, Ordering::Relaxed)) {
                    cases.fetch_add(check(size, specs), Ordering::Relaxed);
                }
            });
        }
    });
    let cases = cases.into_inner();
    println!("{cases} cases of {} sets of quotas", sets.len());
    cases
}

#[test]
fn every_small_quota_decides_like_the_reference() {
    let part = Size { limit: 2, capacity: 2, reserved: 1, window: 2, lasts: 2 };
    let all = Size { limit: 4, capacity: 6, reserved: 4, window: 4, lasts: 4 };
    let size = sized(part, all);
    let sets: Vec<_> = size.specs().into_iter().map(|spec| vec![spec]).collect();
    assert!(check_all(size, &sets) >= sized(100_000, 10_000_000));
}

#[test]
fn every_two_small_quotas_decide_like_the_reference() {
    let few = Size { limit: 1, capacity: 1, reserved: 1, window: 2, lasts: 1 };
    let more = Size { limit: 2, capacity: 2, ..few };
    let (shorter, longer) = (Size { lasts: 2, ..more }, Size { window: 3, ..more });
    let cases = sized(vec![few], vec![shorter, longer]).into_iter().map(check_pairs).sum::<u64>();
    assert!(cases >= sized(100_000, 100_000_000));
}

fn check_pairs(size: Size) -> u64 {
    let specs = size.specs();
    let pairs = specs.iter().flat_map(|one| specs.iter().map(move |two| [one, two]));
    // The shorter window comes first, since the order of quotas does not change the arithmetic.
    let pairs = pairs.filter(|[one, two]| one.window_ms <= two.window_ms);
    let sets = pairs.map(|pair| pair.map(Clone::clone).to_vec());
    // The step is a prime number of pairs, so that each quota is part of the sample.
    let sets: Vec<Vec<Spec>> = sets.step_by(sized(31, 1)).collect();
    check_all(size, &sets)
}
