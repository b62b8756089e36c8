//! The short path of nearly every charge: all of its quotas are plain, and have running windows in
//! entries of the key's own.

use super::super::super::account::Account;
use super::super::super::table::{Found, Slot};
use super::super::time::Reading;
use super::{Count, Home, Shard, state};
use crate::decision::{Ask, Decision, LimitName, Ruling};
use crate::quota::Quota;
use crate::window::{State, Window};

impl Shard {
    /// Decides a plain charge of one plain quota in a window that runs. Returns the state that was
    /// found, too.
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

    /// Decides a charge of a plain quota by a state whose window runs.
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

    /// Decides the first charge of a quota in a window, in the key's entry or in a free one.
    /// Returns the decision, and whether the entry is new. Returns `None` if the charge is not
    /// plain, does not pass or takes nothing, if its window may be about to end, or if the key may
    /// share a count.
    #[inline(always)]
    pub(in crate::store::memory) fn charge_first(
        &mut self,
        now: Reading,
        account: &Account<'_>,
        home: &Home,
        ask: Ask,
    ) -> Option<(Decision, bool)> {
        let quota = &account.quotas().as_slice()[0];
        if !ask.is_plain() || !quota.is_plain() || ask.cost == 0 {
            return None;
        }
        let (slot, is_new) = match self.table.find(home.fingerprint(quota), now.at, |_| false) {
            Found::Entry(slot) if self.table.get(slot).until <= now.at => (slot, false),
            Found::Free(slot) if self.overflows_until(now.at).is_none() => (slot, true),
            _ => return None,
        };
        let window = Window::at(now.at, None, quota, account.shift(quota));
        let is_sure = now.is_exact() || !window.is_over_at(now.at, now.latest());
        if !is_sure || !window.fits(ask.cost, false) {
            return None;
        }
        let name = account.scope().limit_name();
        let (decision, used) = Decision::running_passed(name, now.at, &window, ask.cost);
        // The count of a plain quota ends with its window.
        self.table.set(slot, window.end(), Count { start: window.start(), used });
        Some((decision, is_new))
    }

    /// Decides a plain charge of exactly `N` quotas in windows that run.
    #[inline(always)]
    pub(in crate::store::memory) fn charge_all_running<const N: usize>(
        &mut self,
        now: Reading,
        account: &Account<'_>,
        quotas: &[Quota; N],
        home: &Home,
        ask: Ask,
    ) -> Option<Decision> {
        if !ask.is_plain() {
            return None;
        }
        let (slot, window) = self.running(now, &quotas[0], home)?;
        let (mut slots, mut windows) = ([slot; N], [window; N]);
        for i in 1..N {
            (slots[i], windows[i]) = self.running(now, &quotas[i], home)?;
        }
        let name = account.scope().limit_name();
        let Some((decision, used)) = Decision::all_running(name, now.at, &windows, ask.cost) else {
            // A refusal writes nothing.
            return Some(refuse(name, now.at, windows, ask));
        };
        slots.into_iter().zip(used).for_each(|(slot, used)| self.set_used(slot, used));
        Some(decision)
    }

    /// Sets the used tokens of an entry.
    #[inline]
    pub(in crate::store::memory) fn set_used(&mut self, slot: Slot, used: i64) {
        self.table.payload_mut(slot).used = used;
    }

    /// Returns the key's own entry for a plain quota, if its window runs at every instant that the
    /// reading may mean.
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

/// Refuses a charge. Not inlined, so that a charge that passes needs no stack for it.
#[inline(never)]
fn refuse<const N: usize>(
    name: LimitName,
    now: i64,
    windows: [Window<'_>; N],
    ask: Ask,
) -> Decision {
    Decision::over::<N>(name, now, &windows, ask).0
}
