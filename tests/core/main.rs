//! Everything below HTTP, a module for each promise. Time is a manual clock's or tokio's paused
//! clock's, and in `edges` also the system's.

mod all_or_none;
mod arithmetic;
mod calendars;
mod conformance;
mod decisions;
mod edges;
mod every_small_case;
mod kept_receipts;
mod keys;
mod memory;
mod overflow;
mod pairs;
mod quotas;
mod reference;
mod remembered_refusals;
mod reservations;
#[cfg(unix)]
mod saved;
mod shared_calls;
mod simulated_server;
mod trace;

use std::ops::Range;

use tower_fixed_window::store::{Account, Reply, Windows};
use tower_fixed_window::{Decision, Key, Limiter, Limits, Line, Quota, Receipt};

/// Unwraps a reply of a store in memory, which is there at once and never an error.
pub(crate) fn answer<T>(reply: Reply<T>) -> T {
    reply.into_now().expect("memory answers at once").expect("and does not fail")
}

/// The window of a quota around an instant, in milliseconds since the epoch.
pub(crate) fn window_at(account: &Account<'_>, quota: &Quota, at: i64) -> Range<i64> {
    let length = quota.window().as_millis() as i64;
    match account.windows_of(quota) {
        Windows::Grid { start } => {
            let start = at - (at - start as i64).rem_euclid(length);
            start..start + length
        }
        Windows::FromFirstRequest => at..at + length,
        Windows::OnCalendar(calendar) => {
            let number = calendar.number(at);
            calendar.start_of(number)..calendar.start_of(number + 1)
        }
    }
}

/// The size of a test: full with `FULL_SIZE=1`, else a part of it.
pub(crate) fn sized<T>(part: T, all: T) -> T {
    if std::env::var_os("FULL_SIZE").is_some() { all } else { part }
}

/// A peek at whether a cost would pass.
pub(crate) fn peek(limiter: &Limiter, key: impl Into<Key>, cost: u64) -> Decision {
    answer(Limits::from(limiter).peek([Line::new(limiter.name(), key, cost)]))
}

/// A charge or a reservation, with a receipt if it passed.
pub(crate) fn charge(
    limiter: &Limiter,
    key: impl Into<Key>,
    cost: u64,
    reserve: bool,
) -> (Decision, Option<Receipt>) {
    let charged = answer(match reserve {
        true => limiter.reserve(key, cost),
        false => limiter.charge(key, cost),
    });
    match charged {
        Ok(receipt) => (receipt.decision().clone(), Some(receipt)),
        Err(refused) => (refused.decision().clone(), None),
    }
}
