//! The quotas that each scope was charged under, for resets: [`ChargedQuotas`]. A key is forgotten
//! only if it is found under all of them.

use std::array;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

use super::account::{Scope, ScopeId};
use super::sharded::mix;
use crate::quota::Quota;
use crate::sync::{self, Mutex};

/// Noted quotas of a scope, and of all. Each window of a plan is one, so there may be many. An app
/// that makes up windows as it goes has more, which are not noted.
const MAX_OF_A_SCOPE: usize = 64;
const MAX_OF_ALL: usize = 1_024;
/// The number of marks, and how many are searched for a quota's.
const MARKS: usize = 64;
const PROBES: usize = 4;

pub(super) struct ChargedQuotas {
    /// Hashes of noted quotas, so that most charges need no lock.
    marks: [AtomicU64; MARKS],
    /// Names of scopes and windows may be chosen for equal marks.
    secrets: [u64; 2],
    pub(super) noted: Mutex<NotedScopes>,
}

#[derive(Clone, Default)]
pub(super) struct NotedScopes {
    pub(super) scopes: HashMap<ScopeId, NotedScope>,
    count: usize,
    /// Further ones were not noted.
    pub(super) others: bool,
}

#[derive(Clone, Default)]
pub(super) struct NotedScope {
    pub(super) quotas: Vec<Quota>,
    /// Further ones were not noted.
    pub(super) others: bool,
}

impl ChargedQuotas {
    pub(super) fn note(&self, scope: &Scope, quota: &Quota) {
        // 0 is no mark.
        let ([low, high], [first, second]) = (scope.id(), self.secrets);
        let mark = mix([low ^ first, high ^ second], quota.identity()).max(1);
        if self.cells(mark).all(|cell| cell.load(Ordering::Relaxed) != mark) {
            self.add_quota(scope, quota, mark);
        }
    }

    #[cold]
    fn add_quota(&self, scope: &Scope, quota: &Quota, mark: u64) {
        if !sync::lock(&self.noted).add(scope.id(), quota) {
            return;
        }
        let free = self.cells(mark).find(|cell| cell.load(Ordering::Relaxed) == 0);
        if let Some(cell) = free.or(self.cells(mark).next()) {
            cell.store(mark, Ordering::Relaxed);
        }
    }

    fn cells(&self, mark: u64) -> impl Iterator<Item = &AtomicU64> {
        let first = (mark.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize;
        (0..PROBES).map(move |i| &self.marks[(first + i) % MARKS])
    }

    /// The flag says that these quotas are all.
    pub(super) fn look_at<T>(&self, scope: &Scope, look: impl FnOnce(&[Quota], bool) -> T) -> T {
        let noted = sync::lock(&self.noted);
        match noted.scopes.get(&scope.id()) {
            Some(scope) => look(&scope.quotas, !scope.others),
            None => look(&[], !noted.others),
        }
    }
}

impl NotedScopes {
    /// Returns `false` if there are too many.
    pub(super) fn add(&mut self, scope: ScopeId, quota: &Quota) -> bool {
        let room = self.count < MAX_OF_ALL;
        if !room && !self.scopes.contains_key(&scope) {
            self.others = true;
            return false;
        }
        let scope = self.scopes.entry(scope).or_default();
        if scope.quotas.iter().any(|other| other.same_counter(quota)) {
            return true;
        }
        if !room || scope.quotas.len() == MAX_OF_A_SCOPE {
            scope.others = true;
            return false;
        }
        scope.quotas.push(*quota);
        self.count += 1;
        true
    }
}

impl From<NotedScopes> for ChargedQuotas {
    fn from(noted: NotedScopes) -> Self {
        let secrets = array::from_fn(|i| RandomState::new().hash_one(i));
        let marks = array::from_fn(|_| AtomicU64::new(0));
        Self { marks, secrets, noted: Mutex::new(noted) }
    }
}
