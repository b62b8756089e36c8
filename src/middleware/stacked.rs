//! Stacked layers: a request may be dropped after an inner layer has refused it, while the rest of
//! its body is read. The outer layers then refund their charges (S9). Otherwise a client could use
//! up a limit that it shares with others, by uploads that it breaks off.

use std::cell::Cell;

thread_local! {
    /// Set by futures of refused requests that are dropped, and read by the future of an outer
    /// layer, which drops them. Nothing has to be passed along with requests that are not dropped.
    static REFUSED: Cell<bool> = const { Cell::new(false) };
}

/// Notes that this layer has refused the request that is being dropped.
pub(super) fn note_refused() {
    REFUSED.set(true);
}

/// Drops the future of the inner service. Returns whether a layer in there had refused the request.
pub(super) fn drop_inside(drop: impl FnOnce()) -> bool {
    let outside = REFUSED.replace(false);
    drop();
    let refused = REFUSED.get();
    REFUSED.set(outside || refused);
    refused
}
