//! What decisions show of the states that a store keeps.
//!
//! They don't show all of it: not until when a count is kept, and not whether it was written in an
//! earlier window, under another limit. What is unknown is not assumed: it is noted what a state
//! may be, and under which quotas it looks like this.

use std::ops::Range;

use super::super::charge::Charge;
use crate::decision::Decision;
use crate::quota::{Quota, fmix64};
use crate::window::{MAX, State};

/// What was seen of a state.
#[derive(Clone, Copy, Default)]
pub(super) struct Seen {
    /// With the earliest `until` that it can have.
    pub(super) state: State,
    /// Whether that is the only one.
    pub(super) exact: bool,
    /// Hashes of the limits and capacities under which it looks like this. Under others it may look
    /// different, if it was written in an earlier window.
    terms: [u64; 2],
    /// By how much the store's clock is ahead of this process's: at least, and at most.
    pub(super) lag: [i64; 2],
    /// When it was asked for.
    pub(super) at: i64,
}

impl Seen {
    /// It is the state itself, under whatever terms.
    const ANY: [u64; 2] = [0; 2];

    /// What is seen of the `i`th quota in a decision, given what was seen before.
    pub(super) fn after(
        charge: &Charge<'_>,
        decision: &Decision,
        i: usize,
        quota: &Quota,
        (at, lag): (i64, &Range<i64>),
        last: Option<Self>,
    ) -> Self {
        let ((start, used), until) = {
            let standing = &decision.usage()[i];
            (standing.count(), standing.end())
        };
        let seen = Self {
            state: State { start, used, until },
            exact: false,
            terms: Self::terms(quota),
            lag: [lag.start, lag.end],
            at,
        };
        let known = last.filter(|last| last.exact && last.terms == Self::ANY);
        match decision.granted() {
            0 => seen.unchanged(charge, decision, i, quota, known, last),
            granted => seen.written(charge, decision.now_ms(), granted, quota, known),
        }
    }

    /// What it is after a charge that passed, given the state before if that is known.
    fn written(
        self,
        charge: &Charge<'_>,
        now: i64,
        granted: u64,
        quota: &Quota,
        known: Option<Self>,
    ) -> Self {
        let exactly = |state| Self { state, exact: true, terms: Self::ANY, ..self };
        let written = known
            .map(|known| charge.account().window(now, quota, |_| Some(known.state)).take(granted));
        match written.filter(|written| self.is_count_of(written)) {
            Some(written) => exactly(written),
            // Without debt and rollover a count ends with its window.
            None if quota.capacity == quota.limit && self.state.used <= quota.limit as i64 => {
                exactly(self.state)
            }
            None => self,
        }
    }

    /// What it is if nothing was written here, nor elsewhere if it looks the same as before.
    fn unchanged(
        mut self,
        charge: &Charge<'_>,
        decision: &Decision,
        i: usize,
        quota: &Quota,
        known: Option<Self>,
        last: Option<Self>,
    ) -> Self {
        let (account, now) = (charge.account(), decision.now_ms());
        let window = |state| account.window(now, quota, |_| state);
        let State { start, used, until: end } = self.state;
        let same = |known: &Self| {
            let window = window(Some(known.state));
            (window.start(), window.used()) == (start, used)
        };
        if let Some(known) = known.filter(same) {
            return Self { lag: self.lag, at: self.at, ..known };
        }
        if used <= window(None).used() {
            // No state, or one that makes no difference; but a window may be open since its first
            // request. If it began just now, that is known when it does so again.
            let open = account.grid(quota).is_none();
            if !open || start >= now {
                let none = |last: Self| last.state.until == -MAX && last.state.start < now;
                self.state.until = -MAX;
                self.exact = !open || last.is_some_and(none);
            }
            return self;
        }
        let cost = if charge.is_up_to() { 1 } else { charge.cost() };
        if let Some(retry_at) = decision.retry_at_ms()
            && i == decision.governing()
            && cost <= quota.capacity
            && !charge.may_reserve()
        {
            // When the count has come down so far, or when it ends, whichever is earlier. It ends
            // then if it would otherwise last longer, unless what is rolled over leaves room
            // before.
            let lasting = window(Some(State { until: MAX, ..self.state })).retry_at(cost, false);
            self.exact =
                lasting.is_some_and(|at| at > retry_at) && quota.capacity - cost < quota.limit;
            self.state.until = retry_at.max(end);
        }
        match last.filter(|last| now < last.state.until && self.is_count_of(&last.state)) {
            Some(last) => self.with(&last, quota),
            None => self,
        }
    }

    /// With what was seen of the same count before.
    fn with(mut self, last: &Self, quota: &Quota) -> Self {
        if last.exact || last.state.until > self.state.until {
            (self.exact, self.state.until) = (last.exact, last.state.until);
        }
        if last.holds_under(quota) {
            self.terms = last.terms;
        } else {
            self.terms[1] = last.terms[0];
        }
        self
    }

    fn is_count_of(&self, state: &State) -> bool {
        (self.state.start, self.state.used) == (state.start, state.used)
    }

    fn terms(quota: &Quota) -> [u64; 2] {
        // Not 0: that is any.
        [fmix64(fmix64(quota.limit) ^ quota.capacity).max(1), 0]
    }

    pub(super) fn holds_under(&self, quota: &Quota) -> bool {
        self.terms == Self::ANY || self.terms.contains(&Self::terms(quota)[0])
    }
}
