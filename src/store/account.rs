//! The counters of a key: [`Account`].

use super::scope::Scope;
use crate::key::Key;
use crate::quota::{Anchor, MAX_TOKENS, Quota, Quotas};
use crate::window::{State, Window, stagger};

/// The counters of a key, under a scope, for a set of quotas.
#[derive(Clone, Copy, Debug)]
pub struct Account<'a> {
    pub(super) scope: &'a Scope,
    pub(super) quotas: &'a Quotas,
    pub(super) key: &'a Key,
}

impl<'a> Account<'a> {
    /// Returns the counters of `key` under `scope` for `quotas`.
    pub fn new(scope: &'a Scope, quotas: &'a Quotas, key: &'a Key) -> Self {
        Self { scope, quotas, key }
    }

    /// Returns the name of the counters.
    pub fn scope(&self) -> &'a Scope {
        self.scope
    }

    /// Returns the quotas.
    pub fn quotas(&self) -> &'a Quotas {
        self.quotas
    }

    /// Returns the key.
    pub fn key(&self) -> &'a Key {
        self.key
    }

    /// Returns a copy without borrows, for a reply that comes later.
    pub fn to_owned(&self) -> OwnedAccount {
        OwnedAccount { scope: self.scope.clone(), quotas: *self.quotas, key: self.key.clone() }
    }

    /// Where the grid of one of the quotas is shifted to, if it is staggered.
    #[inline]
    pub(crate) fn shift(&self, quota: &Quota) -> u64 {
        shift(self.scope, self.key, quota)
    }

    /// Where the grid of a quota passes through, less than a window after the epoch; `None`: it has
    /// none, windows begin with the first charge or on days of a calendar.
    pub(crate) fn grid(&self, quota: &Quota) -> Option<u64> {
        match quota.anchor {
            Anchor::Grid { offset } => Some(offset),
            Anchor::Staggered => Some(self.shift(quota) % quota.window),
            Anchor::FirstRequest | Anchor::Calendar(_) => None,
        }
    }

    /// A window for each quota; the first one's stands also in the places from there on to `N`.
    #[inline(always)]
    pub(super) fn windows<const N: usize>(
        &self,
        mut window: impl FnMut(usize, &'a Quota) -> Window<'a>,
    ) -> [Window<'a>; N] {
        let quotas = self.quotas.as_slice();
        let mut windows = [window(0, &quotas[0]); N];
        if N > 1 {
            for (i, quota) in quotas.iter().enumerate().skip(1) {
                windows[i] = window(i, quota);
            }
        }
        windows
    }

    #[inline]
    pub(super) fn window(
        &self,
        now: i64,
        quota: &'a Quota,
        load: impl FnOnce(&Quota) -> Option<State>,
    ) -> Window<'a> {
        Window::at(now, load(quota), quota, self.shift(quota))
    }
}

/// An [`Account`] without borrows.
#[derive(Clone, Debug)]
pub struct OwnedAccount {
    scope: Scope,
    quotas: Quotas,
    key: Key,
}

impl OwnedAccount {
    /// The same under the limits that are in force now.
    pub(crate) fn updated(mut self, current: &Quotas) -> Self {
        self.quotas = self.quotas.updated(current);
        self
    }

    /// Returns the account.
    pub fn as_account(&self) -> Account<'_> {
        Account::new(&self.scope, &self.quotas, &self.key)
    }
}

/// Where the grid of a staggered quota is shifted to for a key.
#[inline]
pub(super) fn shift(scope: &Scope, key: &Key, quota: &Quota) -> u64 {
    match quota.anchor {
        Anchor::Staggered => stagger(scope.name(), key.as_bytes()),
        _ => 0,
    }
}

/// A reading of a clock, as the arithmetic takes it.
#[inline]
pub(crate) fn instant(now: u64) -> i64 {
    // One less than the latest `until`, which is never reached.
    now.min(MAX_TOKENS - 1) as i64
}
