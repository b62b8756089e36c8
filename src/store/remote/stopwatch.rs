//! The time that passes in this process, and how far the clock of a store elsewhere is ahead.

use std::ops::Range;

use crate::decision::Decision;
use crate::timer::Instant;

/// Returns the milliseconds since then, by a clock that never steps back.
pub(super) fn passed(since: Instant) -> i64 {
    let elapsed = since.elapsed();
    // `as_millis` would count in 128 bits.
    (elapsed.as_secs() * 1_000) as i64 + i64::from(elapsed.subsec_millis())
}

/// Returns by how much the store's clock is ahead, at least and at most. The store read it after
/// `sent_at`, when it was asked, and before `decision` arrived, which is now. With the most, an end
/// that the store has given comes early; with the least, the store's time is taken as late.
pub(super) fn lag(since: Instant, decision: &Decision, sent_at: i64) -> Range<i64> {
    // Rounded up, so that the decision does not seem younger than it is.
    let received = since.elapsed().as_nanos().div_ceil(1_000_000) as i64;
    // Plus 1: the store's clock leaves out a fraction of a millisecond.
    decision.now_ms() - received..decision.now_ms() - sent_at + 1
}
