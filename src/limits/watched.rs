//! Charges of limits whose quotas have changed since they were made, or whose decisions are
//! watched.

use std::borrow::Cow;

use super::line::Line;
use super::{Limits, charge_of};
use crate::decision::{Decision, MAX_LIMITS};
use crate::limiter::Limiter;
use crate::store::{Charge, Reply};

impl Limits {
    /// Charges these limits under their current quotas.
    #[cold]
    pub(super) fn charge_changed(
        &self,
        lines: &[Line<'_>],
        limits: [&Limiter; MAX_LIMITS],
        configure: impl for<'c> Fn(Charge<'c>) -> Charge<'c>,
    ) -> Reply<Decision> {
        let all = || lines.iter().zip(limits);
        let now: Result<Vec<_>, _> = all()
            .map(|(line, limit)| {
                line.quotas
                    .map_or_else(|| limit.quotas_now(&line.key), |own| Ok(Cow::Borrowed(own)))
            })
            .collect();
        let quotas = match now {
            Ok(quotas) => quotas,
            Err(error) => return Reply::failed(error),
        };
        let charges: Vec<_> = all()
            .zip(&quotas)
            .map(|((line, limit), quotas)| configure(charge_of(limit, quotas, line)))
            .collect();
        let mut reply = self.charge_and_note(limits, &charges);
        let is_peek = charges.iter().any(Charge::is_peek);
        if is_peek || !all().any(|(_, limit)| limit.live().is_watched()) {
            return reply;
        }
        if let Some(answer) = reply.as_now() {
            if let Ok(decision) = answer {
                charges
                    .iter()
                    .zip(limits)
                    .for_each(|(charge, limit)| watch(limit, charge, decision));
            }
            return reply;
        }
        let charges = charges.iter().zip(limits);
        let charges: Vec<_> =
            charges.map(|(charge, limit)| (charge.to_owned(), limit.clone())).collect();
        reply.map(move |decision| {
            charges.iter().for_each(|(charge, limit)| watch(limit, &charge.as_charge(), &decision));
            decision
        })
    }
}

/// Looks at the decision of one limit, if the limit watches these.
fn watch(limit: &Limiter, charge: &Charge<'_>, decision: &Decision) {
    if !limit.live().is_watched() {
        return;
    }
    if let Some(of) = decision.of(limit.name()) {
        let account = charge.account();
        limit.watch(account.key(), account.quotas(), &of, |_| None);
    }
}
