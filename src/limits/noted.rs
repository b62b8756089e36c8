//! Reports decisions over several limits to metrics and logs, and adds to them what responses need.

use std::sync::Arc;

use crate::decision::{Decision, KeptRefuser};
use crate::limiter::{note_passed, observe_decision};
use crate::observe::{self, Outcome};
use crate::quota::Quotas;
use crate::store::{Account, Charge};

/// Reports the decisions that passed, or those that refused, and notes in a refusal which limits
/// refused, for its response.
#[inline(always)]
pub(super) fn note_decision(
    decision: &mut Decision,
    charges: &[Charge<'_>],
    refuser: impl Fn(usize, &Quotas) -> Option<KeptRefuser>,
) {
    match decision.allowed() {
        true => observe_all(decision, charges),
        false => note_refused(decision, charges, refuser),
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
    let (mut next, mut noted) = (verdicts.next(), 0);
    for charge in charges {
        let scope = charge.account().scope();
        // Both are in the same order, but a limit whose store failed has no decision.
        let Some((name, allowed, waits)) = next else { break };
        if !Arc::ptr_eq(name, scope.shared_name()) {
            continue;
        }
        noted += 1;
        if allowed && !charge.is_peek() {
            note_passed(scope, charge.cost(), waits);
        }
        next = verdicts.next();
    }
    if noted < charges.len() {
        observe_failed_open(decision, charges);
    }
}

#[cold]
fn observe_failed_open(decision: &Decision, charges: &[Charge<'_>]) {
    for charge in charges.iter().filter(|charge| !charge.is_peek()) {
        let scope = charge.account().scope();
        if decision.of(scope.name()).is_none() {
            scope.observe().answered(Outcome::FailedOpen);
        }
    }
}

#[cold]
fn observe_refusals(decision: &Decision, charges: &[Charge<'_>]) {
    for charge in charges.iter().filter(|charge| !charge.is_peek()) {
        let account = charge.account();
        let of = decision.of(account.scope().name());
        if let Some(refusal) = of.filter(|of| !of.allowed()) {
            let governs = decision.governing_limit() == Some(account.scope().name());
            observe_refusal(account, &refusal, governs);
        }
    }
}

/// Counts a refusal, and logs it if its limit governs: a request is one line.
fn observe_refusal(account: Account<'_>, refusal: &Decision, governs: bool) {
    let (scope, quotas) = (account.scope(), account.quotas());
    if governs {
        observe_decision(scope, quotas, refusal, false);
    } else if observe::ON {
        scope.observe().also_refused(Outcome::Refused);
    }
}

#[cold]
fn note_refused(
    decision: &mut Decision,
    charges: &[Charge<'_>],
    refuser: impl Fn(usize, &Quotas) -> Option<KeptRefuser>,
) {
    for (i, charge) in charges.iter().enumerate() {
        let account = charge.account();
        let (scope, quotas) = (account.scope(), account.quotas());
        let governs = decision.governing_limit() == Some(scope.name());
        decision.amend_refusal_of(scope.shared_name(), |refusal| {
            if !charge.is_peek() {
                observe_refusal(account, refusal, governs);
            }
            match refuser(i, quotas) {
                Some(kept) => refusal.note_kept_refuser(kept),
                None => refusal.note_refuser(scope.name(), quotas),
            }
        });
    }
}
