//! The checker, on histories that were made.

use tower_fixed_window_checker::check::{Promise, Windows, above};
use tower_fixed_window_checker::history::{Answer, Ask, Line, collect};
use tower_fixed_window_checker::line::{idle, overtaken};
use tower_fixed_window_checker::several::{Returns, torn, unexplained};

const MS: u64 = 1_000;
/// A multiple of a second, in microseconds.
const T: u64 = 1_700_000_000_000_000;

fn promise(windows: Windows) -> Promise {
    Promise::new(windows, 3, 1_000)
}

fn ask(sent: u64, received: u64) -> Ask {
    let answer = Answer::Passed;
    let (returned, due, joined) = (None, None, None);
    Ask { node: 0, id: sent, key: 1, cost: 1, sent, received, answer, returned, due, joined }
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
    // The two limits pass in two windows, on whatever grid. A bucket would need another second, and
    // a window that begins with the first request is not over.
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
    // A pass that may have been decided after that takes its place.
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
    // The loss may have been at the first instant of the window.
    let just = Promise { losses: vec![(T - 500 * MS, T)], ..promise(Windows::Aligned) };
    assert_eq!(above(&asks, &just).above, 0);
    // The request that began the first window after a loss may have been sent before the loss.
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
        let promise = Promise::new(Windows::OnDemand, 1, LENGTH);
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
    asks[1].due = Some(T + 9 * MS);
    asks[3].joined = Some(T + 5 * MS);
    asks[2].answer = Answer::GaveUp;
    asks[3].answer = Answer::PassedLocally;
    let mut text = String::new();
    for ask in &asks {
        ask.lines().for_each(|line| text += &format!("{line}\n"));
    }
    let lines = text.lines().map(|line| line.parse().expect("a line"));
    assert_eq!(collect(lines), asks);
    for bad in
        ["", "1 2 3", "1 2 done 3", "1 2 3 4 5 6 perhaps", "1 2 3 4 5 -6 passed", "0 1 came 3"]
    {
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

/// The unexplained refusals of key 1, by their times.
fn unexplained_at(asks: &[Ask], disturbed: &[(u64, u64)]) -> Vec<u64> {
    unexplained_under(&[promise(Windows::Aligned)], asks, disturbed)
}

fn unexplained_under(quotas: &[Promise], asks: &[Ask], disturbed: &[(u64, u64)]) -> Vec<u64> {
    let returns = Returns { within: 100 * MS, disturbed: disturbed.to_vec() };
    let found = unexplained(asks, quotas, &returns);
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
    // Passes of another key explain nothing.
    let mut others = full.clone();
    others[0].key = 2;
    assert_eq!(unexplained_at(&[others, vec![refused(400)]].concat(), &[]), [400]);
    // More than there is room for.
    let larger = Ask { cost: 2, ..refused(400) };
    assert_eq!(unexplained_at(&[&full[..2], &[larger]].concat(), &[]), []);
    // Failed requests may be counted, and requests answered in the next window.
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
    // The pass was sent later.
    assert_eq!(unexplained_at(&asks(299), &[]), [299]);
    // A refund may be lost.
    for lost in [(T, T + 299 * MS), (T + 401 * MS, T + 500 * MS)] {
        assert_eq!(unexplained_at(&asks(600), &[lost]), [600], "{lost:?}");
    }
    for lost in [(T, T + 300 * MS), (T + 400 * MS, T + 500 * MS), (T + 310 * MS, T + 320 * MS)] {
        assert_eq!(unexplained_at(&asks(600), &[lost]), [], "{lost:?}");
    }
}

#[test]
fn answers_that_wait_for_a_window_are_counted_over_several() {
    let waited = |n: u64| -> Vec<_> {
        (0..n).map(|i| Ask { id: i, ..ask(T + 900 * MS, T + 2_100 * MS) }).collect()
    };
    assert_eq!(aligned(&waited(9)), 0);
    assert_eq!(aligned(&waited(11)), 2);
    // Late answers may belong to any of the three windows.
    assert_eq!(aligned(&[waited(7), passes([1_400, 1_500, 1_600])].concat()), 1);
    assert_eq!(aligned(&[waited(6), passes([1_400, 1_500, 1_600])].concat()), 0);
    // Before and after them are other windows.
    assert_eq!(aligned(&[waited(9), passes([3_100, 3_200, 3_300])].concat()), 0);
    let before: Vec<_> = [100, 200, 300].map(|at| ask(T - at * MS, T - at * MS + 100)).into();
    assert_eq!(aligned(&[waited(9), before].concat()), 0);
}

#[test]
fn tokens_that_are_kept_pass_later() {
    let kept = Promise { capacity: 6, ..promise(Windows::Aligned) };
    let most = |asks: &[Ask]| above(asks, &kept).above;
    assert_eq!(most(&passes(100..106)), 0);
    assert_eq!(most(&passes(100..107)), 1);
    // Three are granted anew.
    let all = [passes(100..106), passes(1_100..1_103), passes(2_100..2_103)].concat();
    assert_eq!(most(&all), 0);
    assert_eq!(most(&[all, passes([2_500])].concat()), 1);
    // Six, if one window leaves them.
    assert_eq!(most(&[passes(100..106), passes(2_100..2_106)].concat()), 0);
    assert_eq!(most(&[passes(100..106), passes(1_100..1_101), passes(2_100..2_106)].concat()), 1);
    // No more are kept, however long nobody asks.
    assert_eq!(most(&[passes([100]), passes(9_100..9_107)].concat()), 1);
    // A refund is of its window.
    let mut late = [passes(100..106), passes(1_100..1_104)].concat();
    late[0].returned = Some(T + 900 * MS);
    assert_eq!(most(&late), 0);
    late[0].returned = Some(T + 1_000 * MS);
    assert_eq!(most(&late), 1);
    // A store that loses its counts has all of them again.
    let losses = vec![(T + 800 * MS, T + 801 * MS)];
    let lost = Promise { losses, ..kept.clone() };
    assert_eq!(above(&[passes(100..106), passes(900..906)].concat(), &lost).above, 0);
    assert_eq!(above(&[passes(1_100..1_107)].concat(), &lost).above, 1);
}

/// Passes with a time from when on they may run, in milliseconds since T.
fn due(at: impl IntoIterator<Item = (u64, u64)>) -> Vec<Ask> {
    let due = |(at, due)| Ask { due: Some(T + due * MS), ..ask(T + at * MS, T + at * MS + 100) };
    at.into_iter().map(due).collect()
}

#[test]
fn tokens_of_later_windows_are_taken_up_to_what_is_reserved() {
    let reserved = Promise { reserved: 6, ..promise(Windows::Aligned) };
    let most = |asks: &[Ask]| above(asks, &reserved).above;
    let later = |from: u64| due((from..from + 3).map(|at| (at, at / 1_000 * 1_000 + 1_000)));
    let latest = due((200..203).map(|at| (at, 2_000)));
    let full = [passes(100..103), later(110), latest].concat();
    assert_eq!(most(&full), 0);
    assert_eq!(most(&[full.clone(), due([(300, 3_000)])].concat()), 1);
    // A window later, what it grants.
    let next = due((1_100..1_103).map(|at| (at, 3_000)));
    assert_eq!(most(&[full.clone(), next.clone()].concat()), 0);
    assert_eq!(most(&[full.clone(), next, due([(1_200, 4_000)])].concat()), 1);
    // A refund until the end of the window that covers the request makes room.
    let mut returned = [full.clone(), due((1_100..1_104).map(|at| (at, 3_000)))].concat();
    returned[8].returned = Some(T + 1_050 * MS);
    returned[12].due = Some(T + 2_000 * MS);
    assert_eq!(most(&returned), 0);
    returned[3].returned = Some(T + 2_050 * MS);
    returned[8].returned = None;
    assert_eq!(most(&returned), 1);
    // The refund brings what earlier windows have covered.
    let mut large = due([(100, 2_000)]);
    (large[0].cost, large[0].returned) = (3, Some(T + 2_050 * MS));
    let many = |last: u64| {
        let due_in = |n: u64, window| due((0..n).map(|i| (2_100 + i, window)));
        let reserved = [due_in(3, 3_000), due_in(5, 4_000), due_in(last, 5_000)].concat();
        [large.clone(), passes(2_100..2_103), reserved].concat()
    };
    assert_eq!(most(&many(0)), 0);
    assert_eq!(most(&many(1)), 1);
    let mut kept = many(0);
    (kept[0].due, kept[0].returned) = (Some(T + 1_000 * MS), None);
    assert_eq!(most(&kept), 2);
}

#[test]
fn what_is_reserved_runs_in_windows_that_cover_it() {
    let reserved = Promise { reserved: 9, ..promise(Windows::Aligned) };
    let most = |asks: &[Ask]| above(asks, &reserved).above;
    assert_eq!(most(&due((100..103).map(|at| (at, 2_000)))), 0);
    assert_eq!(most(&due((100..104).map(|at| (at, 2_000)))), 1);
    // Beside what passes at once there.
    let both =
        |n: u64| [due((100..100 + n).map(|at| (at, 2_000))), passes([2_100, 2_200])].concat();
    assert_eq!(most(&both(1)), 0);
    assert_eq!(most(&both(3)), 2);
    // Refunded requests don't run, but others may take their place.
    let mut returned = due((100..104).map(|at| (at, 2_000)));
    returned[1].returned = Some(T + 500 * MS);
    assert_eq!(most(&returned), 0);
    returned[1].cost = 2;
    assert_eq!(most(&[&returned[..], &due([(300, 2_000)])].concat()), 0);
    // The last of a window as a whole, but only of one.
    let costs = |n: u64| {
        let all = (0..n).map(|i| (100 + i, 2_000 + i / 3 * 1_000));
        due(all).into_iter().map(|ask| Ask { cost: 2, ..ask }).collect::<Vec<_>>()
    };
    assert_eq!(most(&costs(2)), 0);
    assert_eq!(most(&costs(3)), 2);
    // In two windows, seven.
    assert_eq!(most(&costs(4)[1..]), 0);
    let single = due((100..108).map(|at| (at, 2_000 + at % 2 * 1_000)));
    assert_eq!(most(&single), 2);
    // After a loss of counts, this is not known.
    let losses = vec![(T + 50 * MS, T + 60 * MS)];
    let lost = Promise { losses, ..reserved.clone() };
    assert_eq!(above(&due((100..104).map(|at| (at, 2_000))), &lost).above, 0);
}

#[test]
fn windows_of_a_calendar_begin_when_it_says() {
    let starts = vec![T + 500 * MS, T + 2_500 * MS];
    let listed = Promise { starts, ..promise(Windows::Listed) };
    let most = |asks: &[Ask]| above(asks, &listed);
    let three = |from: u64| passes(from..from + 3);
    let all = [three(400), three(500), three(2_400), three(2_500), three(9_000)];
    assert_eq!(most(&[&all[0][..], &all[1], &all[3]].concat()).above, 0);
    assert_eq!(most(&all[..2].concat()).above, 0);
    let worst = most(&all[1..3].concat());
    assert_eq!((worst.above, worst.at), (3, Some((1, T + 500 * MS))));
    let worst = most(&all[3..].concat());
    assert_eq!((worst.above, worst.at), (3, Some((1, T + 2_500 * MS))));
    assert_eq!(most(&passes(100..104)).above, 1);
    // Refunds belong to their window there, too.
    let mut returned = passes([600, 700, 800, 900]);
    returned[0].returned = Some(T + 850 * MS);
    assert_eq!(most(&returned).above, 0);
}

/// An exact count as the rules have it, with tokens that are kept or reserved, and refunds.
#[test]
fn an_exact_limiter_that_keeps_and_reserves_is_never_above() {
    for seed in 0..500_u64 {
        let mut state = seed;
        let mut below = |bound: u64| random(&mut state) % bound;
        let (capacity, reserved) = (3 + below(4), below(3) * 3);
        let promise = Promise { capacity, reserved, ..promise(Windows::Aligned) };
        let (mut asks, mut used, mut window) =
            (Vec::<Ask>::new(), 3 - capacity as i64, T / (1_000 * MS));
        // When they were decided, and in which window they run.
        let mut runs = Vec::new();
        let mut now = T;
        for _ in 0..60 {
            now += if below(10) == 0 { below(2_500 * MS) } else { below(90 * MS) };
            while window < now / (1_000 * MS) {
                (used, window) = ((used - 3).max(3 - capacity as i64), window + 1);
            }
            // Now and then one comes back, if its window is open and nothing is taken of a later one.
            if below(4) == 0 && !asks.is_empty() {
                let one = below(asks.len() as u64) as usize;
                let latest = *runs.iter().max().expect("there is one");
                let is_last = reserved == 0 || runs[one] == latest;
                if asks[one].returned.is_none() && runs[one] >= window && is_last {
                    used = (used - asks[one].cost as i64).max(3 - capacity as i64);
                    asks[one].returned = Some(now);
                }
            }
            let cost = 1 + below(3);
            if used + cost as i64 <= 3 + reserved as i64 {
                used += cost as i64;
                let later = (used - 3).max(0).cast_unsigned().div_ceil(3);
                let (before, after) = (below(30 * MS), below(30 * MS));
                let due = (later > 0).then_some((window + later) * 1_000 * MS);
                asks.push(Ask { cost, due, id: now, ..ask(now - before, now + after) });
                runs.push(window + later);
            }
        }
        assert_eq!(above(&asks, &promise).above, 0, "seed {seed}: {promise:?}");
    }
}

#[test]
fn a_refusal_needs_a_reason_under_one_of_its_quotas() {
    let refused = |at: u64| Ask { answer: Answer::Refused, ..ask(T + at * MS, T + at * MS + 100) };
    let long = Promise::new(Windows::Aligned, 5, 10_000);
    let both = [promise(Windows::Aligned), long.clone()];
    let at = |asks: &[Ask]| unexplained_under(&both, asks, &[]);
    assert_eq!(at(&[passes([100, 200]), vec![refused(300)]].concat()), [300]);
    assert_eq!(at(&[passes([100, 200, 250]), vec![refused(300)]].concat()), []);
    assert_eq!(at(&[passes([100, 200, 250]), vec![refused(1_300)]].concat()), [1_300]);
    assert_eq!(at(&[passes([100, 200, 250, 1_100, 1_200]), vec![refused(2_300)]].concat()), []);
    // On the edge of either.
    let edge = Ask { received: T + 2_001 * MS, ..refused(1_999) };
    assert_eq!(at(&[edge]), []);
    // Kept tokens are available.
    let kept = [Promise { capacity: 6, ..promise(Windows::Aligned) }];
    let at = |asks: &[Ask]| unexplained_under(&kept, asks, &[]);
    assert_eq!(at(&[passes([1_100, 1_200, 1_300]), vec![refused(1_400)]].concat()), [1_400]);
    let used = passes(100..106);
    assert_eq!(at(&[used.clone(), passes(1_100..1_102), vec![refused(1_400)]].concat()), [1_400]);
    assert_eq!(at(&[used.clone(), passes(1_100..1_103), vec![refused(1_400)]].concat()), []);
    assert_eq!(at(&[used, passes(2_100..2_105), vec![refused(2_400)]].concat()), [2_400]);
    // Tokens that may be reserved are, too.
    let reserved = [Promise { reserved: 3, ..promise(Windows::Aligned) }];
    let at = |asks: &[Ask]| unexplained_under(&reserved, asks, &[]);
    assert_eq!(at(&[passes(100..105), vec![refused(300)]].concat()), [300]);
    assert_eq!(at(&[passes(100..106), vec![refused(300)]].concat()), []);
    assert_eq!(at(&[passes(100..106), passes(1_100..1_103), vec![refused(1_300)]].concat()), []);
    assert_eq!(
        at(&[passes(100..106), passes(1_100..1_102), vec![refused(1_300)]].concat()),
        [1_300]
    );
}

/// Asked and answered at these times in milliseconds, in line a millisecond after it was asked.
fn waits(sent: u64, received: u64) -> Ask {
    let joined = Some(T + (sent + 1) * MS);
    Ask { joined, ..ask(T + sent * MS, T + received * MS) }
}

#[test]
fn nobody_overtakes_in_line() {
    let count = |asks: &[Ask]| {
        let mut found: Vec<_> = overtaken(asks, &promise(Windows::Aligned));
        found.sort_unstable_by_key(|ask| ask.sent);
        found.iter().map(|ask| (ask.sent - T) / MS).collect::<Vec<_>>()
    };
    let line = [waits(100, 1_010), waits(200, 2_010), waits(300, 3_010)];
    assert_eq!(count(&line), []);
    // Its answer may be late by a window.
    assert_eq!(count(&[waits(100, 2_900), waits(200, 1_010)]), []);
    assert_eq!(count(&[waits(100, 3_010), waits(200, 1_010)]), [100]);
    assert_eq!(count(&[waits(100, 3_010), waits(150, 3_020), waits(200, 1_010)]), [100, 150]);
    // The request was sent before the other was in line.
    assert_eq!(count(&[waits(100, 3_010), waits(101, 1_010)]), []);
    let mut both = [waits(100, 3_010), waits(200, 1_010)];
    both[0].joined = None;
    assert_eq!(count(&both), []);
    // Both were charged at once, or a smaller one fits.
    assert_eq!(count(&[waits(100, 3_010), waits(115, 1_010)]), []);
    assert_eq!(count(&[Ask { cost: 2, ..waits(100, 3_010) }, waits(200, 1_010)]), []);
    // Other lines.
    both[0].joined = Some(T + 101 * MS);
    both[1].key = 2;
    assert_eq!(count(&both), []);
    both[1].key = 1;
    both[1].node = 1;
    assert_eq!(count(&both), []);
    both[1].node = 0;
    both[1].answer = Answer::Refused;
    assert_eq!(count(&both), []);
}

#[test]
fn a_window_in_which_one_waits_is_used_up() {
    let idle = |asks: &[Ask]| idle(asks, &promise(Windows::Aligned));
    let window = |n: u64| (1, T / (1_000 * MS) + n);
    // This request waits through window 1.
    let waits_for_two = waits(900, 2_010);
    let used = passes([1_100, 1_200, 1_300]);
    assert_eq!(idle(&[used.clone(), vec![waits_for_two.clone()]].concat()), []);
    // With an answer that may have been decided there, two are missing one.
    assert_eq!(idle(&[&used[..2], std::slice::from_ref(&waits_for_two)].concat()), []);
    assert_eq!(idle(&[&used[..1], std::slice::from_ref(&waits_for_two)].concat()), [window(1)]);
    // Whatever its own answer is.
    let refused = Ask { answer: Answer::Refused, ..waits_for_two.clone() };
    assert_eq!(idle(&[&used[..2], std::slice::from_ref(&refused)].concat()), [window(1)]);
    assert_eq!(idle(&[&used[..], std::slice::from_ref(&refused)].concat()), []);
    // Requests that are not known to be refused may be counted.
    for answer in [Answer::Failed, Answer::GaveUp] {
        let mut unknown = used.clone();
        unknown[0].answer = answer;
        assert_eq!(idle(&[unknown, vec![refused.clone()]].concat()), []);
    }
    // Refused ones are not, nor those of other keys.
    let mut others = used.clone();
    others[0].key = 2;
    assert_eq!(idle(&[others, vec![refused.clone()]].concat()), [window(1)]);
    // The head may need more than is left.
    let mut larger = used[..2].to_vec();
    larger[1].cost = 2;
    larger[0].cost = 0;
    assert_eq!(idle(&[larger, vec![refused.clone()]].concat()), []);
    let one = [Ask { cost: 2, ..used[0].clone() }, refused.clone()];
    assert_eq!(idle(&one), []);
    // Only a request that is in line from before the window until after it shows an idle one.
    assert_eq!(idle(&[waits(1_000, 2_010)]), []);
    assert_eq!(idle(&[Ask { answer: Answer::Refused, ..waits(900, 1_999) }]), []);
    assert_eq!(idle(&[Ask { joined: None, ..refused.clone() }]), []);
    let joined = Some(T + 1_001 * MS);
    assert_eq!(idle(&[Ask { joined, ..refused }]), []);
    // An answer of the next window may be late, not one that was asked for then.
    let late = ask(T + 1_900 * MS, T + 2_005 * MS);
    let refused = Ask { answer: Answer::Refused, ..waits_for_two };
    assert_eq!(idle(&[&used[..2], &[late, refused.clone()]].concat()), []);
    let next = ask(T + 2_001 * MS, T + 2_005 * MS);
    assert_eq!(idle(&[&used[..2], &[next, refused]].concat()), [window(1)]);
}
