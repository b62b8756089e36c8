//! Logs when a store begins to fail and when it is back, not each request.

use std::time::Duration;

use super::super::reply::StoreError;
use crate::sync::{self, Instant, Mutex};

/// The store is back when it has answered for this time without a failure.
const STEADY: Duration = Duration::from_secs(1);
/// Those of one outage that are logged.
const MAX_CAUSES: usize = 8;

#[derive(Default)]
pub(super) struct Outage(Mutex<Option<Failing>>);

struct Failing {
    since: Instant,
    /// Those logged, each with the part of the store that has failed.
    causes: Vec<(u64, String)>,
    well_since: Option<Instant>,
    answered_without: u64,
}

impl Outage {
    /// If the handle's outage is on already, it was told why.
    pub(super) fn begin(&self, domain: u64, error: &StoreError) -> bool {
        let is_on = sync::lock(&self.0).is_some();
        !is_on && self.note_failure(domain, error)
    }

    pub(super) fn note_failure(&self, domain: u64, error: &StoreError) -> bool {
        let cause = (domain, error.to_string());
        let mut state = sync::lock(&self.0);
        match &mut *state {
            Some(failing) => {
                failing.well_since = None;
                // A cause that comes and goes is logged once.
                if failing.causes.len() == MAX_CAUSES || failing.causes.contains(&cause) {
                    return false;
                }
                failing.causes.push(cause);
            }
            None => {
                let (since, causes) = (Instant::now(), vec![cause]);
                *state = Some(Failing { since, causes, well_since: None, answered_without: 0 });
            }
        }
        true
    }

    /// If the store is back, returns how many requests were answered without it, and how long it
    /// failed.
    pub(super) fn note_success(&self) -> Option<(u64, Duration)> {
        let mut state = sync::lock(&self.0);
        let failing = state.as_mut()?;
        let now = Instant::now();
        let well_since = *failing.well_since.get_or_insert(now);
        if now - well_since < STEADY {
            return None;
        }
        let back = (failing.answered_without, well_since - failing.since);
        *state = None;
        Some(back)
    }

    pub(super) fn count_answers_without(&self, answers: i64) {
        if let Some(failing) = &mut *sync::lock(&self.0) {
            failing.answered_without = failing.answered_without.saturating_add_signed(answers);
        }
    }
}
