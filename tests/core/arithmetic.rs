//! Rules S1 to S16: every answer is the reference's, and what the rules promise holds.

use proptest::prelude::*;

use crate::reference::{Ask, END_OF_TIME, Grid};
use crate::sized;
use crate::trace::*;

fn config() -> ProptestConfig {
    ProptestConfig {
        // A failing case becomes a test of its own instead of a file of seeds.
        failure_persistence: None,
        cases: if std::env::var_os("PROPTEST_CASES").is_some() {
            ProptestConfig::default().cases
        } else {
            sized(300, 20_000)
        },
        ..ProptestConfig::default()
    }
}

/// Found by the properties below.
#[test]
fn a_state_from_the_end_of_time_lasts_whole_windows_after_a_step_back() {
    let spec = Spec { amounts: (9, 0, 5), window_ms: 2, grid: Grid::Staggered };
    let mut rig = Rig::new(vec![vec![spec]], END_OF_TIME as u64 - 1);
    assert!(rig.charge(9, false).is_allowed());
    rig.go_to(0);
    rig.apply(&Op::Limits(vec![(4, 0, 0)]));
    let refused = rig.charge(1, false);
    rig.go_to(refused.retry_at().map(ms).expect("a later window") as u64);
    assert!(rig.charge(1, false).is_allowed());
}

pub(crate) fn small() -> impl Strategy<Value = Amounts> {
    let more = || prop_oneof![3 => Just(0_u64), 1 => 1..=30_u64];
    prop_oneof![9 => (1..=20_u64, more(), more()), 1 => amounts()]
}

/// Forward, and now and then back.
fn small_step() -> impl Strategy<Value = Step> {
    let by =
        prop_oneof![6 => Just(0), 6 => 0..=1_500_i64, 1 => -1_200..=0_i64, 1 => -4_000..=9_000_i64];
    (any::<prop::sample::Index>(), by).prop_map(|(of, by)| Step::Windows(of, by))
}

pub(crate) fn op_together() -> impl Strategy<Value = Op> {
    let cost = prop_oneof![
        2 => Just(None),
        1 => Just(Some(0)),
        6 => (1..=5_u64).prop_map(Some),
        1 => (1..=40_u64).prop_map(Some),
    ];
    let lines = prop::collection::vec((0..2_usize, cost), 4);
    let ask = prop_oneof![4 => Just(Ask::Charge), 3 => Just(Ask::Reserve), 1 => Just(Ask::Peek)];
    let index = any::<prop::sample::Index>;
    prop_oneof![
        12 => (ask, lines).prop_map(|(ask, lines)| Op::Together(ask, lines)),
        2 => index().prop_map(Op::Refund),
        2 => (index(), 0..=40_u64).prop_map(|(of, to)| Op::Settle(of, Cost::Of(to))),
        1 => index().prop_map(Op::Reset),
        1 => prop::collection::vec(small(), 4).prop_map(Op::Limits),
    ]
}

proptest! {
    #![proptest_config(config())]

    /// S37, of one limit to four.
    #[test]
    fn memory_decides_limits_together_like_the_reference(
        specs in prop::collection::vec(specs(small()), 1..=4), now in start(),
        trace in prop::collection::vec((small_step(), op_together()), 1..40),
    ) {
        let mut rig = Rig::new(specs, now);
        for (step, op) in &trace {
            rig.take(step, op);
        }
    }

    #[test]
    fn memory_answers_like_the_reference(
        specs in specs(amounts()), now in start(), trace in trace(any_step(), op()),
    ) {
        let mut rig = Rig::new(vec![specs], now);
        for (step, op) in &trace {
            rig.take(step, op);
        }
    }

    /// S16.
    #[test]
    fn a_charge_passes_at_retry_at_and_not_before(
        specs in specs(amounts()), now in start(),
        before in trace(any_step(), op()), cost in cost(), reserve: bool,
    ) {
        let mut rig = Rig::new(vec![specs], now);
        for (step, op) in &before {
            rig.take(step, op);
            let cost = rig.cost(&cost);
            let there = rig.now;
            // A refused charge changes nothing (S6, S9): it may be asked in the midst of a trace.
            let (stood, had) = (rig.peek(0), rig.receipts.len());
            let decision = rig.charge(cost, reserve);
            if decision.is_allowed() {
                rig.settle(had, None);
                continue;
            }
            prop_assert_eq!(&rig.peek(0), &stood);
            if let Some(retry_at) = decision.retry_at().map(ms) {
                prop_assert!(retry_at > rig.model_now());
                // The end itself is never reached.
                if retry_at == END_OF_TIME { return Ok(()) }
                rig.go_to((retry_at as u64 - 1).max(there));
                prop_assert!(!rig.charge(cost, false).is_allowed(), "at {}", rig.now);
                rig.go_to(retry_at as u64);
                if reserve && rig.comes_too_late(&decision, cost) {
                    // No quota refuses it for its count, so that each covers it then.
                    let fits = rig.specs[0].iter().all(|spec| cost <= spec.amounts.0 + spec.amounts.1);
                    prop_assert!(!fits || rig.charge(cost, false).is_allowed(), "not at {retry_at}");
                    return Ok(());
                }
                let decision = rig.charge(cost, reserve);
                let late = reserve && rig.comes_too_late(&decision, cost);
                prop_assert!(decision.is_allowed() || late, "not at {retry_at}");
                // Without debt; but another quota, which did not refuse, may go into it.
                if let [Spec { amounts: (limit, more, _), .. }] = rig.specs[0][..] {
                    prop_assert!(cost > limit + more || decision.ready_at().is_none());
                }
                return Ok(());
            }
            prop_assert!(!decision.is_allowed());
        }
    }
}
