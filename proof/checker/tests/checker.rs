//! The checker, on histories that were made.

use tower_fixed_window_checker::check::{Promise, Windows, above};
use tower_fixed_window_checker::history::{Answer, Ask, Line, collect};
use tower_fixed_window_checker::several::{Returns, torn, unexplained};

const MS: u64 = 1_000;
/// A multiple of a second, in microseconds.
const T: u64 = 1_700_000_000_000_000;

fn promise(windows: Windows) -> Promise {
    Promise { windows, limit: 3, length: 1_000, losses: Vec::new(), local: false }
}

fn ask(sent: u64, received: u64) -> Ask {
    let answer = Answer::Passed;
    Ask { node: 0, id: sent, key: 1, cost: 1, sent, received, answer, returned: None }
}

/// Passes that were sent at these times, in milliseconds since T, and answered 100 us later.
fn passes(at: impl IntoIterator<Item = u64>) -> Vec<Ask> {
    at.into_iter().map(|at| ask(T + at * MS, T + at * MS + 100)).collect()
}

fn all(asks: &[Ask]) -> [u64; 4] {
    [Windows::Aligned, Windows::Regular, Windows::OnDemand, Windows::Bucket]
        .map(|windows| above(asks, &promise(windows)).above)
}

fn aligned(asks: &[Ask]) -> u64 {
    above(asks, &promise(Windows::Aligned)).above
}

#[test]
fn a_correct_history_is_not_above() {
    assert_eq!(all(&[]), [0; 4]);
    assert_eq!(all(&passes([0, 10, 20, 1_020, 1_030, 1_040])), [0; 4]);
}

#[test]
fn one_too_many_is_one_above() {
    // On some grid, two and two are in a window each. One that begins with a request begins with the first.
    assert_eq!(all(&passes([100, 200, 300, 400])), [1, 0, 1, 1]);
    // With one that is on an edge, and may be in either window, nine and ten.
    assert_eq!(all(&passes(100..120)), [17, 7, 17, 17]);
    // Beside any number of windows that are as they should be.
    let more = passes([100, 200, 300, 1_400, 1_401, 1_402, 1_403, 2_500, 2_600]);
    assert_eq!(all(&more), [1, 0, 1, 1]);
}

#[test]
fn what_is_not_a_pass_is_not_counted() {
    let mut asks = passes([100, 200, 300, 400, 500, 600]);
    asks[1].answer = Answer::Refused;
    asks[2].answer = Answer::Failed;
    asks[3].answer = Answer::GaveUp;
    assert_eq!(all(&asks), [0; 4]);
    asks[3].answer = Answer::PassedLocally;
    assert_eq!(all(&asks), [1, 0, 1, 0]);
}

#[test]
fn a_request_of_unknown_fate_may_have_begun_a_window() {
    let mut asks = passes([2_100, 3_000, 3_050, 3_150, 3_200]);
    for answer in [Answer::Failed, Answer::GaveUp] {
        asks[0].answer = answer;
        assert_eq!(all(&asks)[2], 0, "{answer:?}");
    }
    asks[0].answer = Answer::Refused;
    assert_eq!(all(&asks)[2], 1);
}

#[test]
fn both_limits_may_pass_around_an_edge() {
    let burst = passes([996, 997, 998, 1_000, 1_001, 1_002]);
    // Of windows, on whatever grid. A bucket would have had to flow for a second, and a window that begins with
    // the first is not over.
    assert_eq!(all(&burst), [0, 0, 3, 3]);
    let burst = passes([1, 996, 997, 1_001, 1_002, 1_003]);
    assert_eq!(all(&burst), [0, 0, 0, 2]);
    // Three limits may not.
    let longer = passes([996, 997, 998, 1_000, 1_001, 1_002, 1_003, 1_004, 1_005]);
    assert_eq!(all(&longer)[..3], [3, 1, 6]);
}

#[test]
fn an_edge_is_in_the_next_window() {
    let mut asks = passes([100, 200, 300]);
    // Decided at the last instant of the window: answered before its end.
    asks.push(ask(T + 999 * MS, T + 1_000 * MS - 1));
    assert_eq!(aligned(&asks), 1);
    // Answered at its end: it may have been decided then.
    asks[3] = ask(T + 999 * MS, T + 1_000 * MS);
    assert_eq!(aligned(&asks), 0);
    // Sent at the first instant of a window, it is in that one.
    let mut asks = passes([1_100, 1_200, 1_300]);
    asks.push(ask(T + 1_000 * MS, T + 1_050 * MS));
    assert_eq!(aligned(&asks), 1);
    asks[3] = ask(T + 1_000 * MS - 1, T + 1_050 * MS);
    assert_eq!(aligned(&asks), 0);
}

#[test]
fn slow_answers_are_no_proof() {
    // Ten, and for each there is an instant at which it may pass.
    let slow: Vec<_> = (0..10).map(|i| ask(T + (900 + i) * MS, T + (4_100 + i) * MS)).collect();
    assert_eq!(all(&slow)[..3], [0; 3]);
    // As soon as one is quick, the others are still not.
    let mut one = slow;
    one.extend(passes([1_500, 1_600, 1_700]));
    assert_eq!(all(&one)[..3], [0; 3]);
    // A bucket that is full before may be empty by then, and has flown for 3.2 s.
    let many: Vec<_> = (0..20).map(|i| ask(T + (900 + i) * MS, T + (4_100 + i) * MS)).collect();
    assert_eq!(all(&many)[3], 20 - 3 - 9);
}

#[test]
fn costs_add_up() {
    let mut asks = passes([100, 200]);
    asks[1].cost = 5;
    assert_eq!(all(&asks), [3, 0, 3, 3]);
}

#[test]
fn keys_have_a_count_each() {
    let mut asks = passes([100, 200, 300, 400, 500, 600]);
    asks[3..].iter_mut().for_each(|ask| ask.key = 2);
    assert_eq!(all(&asks), [0; 4]);
    asks[3].key = 1;
    let most = above(&asks, &promise(Windows::Aligned));
    assert_eq!((most.above, most.at), (1, Some((1, T))));
}

#[test]
fn tokens_that_were_given_back_may_pass_again() {
    let mut asks = passes([100, 200, 300, 400]);
    asks[0].returned = Some(T + 350 * MS);
    assert_eq!(aligned(&asks), 0);
    // Not before they are given back.
    asks[0].returned = Some(T + 450 * MS);
    assert_eq!(aligned(&asks), 1);
    // One that may have been decided after that takes its place.
    asks[0].returned = Some(T + 350 * MS);
    asks[3] = ask(T + 340 * MS, T + 360 * MS);
    assert_eq!(aligned(&asks), 0);
    // Where windows are not known, what is ever given back is not counted.
    let mut many = passes(100..120);
    assert_eq!(all(&many), [17, 7, 17, 17]);
    many[5].returned = Some(T + 150 * MS);
    assert_eq!(all(&many), [17, 6, 16, 16]);
    // A refund of an earlier window gives nothing back in this one.
    let mut asks = passes([900, 1_100, 1_200, 1_300, 1_400]);
    asks[0].returned = Some(T + 1_350 * MS);
    assert_eq!(aligned(&asks), 1);
}

#[test]
fn a_store_that_lost_its_counts_may_let_a_limit_pass_again() {
    let asks = passes([100, 200, 300, 500, 600, 700]);
    let lost = |windows, from, to| {
        let losses = vec![(T + from * MS, T + to * MS)];
        above(&asks, &Promise { losses, ..promise(windows) }).above
    };
    for windows in [Windows::Aligned, Windows::Regular, Windows::OnDemand, Windows::Bucket] {
        assert_eq!(lost(windows, 400, 410), 0, "{windows:?}");
    }
    assert_eq!(lost(Windows::Bucket, 650, 660), 1);
    assert_eq!(lost(Windows::Aligned, 1_000, 1_010), 3);
    let earlier = Promise { losses: vec![(T - 500 * MS, T - 1)], ..promise(Windows::Aligned) };
    assert_eq!(above(&asks, &earlier).above, 3);
    // It may have been done at the first instant of the window.
    let just = Promise { losses: vec![(T - 500 * MS, T)], ..promise(Windows::Aligned) };
    assert_eq!(above(&asks, &just).above, 0);
    // Who began the first window after a loss may have been sent before it.
    let mut begun = passes([1_300, 1_350, 1_420, 1_430, 1_440]);
    begun.push(ask(T + 405 * MS, T + 420 * MS));
    let losses = vec![(T + 400 * MS, T + 410 * MS)];
    assert_eq!(above(&begun, &Promise { losses, ..promise(Windows::OnDemand) }).above, 0);
    // A window that nobody knows the beginning of, between 200 and 500.
    assert_eq!(lost(Windows::OnDemand, 650, 660), 2);
    assert_eq!(lost(Windows::Regular, 650, 660), 0);
}

#[test]
fn a_node_that_counts_by_itself_has_a_limit_of_its_own() {
    let mut asks = passes([100, 200, 300, 400, 500, 600, 700]);
    asks[3..].iter_mut().for_each(|ask| ask.answer = Answer::PassedLocally);
    let local = Promise { local: true, ..promise(Windows::Aligned) };
    assert_eq!(above(&asks, &local).above, 1);
    asks[6].node = 1;
    assert_eq!(above(&asks, &local).above, 0);
    // A store that loses its counts takes nothing from the node's.
    asks[6].node = 0;
    let losses = vec![(T + 350 * MS, T + 360 * MS)];
    assert_eq!(above(&asks, &Promise { losses, ..local }).above, 1);
    // Unless nobody promised that.
    assert_eq!(aligned(&asks), 4);
}

/// A tiny generator, so that these need no dependency.
fn random(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *seed >> 33
}

/// An exact limiter, whose answers are as late as they like, is never above: whatever its windows are.
#[test]
fn an_exact_limiter_is_never_above() {
    for seed in 0..500_u64 {
        let mut state = seed;
        let mut below = |bound: u64| random(&mut state) % bound;
        let phase = below(1_000);
        let (mut on_demand, mut grid) = (Vec::new(), Vec::new());
        let (mut window, mut used) = (0, 0);
        let mut counts = std::collections::HashMap::<u64, u64>::new();
        let mut now = T;
        for _ in 0..40 {
            // In microseconds, mostly dense, at times idle.
            now += if below(10) == 0 { below(2_500 * MS) } else { below(60 * MS) };
            let (before, after) = (below(30 * MS), below(30 * MS));
            let one = Ask { id: now, ..ask(now - before, now + after) };
            if now >= window + 1_000 * MS {
                (window, used) = (now, 0);
            }
            if used < 3 {
                used += 1;
                on_demand.push(one.clone());
            }
            let count = counts.entry((now + phase * MS) / (1_000 * MS)).or_default();
            if *count < 3 {
                *count += 1;
                grid.push(one);
            }
        }
        assert_eq!(above(&on_demand, &promise(Windows::OnDemand)).above, 0, "seed {seed}");
        assert_eq!(above(&grid, &promise(Windows::Regular)).above, 0, "seed {seed}");
        if phase == 0 {
            assert_eq!(aligned(&grid), 0, "seed {seed}");
        }
    }
}

/// Where answers come at once, windows that begin with a pass are known.
#[test]
fn windows_that_begin_with_a_pass_are_found() {
    const LENGTH: u64 = 40;
    for seed in 0..1_000_u64 {
        let mut state = seed;
        let mut times: Vec<_> = (0..30).map(|_| 1_000 + random(&mut state) % 200).collect();
        times.sort_unstable();
        times.dedup();
        let (mut most, mut window, mut passed, mut on_an_edge) = (0, 0, 0, false);
        for &time in &times {
            on_an_edge |= time == window + LENGTH;
            if time >= window + LENGTH {
                (window, passed) = (time, 0);
            }
            passed += 1;
            most = most.max(passed);
        }
        let asks: Vec<_> = times.iter().map(|at| ask(at * MS + 1, at * MS + 2)).collect();
        let promise = Promise { limit: 1, length: LENGTH, ..promise(Windows::OnDemand) };
        let found = above(&asks, &promise).above;
        // A window begins somewhere in its millisecond, and so does the next.
        assert!(found < most, "seed {seed}: {times:?}");
        assert!(on_an_edge || found == most - 1, "seed {seed}: {found}, {most}, {times:?}");
    }
}

#[test]
fn a_history_is_read_as_it_was_written() {
    let mut asks = passes([1, 2, 3, 4]);
    asks[1].returned = Some(T + 7 * MS);
    asks[2].answer = Answer::GaveUp;
    asks[3].answer = Answer::PassedLocally;
    let mut text = String::new();
    for ask in &asks {
        text += &format!("{}\n", Line::Asked(ask.clone()));
        if let Some(sent) = ask.returned {
            text += &format!("{}\n", Line::Returned { node: ask.node, id: ask.id, sent });
        }
    }
    let lines = text.lines().map(|line| line.parse().expect("a line"));
    assert_eq!(collect(lines), asks);
    for bad in ["", "1 2 3", "1 2 3 4 5 6 perhaps", "1 2 3 4 5 -6 passed", "0 1 came 3"] {
        assert!(bad.parse::<Line>().is_err(), "{bad:?}");
    }
}

/// A request for two limits, keys 1 and 2.
fn both(at: u64, answers: [Answer; 2]) -> [Ask; 2] {
    let line = |(key, answer)| Ask { key, answer, ..ask(T + at * MS, T + at * MS + 100) };
    [(1, answers[0]), (2, answers[1])].map(line)
}

#[test]
fn a_request_that_passes_in_part_is_torn() {
    use Answer::*;
    let whole = [both(1, [Passed, Passed]), both(2, [Undone, Refused]), both(3, [Failed, Failed])];
    assert_eq!(torn(&whole.concat()), []);
    for other in [Undone, Refused, Failed] {
        let part = both(4, [Passed, other]);
        assert_eq!(torn(&[whole.concat(), part.to_vec()].concat()), [(0, T + 4 * MS)], "{other:?}");
        assert_eq!(torn(&both(4, [other, PassedLocally])), [(0, T + 4 * MS)], "{other:?}");
    }
    // Another node's request of the same id.
    let mut others = both(4, [Passed, Refused]);
    others[1].node = 1;
    assert_eq!(torn(&others), []);
}

/// Of the key 1, for the times of its refusals.
fn unexplained_at(asks: &[Ask], disturbed: &[(u64, u64)]) -> Vec<u64> {
    let returns = Returns { within: 100 * MS, disturbed: disturbed.to_vec() };
    let found = unexplained(asks, &promise(Windows::Aligned), &returns);
    found.iter().map(|ask| (ask.sent - T) / MS).collect()
}

#[test]
fn a_refusal_needs_a_reason() {
    let refused = |at: u64| Ask { answer: Answer::Refused, ..ask(T + at * MS, T + at * MS + 100) };
    // Three pass in a window.
    let full = passes([100, 200, 300]);
    assert_eq!(unexplained_at(&[full.clone(), vec![refused(400)]].concat(), &[]), []);
    assert_eq!(unexplained_at(&[full.clone(), vec![refused(1_400)]].concat(), &[]), [1_400]);
    assert_eq!(unexplained_at(&[&full[..2], &[refused(400)]].concat(), &[]), [400]);
    // Of another key.
    let mut others = full.clone();
    others[0].key = 2;
    assert_eq!(unexplained_at(&[others, vec![refused(400)]].concat(), &[]), [400]);
    // More than there is room for.
    let larger = Ask { cost: 2, ..refused(400) };
    assert_eq!(unexplained_at(&[&full[..2], &[larger]].concat(), &[]), []);
    // What failed may be counted, and what was answered in the next window.
    for answer in [Answer::Failed, Answer::GaveUp, Answer::PassedLocally] {
        let mut asks = full.clone();
        asks[0].answer = answer;
        assert_eq!(unexplained_at(&[asks, vec![refused(400)]].concat(), &[]), [], "{answer:?}");
    }
    let edge = Ask { received: T + 1_001 * MS, ..ask(T + 999 * MS, 0) };
    let next = [passes([1_100, 1_200]), vec![edge, refused(1_300)]].concat();
    assert_eq!(unexplained_at(&next, &[]), []);
    // On an edge, it may be of either window.
    let late = Ask { received: T + 1_001 * MS, ..refused(999) };
    assert_eq!(unexplained_at(&[late], &[]), []);
}

#[test]
fn what_is_undone_explains_a_refusal_for_a_moment() {
    let undone = |at: u64| Ask { answer: Answer::Undone, ..ask(T + at * MS, T + at * MS + 100) };
    let refused = |at: u64| Ask { answer: Answer::Refused, ..ask(T + at * MS, T + at * MS + 100) };
    let asks = |at: u64| [passes([100, 200]), vec![undone(300), refused(at)]].concat();
    assert_eq!(unexplained_at(&asks(350), &[]), []);
    assert_eq!(unexplained_at(&asks(400), &[]), []);
    assert_eq!(unexplained_at(&asks(401), &[]), [401]);
    // It was not asked yet.
    assert_eq!(unexplained_at(&asks(299), &[]), [299]);
    // What was to be returned may be lost.
    for lost in [(T, T + 299 * MS), (T + 401 * MS, T + 500 * MS)] {
        assert_eq!(unexplained_at(&asks(600), &[lost]), [600], "{lost:?}");
    }
    for lost in [(T, T + 300 * MS), (T + 400 * MS, T + 500 * MS), (T + 310 * MS, T + 320 * MS)] {
        assert_eq!(unexplained_at(&asks(600), &[lost]), [], "{lost:?}");
    }
}
