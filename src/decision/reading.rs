//! The getters of [`Decision`]: its verdict, and the standing of its quotas.

use std::time::{Duration, SystemTime};

use super::Decision;
use super::details::Verdict;
use super::standing::{Usage, system_time};
use crate::quota::{Quota, Quotas};

impl Decision {
    /// Returns whether the charge passed, immediately or as a reservation.
    #[inline]
    pub fn allowed(&self) -> bool {
        matches!(self.verdict, Verdict::Passed | Verdict::Reserved { .. })
    }

    /// Returns the number of tokens taken: the cost, or fewer if fewer were acceptable; 0 for a
    /// refusal or a peek.
    pub fn granted(&self) -> u64 {
        if self.allowed() { self.cost } else { 0 }
    }

    /// Returns the tokens that are left, and the higher cost of a refused charge.
    #[inline]
    pub(crate) fn left_and_cost(&self) -> Option<(u64, u64)> {
        // Most charges are of one token, which fits wherever any is left.
        if self.cost <= 1 || self.allowed() {
            return None;
        }
        let left = self.remaining();
        (0 < left && left < self.cost).then_some((left, self.cost))
    }

    /// Returns the limit of the governing quota.
    #[inline]
    pub fn limit(&self) -> u64 {
        self.governor().limit()
    }

    /// Returns the tokens used in the window of the governing quota.
    #[inline]
    pub fn used(&self) -> u64 {
        self.governor().used()
    }

    /// Returns the tokens left in the window of the governing quota.
    #[inline]
    pub fn remaining(&self) -> u64 {
        self.governor().remaining()
    }

    /// Returns when the window of the governing quota ends.
    pub fn reset_at(&self) -> SystemTime {
        self.governor().reset_at()
    }

    /// Returns how long the window of the governing quota still runs.
    pub fn reset_after(&self) -> Duration {
        self.until(self.governor().end())
    }

    /// Returns how long to wait after a refusal until the same charge fits, if no other request
    /// takes tokens. `None` if the charge was not refused, or can never fit
    /// ([`exceeds_capacity`](Self::exceeds_capacity)).
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_at_ms().map(|at| self.until(at))
    }

    /// Returns the start of the first window in which a refused charge would fit.
    pub fn retry_at(&self) -> Option<SystemTime> {
        self.retry_at_ms().map(system_time)
    }

    /// Returns whether the charge was refused for good, because its cost exceeds what the quota can
    /// grant.
    pub fn exceeds_capacity(&self) -> bool {
        self.verdict == Verdict::RefusedForGood
    }

    /// Returns the start of the window that covers a reservation, if that is a later window.
    pub fn ready_at(&self) -> Option<SystemTime> {
        self.ready_at_ms().map(system_time)
    }

    /// Returns how long a reservation has to wait. Zero if the tokens were available.
    pub fn ready_after(&self) -> Duration {
        self.ready_at_ms().map_or(Duration::ZERO, |at| self.until(at))
    }

    /// Returns when this was decided, by the store's clock.
    pub fn decided_at(&self) -> SystemTime {
        system_time(self.now)
    }

    /// Returns the standing of each quota, in the order of the quotas.
    #[inline]
    pub fn usage(&self) -> &[Usage] {
        match self.quota_details() {
            Some(details) => &details.standings[..self.len.into()],
            None => &self.inline[..self.len.into()],
        }
    }

    /// Returns the quotas that refused, as positions in [`usage`](Self::usage).
    pub fn refusing(&self) -> impl Iterator<Item = usize> + use<> {
        let refusing = self.refusing;
        (0..Quotas::MAX).filter(move |i| refusing >> i & 1 == 1)
    }

    /// Returns the position of the governing quota in [`usage`](Self::usage).
    #[inline]
    pub fn governing(&self) -> usize {
        self.governing.into()
    }

    /// Returns the governing quota, of the quotas that the decision was made by. Returns the first
    /// if these have changed and are fewer.
    pub(crate) fn governing_of<'a>(&self, quotas: &'a Quotas) -> &'a Quota {
        let quotas = quotas.as_slice();
        quotas.get(self.governing()).unwrap_or(&quotas[0])
    }

    /// Returns whether this process decided in memory, because the store failed.
    pub fn is_local(&self) -> bool {
        self.local
    }

    fn until(&self, at: i64) -> Duration {
        Duration::from_millis(at.saturating_sub(self.now).max(0) as u64)
    }
}
