//! Requests for several limits at once: a line of the history for each, with the same node and id.
//!
//! All lines of a request pass, or none. And what was refused has left nothing: where a limit refuses, enough
//! has passed in its window, or may have. An exact limiter that returns what it took is never reported.

use std::collections::{BTreeMap, HashMap};

use crate::check::Promise;
use crate::history::{Answer, Ask};

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

/// The refusals for which not enough has passed in an aligned window, nor may have.
pub fn unexplained<'a>(asks: &'a [Ask], promise: &Promise, returns: &Returns) -> Vec<&'a Ask> {
    let length = promise.length * 1_000;
    let start = |instant: u64| instant / length * length;
    let within = returns.within;
    let is_lost = |ask: &Ask| {
        let overlaps = |(from, to): &(u64, u64)| ask.sent <= *to && ask.received + within >= *from;
        returns.disturbed.iter().any(overlaps)
    };
    // What may be counted in each window of a key, and what was held for a moment.
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
        let mut windows = vec![start(ask.sent), start(ask.received)];
        windows.dedup();
        for window in windows {
            *counted.entry((ask.key, window)).or_default() += ask.cost;
        }
    }
    let is_unexplained = |ask: &&Ask| {
        let window = start(ask.sent);
        // On an edge, it may have been decided in either window.
        if ask.answer != Answer::Refused || window != start(ask.received) {
            return false;
        }
        let counted = counted.get(&(ask.key, window)).copied().unwrap_or(0);
        let may_be_known =
            |other: &&&Ask| other.sent <= ask.received && other.received + within >= ask.sent;
        let held = || {
            let held = held.get(&ask.key).into_iter().flatten().filter(may_be_known);
            held.map(|other| other.cost).sum::<u64>()
        };
        let has_room = |held: u64| counted + held + ask.cost <= promise.limit;
        // Most refusals are explained by what has passed.
        has_room(0) && has_room(held())
    };
    asks.iter().filter(is_unexplained).collect()
}
