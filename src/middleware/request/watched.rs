//! Counts refusals by key and by route, for limits that track them, and warns of shares of a limit
//! that a request has reached.

use http::request::Parts;

use super::LimitedRequest;
use super::charges::LimitCharges;
use crate::decision::Decision;
use crate::key::Key;
use crate::limiter::Limiter;
use crate::quota::Quotas;

impl<J> LimitedRequest<J> {
    /// Reports a decision that would have refused outside of shadow mode.
    #[cold]
    #[inline(never)]
    pub(super) fn report_shadow(&self, parts: &Parts, decision: &Decision) {
        self.report(parts, decision);
        self.watch_decision(parts, decision);
    }

    /// Charges limits in shadow mode, and looks at the charge.
    #[cold]
    #[inline(never)]
    pub(super) fn follow_charge(&self, parts: &Parts) {
        self.charge_shadows(parts);
        if let Some(decision) = &self.charged {
            self.watch_decision(parts, decision);
        }
    }

    /// Counts a refusal by its key and route, or warns of a share, for limits that do so.
    #[inline(never)]
    pub(super) fn watch_decision(&self, parts: &Parts, decision: &Decision) {
        match self.limit_charges() {
            None => note(&self.current.shared.limiter, &self.key, self.quotas(), decision, parts),
            Some(charges) => self.watch_decisions(charges, parts, decision),
        }
    }

    fn watch_decisions(&self, charges: &LimitCharges, parts: &Parts, decision: &Decision) {
        for charge in &charges.enforced {
            let limiter = self.limiter_of(charge.limit);
            if limiter.live().is_watched()
                && let Some(of) = decision.of(limiter.name())
            {
                note(limiter, &charge.key, self.quotas_of(charge), &of, parts);
            }
        }
    }
}

#[inline(always)]
fn note(limiter: &Limiter, key: &Key, quotas: &Quotas, decision: &Decision, parts: &Parts) {
    limiter.watch(key, quotas, decision, |tracker| Some(tracker.route()?(parts)?.into()));
}
