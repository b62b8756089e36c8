//! Which counters each scope was charged under: a key has to be found under all of them to be
//! forgotten.

use std::collections::HashMap;
use std::sync::PoisonError;

use crate::quota::Quota;
use crate::sync::Mutex;

/// Counters of one scope, and of all scopes of a store. A plan is one for each of its windows, so these
/// are many; what makes up windows as it goes is not followed further.
const OF_A_SCOPE: usize = 64;
const OF_A_STORE: usize = 1_024;

#[derive(Default)]
pub(super) struct Counters(Mutex<Known>);

#[derive(Default)]
struct Known {
    scopes: HashMap<u64, Scope>,
    count: usize,
    /// Whether there are scopes beside these.
    others: bool,
}

#[derive(Default)]
struct Scope {
    quotas: Vec<Quota>,
    /// Whether there are counters beside these.
    others: bool,
}

impl Counters {
    /// `false`: there are too many to know this one, too.
    #[cold]
    pub(super) fn add(&self, scope: u64, quota: &Quota) -> bool {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Known { scopes, count, others } = &mut *known;
        let room = *count < OF_A_STORE;
        if !room && !scopes.contains_key(&scope) {
            *others = true;
            return false;
        }
        let scope = scopes.entry(scope).or_default();
        if scope.quotas.iter().any(|other| other.identity() == quota.identity()) {
            return true;
        }
        if !room || scope.quotas.len() == OF_A_SCOPE {
            scope.others = true;
            return false;
        }
        scope.quotas.push(*quota);
        *count += 1;
        true
    }

    /// The counters of a scope that are known, and whether these are all.
    pub(super) fn of<T>(&self, scope: u64, look: impl FnOnce(&[Quota], bool) -> T) -> T {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match known.scopes.get(&scope) {
            Some(scope) => look(&scope.quotas, !scope.others),
            None => look(&[], !known.others),
        }
    }
}
