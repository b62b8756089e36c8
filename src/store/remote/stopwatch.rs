//! The time that passes in this process, and how far the clock of a store elsewhere is ahead:
//! [`Stopwatch`].

use std::ops::Range;
use std::time::Duration;

use crate::decision::Decision;
use crate::timer::Instant;

/// Measures time from its start on, in milliseconds, also while the machine sleeps.
pub(super) struct Stopwatch {
    since: Instant,
    #[cfg(not(tfw_sim))]
    clocks: [Duration; 2],
}

impl Stopwatch {
    pub(super) fn start() -> Self {
        Self {
            since: Instant::now(),
            #[cfg(not(tfw_sim))]
            clocks: asleep::clocks(),
        }
    }

    /// The monotonic clock stands still while a machine is suspended, or a virtual one paused, so
    /// that time is added.
    fn elapsed(&self) -> Duration {
        let elapsed = self.since.elapsed();
        #[cfg(not(tfw_sim))]
        let elapsed = elapsed + asleep::since(self.clocks);
        elapsed
    }

    pub(super) fn now(&self) -> i64 {
        let elapsed = self.elapsed();
        // `as_millis` would count in 128 bits.
        (elapsed.as_secs() * 1_000) as i64 + i64::from(elapsed.subsec_millis())
    }

    /// Returns by how much the store's clock is ahead, at least and at most. The store read it
    /// after `sent_at`, when it was asked, and before `decision` arrived, which is now. With the
    /// most, an end that the store has given comes early; with the least, the store's time is taken
    /// as late.
    pub(super) fn lag(&self, decision: &Decision, sent_at: i64) -> Range<i64> {
        // Rounded up, so that the decision does not seem younger than it is.
        let received = self.elapsed().as_nanos().div_ceil(1_000_000) as i64;
        // Plus 1: the store's clock leaves out a fraction of a millisecond.
        decision.now_ms() - received..decision.now_ms() - sent_at + 1
    }
}

/// The time for which the machine was asleep, by the difference of two clocks.
#[cfg(not(tfw_sim))]
mod asleep {
    use std::time::Duration;

    /// A smaller difference may be the time between the readings of the two clocks.
    const LEAST: Duration = Duration::from_millis(100);

    /// Returns the time by a clock that stands still meanwhile, and by one that goes on.
    #[cfg(target_os = "linux")]
    pub(super) fn clocks() -> [Duration; 2] {
        use rustix::time::{ClockId, clock_gettime};

        [ClockId::Monotonic, ClockId::Boottime].map(|clock| {
            let time = clock_gettime(clock);
            Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
        })
    }

    /// The wall clock goes on. If it is set forward, refusals end early.
    #[cfg(not(target_os = "linux"))]
    pub(super) fn clocks() -> [Duration; 2] {
        use std::sync::LazyLock;
        use std::time::{Instant, SystemTime, UNIX_EPOCH};

        static START: LazyLock<Instant> = LazyLock::new(Instant::now);

        [START.elapsed(), SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()]
    }

    pub(super) fn since([awake, all]: [Duration; 2]) -> Duration {
        let [awake_now, all_now] = clocks();
        let all = all_now.saturating_sub(all);
        let asleep = all.saturating_sub(awake_now.saturating_sub(awake));
        if asleep < LEAST { Duration::ZERO } else { asleep }
    }
}
