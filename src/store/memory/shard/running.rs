//! The short path of nearly every charge: all of its quotas are plain, and have running windows in
//! entries of the key's own.

use super::super::super::table::Slot;
use super::super::time::Reading;
use super::{Count, Home, Shard, state};
use crate::decision::{Ask, Decision};
use crate::quota::Quota;
use crate::window::{State, Window};

impl Shard {
    /// Decides what nearly every charge is: plain, of one quota, in a window that runs.
    #[inline(always)]
    pub(in crate::store::memory) fn charge_running(
        &mut self,
        now: Reading,
        quota: &Quota,
        home: &Home,
        ask: Ask,
    ) -> Option<Decision> {
        if !ask.is_plain() {
            return None;
        }
        let (slot, window) = self.running(now, quota, home)?;
        let (decision, used) = Decision::running(now.at, &window, ask.cost);
        // A refusal writes nothing.
        if let Some(used) = used {
            self.table.set(slot, window.end(), Count { start: window.start(), used });
        }
        Some(decision)
    }

    /// The same over several quotas.
    #[inline(always)]
    pub(in crate::store::memory) fn charge_all_running<const N: usize>(
        &mut self,
        now: Reading,
        quotas: &[Quota],
        home: &Home,
        ask: Ask,
    ) -> Option<Decision> {
        let (slot, window) = self.running(now, &quotas[0], home)?;
        let (mut slots, mut windows) = ([slot; N], [window; N]);
        for (i, quota) in quotas.iter().enumerate().skip(1) {
            (slots[i], windows[i]) = self.running(now, quota, home)?;
        }
        let (decision, writes) = Decision::over::<N>(now.at, &windows[..quotas.len()], ask);
        let writes = writes.into_iter().flatten().take(quotas.len());
        for (slot, State { start, used, until }) in slots.into_iter().zip(writes) {
            self.table.set(slot, until, Count { start, used });
        }
        Some(decision)
    }

    /// The key's own entry for a plain quota, in a window that still runs whenever it is now.
    #[inline(always)]
    fn running<'a>(
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
