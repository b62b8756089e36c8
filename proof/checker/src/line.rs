//! Requests that wait in line for their tokens: one line for each key of each node.
//!
//! A window in which one waits from beginning to end is used up, and nobody overtakes. Where a request was
//! decided is known from its answer only, so that an answer may be late by a window.

use std::collections::HashMap;

use crate::check::Promise;
use crate::history::{Answer, Ask};

/// Charges in flight at once may be granted in any order (S13), in microseconds.
const AT_ONCE: u64 = 20_000;

/// Requests that were answered at least two windows later than a request of at least their cost that
/// joined their line after them. A smaller one may pass where a larger one does not fit, since several
/// of a line are charged at once. A head of the line that is not polled may miss a window.
pub fn overtaken<'a>(asks: &'a [Ask], promise: &Promise) -> Vec<&'a Ask> {
    let mut lines = HashMap::<(u32, u32), Vec<&Ask>>::new();
    for ask in asks.iter().filter(|ask| ask.passed()) {
        lines.entry((ask.node, ask.key)).or_default().push(ask);
    }
    let mut overtaken = Vec::new();
    for mut passed in lines.into_values() {
        passed.sort_unstable_by_key(|ask| ask.sent);
        let is_overtaken = |ask: &&&Ask| {
            let Some(joined) = ask.joined else { return false };
            let later = passed.partition_point(|other| other.sent <= joined + AT_ONCE);
            let later = passed[later..].iter().filter(|other| other.cost >= ask.cost);
            let first = later.map(|other| other.received).min();
            first.is_some_and(|first| promise.window(first) + 2 <= promise.window(ask.received))
        };
        overtaken.extend(passed.iter().filter(is_overtaken));
    }
    overtaken
}

/// Windows of a key that were not used up, by their number, although one waited from before their beginning
/// until after their end.
pub fn idle(asks: &[Ask], promise: &Promise) -> Vec<(u32, u64)> {
    let most = asks.iter().map(|ask| ask.cost).max().unwrap_or(0);
    let mut used = HashMap::<(u32, u64), u64>::new();
    for ask in asks.iter().filter(|ask| ask.answer != Answer::Refused) {
        // The answer may be late.
        let received = promise.window(ask.received);
        let first = received.saturating_sub(1).max(promise.window(ask.sent));
        (first..=received)
            .for_each(|window| *used.entry((ask.key, window)).or_default() += ask.cost);
    }
    let waited = asks.iter().filter(|ask| ask.joined.is_some()).flat_map(|ask| {
        let windows =
            promise.window(ask.joined.unwrap_or(ask.sent)) + 1..promise.window(ask.received);
        windows.map(|window| (ask.key, window))
    });
    let is_idle = |of: &(u32, u64)| {
        // The tokens that are left may be too few for the head.
        used.get(of).copied().unwrap_or(0) + most <= promise.limit
    };
    let mut idle: Vec<_> = waited.filter(is_idle).collect();
    idle.sort_unstable();
    idle.dedup();
    idle
}
