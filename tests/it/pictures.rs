//! The pictures in `docs/windows.md` are drawn by the limiter, in [`drawings`]. Here are the numbers
//! beside them.

mod drawings;
mod svg;

use std::fmt::Write;
use std::time::Duration;

use tower_fixed_window::testing::block_on;
use tower_fixed_window::{Limit, ManualClock, MemoryStore, Quota, Quotas};

const PAGE: &str = include_str!("../../docs/windows.md");

/// 12:00 of a day.
const NOON_MS: u64 = 1_700_000_000_000 / 86_400_000 * 86_400_000 + 12 * 3_600_000;

const FIVE: Quota = Quota::per_minute(5);
const TWO_IN_TEN: Quota = Quota::new(2, Duration::from_secs(10));

/// The requests of one client that pass in each 5 seconds from 12:00 on. `sent` has a digit for
/// each.
fn passes(quotas: impl Into<Quotas>, sent: &str) -> String {
    let clock = ManualClock::at_ms(NOON_MS);
    let limiter = Limit::new(quotas).store(MemoryStore::new().clock(clock.clone()));
    let mut passes = String::new();
    for figure in sent.chars() {
        let sent = figure.to_digit(10).unwrap_or(0);
        let passed = (0..sent).filter(|_| block_on(limiter.check("client")).unwrap().is_allowed());
        match passed.count() {
            0 => passes.push('.'),
            passed => write!(passes, "{passed}").expect("a string"),
        }
        clock.advance(Duration::from_secs(5));
    }
    passes
}

#[test]
fn a_window_begins_with_a_full_limit() {
    let sent = "111111111111111111111111111111111111";
    let passed = passes(FIVE, sent);
    assert_eq!(passed, "11111.......".repeat(3));
    let picture = format!("\nsent      {sent}\npassed    {passed}\n");
    assert!(PAGE.contains(&picture), "not in docs/windows.md:{picture}");
}

/// A client that sends evenly loses nothing to a second, shorter window.
#[test]
fn even_requests_pass_a_second_shorter_window() {
    let sent = "1..1..1..1..1..1..1..1..1..1..1..1..";
    assert_eq!(passes(FIVE.and(TWO_IN_TEN), sent), sent);
}

/// The numbers of README and docs/windows.md.
#[test]
fn fifteen_in_ten_seconds_lower_a_burst_of_120_to_30() {
    let burst = |quotas: Quotas| {
        let clock = ManualClock::at_ms(NOON_MS + 59_500);
        let limiter = Limit::new(quotas).store(MemoryStore::new().clock(clock.clone()));
        let pass =
            || (0..60).filter(|_| block_on(limiter.check("alice")).unwrap().is_allowed()).count();
        let before = pass();
        clock.advance(Duration::from_millis(500));
        before + pass()
    };
    let minute = Quota::per_minute(60);
    assert_eq!(burst(minute.into()), 120);
    assert_eq!(burst(minute.and(Quota::new(15, Duration::from_secs(10)))), 30);
}

#[test]
fn the_same_window_half_a_window_later_leaves_no_boundary() {
    let twice = FIVE.and(FIVE.starting_at(Duration::from_secs(30)));
    let around = "...........99.......................";
    let all = "999999999999999999999999999999999999";
    assert_eq!(passes(twice, around), "...........5........................");
    assert_eq!(passes(twice, all), "5...........5...........5...........");
    // No half window has more than one limit, wherever it begins.
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..200 {
        let sent: String =
            (0..60).map(|_| *random.choice(&['.', '1', '3', '9']).unwrap()).collect();
        let figures = passes(twice, &sent);
        let passed: Vec<_> = figures.chars().map(|c| c.to_digit(10).unwrap_or(0)).collect();
        assert!(passed.windows(6).all(|half| half.iter().sum::<u32>() <= 5), "{sent}\n{figures}");
    }
}

/// 1,200 clients who have been refused, by the 5 seconds after 12:00 in which their window ends.
fn herd(quota: Quota) -> Vec<usize> {
    let clock = ManualClock::at_ms(NOON_MS);
    let limiter = Limit::new(quota).name("api").store(MemoryStore::new().clock(clock));
    let mut back = vec![0; 13];
    for client in 0..1_200_u64 {
        assert!(block_on(limiter.check(client)).unwrap().is_allowed());
        let refused = block_on(limiter.check(client)).unwrap();
        let wait = refused.retry_after().expect("a window to come");
        back[(wait.as_millis() as u64).div_ceil(5_000) as usize] += 1;
    }
    back
}

#[test]
fn staggered_windows_have_their_boundaries_at_different_times() {
    let both_sides = |quota: Quota| {
        let clock = ManualClock::at_ms(NOON_MS + 59_500);
        let limiter = Limit::new(quota).name("api").store(MemoryStore::new().clock(clock.clone()));
        let pass = || {
            let passes = |client: &u64| block_on(limiter.check(*client)).unwrap().is_allowed();
            (0..1_200).filter(passes).count()
        };
        let before = pass();
        clock.advance(Duration::from_millis(500));
        before + pass()
    };
    assert_eq!(both_sides(Quota::per_minute(1)), 2_400);
    assert_eq!(both_sides(Quota::per_minute(1).staggered()), 1_208);
}
