//! Where a store reads the time: [`Clock`], the system's, and one for tests.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

// There, `SystemTime` panics, which would be at the first request.
#[cfg(all(target_family = "wasm", target_os = "unknown"))]
compile_error!(
    "wasm32-unknown-unknown has no clock that the standard library could read: build for \
     wasm32-wasip1 or wasm32-wasip2"
);

/// A source of wall time, such as [`ManualClock`] or [one of your
/// own](crate::guide::testing#queues).
///
/// A store reads its clock once per decision. If the clock steps back, that alone grants no tokens.
pub trait Clock: Send + Sync + 'static {
    /// Returns the milliseconds since the Unix epoch, UTC, as [`ManualClock::set_ms`] sets them.
    /// Values above 2^53 - 2 count as 2^53 - 2.
    fn now_ms(&self) -> u64;
}

/// The system's wall clock, the default of a [`MemoryStore`](crate::MemoryStore). Before 1970, it
/// reads 0.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

/// How far [`SystemClock::recent_ms`] lags: three ticks of the kernels with the longest ones. If a
/// machine stands still for longer, its clock is late by that: charges count in the window of the
/// last tick, which gets no more than its limit, and never in one before what its shard has seen.
pub(crate) const LAG_MS: i64 = 30;

impl SystemClock {
    /// The time at the kernel's last tick, up to [`LAG_MS`] ago: the same clock, but cheaper to
    /// read. `None` if the system has none.
    #[inline]
    pub(crate) fn recent_ms(self) -> Option<u64> {
        #[cfg(all(target_os = "linux", not(tfw_sim)))]
        {
            use rustix::time::{ClockId, DynamicClockId, clock_gettime_dynamic};

            let clock = DynamicClockId::Known(ClockId::RealtimeCoarse);
            let time = clock_gettime_dynamic(clock).ok()?;
            let seconds = u64::try_from(time.tv_sec).ok()?;
            // The kernel counts nanoseconds in 64 bits: this does not wrap.
            Some(seconds.wrapping_mul(1_000).wrapping_add(time.tv_nsec as u64 / 1_000_000))
        }
        #[cfg(any(not(target_os = "linux"), tfw_sim))]
        None
    }
}

impl Clock for SystemClock {
    fn now_ms(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| {
            // `as_millis` would divide in 128 bits.
            since.as_secs().saturating_mul(1_000) + u64::from(since.subsec_millis())
        })
    }
}

/// A clock for tests, a mock, that moves only when you move it. Clones show the same time.
///
/// ```
/// use std::time::Duration;
/// use tower_fixed_window::{Limit, ManualClock, MemoryStore, Quota};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tower_fixed_window::StoreError> {
/// let clock = ManualClock::at_ms(1_700_000_040_000);
/// let limiter = Limit::new(Quota::per_minute(1)).store(MemoryStore::new().clock(clock.clone()));
///
/// assert!(limiter.check("alice").await?.is_allowed());
/// assert!(!limiter.check("alice").await?.is_allowed());
/// clock.advance(Duration::from_secs(60));
/// assert!(limiter.check("alice").await?.is_allowed());
/// clock.set_ms(1_700_000_040_000);
/// assert!(!limiter.check("alice").await?.is_allowed());
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default)]
#[doc(alias("MockClock", "TestClock"))]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// Creates a clock that shows the given milliseconds since the Unix epoch.
    #[doc(alias = "new")]
    pub fn at_ms(ms: u64) -> Self {
        Self(Arc::new(AtomicU64::new(ms)))
    }

    /// Sets the clock, forwards or back, to milliseconds since the epoch.
    pub fn set_ms(&self, ms: u64) {
        self.0.store(ms, Ordering::SeqCst);
    }

    /// Moves the clock forwards, by whole milliseconds.
    pub fn advance(&self, by: Duration) {
        self.0.fetch_add(by.as_millis() as u64, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now_ms(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

impl fmt::Debug for dyn Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}
