//! Decisions that are watched: refusals that are counted by key.

use std::borrow::Cow;

use super::Limiter;
use super::refused::Tracker;
use crate::decision::Decision;
use crate::key::Key;
use crate::quota::Quotas;
use crate::store::{Charge, Reply};

impl Limiter {
    /// Counts a decision, if it is a refusal and these are counted.
    #[inline(always)]
    pub(crate) fn watch<'a>(
        &self,
        key: &Key,
        quotas: &Quotas,
        decision: &Decision,
        route: impl FnOnce(&Tracker) -> Option<Cow<'a, str>>,
    ) {
        if let Some(tracker) = self.live().tracker()
            && !decision.allowed()
            && let Some(weight) = tracker.weight(decision)
        {
            let route = route(tracker);
            tracker.note(weight, key, quotas, decision, route.as_deref());
        }
    }

    /// Charges, and looks at the decision.
    #[inline]
    pub(super) fn ask_watched(&self, charge: Charge<'_>) -> Reply<Decision> {
        let mut reply = self.ask_by(charge);
        if charge.is_peek() || !self.live().is_watched() {
            return reply;
        }
        let account = charge.account();
        match reply.as_now() {
            Some(Ok(decision)) => self.watch(account.key(), account.quotas(), decision, |_| None),
            Some(Err(_)) => {}
            None => {
                let (this, charge) = (self.clone(), charge.to_owned());
                reply.map_in_place(move |decision| {
                    let account = charge.account().as_account();
                    this.watch(account.key(), account.quotas(), decision, |_| None);
                });
            }
        }
        reply
    }
}
