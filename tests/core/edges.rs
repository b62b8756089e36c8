//! Threads charge a few keys concurrently while windows end by the system's clock, which reads the
//! last tick when no edge is near.

use std::collections::HashMap;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use tower_fixed_window::{Clock, Limiter, Quota, Quotas, SystemClock};

use crate::{answer, sized};

const KEYS: u64 = 3;
const LIMIT: u64 = 200;

/// For each window of each key: how many requests passed, and whether any was refused.
type Windows = HashMap<(u64, SystemTime), (u64, bool)>;

/// Charges from many threads until `over` returns true.
fn charge(limiter: &Limiter, threads: u64, over: impl Fn() -> bool + Sync) -> Windows {
    let windows = Mutex::new(Windows::new());
    thread::scope(|scope| {
        for thread in 0..threads {
            let (windows, over) = (&windows, &over);
            scope.spawn(move || {
                let mut own = Windows::new();
                for i in thread.. {
                    let key = i % KEYS;
                    let decision = answer(limiter.check(key));
                    let (passed, refused) = own.entry((key, decision.reset_at())).or_default();
                    *passed += u64::from(decision.is_allowed());
                    *refused |= !decision.is_allowed();
                    if i % 16 == 0 && over() {
                        break;
                    }
                }
                let mut all = windows.lock().expect("no panic");
                for (window, (passed, refused)) in own {
                    let sum = all.entry(window).or_default();
                    *sum = (sum.0 + passed, sum.1 | refused);
                }
            });
        }
    });
    windows.into_inner().expect("no panic")
}

fn assert_exact(windows: &Windows, what: &str) {
    for ((key, end), &(passed, refused)) in windows {
        let exact = if refused { passed == LIMIT } else { passed <= LIMIT };
        assert!(exact, "{passed} of {LIMIT} passed, {what}, key {key}, window until {end:?}");
    }
}

#[test]
fn exactly_the_limit_passes_in_windows_of_the_systems_clock() {
    let duration = Duration::from_millis(sized(400, 20_000));
    let window = Quota::new(LIMIT, Duration::from_millis(50));
    for threads in [2, 4, 8] {
        for quota in [window, window.staggered(), window.from_first_request()] {
            let limiter = Limiter::new(quota);
            let until = Instant::now() + duration;
            let windows = charge(&limiter, threads, || Instant::now() >= until);
            assert!(windows.len() >= 3 * KEYS as usize, "several windows of each key");
            assert_exact(&windows, &format!("{threads} threads, {quota}"));
        }
    }
}

/// A machine that stands still, or a processor that does and has to keep the time: the last tick is
/// of any time ago. Then charges count in a window that has ended meanwhile, and no window gets more.
#[test]
#[cfg(target_os = "linux")]
fn a_clock_whose_ticks_are_late_is_only_a_late_clock() {
    let Some(library) = harness::shifted_clock() else { return };
    let passes = |test: &str, tick_ms: u64| {
        let this = std::env::current_exe().expect("this program");
        let mut child = std::process::Command::new(this);
        child.args(["--exact", &format!("edges::{test}")]);
        child.env("LD_PRELOAD", library.path()).env("TICK_MS", tick_ms.to_string());
        let output = child.output().expect("it runs");
        println!("{}", String::from_utf8_lossy(&output.stderr));
        output.status.success()
    };
    for tick_ms in [130, 3_600_000] {
        assert!(passes("exactly_the_limit_passes_in_windows_of_the_systems_clock", tick_ms));
    }
    assert!(!passes("a_request_is_counted_in_a_window_that_runs_when_it_is_sent", 130));
}

/// Near an edge, the last tick may be in the window before.
#[test]
fn a_request_is_counted_in_a_window_that_runs_when_it_is_sent() {
    let length = Duration::from_millis(50);
    let window = Quota::new(LIMIT, length);
    let longer = Quota::new(LIMIT, Duration::from_millis(70));
    for quotas in [
        Quotas::from(window),
        window.staggered().into(),
        window.from_first_request().into(),
        window.and(longer),
    ] {
        let limiter = Limiter::new(quotas);
        let until = Instant::now() + Duration::from_millis(600);
        while Instant::now() < until {
            // Clocks of stores have milliseconds.
            let sent = SystemClock.now_ms();
            let sent = SystemTime::UNIX_EPOCH + Duration::from_millis(sent);
            let decision = answer(limiter.check("alice"));
            assert!(
                decision.usage().iter().all(|usage| usage.reset_at() > sent),
                "{quotas}: {decision:?}, sent at {sent:?}"
            );
            if quotas == window.from_first_request().into() && decision.used() == 1 {
                assert!(decision.reset_at() >= sent + length, "it begins with this request");
            }
        }
    }
}
