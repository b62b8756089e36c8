//! Settings and costs that may be a mistake: hints for the log.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::limit::Limit;
use super::live::Live;
use crate::observe;
use crate::quota::Quota;
use crate::store::Account;

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

pub(super) fn note_cost(account: Account<'_>, cost: u64) {
    const MANY: u64 = 10;

    let windows = |quota: &Quota| cost.div_ceil(quota.limit().max(1));
    if account.quotas.iter().any(|quota| windows(quota) >= MANY) {
        observe::doubt(&format_args!(
            "a true cost of the rate limit `{}` takes {MANY} or more of its windows to pay back, and \
             its key is refused until then: if it is a slip of units, mend that, and lift it by \
             `limits.limiter(name).reset(key)`; if it is right, raise the limit or charge a nearer \
             estimate",
            account.scope.name(),
        ));
    }
}

pub(super) fn note_no_change(name: &str) {
    observe::doubt(&format_args!(
        "the rate limit `{name}` is by plan, so `set_quotas` changes nothing: let the closure of \
         `Limit::by_plan` return other quotas, or write `set_key_quotas_until` for one key"
    ));
}

/// In place of a store's identity: each limit counts in a memory of its own.
pub(crate) const OWN_MEMORY: &str = "own memory";

/// Two limits of one name in the same counts charge the same counters, as plans are to. If each
/// counts in a memory of its own, a key has both limits.
pub(crate) fn note_name(counts: String, live: &Arc<Live>) {
    /// More than an app writes down; limits that an app creates as it runs are not all kept.
    const MOST: usize = 1_024;
    static NAMED: Mutex<BTreeMap<(String, String), Weak<Live>>> = Mutex::new(BTreeMap::new());

    let name = live.limit.scope.name();
    if name.is_empty() || live.limit.plan.is_some() {
        return;
    }
    let mut named = NAMED.lock().unwrap_or_else(PoisonError::into_inner);
    if named.len() >= MOST {
        named.retain(|_, live| live.strong_count() > 0);
    }
    let (is_own, id) = (counts == OWN_MEMORY, (counts, name.to_owned()));
    let has_earlier = named.get(&id).is_some_and(|live| live.strong_count() > 0);
    if named.len() < MOST || has_earlier {
        named.insert(id, Arc::downgrade(live));
    }
    drop(named);
    if !has_earlier {
        return;
    }
    if is_own {
        observe::doubt(&format_args!(
            "two rate limits are named `{name}`, each with counts of its own, so a key may use up \
             both: if they are to be one, make one layer or one `Limiter` for both; if not, give \
             one of them another name"
        ));
    } else {
        observe::doubt(&format_args!(
            "two rate limits of one store are named `{name}`, so a key has one count in both: give \
             one of them another name; if they are to be one, make one `Limiter` for both; if their \
             quotas differ between requests, write one `Limit::by_plan(..)`"
        ));
    }
}
