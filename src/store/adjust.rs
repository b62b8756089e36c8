//! Corrections of earlier charges: [`Adjust`].

use std::num::NonZero;
use std::ops::Range;

use super::account::{Account, OwnedAccount, Windows, instant};
use crate::decision::Decision;
use crate::quota::{Quota, Quotas, Span};
use crate::window::{State, Window};

/// A correction of an earlier charge, which returns tokens or takes more of them.
///
/// ```
/// use tower_fixed_window::store::{Account, Adjust, Charge, Scope};
/// use tower_fixed_window::{Key, Quota};
///
/// let (scope, key) = (Scope::named("api"), Key::from("alice"));
/// let quotas = Quota::per_minute(5).into();
/// let account = Account::new(&scope, &quotas, &key);
/// let now = 1_700_000_050_000;
/// let (decision, writes) = Charge::new(account, 3).decide(now, |_, _| None);
/// let state = writes[0].2;
///
/// let refund = Adjust::refund(account, 2, &decision);
/// assert!(refund.is_refund());
/// assert_eq!((refund.tokens, refund.account.key), (2, &key));
/// let window = 1_700_000_040_000..1_700_000_100_000;
/// assert_eq!(refund.refundable_within().next().unwrap().1, window);
/// assert_eq!(refund.apply(now, |_| Some(state))[0].1.used, 1);
/// // The window has ended.
/// assert!(refund.apply(1_700_000_100_000, |_| Some(state)).is_empty());
///
/// // Beyond the limit: it was used already.
/// let more = Adjust::take(account, 4, &decision);
/// assert_eq!(more.apply(now, |_| Some(state))[0].1.used, 7);
/// assert!(!more.to_owned().as_adjust().is_refund());
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Adjust<'a> {
    /// The account.
    pub account: Account<'a>,
    /// The number of tokens that are returned or taken.
    pub tokens: u64,
    /// From the start of the window in which each quota was charged to the end of the one that covers
    /// the tokens; `None` if tokens are taken.
    within: Option<[Span; Quotas::MAX]>,
    /// If the fallback of a store that failed decided: how many nodes shared the quotas.
    local: Option<NonZero<u32>>,
}

impl<'a> Adjust<'a> {
    /// Creates a refund of `tokens` that `decision` has taken: to each quota, until the window of
    /// the tokens has ended. The account must have the decision's quotas, in the same order; their
    /// limits may have changed.
    pub fn refund(account: Account<'a>, tokens: u64, decision: &Decision) -> Self {
        let mut within = [Span::default(); Quotas::MAX];
        let window = |i, quota: &Quota| match decision.refundable_within(i) {
            Some(window) => window,
            None if !matches!(account.windows_of(quota), Windows::Grid { .. }) => Span::default(),
            None => account.window(decision.now_ms(), quota, None).span(),
        };
        for (i, quota) in account.quotas.iter().enumerate().take(decision.usage().len()) {
            within[i] = window(i, quota);
        }
        Self { account, tokens, within: Some(within), local: decision.local_nodes() }
    }

    /// Creates a charge of `tokens` in addition to those of `decision`, even beyond the limit,
    /// because they are already used.
    pub fn take(account: Account<'a>, tokens: u64, decision: &Decision) -> Self {
        Self { account, tokens, within: None, local: decision.local_nodes() }
    }

    /// If it is of a local charge: the correction under the share by which that was decided.
    pub(super) fn of_local(&self) -> Option<OwnedAdjust> {
        let nodes = self.local?;
        let mut adjust = self.to_owned();
        adjust.account.share(nodes.get().into());
        Some(adjust)
    }

    /// Returns whether tokens are returned. Such a correction opens no window and revives none that
    /// has ended.
    pub fn is_refund(&self) -> bool {
        self.within.is_some()
    }

    /// Returns a copy without borrows, for a reply that comes later.
    pub fn to_owned(&self) -> OwnedAdjust {
        let Self { account, tokens, within, local } = *self;
        OwnedAdjust { account: account.to_owned(), tokens, within, local }
    }

    /// Returns each quota with the times between which it takes tokens back, in milliseconds since
    /// the epoch, for a store that corrects on its server: from the start of the window that was
    /// charged to the end of the window that covers the tokens. Returns nothing if tokens are
    /// taken.
    pub fn refundable_within(&self) -> impl Iterator<Item = (&'a Quota, Range<i64>)> + use<'a> {
        let quotas = self.account.quotas;
        let within = self.within.into_iter().flatten();
        quotas.iter().zip(within).map(|(quota, within)| (quota, within.start..within.end))
    }

    /// Returns what to write at `now`, given the states of the quotas.
    pub fn apply(
        &self,
        now: u64,
        load: impl FnMut(&Quota) -> Option<State>,
    ) -> Vec<(&'a Quota, State)> {
        let writes = self.account.quotas.iter().zip(self.apply_in_order(now, load));
        writes.filter_map(|(quota, state)| Some((quota, state?))).collect()
    }

    /// Loads the state of each quota in order, once, and returns what to write in the same order.
    pub(super) fn apply_in_order(
        &self,
        now: u64,
        mut load: impl FnMut(&Quota) -> Option<State>,
    ) -> Vec<Option<State>> {
        let now = instant(now);
        let mut states = [None; Quotas::MAX];
        states.iter_mut().zip(self.account.quotas).for_each(|(of, quota)| *of = load(quota));
        #[cfg(feature = "testing")]
        crate::sync::held_up::wait();
        let window = |i, quota| self.account.window(now, quota, states[i]);
        let writes = self.apply_over(now, &states, &self.account.windows(window));
        writes.into_iter().take(self.account.quotas.len()).collect()
    }

    pub(super) fn apply_over(
        &self,
        now: i64,
        states: &[Option<State>; Quotas::MAX],
        windows: &[Window<'a>; Quotas::MAX],
    ) -> [Option<State>; Quotas::MAX] {
        let mut writes = [None; Quotas::MAX];
        if self.tokens == 0 {
            return writes;
        }
        for (i, window) in windows[..self.account.quotas.len()].iter().enumerate() {
            // A step back moves the window of a state, whose start still says which tokens it counts.
            let start = states[i].map_or(i64::MIN, |state| state.start).max(window.start);
            // A moved count has other instants: any debt may be of a window later than the tokens.
            let alone_until = |end| if start > window.start { window.end } else { end };
            writes[i] = match self.within {
                // A window that has ended stays ended, even if the clock has stepped back (S4).
                Some(within) if now.max(start) >= within[i].end => None,
                // A state that it has moved before may have ended since, and be of later tokens.
                Some(within) if start < within[i].start => None,
                Some(within) if window.is_reserved_past(alone_until(within[i].end)) => None,
                Some(_) => window.give_back(self.tokens),
                None => Some(window.take(self.tokens)),
            };
        }
        writes
    }
}

/// An [`Adjust`] without borrows: [`Adjust::to_owned`].
#[derive(Clone, Debug)]
pub struct OwnedAdjust {
    account: OwnedAccount,
    tokens: u64,
    within: Option<[Span; Quotas::MAX]>,
    local: Option<NonZero<u32>>,
}

impl OwnedAdjust {
    /// Returns the [`Adjust`].
    pub fn as_adjust(&self) -> Adjust<'_> {
        let Self { ref account, tokens, within, local } = *self;
        Adjust { account: account.as_account(), tokens, within, local }
    }
}
