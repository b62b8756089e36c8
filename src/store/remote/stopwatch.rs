//! Time as it passes in this process, beside that of a store elsewhere.

use std::ops::Range;

use crate::decision::Decision;
use crate::timer::Instant;

/// Milliseconds since then, by a clock that only goes on.
pub(super) fn passed(since: Instant) -> i64 {
    let elapsed = since.elapsed();
    // `as_millis` would count in 128 bits.
    (elapsed.as_secs() * 1_000) as i64 + i64::from(elapsed.subsec_millis())
}

/// By how much the store's clock is ahead, at least and at most, given a decision that has just
/// come, and when it was asked for. The question and the answer took time: what the store said ends
/// early, counted from when it was asked, and says `now` late, from when it answered.
pub(super) fn lag(since: Instant, decision: &Decision, sent_at: i64) -> Range<i64> {
    // Rounded up: what the store said is not made younger.
    let received = since.elapsed().as_nanos().div_ceil(1_000_000) as i64;
    // One more: it was a fraction of a millisecond later than the store says.
    decision.now_ms() - received..decision.now_ms() - sent_at + 1
}
