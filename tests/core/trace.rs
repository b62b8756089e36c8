//! Random quotas and random traces, of one key under one limit or of two keys under several, and a rig that
//! takes each step twice: through limits in memory, and through the reference.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use proptest::prelude::*;
use tower_fixed_window::{
    Decision, Key, Limit, Limits, Line, ManualClock, MemoryStore, Quota, Quotas, Receipt,
};

use crate::reference::{
    self, Answer, Ask, END_OF_TIME, Grid, Model, Taken, Terms, stagger, together,
};
use crate::{answer, charge, peek};

pub(crate) const NAMES: [&str; 4] = ["model", "tokens", "cents", "jobs"];
const KEYS: [&str; 2] = ["alice", "bob"];

/// A limit, a key and a cost.
type Asked = (usize, usize, u64);

/// A limit, a key and what was taken of it.
type Took = (usize, usize, Taken);

/// Limit, capacity above it, and the maximum of reserved tokens.
pub(crate) type Amounts = (u64, u64, u64);

#[derive(Clone, Debug)]
pub(crate) struct Spec {
    pub(crate) amounts: Amounts,
    pub(crate) window_ms: u64,
    pub(crate) grid: Grid,
}

#[derive(Clone, Debug)]
pub(crate) enum Op {
    /// For each limit the key, and a cost if the limit takes part.
    Together(Ask, Vec<(usize, Option<u64>)>),
    Charge(Cost),
    Reserve(Cost),
    Peek(Cost),
    /// Refunds one of the receipts that are left.
    Refund(prop::sample::Index),
    Settle(prop::sample::Index, Cost),
    /// Resets one of the limits for one of the keys.
    Reset(prop::sample::Index),
    Limits(Vec<Amounts>),
}

/// A cost, mostly close to a limit.
#[derive(Clone, Debug)]
pub(crate) enum Cost {
    Of(u64),
    /// Thousandths of the first quota's limit.
    Share(u64),
    Remaining,
    RemainingAndOne,
    Capacity,
    CapacityAndOne,
}

#[derive(Clone, Debug)]
pub(crate) enum Step {
    Stay,
    /// Thousandths of the window of one of the quotas.
    Windows(prop::sample::Index, i64),
    Millis(i64),
    /// To the last reported end of that quota's window, or a little before or after it.
    Edge(prop::sample::Index, i64),
    To(u64),
}

pub(crate) type Trace = Vec<(Step, Op)>;

pub(crate) fn amounts() -> impl Strategy<Value = Amounts> {
    let limit = prop_oneof![
        1 => Just(0),
        8 => 1..=20_u64,
        2 => 1..=10_000_u64,
        1 => Just(Quota::MAX_TOKENS),
        1 => 1..=Quota::MAX_TOKENS,
    ];
    let more = || {
        prop_oneof![
            4 => Just(0),
            2 => 1..=30_u64,
            1 => 1..=Quota::MAX_TOKENS,
        ]
    };
    (limit, more(), more()).prop_map(|(limit, more, reserved)| {
        let more = more.min(Quota::MAX_TOKENS - limit);
        (limit, more, reserved.min(Quota::MAX_TOKENS - limit - more))
    })
}

fn window_ms() -> impl Strategy<Value = u64> {
    prop_oneof![
        3 => 1..=10_u64,
        3 => prop::sample::select(vec![1_000, 60_000, 3_600_000, 86_400_000, 604_800_000]),
        2 => 1..=100_000_u64,
        1 => Just(Quota::MAX_WINDOW.as_millis() as u64),
        1 => 1..=Quota::MAX_WINDOW.as_millis() as u64,
    ]
}

fn grid() -> impl Strategy<Value = Grid> {
    prop_oneof![
        3 => Just(Grid::Aligned),
        1 => (0..=END_OF_TIME as u64).prop_map(|at| Grid::StartingAt(at.into())),
        1 => (0..=1_000_u64).prop_map(|at| Grid::StartingAt(at.into())),
        1 => Just(Grid::Staggered),
        2 => Just(Grid::FirstRequest),
    ]
}

/// Generates up to four quotas that can be in one set.
pub(crate) fn specs(amounts: impl Strategy<Value = Amounts>) -> impl Strategy<Value = Vec<Spec>> {
    let spec = (amounts, window_ms(), grid()).prop_map(|(amounts, window_ms, grid)| Spec {
        amounts,
        window_ms,
        grid,
    });
    prop::collection::vec(spec, 1..=4).prop_filter_map("two quotas are one counter", |specs| {
        set(&specs).is_some().then_some(specs)
    })
}

pub(crate) fn cost() -> impl Strategy<Value = Cost> {
    prop_oneof![
        6 => (1..=5_u64).prop_map(Cost::Of),
        1 => Just(Cost::Of(0)),
        1 => any::<u64>().prop_map(Cost::Of),
        1 => prop::sample::select(vec![Quota::MAX_TOKENS, Quota::MAX_TOKENS + 1, u64::MAX]).prop_map(Cost::Of),
        3 => (0..=2_000_u64).prop_map(Cost::Share),
        2 => Just(Cost::Remaining),
        1 => Just(Cost::RemainingAndOne),
        1 => Just(Cost::Capacity),
        1 => Just(Cost::CapacityAndOne),
    ]
}

pub(crate) fn op() -> impl Strategy<Value = Op> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        8 => cost().prop_map(Op::Charge),
        4 => cost().prop_map(Op::Reserve),
        2 => cost().prop_map(Op::Peek),
        3 => index().prop_map(Op::Refund),
        3 => (index(), cost()).prop_map(|(of, actual)| Op::Settle(of, actual)),
        1 => index().prop_map(Op::Reset),
        1 => prop::collection::vec(amounts(), 4).prop_map(Op::Limits),
    ]
}

pub(crate) fn forward() -> impl Strategy<Value = Step> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        4 => Just(Step::Stay),
        4 => (index(), 0..=900_i64).prop_map(|(of, by)| Step::Windows(of, by)),
        2 => (index(), 0..=5_000_i64).prop_map(|(of, by)| Step::Windows(of, by)),
        2 => (0..=5_i64).prop_map(Step::Millis),
        2 => (index(), 0..=1_i64).prop_map(|(of, by)| Step::Edge(of, by)),
    ]
}

pub(crate) fn any_step() -> impl Strategy<Value = Step> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        12 => forward(),
        2 => (index(), -1_200..=0_i64).prop_map(|(of, by)| Step::Windows(of, by)),
        1 => (index(), -50_000..=9_000_000_i64).prop_map(|(of, by)| Step::Windows(of, by)),
        1 => (-5..=5_i64).prop_map(Step::Millis),
        2 => (index(), -1..=1_i64).prop_map(|(of, by)| Step::Edge(of, by)),
        1 => start().prop_map(Step::To),
    ]
}

/// A time on the clock: near its start, today, near its largest value, or beyond.
pub(crate) fn start() -> impl Strategy<Value = u64> {
    let end = END_OF_TIME as u64;
    prop_oneof![
        1 => 0..=100_u64,
        6 => 1_700_000_000_000..=1_700_001_000_000_u64,
        1 => end - 100_000..=end,
        1 => 0..=end,
        1 => prop::sample::select(vec![end - 1, end, end + 1, u64::MAX]),
    ]
}

pub(crate) fn trace(
    step: impl Strategy<Value = Step>,
    op: impl Strategy<Value = Op>,
) -> impl Strategy<Value = Trace> {
    prop::collection::vec((step, op), 1..60)
}

pub(crate) fn quota(spec: &Spec) -> Quota {
    let (limit, more, reserved) = spec.amounts;
    let quota = Quota::new(limit, Duration::from_millis(spec.window_ms));
    let quota = match spec.grid {
        Grid::Aligned => quota,
        Grid::StartingAt(at) => quota.starting_at(Duration::from_millis(at as u64)),
        Grid::Staggered => quota.staggered(),
        Grid::FirstRequest => quota.from_first_request(),
    };
    quota.rollover_up_to(limit + more).reserve_up_to(reserved)
}

/// The quotas as a set, if they can be in one.
pub(crate) fn set(specs: &[Spec]) -> Option<Quotas> {
    let mut quotas = specs.iter().map(quota);
    let first = Quotas::from(quotas.next()?);
    quotas.try_fold(first, |set, quota| format!("{set}, {quota}").parse().ok())
}

pub(crate) fn terms(spec: &Spec) -> Terms {
    let (limit, more, reserved) = spec.amounts;
    Terms {
        limit: limit.into(),
        window: spec.window_ms.into(),
        grid: spec.grid,
        capacity: i128::from(limit) + i128::from(more),
        max_reserved: reserved.into(),
    }
}

/// The limits and the reference: each step goes through both, and their answers have to agree.
pub(crate) struct Rig {
    pub(crate) clock: ManualClock,
    pub(crate) now: u64,
    latest: u64,
    /// The quotas of each limit.
    pub(crate) specs: Vec<Vec<Spec>>,
    pub(crate) limits: Limits,
    pub(crate) receipts: Vec<(Receipt, Vec<Took>)>,
    models: Vec<[Model; 2]>,
    /// The store has counts of another key, or limit, than the first.
    has_others: bool,
    resets: Vec<i128>,
}

impl Rig {
    pub(crate) fn new(specs: Vec<Vec<Spec>>, now: u64) -> Self {
        let clock = ManualClock::at_ms(now);
        // In one shard of few places.
        let store = MemoryStore::with_max_keys(200).clock(clock.clone());
        let models = NAMES.iter().zip(&specs).map(|(name, specs)| {
            KEYS.map(|key| Model::new(specs.len(), stagger(name, Key::from(key).as_bytes())))
        });
        let (models, limits) = (models.collect(), limits_of(&specs).store(store));
        Self {
            clock,
            now,
            latest: now,
            limits,
            receipts: vec![],
            models,
            has_others: false,
            resets: vec![],
            specs,
        }
    }

    pub(crate) fn go_to(&mut self, now: u64) {
        self.now = now;
        self.latest = self.latest.max(now);
        self.clock.set_ms(now);
    }

    /// Whether a clock that goes there finds what it should. Of several entries one that has expired
    /// may be another one's by then, and far away windows have no length.
    fn may_go_to(&self, to: u64) -> bool {
        let (to, latest) = (i128::from(to), i128::from(self.latest));
        let ended = || self.models.iter().flatten().any(|model| model.ends_between(to, latest));
        !self.has_others || (1_000_000_000..1 << 51).contains(&to) && !ended()
    }

    /// The time after a step.
    pub(crate) fn after(&self, step: &Step) -> u64 {
        let now = i128::from(self.now);
        let to = match step {
            Step::Stay => now,
            Step::Windows(of, by) => {
                let windows: Vec<_> =
                    self.specs.iter().flatten().map(|spec| spec.window_ms).collect();
                let window = *of.get(&windows);
                now + i128::from(window) * i128::from(*by) / 1_000
            }
            Step::Millis(by) => now + i128::from(*by),
            Step::Edge(_, _) if self.resets.is_empty() => now,
            Step::Edge(of, by) => of.get(&self.resets) + i128::from(*by),
            Step::To(at) => i128::from(*at),
        };
        to.clamp(0, u64::MAX.into()) as u64
    }

    pub(crate) fn model_now(&self) -> i128 {
        // The end itself is never reached: a state that lasts until then lasts for ever.
        i128::from(self.now).min(END_OF_TIME - 1)
    }

    fn terms(&self, limit: usize) -> Vec<Terms> {
        self.specs[limit].iter().map(terms).collect()
    }

    /// Returns whether every refusal of a reservation is because it would run too late, rather than
    /// for the count (S13).
    pub(crate) fn comes_too_late(&self, decision: &Decision, cost: u64) -> bool {
        let fits = |i: usize| {
            let ((limit, _, reserved), usage) = (self.specs[0][i].amounts, &decision.usage()[i]);
            let debt = usage.used().saturating_sub(limit);
            cost + debt <= usage.remaining() + reserved
        };
        decision.retry_at().is_some() && decision.refusing().all(fits)
    }

    pub(crate) fn cost(&self, cost: &Cost) -> u64 {
        let (limit, more, _) = self.specs[0][0].amounts;
        match cost {
            Cost::Of(cost) => *cost,
            Cost::Share(share) => (u128::from(limit) * u128::from(*share) / 1_000) as u64,
            Cost::Remaining => self.remaining(),
            Cost::RemainingAndOne => self.remaining() + 1,
            Cost::Capacity => limit + more,
            Cost::CapacityAndOne => limit + more + 1,
        }
    }

    pub(crate) fn remaining(&self) -> u64 {
        let decision = answer(self.limits.limiter(NAMES[0]).peek(KEYS[0]));
        decision.usage().iter().map(|s| s.remaining()).min().expect("a quota")
    }

    pub(crate) fn peek(&mut self, cost: u64) -> Decision {
        self.ask(Ask::Peek, &[(0, 0, cost)])
    }

    pub(crate) fn charge(&mut self, cost: u64, reserve: bool) -> Decision {
        self.ask(if reserve { Ask::Reserve } else { Ask::Charge }, &[(0, 0, cost)])
    }

    fn ask(&mut self, ask: Ask, asked: &[Asked]) -> Decision {
        let now = self.model_now();
        let terms: Vec<_> = (0..self.specs.len()).map(|limit| self.terms(limit)).collect();
        let (decision, receipt) = self.decide(ask, asked);
        let mut lines = vec![];
        for (limit, models) in self.models.iter_mut().enumerate() {
            let Some(&(_, key, cost)) = asked.iter().find(|(of, ..)| *of == limit) else {
                continue;
            };
            let (model, terms) = (&mut models[key], &terms[limit][..]);
            lines.push(reference::Line { model, terms, cost: cost.into() });
        }
        let expected = together(&mut lines, now, ask);
        let at = format!("{ask:?} {asked:?} at {now}");
        assert_eq!(decision.is_allowed(), expected.allowed, "{at}");
        let told = (decision.retry_at().map(ms), decision.ready_at().map(ms));
        assert_eq!(told, (expected.retry_at, expected.ready_at), "{at}");
        for (&(limit, ..), expected) in asked.iter().zip(&expected.answers) {
            let told = answer_of(&decision.of(NAMES[limit]).expect("it took part"));
            match asked {
                [_] => assert_eq!(&told, expected, "{at}"),
                _ => assert_eq!(told.numbers(), expected.numbers(), "{}: {at}", NAMES[limit]),
            }
        }
        if ask != Ask::Peek {
            self.has_others |= asked.iter().any(|&(limit, key, _)| limit + key > 0);
            self.resets = expected.answers.iter().flat_map(|answer| answer.reset.clone()).collect();
        }
        match (receipt, expected.taken) {
            (Some(receipt), Some(taken)) => {
                let taken = asked.iter().zip(taken).map(|(&(limit, key, _), of)| (limit, key, of));
                self.receipts.push((receipt, taken.collect()));
            }
            (None, None) => {}
            _ => panic!("a receipt for each charge that passed, and no other"),
        }
        decision
    }

    /// A limiter's charge is that of its limit alone.
    fn decide(&self, ask: Ask, asked: &[Asked]) -> (Decision, Option<Receipt>) {
        if let &[(limit, key, cost)] = asked {
            let limiter = self.limits.limiter(NAMES[limit]);
            return match ask {
                Ask::Peek => (peek(limiter, KEYS[key], cost), None),
                _ => charge(limiter, KEYS[key], cost, ask == Ask::Reserve),
            };
        }
        let line = |&(limit, key, cost): &Asked| Line::new(NAMES[limit], KEYS[key], cost);
        let lines: Vec<_> = asked.iter().map(line).collect();
        let charged = match ask {
            Ask::Peek => return (answer(self.limits.peek(&lines)), None),
            Ask::Charge => answer(self.limits.charge(&lines)),
            Ask::Reserve => answer(self.limits.reserve(&lines)),
        };
        match charged {
            Ok(receipt) => (receipt.decision().clone(), Some(receipt)),
            Err(refused) => (refused.decision().clone(), None),
        }
    }

    /// Of several limits, some keep the cost that they were charged.
    pub(crate) fn settle(&mut self, of: usize, actual: Option<u64>) {
        let (receipt, taken) = self.receipts.swap_remove(of);
        let (now, alone) = (self.model_now(), taken.len() == 1);
        let mut costs = vec![];
        for (limit, key, taken) in taken {
            let actual = match actual {
                Some(actual) if !alone => actual / 4 * (limit as u64 + 1),
                actual => actual.unwrap_or(0),
            };
            if !alone && actual % 5 == 4 {
                continue;
            }
            let terms = self.terms(limit);
            self.models[limit][key].settle(&terms, taken, now, actual.into());
            costs.push((NAMES[limit], actual));
        }
        answer(match actual {
            Some(_) => self.limits.settle(receipt, costs),
            None => self.limits.refund(receipt),
        });
    }

    /// Takes a step, and asserts that the answer and the usage afterwards are the reference's.
    pub(crate) fn take(&mut self, step: &Step, op: &Op) {
        let to = self.after(step);
        if self.may_go_to(to) {
            self.go_to(to);
        }
        self.apply(op);
        let limits = self.specs.len();
        for (key, cost) in [(0, 1), (0, 0), (1, 0)] {
            let all: Vec<_> = (0..limits).map(|limit| (limit, key, cost)).collect();
            let _ = self.ask(Ask::Peek, &all);
        }
    }

    pub(crate) fn apply(&mut self, op: &Op) {
        match op {
            Op::Together(ask, lines) => {
                let of_limits = lines.iter().enumerate().take(self.specs.len());
                let asked = of_limits.filter_map(|(i, &(key, cost))| Some((i, key, cost?)));
                let asked: Vec<_> = asked.collect();
                if !asked.is_empty() {
                    drop(self.ask(*ask, &asked));
                }
            }
            Op::Charge(cost) => drop(self.charge(self.cost(cost), false)),
            Op::Reserve(cost) => drop(self.charge(self.cost(cost), true)),
            Op::Peek(cost) => drop(self.peek(self.cost(cost))),
            Op::Refund(of) if !self.receipts.is_empty() => {
                self.settle(of.index(self.receipts.len()), None);
            }
            Op::Settle(of, actual) if !self.receipts.is_empty() => {
                let actual = self.cost(actual);
                self.settle(of.index(self.receipts.len()), Some(actual));
            }
            Op::Refund(_) | Op::Settle(..) => {}
            Op::Reset(of) => {
                let of = of.index(2 * self.specs.len());
                let (limit, key) = (of / 2, of % 2);
                self.models[limit][key].reset();
                answer(self.limits.limiter(NAMES[limit]).reset(KEYS[key]));
            }
            Op::Limits(amounts) => {
                for (specs, name) in self.specs.iter_mut().zip(NAMES) {
                    let specs_of = specs.iter_mut().zip(amounts);
                    specs_of.for_each(|(spec, amounts)| spec.amounts = *amounts);
                    self.limits.limiter(name).set_quotas(set(specs).expect("checked"));
                }
            }
        }
    }
}

/// Limits of these quotas, on a store of their own.
pub(crate) fn limits_of(specs: &[Vec<Spec>]) -> Limits {
    let named = NAMES.iter().zip(specs);
    Limits::new(named.map(|(name, specs)| Limit::new(set(specs).expect("checked")).name(name)))
}

pub(crate) fn ms(at: SystemTime) -> i128 {
    match at.duration_since(UNIX_EPOCH) {
        Ok(since) => since.as_millis() as i128,
        Err(before) => -(before.duration().as_millis() as i128),
    }
}

/// The position of the quota that the numbers of a decision are of.
fn governing(decision: &Decision) -> usize {
    let text = format!("{decision:?}");
    let (_, from) = text.split_once("governing: ").expect("the text says it");
    from.split(',').next().and_then(|place| place.parse().ok()).expect("a number")
}

pub(crate) fn answer_of(decision: &Decision) -> Answer {
    let standings = decision.usage();
    let all = |f: fn(&tower_fixed_window::Usage) -> i128| standings.iter().map(f).collect();
    Answer {
        allowed: decision.is_allowed(),
        granted: decision.granted().into(),
        limit: all(|s| s.limit().into()),
        used: all(|s| s.used().into()),
        remaining: all(|s| s.remaining().into()),
        reset: all(|s| ms(s.reset_at())),
        refusing: decision.refusing().collect(),
        governing: governing(decision),
        retry_at: decision.retry_at().map(ms),
        for_good: !decision.is_allowed() && decision.retry_at().is_none(),
        ready_at: decision.ready_at().map(ms),
    }
}
