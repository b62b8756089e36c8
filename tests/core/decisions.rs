//! The numbers in a decision about the governing quota, worked out by hand.

use std::time::{Duration, UNIX_EPOCH};

use tower_fixed_window::{Decision, Limit, ManualClock, MemoryStore, Quota};

use crate::{answer, charge};

/// The start of an hour, and so of a minute.
const HOUR_MS: u64 = 1_699_999_200_000;

#[test]
fn a_decision_describes_the_quota_that_governs_it() {
    let clock = ManualClock::at_ms(HOUR_MS + 20_000);
    let store = MemoryStore::new().clock(clock.clone());
    let limiter = Limit::new(Quota::per_minute(5).and(Quota::per_hour(7))).store(store);
    let seconds = Duration::from_secs;
    let hour = UNIX_EPOCH + Duration::from_millis(HOUR_MS);

    let passed = charge(&limiter, "alice", 4, false).0;
    assert_eq!((passed.is_allowed(), passed.granted()), (true, 4));
    assert_eq!((passed.limit(), passed.used(), passed.remaining()), (5, 4, 1));
    assert_eq!((passed.reset_after(), passed.reset_at()), (seconds(40), hour + seconds(60)));
    assert_eq!((passed.ready_after(), passed.ready_at()), (Duration::ZERO, None));
    assert_eq!((passed.refusing().count(), passed.is_local()), (0, false));

    let refused = charge(&limiter, "alice", 2, false).0;
    assert_eq!((refused.is_allowed(), refused.granted()), (false, 0));
    assert_eq!((refused.limit(), refused.used(), refused.remaining()), (5, 4, 1));
    assert_eq!(refused.retry_after(), Some(seconds(40)));
    assert_eq!(refused.retry_at(), Some(hour + seconds(60)));
    assert_eq!(refused.refusing().collect::<Vec<_>>(), [0]);
    let text = |refused: Decision| refused.into_result().expect_err("it is refused").to_string();
    assert_eq!(
        text(refused),
        "rate limit exceeded: 4 of 5 used, 1 left for a cost of 2, retry in 40s"
    );

    let impossible = charge(&limiter, "alice", 6, false).0;
    assert_eq!((impossible.is_allowed(), impossible.retry_after()), (false, None));
    assert_eq!(
        text(impossible),
        "rate limit exceeded: 4 of 5 used, 1 left for a cost of 6, and it can never fit"
    );

    clock.advance(seconds(40));
    let passed = charge(&limiter, "alice", 3, false).0;
    assert_eq!((passed.is_allowed(), passed.granted()), (true, 3));
    assert_eq!((passed.limit(), passed.used(), passed.remaining()), (7, 7, 0));
    assert_eq!(passed.reset_at(), hour + seconds(3_600));
    let [minute, hour] = passed.usage() else { panic!("two quotas") };
    assert_eq!((minute.limit(), minute.used(), minute.remaining()), (5, 3, 2));
    assert_eq!((minute.window(), hour.window()), (seconds(60), seconds(3_600)));

    // Nothing is left, so there is nothing to say of it.
    let refused = charge(&limiter, "alice", 2, false).0;
    assert_eq!(text(refused), "rate limit exceeded: 7 of 7 used, retry in 3540s");
}

#[test]
fn the_debug_text_of_a_decision_names_its_parts() {
    let limiter = Limit::new(Quota::per_minute(5)).store(MemoryStore::new());
    let text = format!("{:?}", answer(limiter.check("alice")));
    for part in ["Decision", "verdict: Passed", "usage: [1 of 5 in [", "governing: 0", "now"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    assert!(!text.contains("alice"));
}
