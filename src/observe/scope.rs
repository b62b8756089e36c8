//! Reports the events of a scope.

use std::fmt::Display;
use std::time::Duration;

use super::count::{Change, Event, Meanwhile, Outcome, Timed};
use super::log;
use super::meters::{Meters, Timing};

/// A scope, as its operator sees it.
#[derive(Clone, Copy)]
#[cfg_attr(not(any(feature = "tracing", feature = "metrics")), allow(dead_code))]
pub(crate) struct Observed<'a> {
    name: &'a str,
    meters: &'a Meters,
}

impl<'a> Observed<'a> {
    #[inline]
    pub(crate) fn new(name: &'a str, meters: &'a Meters) -> Self {
        Self { name: if name.is_empty() { "unnamed" } else { name }, meters }
    }
}

impl Observed<'_> {
    /// A request was answered without a refusal by a quota.
    #[inline]
    pub(crate) fn answered(self, outcome: Outcome) {
        self.meters.count_outcome(self.name, outcome);
    }

    /// Tokens are counted from here on: charges have costs.
    pub(crate) fn has_costs(self) {
        self.meters.note_costs();
    }

    /// A charge of some tokens has passed.
    #[inline(always)]
    pub(crate) fn passed(self, outcome: Outcome, tokens: u64) {
        if tokens == 1 && !self.meters.has_costs() {
            self.meters.count_outcome(self.name, outcome);
        } else {
            self.charged(outcome, tokens);
        }
    }

    #[inline(never)]
    fn charged(self, outcome: Outcome, tokens: u64) {
        self.meters.count_outcome(self.name, outcome);
        self.meters.note_costs();
        self.meters.count(self.name, Event::TokensCharged, tokens);
    }

    /// Tokens of a charge were refunded.
    pub(crate) fn refunded(self, tokens: u64) {
        self.meters.count(self.name, Event::TokensRefunded, tokens);
    }

    /// Tokens were taken beyond a charge.
    pub(crate) fn settled(self, tokens: u64) {
        self.meters.count(self.name, Event::TokensSettled, tokens);
    }

    /// A request was refused without a decision, perhaps since it lacks its key.
    pub(crate) fn refused_undecided(self, outcome: Outcome, missing: Option<&impl Display>) {
        self.meters.count_outcome(self.name, outcome);
        log::refused_undecided(self.name, outcome, missing);
    }

    /// A request was refused by a quota, or would have been. Quota and time are worked out only for
    /// a log that shows them; a `retry_after` of `None` is never.
    #[inline]
    pub(crate) fn refused<'q, Q: Display + 'q>(
        self,
        outcome: Outcome,
        quota: impl FnOnce() -> &'q Q,
        retry_after: impl FnOnce() -> Option<Duration>,
    ) {
        self.meters.count_outcome(self.name, outcome);
        if log::shows_refusals() {
            log::refused(self.name, outcome, quota(), retry_after());
        }
    }

    /// A request was refused by a quota, and another limit that refused it governs. The log has a
    /// line for that one.
    pub(crate) fn also_refused(self, outcome: Outcome) {
        self.meters.count_outcome(self.name, outcome);
    }

    /// Reports the instant when the last change of a kind ends, in milliseconds, if there is one.
    pub(crate) fn changed(self, of: Change, end: Option<i64>) {
        self.meters.change(self.name, of, end);
    }

    /// Logs that a change has ended by itself.
    pub(crate) fn change_ended(self, of: Change) {
        log::change_ended(self.name, of);
    }

    /// The store begins to fail. `server` is its name, if that is known.
    pub(crate) fn store_fails(
        self,
        meanwhile: Meanwhile,
        server: Option<&str>,
        error: &impl Display,
    ) {
        log::store_fails(self.name, meanwhile.text(), server, error);
    }

    /// The store answers again: the number of requests answered without it, and the time that it
    /// failed.
    pub(crate) fn store_is_back(self, requests: u64, after: Duration) {
        log::store_is_back(self.name, requests, after);
    }

    /// Starts the timing of a call to a store that may take a while.
    pub(crate) fn store_is_called(self) -> Timing {
        Timing::start()
    }

    /// Records the duration of a call that was sent, whether it was answered or failed.
    pub(crate) fn store_was_called(self, timing: Timing) {
        self.meters.time(self.name, Timed::Store, timing.took());
    }

    /// More requests wait in the queue than before, or fewer.
    pub(crate) fn waits(self, more: i64) {
        self.meters.wait(self.name, more as f64);
    }

    /// A request has waited in the queue.
    pub(crate) fn waited(self, time: Duration) {
        self.meters.time(self.name, Timed::Wait, time);
    }

    /// A call to the store has failed.
    pub(crate) fn store_failed(self) {
        self.meters.count(self.name, Event::StoreFailure, 1);
    }

    /// A request was answered without the store.
    pub(crate) fn without_store(self, meanwhile: Meanwhile) {
        self.meters.count(self.name, meanwhile.event(), 1);
    }

    /// A key has used a share of the limit at which the limit warns.
    pub(crate) fn warned(self) {
        self.meters.count(self.name, Event::Warned, 1);
    }

    /// A charge found no entry of its own in memory.
    #[inline]
    pub(crate) fn overflowed(self) {
        self.meters.count(self.name, Event::Overflow, 1);
    }

    /// A charge was refused from memory, without a call to the store.
    pub(crate) fn refused_from_memory(self) {
        self.meters.count(self.name, Event::RememberedRefusal, 1);
    }
}
