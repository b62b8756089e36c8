//! Random traces of several limits (S37): memory answers like the reference, which decides each limit
//! on a copy of its counters.

use proptest::prelude::*;
use proptest::sample::Index;
use tower_fixed_window::{
    Decision, Key, Limit, Limits, Line, ManualClock, MemoryStore, Quotas, Receipt,
};

use crate::reference::{self, Ask, Model, Taken, Together, stagger, together};
use crate::trace::{Amounts, Spec, amounts, answer_of, ms, set, specs, terms};
use crate::{answer, sized};

const NAMES: [&str; 4] = ["requests", "tokens", "cents", "jobs"];
const KEYS: [&str; 2] = ["ann", "bob"];
const NOW_MS: u64 = 1_700_000_000_000;

#[derive(Clone, Debug)]
enum Op {
    /// For each limit the key, and a cost if the limit takes part.
    Charge(Ask3, Vec<(usize, Option<u64>)>),
    Refund(Index),
    /// Each cost in quarters of the taken tokens, up to twice as many; beyond that, the cost stays.
    Settle(Index, Vec<u64>),
    Reset(usize, usize),
    Limits(usize, Vec<Amounts>),
}

#[derive(Clone, Copy, Debug)]
enum Ask3 {
    Charge,
    Reserve,
    Peek,
}

fn op() -> impl Strategy<Value = Op> {
    let cost = prop_oneof![2 => Just(None), 1 => Just(Some(0)), 6 => (1..=5_u64).prop_map(Some), 1 => (1..=40_u64).prop_map(Some)];
    let lines = || prop::collection::vec((0..KEYS.len(), cost.clone()), 4);
    let ask = prop_oneof![4 => Just(Ask3::Charge), 3 => Just(Ask3::Reserve), 1 => Just(Ask3::Peek)];
    prop_oneof![
        12 => (ask, lines()).prop_map(|(ask, lines)| Op::Charge(ask, lines)),
        2 => any::<Index>().prop_map(Op::Refund),
        2 => (any::<Index>(), prop::collection::vec(0..=9_u64, 4)).prop_map(|(of, to)| Op::Settle(of, to)),
        1 => (0..4_usize, 0..KEYS.len()).prop_map(|(limit, key)| Op::Reset(limit, key)),
        1 => (0..4_usize, prop::collection::vec(small(), 4)).prop_map(|(of, amounts)| Op::Limits(of, amounts)),
    ]
}

fn small() -> impl Strategy<Value = Amounts> {
    let more = || prop_oneof![3 => Just(0_u64), 1 => 1..=30_u64];
    prop_oneof![9 => (1..=20_u64, more(), more()), 1 => amounts()]
}

/// Thousandths of a window of one of the quotas: forward, and now and then back.
fn step() -> impl Strategy<Value = (Index, i64)> {
    let by =
        prop_oneof![6 => Just(0), 6 => 0..=1_500_i64, 1 => -1_200..=0_i64, 1 => -4_000..=9_000_i64];
    (any::<Index>(), by)
}

/// A limit, a key, and the tokens that the reference has taken of them.
type Of = (usize, usize, Taken);

struct Rig {
    clock: ManualClock,
    now: u64,
    latest: u64,
    specs: Vec<Vec<Spec>>,
    limits: Limits,
    models: Vec<Vec<Model>>,
    receipts: Vec<(Receipt, Vec<Of>)>,
}

impl Rig {
    fn new(specs: Vec<Vec<Spec>>, max_keys: usize) -> Self {
        let clock = ManualClock::at_ms(NOW_MS);
        let store = MemoryStore::with_max_keys(max_keys).clock(clock.clone());
        let named = NAMES.iter().zip(&specs);
        let limits = named.map(|(name, specs)| Limit::new(set(specs).expect("checked")).name(name));
        let limits = Limits::new(limits).store(store);
        let model = |(name, specs): (&&str, &Vec<Spec>)| {
            let of = |key| Model::new(specs.len(), stagger(name, Key::from(key).as_bytes()));
            KEYS.into_iter().map(of).collect()
        };
        let models = NAMES.iter().zip(&specs).map(model).collect();
        Self { clock, now: NOW_MS, latest: NOW_MS, specs, limits, models, receipts: vec![] }
    }

    fn quotas(&self) -> Vec<Quotas> {
        self.specs.iter().map(|specs| set(specs).expect("checked")).collect()
    }

    fn move_clock(&mut self, (of, by): &(Index, i64)) {
        let windows: Vec<_> = self.specs.iter().flatten().map(|spec| spec.window_ms).collect();
        let by = i128::from(*of.get(&windows)) * i128::from(*by) / 1_000;
        // Far from the end of time, where windows have no length.
        let to = (i128::from(self.now) + by).clamp(1_000_000_000, 1 << 51);
        // An entry that has expired may be another one's by then: it would not be back.
        let latest = i128::from(self.latest);
        if !self.models.iter().flatten().any(|model| model.ends_between(to, latest)) {
            self.now = to as u64;
            self.latest = self.latest.max(self.now);
            self.clock.set_ms(self.now);
        }
    }

    fn charge(&mut self, how: Ask3, asked: &[(usize, Option<u64>)]) {
        let ask = match how {
            Ask3::Charge => Ask::Charge,
            Ask3::Reserve => Ask::Reserve,
            Ask3::Peek => Ask::Peek,
        };
        let quotas = self.quotas();
        let all_terms: Vec<Vec<_>> =
            self.specs.iter().map(|specs| specs.iter().map(terms).collect()).collect();
        let part: Vec<_> =
            (0..self.specs.len()).filter_map(|i| Some((i, asked[i].0, asked[i].1?))).collect();
        if part.is_empty() {
            return;
        }
        let lines: Vec<_> = part
            .iter()
            .map(|&(i, key, cost)| Line::new(NAMES[i], KEYS[key], cost).with_quotas(&quotas[i]))
            .collect();
        let (decision, receipts) = match how {
            Ask3::Peek => (answer(self.limits.peek(&lines)), None),
            Ask3::Charge => split(answer(self.limits.charge(&lines))),
            Ask3::Reserve => split(answer(self.limits.reserve(&lines))),
        };
        let now = i128::from(self.now);
        let mut expected_lines: Vec<_> = self
            .models
            .iter_mut()
            .enumerate()
            .filter_map(|(i, models)| {
                let &(_, key, cost) = part.iter().find(|(limit, ..)| *limit == i)?;
                Some(reference::Line {
                    model: &mut models[key],
                    terms: &all_terms[i],
                    cost: cost.into(),
                })
            })
            .collect();
        let expected = together(&mut expected_lines, now, ask);
        check(&decision, &expected, &part, (now, how));
        match (receipts, expected.taken) {
            (Some(receipts), Some(taken)) => {
                let taken = part.iter().zip(taken).map(|(&(i, key, _), taken)| (i, key, taken));
                self.receipts.push((receipts, taken.collect()));
            }
            (None, None) => {}
            _ => panic!("receipts for each charge that passed, and no other"),
        }
    }

    fn correct(&mut self, of: &Index, to: Option<&[u64]>) {
        if self.receipts.is_empty() {
            return;
        }
        let (receipts, taken) = self.receipts.swap_remove(of.index(self.receipts.len()));
        let decision = receipts.decision().clone();
        let mut costs = vec![];
        for (i, key, taken) in taken {
            let granted = decision.of(NAMES[i]).expect("it took part").granted();
            let actual = match to.map_or(0, |to| to[i]) {
                9 => continue,
                quarters => granted * quarters / 4,
            };
            let terms: Vec<_> = self.specs[i].iter().map(terms).collect();
            self.models[i][key].settle(&terms, taken, self.now.into(), actual.into());
            costs.push((NAMES[i], actual));
        }
        answer(match to {
            Some(_) => self.limits.settle(receipts, costs),
            None => self.limits.refund(receipts),
        });
    }

    fn take(&mut self, step: &(Index, i64), op: &Op) {
        self.move_clock(step);
        match op {
            Op::Charge(ask, lines) => self.charge(*ask, lines),
            Op::Refund(of) => self.correct(of, None),
            Op::Settle(of, to) => self.correct(of, Some(to)),
            Op::Reset(limit, key) => {
                if let Some(models) = self.models.get_mut(*limit) {
                    models[*key].reset();
                    answer(self.limits.of(NAMES[*limit]).reset(KEYS[*key]));
                }
            }
            Op::Limits(of, amounts) => {
                // Receipts from before are corrected under the quotas that they were decided by.
                self.receipts.clear();
                if let Some(specs) = self.specs.get_mut(*of) {
                    specs.iter_mut().zip(amounts).for_each(|(spec, new)| spec.amounts = *new);
                }
            }
        }
        for key in 0..KEYS.len() {
            self.charge(Ask3::Peek, &[(key, Some(0)); 4]);
        }
    }
}

fn split(charged: Result<Receipt, tower_fixed_window::RateLimited>) -> (Decision, Option<Receipt>) {
    match charged {
        Ok(receipts) => (receipts.decision().clone(), Some(receipts)),
        Err(refused) => (refused.decision().clone(), None),
    }
}

fn check(decision: &Decision, expected: &Together, part: &[(usize, usize, u64)], at: (i128, Ask3)) {
    let (retry_at, ready_at) = (decision.retry_at().map(ms), decision.ready_at().map(ms));
    assert_eq!(decision.allowed(), expected.allowed, "{part:?} at {at:?}");
    assert_eq!((retry_at, ready_at), (expected.retry_at, expected.ready_at), "{part:?} at {at:?}");
    for ((i, ..), expected) in part.iter().zip(&expected.answers) {
        let told = answer_of(&decision.of(NAMES[*i]).expect("it took part"));
        let of = |answer: &reference::Answer| {
            let reference::Answer { granted, limit, used, remaining, reset, .. } = answer;
            (*granted, limit.clone(), used.clone(), remaining.clone(), reset.clone())
        };
        assert_eq!(of(&told), of(expected), "{}: {part:?} at {at:?}", NAMES[*i]);
    }
}

fn config() -> ProptestConfig {
    let cases = sized(300, 40_000);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn memory_decides_several_limits_like_the_reference(
        specs in prop::collection::vec(specs(small()), 1..=4),
        trace in prop::collection::vec((step(), op()), 1..40),
    ) {
        // In one shard of few places.
        let mut rig = Rig::new(specs, 200);
        for (step, op) in &trace {
            rig.take(step, op);
        }
    }
}
