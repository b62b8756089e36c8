//! Grids: windows of one length, laid end to end.

use super::state::MAX;
use crate::quota::{Anchor, Quota, fmix64};

/// Returns the start of the window around `now`.
#[inline]
pub(super) fn grid(now: i64, quota: &Quota, shift: u64) -> i64 {
    let offset = match quota.anchor {
        Anchor::Grid { offset } => offset,
        Anchor::Staggered => shift % quota.window,
        Anchor::FirstRequest | Anchor::Calendar(_) => return now,
    };
    now - (now - offset as i64).rem_euclid(quota.window as i64)
}

/// Returns the end of a window.
#[inline]
pub(super) fn end(start: i64, quota: &Quota) -> i64 {
    start.saturating_add(quota.window as i64).min(MAX)
}

/// Returns the shift of a staggered grid for a scope and an encoded key: FNV-1a, finished by
/// MurmurHash3's fmix64 (S2). The shift is the same on every node, for ever.
pub(crate) fn stagger(scope: &str, key: &[u8]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in scope.bytes().chain(key.iter().copied()) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    fmix64(hash)
}
