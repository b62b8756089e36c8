//! Stops calls to a store that keeps failing, except for a call now and then that tests it (S32).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use super::super::reply::StoreError;
use crate::sync::{self, AtEnd, Instant, Mutex};

/// Consecutive failures before the breaker opens, of calls that are sent one after the other.
const FAILURES: u32 = 5;
/// How long the breaker stays open before a single call may test the store.
const PAUSE: Duration = Duration::from_millis(250);

#[derive(Default)]
pub(crate) struct Breaker {
    /// Parts that fail: usually none, and then nothing is locked.
    failing: AtomicUsize,
    domains: Mutex<HashMap<u64, Failures>>,
    probes: AtomicU64,
}

#[derive(Default)]
struct Failures {
    in_a_row: u32,
    last: Option<Instant>,
    /// Nothing can be sent to the part.
    cut_off: bool,
    next: Option<Instant>,
    /// The number of the call that tests the store, and when the call is given up.
    probe: Option<(u64, Instant)>,
}

impl Failures {
    fn pause(&mut self) {
        self.next = Some(Instant::now() + PAUSE);
    }
}

impl Breaker {
    /// The call ends when the guard is dropped. While the breaker is open, one call may be made in
    /// each pause, and one at a time. It is given up after `longest`, if that is known.
    pub(super) fn begin_call(
        self: &Arc<Self>,
        domain: u64,
        longest: Option<Duration>,
    ) -> Result<AtEnd<impl Fn() + use<>>, StoreError> {
        let mut probe = None;
        if self.failing.load(Ordering::Relaxed) > 0
            && let Some(failures) = sync::lock(&self.domains).get_mut(&domain)
            && (failures.cut_off || failures.in_a_row >= FAILURES)
        {
            let now = Instant::now();
            let is_tried = failures.probe.is_some_and(|(_, until)| now < until);
            if is_tried || failures.next.is_some_and(|next| now < next) {
                return Err(StoreError::new(
                    "the store keeps failing: the circuit breaker is open",
                ));
            }
            let number = self.probes.fetch_add(1, Ordering::Relaxed);
            failures.pause();
            // A call whose end is too far away to be an instant counts as given up.
            let until = now.checked_add(longest.unwrap_or(PAUSE));
            failures.probe = until.map(|until| (number, until));
            probe = Some(number);
        }
        let this = Arc::clone(self);
        Ok(AtEnd(move || {
            if let Some(probe) = probe
                && let Some(failures) = sync::lock(&this.domains).get_mut(&domain)
                && failures.probe.is_some_and(|(of, _)| of == probe)
            {
                failures.probe = None;
            }
        }))
    }

    /// The failure of a call that was `sent` before the last failure was known does not count
    /// again.
    pub(crate) fn report_answer<T>(
        &self,
        domain: u64,
        sent: Option<Instant>,
        answer: &Result<T, StoreError>,
    ) {
        match answer {
            Err(error) if error.is_unsent() => {}
            Err(error) if !error.is_of_key() && !error.is_apart() => {
                self.change_failures(domain, |failures| {
                    if sent.is_none() || sent > failures.last {
                        failures.in_a_row = failures.in_a_row.saturating_add(1);
                        failures.last = Some(Instant::now());
                        failures.pause();
                    }
                })
            }
            _ if self.failing.load(Ordering::Relaxed) > 0 => {
                self.change_failures(domain, |failures| *failures = Failures::default());
            }
            _ => {}
        }
    }

    #[cfg(feature = "redis")]
    pub(crate) fn cut_off(&self, domain: u64) {
        self.change_failures(domain, |failures| {
            if !failures.cut_off {
                failures.cut_off = true;
                failures.pause();
            }
        });
    }

    #[cfg(feature = "redis")]
    pub(crate) fn note_connected(&self, domain: u64) {
        if self.failing.load(Ordering::Relaxed) > 0 {
            self.change_failures(domain, |failures| failures.cut_off = false);
        }
    }

    fn change_failures(&self, domain: u64, change: impl FnOnce(&mut Failures)) {
        let mut domains = sync::lock(&self.domains);
        let failures = domains.entry(domain).or_default();
        change(failures);
        if failures.in_a_row == 0 && !failures.cut_off {
            domains.remove(&domain);
        }
        self.failing.store(domains.len(), Ordering::Relaxed);
    }
}
