//! A request's charges of several limits.

use std::sync::{Arc, Mutex, PoisonError};

use crate::decision::Decision;
use crate::key::Key;
use crate::middleware::correction::{Actual, Charged};
use crate::quota::Quotas;

/// A request's charge of each limit.
#[derive(Default)]
pub(super) struct LimitCharges {
    /// The charges of limits that can refuse.
    pub(super) enforced: Vec<LimitCharge>,
    /// The charges of limits in shadow mode.
    pub(super) shadows: Vec<(LimitCharge, Shadow)>,
    /// The limit whose key was extracted last.
    pub(super) last: usize,
}

/// A request's charge of one limit.
pub(super) struct LimitCharge {
    pub(super) limit: usize,
    pub(super) key: Key,
    pub(super) cost: u64,
    /// The quotas of this request's plan.
    pub(super) quotas: Option<Quotas>,
}

/// The charge of a limit in shadow mode, which the request does not wait for.
#[derive(Clone, Default)]
pub(super) struct Shadow(Arc<Mutex<ShadowCharge>>);

#[derive(Default)]
struct ShadowCharge {
    decision: Option<Decision>,
    /// A correction that arrived before the decision.
    actual: Option<Actual>,
}

impl Shadow {
    pub(super) fn decided(&self, charged: &Charged, decision: Decision) {
        let mut charge = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let actual = charge.actual.take();
        charge.decision = Some(decision);
        drop(charge);
        if let Some(actual) = actual {
            self.correct(charged, &actual);
        }
    }

    pub(super) fn correct(&self, charged: &Charged, actual: &Actual) {
        let mut charge = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match charge.decision.take() {
            Some(decision) if decision.allowed() => {
                let (reply, corrected) = charged.make(&decision, actual);
                charge.decision = Some(corrected);
                drop(charge);
                reply.detach();
            }
            Some(_) => {}
            None => charge.actual = Some(actual.clone()),
        }
    }
}

impl LimitCharges {
    pub(super) fn first_key(&self) -> Option<&Key> {
        self.enforced.first().map(|charge| &charge.key)
    }
}
