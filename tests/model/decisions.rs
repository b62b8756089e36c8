//! What a decision says of the quota that governs it, in numbers worked out by hand.

use std::time::{Duration, UNIX_EPOCH};

use tower_fixed_window::{Limiter, ManualClock, MemoryStore, Quota};

use crate::answer;

/// An hour begins, and with it a minute.
const HOUR_MS: u64 = 1_699_999_200_000;

#[test]
fn a_decision_describes_the_quota_that_governs_it() {
    let clock = ManualClock::at_ms(HOUR_MS + 20_000);
    let store = MemoryStore::with_clock(clock.clone());
    let limiter = Limiter::new(Quota::per_minute(5).and(Quota::per_hour(7))).store(store);
    let seconds = Duration::from_secs;
    let hour = UNIX_EPOCH + Duration::from_millis(HOUR_MS);

    let passed = answer(limiter.check_cost("alice", 4));
    assert_eq!((passed.allowed(), passed.granted(), passed.governing()), (true, 4, 0));
    assert_eq!((passed.limit(), passed.used(), passed.remaining()), (5, 4, 1));
    assert_eq!((passed.reset_after(), passed.reset_at()), (seconds(40), hour + seconds(60)));
    assert_eq!((passed.ready_after(), passed.decided_at()), (Duration::ZERO, hour + seconds(20)));
    assert_eq!((passed.refusing().count(), passed.is_local()), (0, false));

    let refused = answer(limiter.check_cost("alice", 2));
    assert_eq!((refused.allowed(), refused.granted(), refused.governing()), (false, 0, 0));
    assert_eq!((refused.limit(), refused.used(), refused.remaining()), (5, 4, 1));
    assert_eq!(refused.retry_after(), Some(seconds(40)));
    assert_eq!(refused.retry_at(), Some(hour + seconds(60)));
    assert_eq!(refused.refusing().collect::<Vec<_>>(), [0]);
    assert!(!refused.exceeds_capacity());

    let impossible = answer(limiter.check_cost("alice", 6));
    assert_eq!((impossible.allowed(), impossible.retry_after()), (false, None));
    assert!(impossible.exceeds_capacity());

    clock.advance(seconds(40));
    let passed = answer(limiter.check_cost("alice", 3));
    assert_eq!((passed.allowed(), passed.granted(), passed.governing()), (true, 3, 1));
    assert_eq!((passed.limit(), passed.used(), passed.remaining()), (7, 7, 0));
    assert_eq!(passed.reset_at(), hour + seconds(3_600));
    let [minute, hour] = passed.usage() else { panic!("two quotas") };
    assert_eq!((minute.limit(), minute.used(), minute.remaining()), (5, 3, 2));
    assert_eq!((minute.window(), hour.window()), (seconds(60), seconds(3_600)));
}
