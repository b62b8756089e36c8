//! Requests for several quotas of a key, and for several limits at once: of these, a line of the history for
//! each, with the same node and id.
//!
//! All lines of a request pass, or none. And what was refused has left nothing: where a limit refuses, enough
//! has passed under one of its quotas, or may have. An exact limiter that returns what it took is never
//! reported.

use std::collections::{BTreeMap, HashMap};

use crate::check::Promise;
use crate::history::{Answer, Ask};
use crate::spans::LONGEST;

/// The requests of which some lines have passed and others have not, by node and id.
pub fn torn(asks: &[Ask]) -> Vec<(u32, u64)> {
    let mut requests = BTreeMap::<(u32, u64), [bool; 2]>::new();
    for ask in asks {
        requests.entry((ask.node, ask.id)).or_default()[usize::from(ask.passed())] = true;
    }
    requests.into_iter().filter(|(_, seen)| *seen == [true; 2]).map(|(id, _)| id).collect()
}

/// When what was taken may have stayed, and for how long it may be held otherwise. In microseconds.
#[derive(Clone, Debug)]
pub struct Returns {
    /// So long after its refusal a request may still hold tokens, or others may know of them.
    pub within: u64,
    /// Then calls may have been lost.
    pub disturbed: Vec<(u64, u64)>,
}

/// The refusals for which not enough has passed under any of the key's quotas, nor may have. It has to be
/// known when their windows begin.
pub fn unexplained<'a>(asks: &'a [Ask], quotas: &[Promise], returns: &Returns) -> Vec<&'a Ask> {
    let mut left: Vec<_> = asks.iter().filter(|ask| ask.answer == Answer::Refused).collect();
    for quota in quotas {
        let has_room = room(asks, quota, returns);
        left.retain(|ask| has_room(ask));
    }
    left
}

/// Returns `true` if a refused request would have fit under a quota, for all that is known.
fn room<'a>(
    asks: &'a [Ask],
    promise: &'a Promise,
    returns: &Returns,
) -> impl Fn(&Ask) -> bool + use<'a> {
    let within = returns.within;
    let is_lost = |ask: &Ask| {
        let overlaps = |(from, to): &(u64, u64)| ask.sent <= *to && ask.received + within >= *from;
        returns.disturbed.iter().any(overlaps)
    };
    // Tokens that may be counted in each window of a key, and tokens that were held for a moment.
    let mut counted = HashMap::<(u32, u64), u64>::new();
    let mut held = HashMap::<u32, Vec<&Ask>>::new();
    for ask in asks {
        let stays = match ask.answer {
            Answer::Refused => continue,
            Answer::Undone => is_lost(ask),
            _ => true,
        };
        if !stays {
            held.entry(ask.key).or_default().push(ask);
            continue;
        }
        // In either window, if it was decided on an edge.
        let mut windows = vec![promise.window(ask.sent), promise.window(ask.received)];
        windows.dedup();
        for window in windows {
            *counted.entry((ask.key, window)).or_default() += ask.cost;
        }
    }
    // Windows before this one may have left it more, or less.
    let before = if promise.granted(0) > promise.limit { LONGEST } else { 0 };
    move |ask| {
        let window = promise.window(ask.sent);
        // On an edge, it may have been decided in either window.
        if window != promise.window(ask.received) {
            return false;
        }
        let may_be_known =
            |other: &&&Ask| other.sent <= ask.received && other.received + within >= ask.sent;
        let held = || {
            let held = held.get(&ask.key).into_iter().flatten().filter(may_be_known);
            held.map(|other| other.cost).sum::<u64>()
        };
        let has_room = |held: u64| {
            let mut counted_since = 0;
            (0..=before.min(window)).all(|later| {
                let first = (ask.key, window - later);
                counted_since += counted.get(&first).copied().unwrap_or(0);
                counted_since + held + ask.cost <= promise.granted(later)
            })
        };
        // Most refusals are explained by what has passed.
        has_room(0) && has_room(held())
    }
}
