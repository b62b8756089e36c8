//! What the crate tells its operator. The only file that knows `tracing`.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::sync::{Mutex, PoisonError};

/// Tells how to mend a mistake in the set-up, once for each mistake in the life of the process.
/// Without the `tracing` feature it goes to standard error: a service that answers 500 in silence
/// would be worse than a line that nobody asked for.
pub(crate) fn mistake(fix: &impl Display) {
    /// Enough for every mistake of one app; a message of changing content does not fill memory.
    const MOST: usize = 64;
    static TOLD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

    let fix = fix.to_string();
    let mut told = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
    if told.len() < MOST && !told.contains(&fix) {
        #[cfg(feature = "tracing")]
        tracing::error!(target: "tower_fixed_window", "{fix}");
        #[cfg(not(feature = "tracing"))]
        eprintln!("tower_fixed_window: {fix}");
        told.insert(fix);
    }
}

/// Tells that a store in memory is full, so that keys share entries: how large it is, and how many
/// charges that has met so far. It is for the caller not to say so too often.
pub(crate) fn overflow(max_keys: usize, overflowed: u64) {
    const WHAT: &str = "the memory store is full: new keys share entries and may be refused early. \
        Either somebody sends requests under ever new keys (put a limit per address in front), or \
        it is too small (MemoryStore::with_max_keys)";

    #[cfg(feature = "tracing")]
    tracing::warn!(target: "tower_fixed_window", max_keys, overflowed, "{WHAT}");
    #[cfg(not(feature = "tracing"))]
    eprintln!("tower_fixed_window: {WHAT} max_keys={max_keys} overflowed={overflowed}");
}
