//! Windows whose beginnings are known, and spans of them that follow each other.
//!
//! In each span no more passes than its windows grant, with what may be there at its beginning. For one window
//! that is its limit; where tokens are kept or taken in advance, or requests wait for theirs, only longer
//! spans show it.

use std::collections::BTreeSet;

use crate::check::{Pass, Promise, Windows};

/// Longer spans are not looked at.
pub(crate) const LONGEST: u64 = 64;

impl Promise {
    pub(crate) fn has_known_windows(&self) -> bool {
        matches!(self.windows, Windows::Aligned | Windows::Listed)
    }

    /// The number of the window that an instant is in.
    pub(crate) fn window(&self, at: u64) -> u64 {
        match self.windows {
            Windows::Listed => self.starts.partition_point(|start| *start <= at) as u64,
            _ => at / (self.length * 1_000),
        }
    }

    /// When a window begins.
    fn start(&self, window: u64) -> u64 {
        match (self.windows, window) {
            (Windows::Listed, 0) => 0,
            (Windows::Listed, n) => self.starts.get(n as usize - 1).copied().unwrap_or(u64::MAX),
            (_, n) => n * self.length * 1_000,
        }
    }

    /// The most that may be taken in a window and in `later` windows after it.
    pub(crate) fn granted(&self, later: u64) -> u64 {
        self.capacity + self.reserved + self.limit * later
    }

    /// The tokens that may run in these windows. The last request of a window may run there as a
    /// whole, if part of its cost is left for the next.
    fn running(&self, later: u64, most: u64) -> u64 {
        let begun = self.limit * (later + 1) + most.saturating_sub(1);
        begun.max(self.capacity + self.limit * later)
    }
}

/// By how much the worst span is above what it grants, and when it begins.
pub(crate) fn spans(passes: &[Pass], promise: &Promise, losses: &[(u64, u64)]) -> (u64, u64) {
    // A refund in the window that covers the request brings what earlier windows have covered of it.
    let returned = passes.iter().filter(|pass| pass.returned.is_some() && pass.due.is_some());
    let brought = returned.map(|pass| pass.cost.saturating_sub(1)).max().unwrap_or(0);
    let counted = worst(passes, promise, losses, |later| promise.granted(later) + brought);
    // Requests reserved before a loss may run after it, and refunded ones don't run.
    if promise.reserved == 0 || !losses.is_empty() {
        return counted;
    }
    let run = |pass: &Pass| match pass.due {
        Some(due) => Pass { sent: due, received: due, ..*pass },
        None => *pass,
    };
    let run: Vec<_> = passes.iter().filter(|pass| pass.returned.is_none()).map(run).collect();
    // A refunded request may have left others where it ended.
    let most = passes.iter().map(|pass| pass.cost).max().unwrap_or(0);
    counted.max(worst(&run, promise, losses, |later| promise.running(later, most)))
}

fn worst(
    passes: &[Pass],
    promise: &Promise,
    losses: &[(u64, u64)],
    granted: impl Fn(u64) -> u64,
) -> (u64, u64) {
    // Tokens held from an instant on, and the window of their request.
    let mut changes = Vec::<(u64, i64, u64)>::new();
    for pass in passes {
        let sent = promise.window(pass.sent);
        changes.push((pass.received, pass.cost as i64, sent));
        // From here on the limiter may have them back: in their window, or in that which covers them.
        let last = promise.window(pass.due.unwrap_or(pass.received));
        let returned = pass.returned.filter(|at| promise.window(*at) <= last);
        changes.extend(returned.map(|at| (at, -(pass.cost as i64), sent)));
    }
    // At one instant, what comes back comes first.
    changes.sort_unstable();
    let firsts: BTreeSet<_> = changes.iter().map(|change| change.2).collect();
    let mut most = (0, 0);
    for first in firsts {
        let start = promise.start(first);
        let mut held = 0;
        for &(at, change, sent) in &changes[changes.partition_point(|change| change.0 < start)..] {
            let last = promise.window(at);
            if last - first >= LONGEST {
                break;
            }
            if sent < first {
                continue;
            }
            held += change;
            let end = promise.start(last + 1);
            let lost =
                losses.iter().filter(|(from, to)| *from < end && *to >= start).count() as u64;
            let allowed = granted(last - first) * (1 + lost);
            most = most.max((held.max(0).cast_unsigned().saturating_sub(allowed), start));
        }
    }
    most
}
