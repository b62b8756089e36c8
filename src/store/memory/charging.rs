//! A charge of one line: the short path of nearly every charge, and the way of all others.

use super::super::account::Account;
use super::super::charge::Charge;
use super::super::reply::Reply;
use super::MemoryStore;
use super::shard::{CountedIn, Home, Shard};
use super::time::Reading;
use crate::decision::{Decision, Ruling};
use crate::quota::Quotas;
use crate::sync::MutexGuard;

impl MemoryStore {
    /// Does the same as [`Store::charge`], but returns the ruling of a usual charge: it stays in
    /// registers until its decision is made where the reply will be.
    ///
    /// # Errors
    /// The reply to any other charge.
    #[inline(always)]
    pub(crate) fn rule(&self, charge: Charge<'_>) -> Result<Ruling, Reply<Decision>> {
        let Account { scope, quotas, key } = charge.account();
        if !charge.is_single() {
            return Err(self.charge_lines(charge));
        }
        let [quota] = quotas.as_slice() else { return Err(self.charge_quotas(charge)) };
        if !charge.is_plain() || !quota.is_plain() {
            return Err(self.charge_specially(charge));
        }
        let (shard, hash) = self.memory.shards.shard_of(scope, key);
        let (time, home) = (&self.memory.time, Home { hash, scope: scope.id() });
        let (fingerprint, cost) = (home.fingerprint(quota), charge.cost());
        if let Some(ruling) = shard.refuse_again(time, quota, fingerprint, cost) {
            return Ok(ruling);
        }
        let now = time.recently();
        let mut shard = shard.lock_for_charge();
        shard.charge(now, quota, fingerprint, cost).ok_or_else(|| {
            let mut shard = shard.into_any();
            let now = self.enter(now, &mut shard);
            self.decide::<1>(charge, now, shard, home)
        })
    }

    /// Decides a charge of one quota that reserves, peeks, or takes what there is, or whose quota
    /// is not plain.
    #[inline(never)]
    fn charge_specially(&self, charge: Charge<'_>) -> Reply<Decision> {
        let (now, shard, home) = self.find_for(&charge);
        self.decide::<1>(charge, now, shard, home)
    }

    /// Decides a charge of several quotas.
    #[inline(never)]
    fn charge_quotas(&self, charge: Charge<'_>) -> Reply<Decision> {
        let (now, shard, home) = self.find_for(&charge);
        match charge.account().quotas().len() {
            2 => self.decide::<2>(charge, now, shard, home),
            3 => self.decide::<3>(charge, now, shard, home),
            _ => self.decide::<{ Quotas::MAX }>(charge, now, shard, home),
        }
    }

    /// Locks the shard of a charge's key, as [`find`](Self::find) does.
    #[inline(always)]
    fn find_for(&self, charge: &Charge<'_>) -> (Reading, MutexGuard<'_, Shard>, Home) {
        let Account { scope, key, .. } = charge.account();
        // A request that waits for a window counts the time until it ends.
        let time = &self.memory.time;
        let now = if charge.may_reserve() { time.now() } else { time.recently() };
        self.find(now, scope, key)
    }

    /// Decides a charge of at most `N` quotas. Not inlined, so that the usual charge needs no stack
    /// for it.
    #[inline(never)]
    fn decide<const N: usize>(
        &self,
        charge: Charge<'_>,
        mut now: Reading,
        mut shard: MutexGuard<'_, Shard>,
        home: Home,
    ) -> Reply<Decision> {
        let account = &charge.account();
        let (quotas, ask) = (account.quotas().as_slice(), charge.ask(charge.cost()));
        if N > 1
            && let Ok(quotas) = quotas.try_into()
            && let Some(decision) = shard.charge_all_running::<N>(now, account, quotas, &home, ask)
        {
            return Reply::now(decision);
        }
        if N == 1
            && let Some((decision, is_new)) = shard.charge_first(now, account, &home, ask)
        {
            if is_new {
                // Noted under the lock, so that a reset or a save that finds the entry finds its
                // counter.
                self.memory.counters.note(account.scope(), &quotas[0]);
            }
            return Reply::now(decision);
        }
        let (places, windows) = loop {
            let found = shard.locate_all::<N>(now.at, account, &home);
            // Near a boundary, only the exact time shows on which side of it the charge is.
            if now.is_exact()
                || !found.1.iter().any(|window| window.is_over_at(now.at, now.latest()))
            {
                break found;
            }
            now = self.now_again(&mut shard);
        };
        let now = now.at;
        let (mut decision, writes) = charge.decide_line(now, &windows);
        let mut written = 0;
        for (i, (place, state)) in places.into_iter().zip(writes).enumerate() {
            let Some(state) = state else { continue };
            written |= 1 << i;
            if !matches!(place, CountedIn::Own(_))
                && let Some(quota) = quotas.get(i)
            {
                self.memory.counters.note(account.scope(), quota);
            }
            shard.write(now, place, state);
        }
        if let Some(until) = shard.overflows_until(now)
            && !charge.is_peek()
        {
            // Passed by value, so that the places stay in registers on the usual path.
            let shared = self.count_overflow(now, until, shard, account, places, written);
            decision.note_shared(shared);
        }
        Reply::now(decision)
    }
}
