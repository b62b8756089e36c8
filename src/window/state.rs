//! The state of a window that a store keeps: [`State`].

use crate::quota::Quota;

/// The last instant, and the largest count: everything saturates here (S11).
pub(crate) const MAX: i64 = Quota::MAX_TOKENS as i64;

/// The state that a store keeps for one quota of one key. Instants are milliseconds since the
/// epoch. Later versions may add fields, so a store begins with the default and sets what it has
/// read:
///
/// ```
/// use tower_fixed_window::store::State;
///
/// let mut state = State::default();
/// (state.start, state.used, state.until) = (1_700_000_040_000, 3, 1_700_000_100_000);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct State {
    /// The start of the window that was last written.
    pub start: i64,
    /// Tokens taken. Negative while more than the limit is left (rollover), above the limit in
    /// debt.
    pub used: i64,
    /// From here on there is no state.
    pub until: i64,
}

/// The end of a state.
#[derive(Clone, Copy, Debug)]
pub(super) enum StateEnd {
    /// There is no state: a new key.
    New,
    At(i64),
    /// The state is stored in a later window, since the clock stepped back (S4).
    Moved(i64),
}

impl StateEnd {
    #[inline]
    pub(super) fn known(self) -> Option<i64> {
        match self {
            Self::New => None,
            Self::At(until) | Self::Moved(until) => Some(until),
        }
    }

    pub(super) fn map(self, f: impl FnOnce(i64) -> i64) -> Self {
        match self {
            Self::New => Self::New,
            Self::At(until) => Self::At(f(until)),
            Self::Moved(until) => Self::Moved(f(until)),
        }
    }
}
