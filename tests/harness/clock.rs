//! Clocks for tests.

use tokio::time::Instant;
use tower_fixed_window::Clock;

/// A wall clock that moves with tokio's: in a test that pauses tokio's, only while all tasks wait.
#[derive(Clone, Copy)]
pub struct TokioClock {
    start: Instant,
    start_ms: u64,
}

impl TokioClock {
    /// The clock shows this time now.
    pub fn at_ms(start_ms: u64) -> Self {
        Self { start: Instant::now(), start_ms }
    }
}

impl Clock for TokioClock {
    fn now_ms(&self) -> u64 {
        self.start_ms + self.start.elapsed().as_millis() as u64
    }
}
