//! Checks of a store under concurrent charges, from two handles at once.

use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::thread;
use std::time::Duration;

use super::Job;
use super::nodes::Nodes;
use tower_fixed_window::{Key, Limit, Limiter, Limits, Line, ManualClock, Quota, Quotas, Store};

const THREADS: u64 = 4;
const NOW_MS: u64 = 1_700_000_040_000;
/// What causes most failures.
const CHANGED: &str = "are rows written that have changed since they were read? see `mistakes`";

/// Threads that call two handles of the same, new counters.
pub(super) struct Race<'a, S, B> {
    nodes: Nodes<S>,
    clock: ManualClock,
    block_on: &'a B,
}

impl<'a, S: Store, B: Fn(Job<'_>) + Send + Sync> Race<'a, S, B> {
    pub(super) fn new(new: &impl Fn(ManualClock) -> [S; 2], block_on: &'a B) -> Self {
        let clock = ManualClock::at_ms(NOW_MS);
        Self { nodes: Nodes::new(new, clock.clone()), clock, block_on }
    }

    /// Runs a job on several threads at once, each with a limiter on one of the handles.
    fn run<'j>(&self, quotas: &Quotas, job: impl Fn(u64, Limiter) -> Job<'j> + Send + Sync) {
        thread::scope(|scope| {
            for i in 0..THREADS {
                let (job, block_on) = (&job, self.block_on);
                let limiter = Limit::new(*quotas).name("race").store(self.nodes.handle(i));
                scope.spawn(move || block_on(job(i, limiter)));
            }
        });
    }

    /// The tokens that each handle shows as used, which are the same.
    fn used(&self, quotas: &Quotas, key: impl Into<Key>) -> u64 {
        let (key, shown) = (key.into(), Mutex::new(Vec::new()));
        for i in 0..2 {
            let limiter = Limit::new(*quotas).name("race").store(self.nodes.handle(i));
            (self.block_on)(Box::pin(async {
                let usage = limiter.peek(key.clone()).await.expect("the store answers");
                shown.lock().expect("no panic").push(usage.used());
            }));
        }
        let shown = shown.into_inner().expect("no panic");
        assert_eq!(shown[0], shown[1], "two handles of one counter show different counts");
        shown[0]
    }

    /// Exactly the limit passes in each window, under concurrency (S7). Each charge is told of its own
    /// key, also beside others.
    pub(super) fn exact(&self) {
        let quotas = Quota::per_minute(10).into();
        for window in 0..20 {
            let passed = &Mutex::new(Vec::new());
            self.run(&quotas, |thread, limiter| {
                Box::pin(async move {
                    let ask = |key: u64| {
                        let limiter = limiter.clone();
                        Box::pin(async move {
                            let decision = limiter.check(key).await.expect("the store answers");
                            let used = decision.is_allowed().then_some((key, decision.used()));
                            passed.lock().expect("no panic").extend(used);
                        }) as Job<'_>
                    };
                    for _ in 0..10 {
                        all([0, 1 + thread].map(ask).into()).await;
                    }
                })
            });
            let mut passed = std::mem::take(&mut *passed.lock().expect("no panic"));
            passed.sort_unstable();
            for key in 0..=THREADS {
                let of: Vec<_> =
                    passed.iter().filter(|(of, _)| *of == key).map(|of| of.1).collect();
                let n = of.len();
                assert!(n == 10, "{n} passed of a limit of 10, in window {window}: {CHANGED}");
                assert!(of.is_sorted_by(|a, b| a < b), "each is told another number: {of:?}");
                assert_eq!(self.used(&quotas, key), 10, "what passed is what is counted");
            }
            self.clock.advance(Duration::from_secs(60));
        }
    }

    /// Nor does more pass where a window ends between what a charge reads and what it writes.
    pub(super) fn over_boundaries(&self) {
        let quotas = Quota::per_minute(10).into();
        // A charge that has read the time before the boundary is less than a window late (S4).
        self.clock.advance(Duration::from_secs(1));
        for round in 0..100 {
            // Threads may also run one after the other: behind so late a charge, the window gets to a
            // count that an early one, which was held up, has read in the window before.
            let first_behind = (THREADS - 1 - round % 2, 1 + round / 2 % 3);
            let passed = Mutex::new(HashMap::new());
            self.run(&quotas, |thread, limiter| {
                let passed = &passed;
                Box::pin(async move {
                    for i in 0..4 {
                        if (thread, i) == first_behind {
                            self.clock.advance(Duration::from_secs(60));
                        }
                        let decision = limiter.check("edge").await.expect("the store answers");
                        let mut passed = passed.lock().expect("no panic");
                        *passed.entry(decision.reset_at()).or_insert(0) +=
                            u64::from(decision.is_allowed());
                    }
                })
            });
            let passed = passed.into_inner().expect("no panic");
            let (_, last) = passed.iter().max().expect("decisions");
            let used = self.used(&quotas, "edge");
            let of_both = "of two windows, in the second one";
            assert!(used == *last, "{last} passed {of_both}, and {used} are counted: {CHANGED}");
            self.clock.advance(Duration::from_secs(60));
        }
    }

    /// The first charges of a key meet: there is nothing yet that they could lock (S7).
    pub(super) fn first_charges(&self) {
        let quotas = Quota::per_minute(2).into();
        for key in 0..60_u64 {
            let passed = &AtomicU64::new(0);
            self.run(&quotas, |_, limiter| {
                Box::pin(async move {
                    let decision = limiter.check(("new", key)).await.expect("the store answers");
                    passed.fetch_add(decision.is_allowed().into(), Ordering::SeqCst);
                })
            });
            let passed = passed.load(Ordering::SeqCst);
            assert!(passed == 2, "{passed} first charges of a key passed, of 2: {CHANGED}");
            self.clock.advance(Duration::from_secs(60));
        }
    }

    /// Charges that are made at the same time, by one handle and by two, each get their own answer,
    /// whether or not the store sends them together.
    pub(super) fn own_answers(&self) {
        for round in 0..20_u64 {
            self.run(&Quota::per_minute(1).into(), |thread, limiter| {
                Box::pin(async move {
                    let limiters =
                        (1..=4).map(|limit| limiter.with_quotas(Quota::per_minute(limit)));
                    let limiters: Vec<_> = limiters.collect();
                    let key = |limit| Key::from((thread, round, limit));
                    let asked = limiters.iter().zip(1..).map(|(limiter, limit)| {
                        Box::pin(async move {
                            let answer = limiter.charge(key(limit), limit).await;
                            let receipt = answer.expect("the store answers").expect("it passes");
                            let decision = receipt.decision();
                            let got = (decision.limit(), decision.used());
                            assert_eq!(got, (limit, limit), "another charge's answer");
                        }) as Job<'_>
                    });
                    all(asked.collect()).await;
                })
            });
            self.clock.advance(Duration::from_secs(60));
        }
    }

    /// A refusal by one quota takes nothing from another (S6).
    pub(super) fn all_or_nothing(&self) {
        let quotas = Quota::per_minute(33).and(Quota::per_hour(50));
        let passed = &AtomicU64::new(0);
        for _ in 0..2 {
            self.run(&quotas, |_, limiter| {
                Box::pin(async move {
                    for _ in 0..40 {
                        let decision = limiter.check("all").await.expect("the store answers");
                        passed.fetch_add(decision.is_allowed().into(), Ordering::SeqCst);
                        let used: Vec<_> = decision.usage().iter().map(|s| s.used()).collect();
                        let fit = used[0] <= 33 && used[1] <= 50 && used[0] <= used[1];
                        assert!(fit, "used {used:?}");
                    }
                })
            });
            self.clock.advance(Duration::from_secs(60));
        }
        // 33 pass in the first minute, then the rest of the hour's quota: fewer, if the hour had
        // counted a refusal.
        let passed = passed.load(Ordering::SeqCst);
        assert_eq!(passed, 50, "of 33 a minute and 50 an hour, in two minutes");
    }

    /// A refusal by one limit takes nothing from another, whatever their order (S37).
    pub(super) fn all_limits_or_none(&self, in_one_step: bool) {
        let limits = |thread| {
            let limits = ["few", "many", "own"].into_iter().zip([66, 100, 200]);
            let limits = limits.map(|(name, limit)| Quota::per_hour(limit).name(name));
            Limits::new(limits).store(self.nodes.handle(thread))
        };
        let limits = [limits(0), limits(1)];
        // Keys of one limit, and one key of the other limit, which all charges share.
        let passed = [(); THREADS as usize].map(|()| AtomicU64::new(0));
        self.run(&Quota::per_minute(1).into(), |thread, _| {
            let (limits, passed) = (&limits[thread as usize / 2], &passed);
            Box::pin(async move {
                for round in 0..40 {
                    // Others change a part of the charge's rows, or all: both handles charge the key.
                    let key = if round % 8 < 4 { thread } else { thread % 2 };
                    let mut lines = [("few", key), ("many", 9), ("own", key)];
                    if thread > 1 {
                        lines.reverse();
                    }
                    let lines = lines.map(|(name, key)| Line::new(name, key, 1));
                    let decision = limits.check(&lines).await.expect("the store answers");
                    passed[key as usize].fetch_add(decision.is_allowed().into(), Ordering::SeqCst);
                }
            })
        });
        let passed = passed.map(AtomicU64::into_inner);
        let used = Mutex::new(Vec::new());
        (self.block_on)(Box::pin(async {
            let of = |name, key: Key| limits[0].limiter(name).peek(key);
            let few = (0..THREADS).map(|key| of("few", key.into()));
            for reply in few.chain([of("many", 9.into())]) {
                let standing = reply.await.expect("the store answers");
                used.lock().expect("no panic").push(standing.used());
            }
        }));
        let used = used.into_inner().expect("no panic");
        assert!(passed.iter().all(|passed| *passed <= 66), "{passed:?} passed, of 66 each");
        let all = passed.iter().sum();
        assert!(all <= 100, "{passed:?} passed, of 100 together");
        // If limits are charged one after the other, a request may be refused for tokens that are
        // returned a moment later.
        assert!(!in_one_step || all == 100, "{passed:?} passed, of 100 together");
        assert_eq!(used, [&passed[..], &[all]].concat(), "what passed is what is counted");
    }

    /// Returned tokens can be taken again, once (S14), by either handle. What was used beyond a charge
    /// is counted, also past the limit (S15).
    pub(super) fn corrections_once(&self) {
        let quotas = Quota::per_minute(200).into();
        let (kept, order) = (&AtomicU64::new(0), &AtomicU64::new(0));
        self.run(&quotas, |_, limiter| {
            Box::pin(async move {
                for _ in 0..100 {
                    let charged = limiter.charge("refunds", 1).await.expect("the store answers");
                    let Ok(receipt) = charged else { continue };
                    let keeps = order.fetch_add(1, Ordering::SeqCst) % 3;
                    match keeps {
                        0 => limiter.refund(receipt).await.expect("the store answers"),
                        1 => drop(receipt),
                        _ => limiter.settle(receipt, keeps).await.expect("the store answers"),
                    }
                    kept.fetch_add(keeps, Ordering::SeqCst);
                }
            })
        });
        let kept = kept.load(Ordering::SeqCst);
        assert_eq!(self.used(&quotas, "refunds"), kept, "what was kept is what is counted");
    }

    /// A reset while others charge forgets what was before it, and nothing that came after (S12).
    pub(super) fn resets(&self) {
        let quotas = Quota::per_minute(1_000).into();
        for round in 0..10_u64 {
            let key = &Key::from(("reset", round));
            let since = &AtomicU64::new(0);
            self.run(&quotas, |thread, limiter| {
                Box::pin(async move {
                    for _ in 0..10 {
                        if thread == 0 && since.load(Ordering::SeqCst) == 0 {
                            limiter.reset(key.clone()).await.expect("the store answers");
                            since.store(1, Ordering::SeqCst);
                        }
                        let is_after = since.load(Ordering::SeqCst) > 0;
                        let decision = limiter.check(key.clone()).await;
                        assert!(decision.expect("the store answers").is_allowed());
                        if is_after {
                            since.fetch_add(1, Ordering::SeqCst);
                        }
                    }
                })
            });
            let since = since.load(Ordering::SeqCst) - 1;
            let used = self.used(&quotas, key.clone());
            self.clock.advance(Duration::from_secs(60));
            assert!(used >= since, "{since} passed after a reset, and {used} are counted");
            assert!(used <= 10 * THREADS, "{used} are counted of {}", 10 * THREADS);
        }
    }
}

/// Waits for all of them at the same time.
async fn all(mut jobs: Vec<Job<'_>>) {
    poll_fn(|cx| {
        jobs.retain_mut(|job| Pin::new(job).poll(cx).is_pending());
        if jobs.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}
