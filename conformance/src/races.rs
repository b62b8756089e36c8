//! Checks of a store under concurrent charges.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use super::Job;
use tower_fixed_window::{Key, Limit, Limiter, Limits, Line, ManualClock, Quota, Quotas, Store};

const THREADS: u64 = 4;
const NOW_MS: u64 = 1_700_000_040_000;

/// Runs a job on several threads at once.
fn race<'a>(
    block_on: &(impl Fn(Job<'_>) + Send + Sync),
    job: impl Fn(u64) -> Job<'a> + Send + Sync,
) {
    thread::scope(|scope| {
        for i in 0..THREADS {
            let job = &job;
            scope.spawn(move || block_on(job(i)));
        }
    });
}

/// Exactly the limit passes in each window, under concurrency (S7).
pub(super) fn exact<S: Store>(
    new: &impl Fn(ManualClock) -> S,
    block_on: &(impl Fn(Job<'_>) + Send + Sync),
) {
    let clock = ManualClock::at_ms(NOW_MS);
    let limiter = limiter(Quota::per_minute(10).into(), new, &clock);
    for window in 0..20 {
        let passed = AtomicU64::new(0);
        race(block_on, |_| {
            Box::pin(async {
                for _ in 0..10 {
                    let decision = limiter.check("one").await.expect("the store answers");
                    passed.fetch_add(decision.allowed().into(), Ordering::SeqCst);
                }
            })
        });
        assert_eq!(passed.into_inner(), 10, "of a limit of 10, in window {window}");
        clock.advance(Duration::from_secs(60));
    }
}

/// A refusal by one quota takes nothing from another (S6).
pub(super) fn all_or_nothing<S: Store>(
    new: &impl Fn(ManualClock) -> S,
    block_on: &(impl Fn(Job<'_>) + Send + Sync),
) {
    let clock = ManualClock::at_ms(NOW_MS);
    let limiter = limiter(Quota::per_minute(33).and(Quota::per_hour(50)), new, &clock);
    let passed = AtomicU64::new(0);
    for _ in 0..2 {
        race(block_on, |_| {
            Box::pin(async {
                for _ in 0..40 {
                    let decision = limiter.check("one").await.expect("the store answers");
                    passed.fetch_add(decision.allowed().into(), Ordering::SeqCst);
                    let used: Vec<_> = decision.usage().iter().map(|s| s.used()).collect();
                    assert!(used[0] <= 33 && used[1] <= 50 && used[0] <= used[1], "used {used:?}");
                }
            })
        });
        clock.advance(Duration::from_secs(60));
    }
    // 33 pass in the first minute, then the rest of the hour's quota: fewer, if the hour had
    // counted a refusal.
    assert_eq!(passed.into_inner(), 50, "of 33 a minute and 50 an hour, in two minutes");
}

/// A refusal by one limit takes nothing from another, whatever their order (S37).
pub(super) fn all_limits_or_none<S: Store>(
    new: &impl Fn(ManualClock) -> S,
    block_on: &(impl Fn(Job<'_>) + Send + Sync),
    in_one_step: bool,
) {
    let clock = ManualClock::at_ms(NOW_MS);
    let limits = ["few", "many"].into_iter().zip([33, 50]);
    let limits = limits.map(|(name, limit)| Quota::per_hour(limit).name(name));
    let limits = Limits::new(limits).store(new(clock.clone()));
    // Two keys of one limit, and one key of the other limit, which both charges share.
    let passed = [AtomicU64::new(0), AtomicU64::new(0)];
    race(block_on, |thread| {
        let passed = &passed[thread as usize % 2];
        let mut lines = [Line::new("few", thread % 2, 1), Line::new("many", "all", 1)];
        if thread > 1 {
            lines.reverse();
        }
        let limits = &limits;
        Box::pin(async move {
            for _ in 0..40 {
                let decision = limits.check(&lines).await.expect("the store answers");
                passed.fetch_add(decision.allowed().into(), Ordering::SeqCst);
            }
        })
    });
    let passed = passed.map(AtomicU64::into_inner);
    let used = Mutex::new([0; 3]);
    block_on(Box::pin(async {
        let of = |name, key: Key| limits.of(name).peek(key);
        let replies = [of("few", 0.into()), of("few", 1.into()), of("many", "all".into())];
        for (i, reply) in replies.into_iter().enumerate() {
            let standing = reply.await.expect("the store answers");
            used.lock().expect("no panic")[i] = standing.used();
        }
    }));
    let used = used.into_inner().expect("no panic");
    assert!(passed.iter().all(|passed| *passed <= 33), "{passed:?} passed, of 33 each");
    assert!(passed[0] + passed[1] <= 50, "{passed:?} passed, of 50 together");
    // If limits are charged one after the other, a request may be refused for tokens that are
    // returned a moment later.
    assert!(!in_one_step || passed[0] + passed[1] == 50, "{passed:?} passed, of 50 together");
    let counted = [passed[0], passed[1], passed[0] + passed[1]];
    assert_eq!(used, counted, "what passed is what is counted");
}

/// Returned tokens can be taken again, once (S14).
pub(super) fn refunds_once<S: Store>(
    new: &impl Fn(ManualClock) -> S,
    block_on: &(impl Fn(Job<'_>) + Send + Sync),
) {
    let clock = ManualClock::at_ms(NOW_MS);
    let limiter = limiter(Quota::per_minute(100).into(), new, &clock);
    let kept = AtomicU64::new(0);
    let order = Mutex::new(0_u64);
    race(block_on, |_| {
        Box::pin(async {
            for _ in 0..100 {
                let charged = limiter.charge("one", 1).await.expect("the store answers");
                let Ok(receipt) = charged else { continue };
                let every_second = {
                    let mut order = order.lock().expect("no panic");
                    *order += 1;
                    (*order).is_multiple_of(2)
                };
                if every_second {
                    limiter.refund(receipt).await.expect("the store answers");
                } else {
                    kept.fetch_add(1, Ordering::SeqCst);
                }
            }
        })
    });
    let used = std::sync::OnceLock::new();
    block_on(Box::pin(async {
        let _ = used.set(limiter.peek("one").await.expect("the store answers").used());
    }));
    assert_eq!(used.into_inner(), Some(kept.into_inner()), "what was kept is what is counted");
}

fn limiter<S: Store>(
    quotas: Quotas,
    new: &impl Fn(ManualClock) -> S,
    clock: &ManualClock,
) -> Limiter {
    Limit::new(quotas).name("race").store(new(clock.clone()))
}
