//! Reports decisions.

use crate::decision::{Decision, KeptRefuser};
use crate::observe::{self, Outcome};
use crate::quota::Quotas;
use crate::store::Scope;

/// Reports a decision that was not made for a layer, and adds to a refusal what a response needs.
#[inline(always)]
pub(super) fn note_decision(
    scope: &Scope,
    quotas: &Quotas,
    decision: &mut Decision,
    is_peek: bool,
    refuser: impl FnOnce() -> Option<KeptRefuser>,
) {
    if !is_peek {
        observe_decision(scope, quotas, decision, false);
    }
    if !decision.allowed() {
        match refuser() {
            Some(kept) => decision.note_kept_refuser(kept),
            None => decision.note_refuser(scope.name(), quotas),
        }
    }
}

/// Reports a decision to the log and the metrics. In shadow mode nothing is refused.
#[inline(always)]
pub(crate) fn observe_decision(scope: &Scope, quotas: &Quotas, decision: &Decision, shadow: bool) {
    if !observe::ON {
        return;
    }
    let observed = scope.observe();
    if decision.allowed() {
        note_passed(scope, decision.granted(), decision.ready_at_ms().is_some());
    } else {
        let outcome = if shadow { Outcome::ShadowRefused } else { Outcome::Refused };
        let quota = || decision.governing_of(quotas);
        observed.refused(outcome, quota, || decision.retry_after());
    }
}

/// Reports that a charge passed, for now or for later.
#[inline(always)]
pub(crate) fn note_passed(scope: &Scope, tokens: u64, waits: bool) {
    if observe::ON {
        scope.observe().passed(if waits { Outcome::Reserved } else { Outcome::Passed }, tokens);
    }
}
