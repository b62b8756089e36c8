//! Limits that may be a mistake, noticed when they are built.

use crate::limit::Limit;
use crate::observe;

/// A limit of 0 often comes from a setting where 0 was to say "unlimited".
pub(super) fn note_zero(limit: &Limit) {
    let is_zero = limit.quotas.iter().any(|quota| quota.limit() == 0);
    if is_zero && limit.plan.is_none() && !limit.shadow {
        observe::doubt(&format_args!(
            "a rate limit of 0 refuses every request: write a higher number, or for \"unlimited\" \
             return `Plan::UNLIMITED` from `Limit::by_plan(..)`; if all are to be refused, write \
             `Limit::by_plan(|_, _| Quota::per_minute(0))`"
        ));
    }
}
