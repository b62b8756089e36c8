//! Random quotas and random traces of one key, and a rig that takes each step twice: through a
//! limiter in memory, and through the reference.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use proptest::prelude::*;
use tower_fixed_window::{
    Decision, Key, Limit, Limiter, ManualClock, MemoryStore, Quota, Quotas, Receipt,
};

use crate::reference::{Answer, Ask, END_OF_TIME, Grid, Model, Taken, Terms, stagger};
use crate::{answer, charge, peek};

const SCOPE: &str = "model";
const KEY: &str = "alice";

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
    Charge(Cost),
    Reserve(Cost),
    Peek(Cost),
    /// Refunds one of the receipts that are left.
    Refund(prop::sample::Index),
    Settle(prop::sample::Index, Cost),
    Reset,
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

pub(crate) fn plain_amounts() -> impl Strategy<Value = Amounts> {
    (1..=20_u64, prop_oneof![3 => Just(0), 1 => 1..=30_u64]).prop_map(|(l, more)| (l, more, 0))
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
        1 => Just(Op::Reset),
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
    quotas.try_fold(first, |set, quota| set.try_and(quota).ok())
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

/// The limiter and the reference: each step goes through both, and their answers have to agree.
pub(crate) struct Rig {
    pub(crate) clock: ManualClock,
    pub(crate) now: u64,
    pub(crate) specs: Vec<Spec>,
    pub(crate) limiter: Limiter,
    pub(crate) receipts: Vec<(Receipt, Taken)>,
    model: Model,
    resets: Vec<i128>,
}

impl Rig {
    pub(crate) fn new(specs: Vec<Spec>, now: u64) -> Self {
        let clock = ManualClock::at_ms(now);
        let store = MemoryStore::with_max_keys(64).clock(clock.clone());
        let model = Model::new(specs.len(), stagger(SCOPE, Key::from(KEY).as_bytes()));
        let set = set(&specs).expect("checked");
        let limiter = Limit::new(set).name(SCOPE).store(store);
        Self { clock, now, limiter, receipts: vec![], model, resets: vec![], specs }
    }

    pub(crate) fn go_to(&mut self, now: u64) {
        self.now = now;
        self.clock.set_ms(now);
    }

    /// The time after a step.
    pub(crate) fn after(&self, step: &Step) -> u64 {
        let now = i128::from(self.now);
        let to = match step {
            Step::Stay => now,
            Step::Windows(of, by) => {
                let window = of.get(&self.specs).window_ms;
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

    pub(crate) fn terms(&self) -> Vec<Terms> {
        self.specs.iter().map(terms).collect()
    }

    /// Returns whether every refusal of a reservation is because it would run too late, rather than
    /// for the count (S13).
    pub(crate) fn comes_too_late(&self, decision: &Decision, cost: u64) -> bool {
        let fits = |i: usize| {
            let ((limit, _, reserved), usage) = (self.specs[i].amounts, &decision.usage()[i]);
            let debt = usage.used().saturating_sub(limit);
            cost + debt <= usage.remaining() + reserved
        };
        decision.retry_at().is_some() && decision.refusing().all(fits)
    }

    pub(crate) fn cost(&self, cost: &Cost) -> u64 {
        let (limit, more, _) = self.specs[0].amounts;
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
        let decision = answer(self.limiter.peek(KEY));
        decision.usage().iter().map(|s| s.remaining()).min().expect("a quota")
    }

    pub(crate) fn peek(&mut self, cost: u64) -> Decision {
        let (now, terms) = (self.model_now(), self.terms());
        let decision = peek(&self.limiter, KEY, cost);
        let (expected, _) = self.model.ask(&terms, now, cost.into(), Ask::Peek);
        assert_eq!(answer_of(&decision), expected, "peek {cost} at {now}");
        decision
    }

    pub(crate) fn charge(&mut self, cost: u64, reserve: bool) -> Decision {
        let (now, terms) = (self.model_now(), self.terms());
        let ask = if reserve { Ask::Reserve } else { Ask::Charge };
        let (expected, taken) = self.model.ask(&terms, now, cost.into(), ask);
        let (decision, receipt) = charge(&self.limiter, KEY, cost, reserve);
        assert_eq!(answer_of(&decision), expected, "{cost} at {now}, reserving: {reserve}");
        self.resets = expected.reset;
        match (receipt, taken) {
            (Some(receipt), Some(taken)) => {
                assert_eq!(receipt.decision().granted(), cost);
                self.receipts.push((receipt, taken));
            }
            (None, None) => {}
            _ => panic!("a receipt for each charge that passed, and no other"),
        }
        decision
    }

    pub(crate) fn settle(&mut self, of: usize, actual: Option<u64>) {
        let (now, terms) = (self.model_now(), self.terms());
        let (receipt, taken) = self.receipts.swap_remove(of);
        self.model.settle(&terms, taken, now, actual.unwrap_or(0).into());
        answer(match actual {
            Some(actual) => self.limiter.settle(receipt, actual),
            None => self.limiter.refund(receipt),
        });
    }

    /// Takes a step, and asserts that the answer and the usage afterwards are the reference's.
    pub(crate) fn take(&mut self, step: &Step, op: &Op) {
        self.go_to(self.after(step));
        self.apply(op);
        let _ = self.peek(1);
        let _ = self.peek(0);
    }

    pub(crate) fn apply(&mut self, op: &Op) {
        match op {
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
            Op::Reset => {
                self.model.reset();
                answer(self.limiter.reset(KEY));
            }
            Op::Limits(amounts) => {
                let specs = self.specs.iter_mut().zip(amounts);
                specs.for_each(|(spec, amounts)| spec.amounts = *amounts);
                self.limiter.set_quotas(set(&self.specs).expect("checked"));
            }
        }
    }
}

pub(crate) fn ms(at: SystemTime) -> i128 {
    match at.duration_since(UNIX_EPOCH) {
        Ok(since) => since.as_millis() as i128,
        Err(before) => -(before.duration().as_millis() as i128),
    }
}

pub(crate) fn answer_of(decision: &Decision) -> Answer {
    let standings = decision.usage();
    let all = |f: fn(&tower_fixed_window::Usage) -> i128| standings.iter().map(f).collect();
    Answer {
        allowed: decision.allowed(),
        granted: decision.granted().into(),
        limit: all(|s| s.limit().into()),
        used: all(|s| s.used().into()),
        remaining: all(|s| s.remaining().into()),
        reset: all(|s| ms(s.reset_at())),
        refusing: decision.refusing().collect(),
        governing: decision.governing(),
        retry_at: decision.retry_at().map(ms),
        for_good: decision.exceeds_capacity(),
        ready_at: decision.ready_at().map(ms),
    }
}
