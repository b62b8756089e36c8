//! Stops calls to a store that keeps failing, except for a call now and then that tests it (S32).
//!
//! A missed deadline says nothing to callers who wait longer. So the breaker opens for those who
//! would wait no longer than each of the last failures did. Other failures meet all callers.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::sync::{self, AtEnd, Instant, Mutex};

/// Consecutive failures before the breaker opens, of calls that are sent one after the other.
const FAILURES: usize = 5;
/// How long the breaker stays open before a single call may test the store.
const PAUSE: Duration = Duration::from_millis(250);
/// Failures of a part that is no longer called are forgotten.
const FORGOTTEN: Duration = Duration::from_secs(60);

#[derive(Default)]
pub(super) struct Breaker {
    /// Parts that fail: usually none, and then nothing is locked.
    failing: AtomicUsize,
    domains: Mutex<HashMap<u64, Failures>>,
}

#[derive(Default)]
struct Failures {
    /// The most patient of the consecutive ones: how long each call would have waited, and when its
    /// failure was known.
    most_patient: Vec<(Duration, Instant)>,
    next: Option<Instant>,
    /// When the call that tests the store is given up.
    probe: Option<Instant>,
}

impl Failures {
    fn pause(&mut self) {
        self.next = Some(Instant::now() + PAUSE);
    }

    fn stop(&self, patience: Duration) -> bool {
        self.most_patient.len() == FAILURES
            && self.most_patient.iter().all(|(waited, _)| *waited >= patience)
    }

    /// Not again if such a failure became known when the call had begun.
    fn add(&mut self, patience: Duration, began: Option<Instant>) {
        let is_known = |&(waited, known_at): &(Duration, Instant)| {
            waited >= patience && began.is_some_and(|began| known_at >= began)
        };
        if self.most_patient.iter().any(is_known) {
            return;
        }
        self.most_patient.push((patience, Instant::now()));
        self.most_patient.sort_by(|a, b| b.cmp(a));
        self.most_patient.truncate(FAILURES);
        self.pause();
    }
}

impl Breaker {
    /// The call ends when the guard is dropped. While the breaker is open, or nothing can be sent,
    /// one call at a time may be made, and none in the pause after a failure; there is no guard for
    /// others. It is given up after its deadline. A caller who leaves earlier has learned nothing,
    /// so the next one makes a call at once.
    pub(super) fn begin_call(
        self: &Arc<Self>,
        domain: u64,
        deadline: Option<Duration>,
        cut_off: bool,
    ) -> Option<AtEnd<impl Fn() + use<>>> {
        let mut probe = None;
        if cut_off || self.failing.load(Ordering::Relaxed) > 0 {
            let patience = deadline.unwrap_or(Duration::MAX);
            let may_begin = self.change(domain, |failures| {
                if !cut_off && !failures.stop(patience) {
                    return true;
                }
                let now = Instant::now();
                let is_tried = failures.probe.is_some_and(|until| now < until);
                if is_tried || failures.next.is_some_and(|next| now < next) {
                    return false;
                }
                // A call whose end is too far away to be an instant counts as given up.
                probe = now.checked_add(deadline.unwrap_or(PAUSE));
                failures.probe = probe;
                true
            });
            if !may_begin {
                return None;
            }
        }
        let this = Arc::clone(self);
        Some(AtEnd(move || {
            if probe.is_some() {
                // Not that of a later call.
                this.change(domain, |failures| {
                    failures.probe = failures.probe.filter(|_| failures.probe != probe);
                });
            }
        }))
    }

    /// `began`: if several may have failed with one call that they share.
    pub(super) fn note_failure(&self, domain: u64, patience: Duration, began: Option<Instant>) {
        self.change(domain, |failures| failures.add(patience, began));
    }

    /// The first of those that find it so begins the pause.
    pub(super) fn note_unsent(&self, domain: u64) {
        self.change(domain, |failures| {
            if failures.next.is_none_or(|next| next <= Instant::now()) {
                failures.pause();
            }
        });
    }

    pub(super) fn note_answer(&self, domain: u64) {
        if self.failing.load(Ordering::Relaxed) > 0 {
            self.change(domain, |failures| *failures = Failures::default());
        }
    }

    fn change<T>(&self, domain: u64, change: impl FnOnce(&mut Failures) -> T) -> T {
        let mut domains = sync::lock(&self.domains);
        let changed = change(domains.entry(domain).or_default());
        let now = Instant::now();
        domains.retain(|_, failures| {
            failures.probe.is_some() || failures.next.is_some_and(|next| now < next + FORGOTTEN)
        });
        self.failing.store(domains.len(), Ordering::Relaxed);
        changed
    }
}
