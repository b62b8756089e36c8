//! The short path of nearly every charge: all of its quotas are plain, and have running windows in
//! entries of the key's own.

use super::super::super::account::Account;
use super::super::super::table::{Found, Slot};
use super::super::time::Reading;
use super::{Count, Home, Shard, state};
use crate::decision::{Decision, Ruling};
use crate::quota::Quota;
use crate::window::{State, Window};

impl Shard {
    #[inline(always)]
    pub(in crate::store::memory) fn charge_running(
        &mut self,
        now: Reading,
        quota: &Quota,
        fingerprint: u64,
        cost: u64,
    ) -> Option<(Ruling, State)> {
        let entry = self.table.entry_mut(fingerprint)?;
        let state = state(*entry);
        let ruling = Self::rule_running(now, quota, state, cost)?;
        entry.payload.used = ruling.used();
        Some((ruling, state))
    }

    #[inline(always)]
    pub(in crate::store::memory) fn rule_running(
        now: Reading,
        quota: &Quota,
        state: State,
        cost: u64,
    ) -> Option<Ruling> {
        let window = Window::running(now.at, now.latest(), state, quota)?;
        Some(Ruling::new(now.at, &window, cost))
    }

    /// Decides the first plain charge of a quota in a window, in the key's entry or in a free one.
    /// A refusal needs none. The flag says that the entry is new.
    ///
    /// `None` if the quota carries tokens over, the charge takes nothing, its window may be about
    /// to end, or the key may share a count.
    #[inline(always)]
    pub(in crate::store::memory) fn charge_first(
        &mut self,
        now: Reading,
        account: &Account<'_>,
        home: &Home,
        cost: u64,
    ) -> Option<(Decision, bool)> {
        let (quota, name) = (&account.quotas().as_slice()[0], account.scope().limit_name());
        let shares = self.overflows_until(now.at).is_some();
        let window = Window::at(now.at, None, quota, account.shift(quota));
        let is_sure = now.is_exact() || !window.is_over_at(now.at, now.latest());
        if quota.capacity != quota.limit || cost == 0 || !is_sure {
            return None;
        }
        let fingerprint = home.fingerprint(quota);
        if !window.fits(cost, false) {
            let slot = self.table.entry(fingerprint, |_| false);
            let is_first = slot.is_none_or(|slot| self.table.get(slot).until <= now.at);
            let ruling = Ruling::new(now.at, &window, cost);
            return (is_first && !shares).then(|| (ruling.into_decision(name), false));
        }
        let (slot, is_new) = match self.table.find(fingerprint, now.at, |_| false) {
            Found::Entry(slot) if self.table.get(slot).until <= now.at => (slot, false),
            Found::Free(slot) if !shares => (slot, true),
            _ => return None,
        };
        let (decision, [used]) = Decision::all_running(name, now.at, &[window], cost);
        // The count of a quota that carries nothing over ends with its window.
        self.table.set(slot, window.end(), Count { start: window.start(), used });
        Some((decision, is_new))
    }

    #[inline]
    pub(in crate::store::memory) fn set_used(&mut self, slot: Slot, used: i64) {
        self.table.payload_mut(slot).used = used;
    }

    /// `None` unless the window runs at every instant that the reading may mean.
    #[inline(always)]
    pub(in crate::store::memory) fn running<'a>(
        &self,
        now: Reading,
        quota: &'a Quota,
        home: &Home,
    ) -> Option<(Slot, Window<'a>)> {
        if !quota.is_plain() {
            return None;
        }
        let slot = self.table.entry(home.fingerprint(quota), |_| false)?;
        let state = state(self.table.get(slot));
        Some((slot, Window::running(now.at, now.latest(), state, quota)?))
    }
}
