//! Rules S1 to S16: every answer is the reference's, and what the rules promise holds.

use proptest::prelude::*;
use tower_fixed_window::Decision;

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
fn a_step_back_does_not_return_tokens_to_a_window_they_were_not_taken_from() {
    let spec = Spec { amounts: (5, 0, 0), window_ms: 100, grid: Grid::Aligned };
    let mut rig = Rig::new(vec![vec![spec]], 50);
    let _ = rig.charge(5, false);
    rig.go_to(100);
    let _ = rig.charge(5, false);
    rig.go_to(99);
    rig.settle(0, None);
    assert!(!rig.charge(1, false).is_allowed());
}

/// S14: the clock was ahead for a moment, and stepped back by more than a window.
#[test]
fn tokens_that_a_step_back_has_moved_are_not_returned_for_later_ones() {
    for grid in [Grid::Aligned, Grid::Staggered, Grid::FirstRequest] {
        let spec = Spec { amounts: (5, 0, 0), window_ms: 100, grid };
        let mut rig = Rig::new(vec![vec![spec]], 86_400_000);
        assert!(rig.charge(5, false).is_allowed());
        rig.go_to(1_000);
        assert!(!rig.charge(1, false).is_allowed(), "they were moved along");
        rig.go_to(1_100);
        assert!(rig.charge(5, false).is_allowed());
        rig.settle(0, None);
        assert!(!rig.charge(1, false).is_allowed());
    }
}

/// S14: the window that the tokens were taken from had ended before the clock stepped back, or tokens
/// of a later one are reserved.
#[test]
fn a_step_back_returns_no_tokens_of_a_later_window() {
    for grid in [Grid::Aligned, Grid::Staggered, Grid::FirstRequest] {
        let spec = |reserved| Spec { amounts: (5, 0, reserved), window_ms: 100, grid };
        let mut rig = Rig::new(vec![vec![spec(0)]], 86_400_000);
        assert!(rig.charge(5, false).is_allowed());
        rig.go_to(86_400_200);
        assert!(rig.charge(5, false).is_allowed());
        rig.go_to(1_000);
        rig.settle(0, None);
        assert_eq!(left(&rig.peek(0)), [0]);
        // The state is of the second charge's window, though it is found in another one.
        rig.settle(0, None);
        assert_eq!(left(&rig.peek(0)), [5]);

        let mut rig = Rig::new(vec![vec![spec(5)]], 86_400_000);
        assert!(rig.charge(5, false).is_allowed());
        assert!(rig.charge(5, true).ready_at().is_some());
        rig.go_to(1_000);
        rig.settle(0, None);
        rig.go_to(1_100);
        assert!(!rig.charge(1, false).is_allowed(), "it is reserved");
        rig.go_to(1_300);
        assert!(rig.charge(5, false).is_allowed());
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

/// The tokens left in each window.
fn left(decision: &Decision) -> Vec<u64> {
    decision.usage().iter().map(|standing| standing.remaining()).collect()
}

/// S14. A charge that a smaller capacity granted may end earlier than the count says: then the count
/// stands for windows later than the reservation's, and its tokens stay taken.
#[test]
fn a_reservation_over_a_raised_capacity_may_stay_taken() {
    let spec = Spec { amounts: (2, 0, 0), window_ms: 3, grid: Grid::Aligned };
    let mut rig = Rig::new(vec![vec![spec]], 0);
    assert!(rig.charge(1, false).is_allowed());
    rig.apply(&Op::Limits(vec![(2, 3, 4)]));
    let had = rig.receipts.len();
    assert!(rig.charge(5, true).ready_at().is_some());
    rig.settle(had, None);
    assert_eq!(left(&rig.peek(0)), [0]);
}

fn small() -> impl Strategy<Value = Amounts> {
    let more = || prop_oneof![3 => Just(0_u64), 1 => 1..=30_u64];
    prop_oneof![9 => (1..=20_u64, more(), more()), 1 => amounts()]
}

/// Forward, and now and then back.
fn small_step() -> impl Strategy<Value = Step> {
    let by =
        prop_oneof![6 => Just(0), 6 => 0..=1_500_i64, 1 => -1_200..=0_i64, 1 => -4_000..=9_000_i64];
    (any::<prop::sample::Index>(), by).prop_map(|(of, by)| Step::Windows(of, by))
}

fn op_together() -> impl Strategy<Value = Op> {
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
        specs in prop::collection::vec(specs(small()), 1..=4),
        trace in prop::collection::vec((small_step(), op_together()), 1..40),
    ) {
        let mut rig = Rig::new(specs, 1_700_000_000_000);
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

    /// S7. Limits only go down, and the clock never back by a window.
    #[test]
    fn no_more_than_the_capacity_passes_in_a_window(
        specs in specs(plain_amounts()),
        // At the end of time every window ends at once.
        now in start().prop_filter("time is left", |now| i128::from(*now) < END_OF_TIME / 2),
        trace in trace(any_step(), prop_oneof![
            6 => cost().prop_map(Op::Charge),
            1 => cost().prop_map(Op::Peek),
            1 => any::<prop::sample::Index>().prop_map(Op::Refund),
            1 => prop::collection::vec(plain_amounts(), 4).prop_map(Op::Limits),
        ]),
    ) {
        let mut rig = Rig::new(vec![specs], now);
        let window = rig.specs[0].iter().map(|spec| spec.window_ms).min().expect("a quota");
        let most: Vec<u64> = rig.specs[0].iter().map(|s| s.amounts.0 + s.amounts.1).collect();
        // (quota, start of the window it says it is in) -> tokens passed.
        let mut passed = std::collections::HashMap::<(usize, i128), u64>::new();
        let mut latest = now;
        for (step, op) in &trace {
            let to = rig.after(step).max((latest + 1).saturating_sub(window));
            if i128::from(to) >= END_OF_TIME - 1 { continue }
            latest = latest.max(to);
            rig.go_to(to);
            match op {
                Op::Charge(cost) => {
                    let decision = rig.charge(rig.cost(cost), false);
                    for (i, standing) in decision.usage().iter().enumerate() {
                        let start = ms(standing.reset_at()) - standing.window().as_millis() as i128;
                        let passed = passed.entry((i, start)).or_default();
                        *passed += decision.granted();
                        prop_assert!(*passed <= most[i], "{passed} of {} at {to}", most[i]);
                    }
                }
                Op::Limits(lower) => {
                    let lower = rig.specs[0].iter().zip(lower).map(|(spec, lower)| {
                        let limit = spec.amounts.0.min(lower.0);
                        (limit, (spec.amounts.0 + spec.amounts.1).min(lower.0 + lower.1) - limit, 0)
                    });
                    let lower = lower.collect();
                    rig.apply(&Op::Limits(lower));
                }
                Op::Refund(of) if !rig.receipts.is_empty() => {
                    let of = of.index(rig.receipts.len());
                    let before = rig.peek(0);
                    let cost = rig.receipts[of].0.decision().granted();
                    rig.settle(of, None);
                    let after = rig.peek(0);
                    // Tokens that a refund returned to a window may pass in it again.
                    for (i, (before, after)) in before.usage().iter().zip(after.usage()).enumerate() {
                        let back = after.remaining().saturating_sub(before.remaining());
                        prop_assert!(back <= cost);
                        let start = ms(after.reset_at()) - after.window().as_millis() as i128;
                        if let Some(passed) = passed.get_mut(&(i, start)) {
                            prop_assert!(back <= *passed, "more than passed in this window came back");
                            *passed -= back;
                        } else {
                            prop_assert_eq!(back, 0, "to a window that nothing was taken from");
                        }
                    }
                }
                op => rig.apply(op),
            }
        }
    }

    /// S4.
    #[test]
    fn a_clock_that_steps_back_grants_nothing(
        specs in specs(amounts()), now in start(),
        before in trace(any_step(), op()), back in prop_oneof![0..=10_u64, 0..=100_000_u64, any::<u64>()],
    ) {
        let mut rig = Rig::new(vec![specs], now);
        for (step, op) in &before {
            rig.take(step, op);
        }
        let there = rig.now;
        let stood = left(&rig.peek(0));
        rig.go_to(there.saturating_sub(back));
        let stands = left(&rig.peek(0));
        prop_assert!(stood.iter().zip(&stands).all(|(stood, stands)| stands <= stood), "{stood:?}, then {stands:?}");
        rig.go_to(there);
        prop_assert_eq!(left(&rig.peek(0)), stood, "there and back changed something");
    }

    /// S14.
    #[test]
    fn a_refund_returns_no_more_than_was_taken_and_never_above_capacity(
        specs in specs(amounts()), now in start(),
        before in trace(any_step(), op()), cost in cost(), reserve: bool,
        between in trace(any_step(), op()), actual in prop::option::of(cost()),
    ) {
        let mut rig = Rig::new(vec![specs], now);
        for (step, op) in &before {
            rig.take(step, op);
        }
        // At the same instant, a refund undoes the charge exactly.
        let cost = rig.cost(&cost);
        let stood = rig.peek(0);
        let had = rig.receipts.len();
        let decision = rig.charge(cost, reserve);
        if decision.is_allowed() {
            rig.settle(had, None);
            let limits_changed = before.iter().any(|(_, op)| matches!(op, Op::Limits(_)));
            if limits_changed && decision.ready_at().is_some() {
                let left = left(&rig.peek(0));
                let stood = stood.usage().iter().map(|standing| standing.remaining());
                prop_assert!(left.iter().zip(stood).all(|(left, stood)| *left <= stood));
            } else if stood.usage().iter().all(|standing| ms(standing.reset_at()) < END_OF_TIME) {
                prop_assert_eq!(left(&rig.peek(0)), left(&stood));
            }
        }
        // At any other, it returns at most what was taken.
        let Some(taken) = rig.charge(cost, reserve).is_allowed().then(|| rig.receipts.pop()).flatten() else {
            return Ok(());
        };
        for (step, op) in &between {
            rig.take(step, op);
        }
        let stood = rig.peek(0);
        rig.receipts.push(taken);
        let actual = actual.map(|actual| rig.cost(&actual).min(cost));
        rig.settle(rig.receipts.len() - 1, actual);
        let stands = rig.peek(0);
        for (i, (before, after)) in stood.usage().iter().zip(stands.usage()).enumerate() {
            let (limit, more, _) = rig.specs[0][i].amounts;
            let back = after.remaining().saturating_sub(before.remaining());
            prop_assert!(after.remaining() <= limit + more);
            prop_assert!(back <= cost - actual.unwrap_or(0));
            prop_assert!(after.remaining() >= before.remaining(), "it took something");
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
