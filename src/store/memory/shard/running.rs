//! The short path of nearly every charge: all of its quotas are plain, and have running windows in
//! entries of the key's own.

use super::super::super::account::Account;
use super::super::super::table::{Found, Slot};
use super::super::time::Reading;
use super::{Count, Home, Shard, state};
use crate::decision::{Ruling, Usage};
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
        let window = Window::running(now.at, now.latest, state, quota)?;
        Some(Ruling::new(now.at, Usage::from_window(&window), cost))
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
    ) -> Option<(Ruling, bool)> {
        let quota = account.quotas().first();
        let shares = self.overflows_until(now.at).is_some();
        let window = Window::at(now.at, None, quota, account.shift(quota));
        let is_sure = now.is_exact() || !window.is_over_at(now.at, now.latest);
        if quota.capacity != quota.limit || cost == 0 || !is_sure {
            return None;
        }
        let (fingerprint, ruling) =
            (home.fingerprint(quota), Ruling::new(now.at, Usage::from_window(&window), cost));
        if !ruling.passed() {
            let slot = self.table.entry(fingerprint, |_| false);
            let is_first = slot.is_none_or(|slot| self.table.get(slot).until <= now.at);
            return (is_first && !shares).then_some((ruling, false));
        }
        let (slot, is_new) = match self.table.find(fingerprint, now.at, |_| false) {
            Found::Entry(slot) if self.table.get(slot).until <= now.at => (slot, false),
            Found::Free(slot) if !shares => (slot, true),
            _ => return None,
        };
        // The count of a quota that carries nothing over ends with its window.
        let count = Count { start: window.start(), used: ruling.used() };
        self.table.set(slot, window.end(), count);
        Some((ruling, is_new))
    }

    /// `None` unless the window runs at every instant that the reading may mean.
    #[inline(always)]
    pub(in crate::store::memory) fn running(
        &self,
        now: Reading,
        quota: &Quota,
        home: &Home,
    ) -> Option<(Slot, Usage)> {
        if !quota.is_plain() {
            return None;
        }
        let (slot, entry) = self.table.placed(home.fingerprint(quota))?;
        let window = Window::running(now.at, now.latest, state(entry), quota)?;
        Some((slot, Usage::from_window(&window)))
    }

    /// Takes tokens of a plain quota, whose window runs and has them.
    #[inline(always)]
    pub(in crate::store::memory) fn take_running(&mut self, slot: Slot, cost: u64) {
        self.table.get_mut(slot).payload.used += cost as i64;
    }
}
