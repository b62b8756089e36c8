//! Corrections of earlier charges: [`Adjust`].

use super::account::{Account, OwnedAccount, Windows, instant};
use crate::decision::Decision;
use crate::quota::{Quota, Quotas};
use crate::window::{State, Window};

/// A correction of an earlier charge: tokens are returned, or more of them are taken.
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
/// assert_eq!((refund.tokens(), refund.account().key()), (2, &key));
/// assert_eq!(refund.refundable_until().next().unwrap().1, 1_700_000_100_000);
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
    account: Account<'a>,
    tokens: u64,
    /// The ends of the windows that the tokens are returned to; `None` if tokens are taken.
    until: Option<[i64; Quotas::MAX]>,
    local: bool,
}

impl<'a> Adjust<'a> {
    /// Returns `tokens` that `decision` has taken: to each quota until the window of the tokens has
    /// ended. The account has the decision's quotas, in the same order; their limits may have
    /// changed.
    pub fn refund(account: Account<'a>, tokens: u64, decision: &Decision) -> Self {
        let mut until = [0; Quotas::MAX];
        let last = |i, quota: &Quota| match decision.refundable_until(i) {
            Some(until) => until,
            None if !matches!(account.windows_of(quota), Windows::Grid { .. }) => 0,
            None => account.window(decision.now_ms(), quota, |_| None).end(),
        };
        for (i, quota) in account.quotas.iter().enumerate().take(decision.usage().len()) {
            until[i] = last(i, quota);
        }
        Self { account, tokens, until: Some(until), local: decision.is_local() }
    }

    /// Takes `tokens` in addition to those of `decision`, even beyond the limit: they are used
    /// already.
    pub fn take(account: Account<'a>, tokens: u64, decision: &Decision) -> Self {
        Self { account, tokens, until: None, local: decision.is_local() }
    }

    pub(super) fn is_local(&self) -> bool {
        self.local
    }

    /// Returns the account.
    pub fn account(&self) -> Account<'a> {
        self.account
    }

    /// Returns whether tokens are returned. Such a correction never opens or revives a window.
    pub fn is_refund(&self) -> bool {
        self.until.is_some()
    }

    /// Returns a copy without borrows, for a reply that comes later.
    pub fn to_owned(&self) -> OwnedAdjust {
        let Self { account, tokens, until, local } = *self;
        OwnedAdjust { account: account.to_owned(), tokens, until, local }
    }

    /// Returns the number of tokens that are returned or taken.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Returns each quota with the instant, in milliseconds since the epoch, from which on it takes
    /// no tokens back, for a store that corrects on its server. Empty if tokens are taken.
    pub fn refundable_until(&self) -> impl Iterator<Item = (&'a Quota, u64)> + use<'a> {
        let quotas = self.account.quotas;
        let until = self.until.into_iter().flatten();
        quotas.iter().zip(until).map(|(quota, until)| (quota, until.max(0) as u64))
    }

    /// Returns what to write at `now`, given the states of the quotas.
    pub fn apply(
        &self,
        now: u64,
        mut load: impl FnMut(&Quota) -> Option<State>,
    ) -> Vec<(&'a Quota, State)> {
        let mut quotas = self.account.quotas.as_slice().iter();
        let writes = self.apply_in_order(now, || quotas.next().and_then(&mut load));
        let writes = self.account.quotas.iter().zip(writes);
        writes.filter_map(|(quota, state)| Some((quota, state?))).collect()
    }

    /// Loads the state of each quota in order, once, and returns what to write in the same order.
    pub(super) fn apply_in_order(
        &self,
        now: u64,
        mut load: impl FnMut() -> Option<State>,
    ) -> Vec<Option<State>> {
        let now = instant(now);
        let mut states = [None; Quotas::MAX];
        states.iter_mut().zip(self.account.quotas).for_each(|(of, _)| *of = load());
        #[cfg(feature = "testing")]
        crate::sync::held_up::wait();
        let window = |i, quota| self.account.window(now, quota, |_| states[i]);
        let writes = self.apply_over(now, &self.account.windows(window));
        writes.into_iter().take(self.account.quotas.len()).collect()
    }

    pub(super) fn apply_over(
        &self,
        now: i64,
        windows: &[Window<'a>; Quotas::MAX],
    ) -> [Option<State>; Quotas::MAX] {
        let mut writes = [None; Quotas::MAX];
        if self.tokens == 0 {
            return writes;
        }
        for (i, window) in windows[..self.account.quotas.len()].iter().enumerate() {
            writes[i] = match self.until {
                // A window that has ended stays ended, even if the clock has stepped back (S4).
                Some(until) if now.max(window.start()) >= until[i] => None,
                Some(until) if window.is_reserved_past(until[i]) => None,
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
    until: Option<[i64; Quotas::MAX]>,
    local: bool,
}

impl OwnedAdjust {
    /// Under the share of each of `nodes` nodes, by which a local charge was decided.
    pub(super) fn share(mut self, nodes: u64) -> Self {
        self.account.share(nodes);
        self
    }

    /// Returns the [`Adjust`].
    pub fn as_adjust(&self) -> Adjust<'_> {
        let Self { ref account, tokens, until, local } = *self;
        Adjust { account: account.as_account(), tokens, until, local }
    }
}
