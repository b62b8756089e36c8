//! Reports decisions over several limits to metrics and logs, and adds to them what responses need.

use std::sync::Arc;

use crate::decision::Decision;
use crate::limiter::{note_passed, observe_decision};
use crate::store::Charge;

/// Reports the decisions that passed, or those that refused, and notes in a refusal which limits
/// refused, for its response.
#[inline(always)]
pub(super) fn note_decision(decision: &mut Decision, charges: &[Charge<'_>]) {
    match decision.allowed() {
        true => observe_all(decision, charges),
        false => note_refused(decision, charges),
    }
}

/// Reports the decisions that passed, or those that refused. In a refusal, limits that would have
/// passed are not reported.
#[inline(always)]
pub(crate) fn observe_all(decision: &Decision, charges: &[Charge<'_>]) {
    if !decision.allowed() {
        return observe_refusals(decision, charges);
    }
    let mut verdicts = decision.verdicts();
    let mut next = verdicts.next();
    for charge in charges {
        let scope = charge.account().scope();
        // Both are in the same order, but a limit that did not answer has no decision.
        let Some((name, allowed, waits)) = next else { break };
        if !Arc::ptr_eq(name, scope.shared_name()) {
            continue;
        }
        if allowed && !charge.is_peek() {
            note_passed(scope, charge.cost(), waits);
        }
        next = verdicts.next();
    }
}

#[cold]
fn observe_refusals(decision: &Decision, charges: &[Charge<'_>]) {
    for charge in charges.iter().filter(|charge| !charge.is_peek()) {
        let account = charge.account();
        let of = decision.of(account.scope().name());
        if let Some(refusal) = of.filter(|of| !of.allowed()) {
            observe_decision(account.scope(), account.quotas(), &refusal, false);
        }
    }
}

#[cold]
fn note_refused(decision: &mut Decision, charges: &[Charge<'_>]) {
    for charge in charges {
        let account = charge.account();
        let (scope, quotas) = (account.scope(), account.quotas());
        decision.amend_refusal_of(scope.shared_name(), |refusal| {
            if !charge.is_peek() {
                observe_decision(scope, quotas, refusal, false);
            }
            refusal.note_refuser(scope.name(), quotas);
        });
    }
}
