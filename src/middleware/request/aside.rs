//! Charges of limits in shadow mode, beside limits that can refuse: the request does not wait.

use std::sync::{Arc, Mutex, PoisonError};

use http::request::Parts;

use super::{LimitedRequest, RequestLine};
use crate::decision::Decision;
use crate::limits::observe;
use crate::middleware::correction::{Actual, Charged};
use crate::observe::Outcome;
use crate::store::{Charge, Reply};

/// The charge of a limit in shadow mode, once the others have passed.
pub(super) struct AsideCharge {
    line: RequestLine,
    decided: Decided,
}

/// What was decided, and corrected, in the order in which that happens.
#[derive(Clone, Default)]
struct Decided(Arc<Mutex<(Option<Decision>, Option<Actual>)>>);

impl AsideCharge {
    pub(super) fn new(line: RequestLine) -> Self {
        Self { line, decided: Decided::default() }
    }
}

impl Decided {
    fn note(&self, charged: &Charged, decision: Decision) {
        let mut decided = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let early = decided.1.take();
        decided.0 = Some(decision);
        drop(decided);
        if let Some(actual) = early {
            self.correct(charged, &actual);
        }
    }

    /// Corrects the charge, or keeps the correction until the charge is decided.
    fn correct(&self, charged: &Charged, actual: &Actual) {
        let mut decided = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match decided.0.take() {
            Some(decision) if decision.allowed() => {
                let (reply, corrected) = charged.make(&decision, actual);
                decided.0 = Some(corrected);
                drop(decided);
                reply.detach();
            }
            Some(_) => {}
            None => decided.1 = Some(actual.clone()),
        }
    }
}

impl<J> LimitedRequest<J> {
    /// Charges the limits in shadow mode, each by itself.
    #[cold]
    #[inline(never)]
    pub(super) fn charge_aside(&self, parts: &Parts) {
        for AsideCharge { line, decided } in self.aside() {
            let (charged, decided, cost) = (self.charged_of(line), decided.clone(), line.cost);
            let charge = Charge::new(charged.account.as_account(), cost);
            let reply = self.current.shared.limits.shared_store().charge(charge);
            let on_decision = self.current.shared.options.on_decision.clone();
            // Copied only if a closure of the app looks at them later.
            let is_seen = on_decision.is_some() || charged.limiter.is_watched();
            let note = move |parts: Option<&Parts>, answer| match answer {
                Ok(decision) => {
                    let line = (&charged.limiter, charged.account.as_account(), cost);
                    // First, since a hook of the app's may panic.
                    decided.note(&charged, Decision::clone(&decision));
                    observe(
                        &decision,
                        1,
                        |_| line,
                        true,
                        |tracker| Some(tracker.route()?(parts?)?.into()),
                    );
                    if let Some((on_decision, parts)) = on_decision.zip(parts) {
                        on_decision(parts, &decision);
                    }
                }
                Err(_) => charged.limiter.scope().observe().answered(Outcome::FailedOpen),
            };
            match reply.into_now() {
                Ok(answer) => note(Some(parts), answer),
                Err(later) => {
                    let parts = is_seen.then(|| parts.clone());
                    let noted = Reply::later(async move {
                        note(parts.as_ref(), later.await);
                        Ok(())
                    });
                    noted.detach();
                }
            }
        }
    }

    pub(super) fn has_aside(&self) -> bool {
        !self.aside().is_empty()
    }

    fn aside(&self) -> &[AsideCharge] {
        self.rare.as_ref().map_or(&[], |rare| &rare.aside)
    }

    /// Corrects the charges of limits in shadow mode.
    pub(super) fn correct_aside(&self, actual: &Actual) {
        for AsideCharge { line, decided } in self.aside() {
            decided.correct(&self.charged_of(line), actual);
        }
    }

    /// Returns a closure that corrects the charges of limits in shadow mode later.
    pub(super) fn aside_correction(&self) -> Box<dyn FnOnce(&Actual) + Send> {
        let of = |aside: &AsideCharge| (self.charged_of(&aside.line), aside.decided.clone());
        let all: Vec<_> = self.aside().iter().map(of).collect();
        Box::new(move |actual| {
            all.iter().for_each(|(charged, decided)| decided.correct(charged, actual));
        })
    }
}
