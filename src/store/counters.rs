//! Which counters each scope was charged under: a key has to be found under all of them to be
//! forgotten.

use std::array;
use std::collections::HashMap;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

use super::scope::Scope;
use crate::quota::Quota;
use crate::sync::Mutex;

/// Counters of one scope, and of all scopes. A plan is one for each of its windows, so these are
/// many; what makes up windows as it goes is not followed further.
const MAX_OF_A_SCOPE: usize = 64;
const MAX_OF_ALL: usize = 1_024;
/// Marks of counters that are known, and among how many of them one is looked for.
const MARKS: usize = 64;
const PROBES: usize = 4;

pub(super) struct Counters {
    /// Hashes of counters that are known: most charges need no lock.
    marks: [AtomicU64; MARKS],
    known: Mutex<Noted>,
}

#[derive(Default)]
struct Noted {
    scopes: HashMap<u64, OfScope>,
    count: usize,
    /// Whether there are scopes beside these.
    others: bool,
}

#[derive(Default)]
struct OfScope {
    quotas: Vec<Quota>,
    /// Whether there are counters beside these.
    others: bool,
}

impl Default for Counters {
    fn default() -> Self {
        Self { marks: array::from_fn(|_| AtomicU64::new(0)), known: Mutex::default() }
    }
}

impl Counters {
    /// Notes that a scope is charged under this counter, for resets to find it. `false`: there are
    /// too many to note.
    #[inline]
    pub(super) fn note(&self, scope: &Scope, quota: &Quota) -> bool {
        // 0 is no mark.
        let mark = (scope.id().rotate_left(32) ^ quota.identity()).max(1);
        self.cells(mark).any(|cell| cell.load(Ordering::Relaxed) == mark)
            || self.add(scope, quota, mark)
    }

    #[cold]
    fn add(&self, scope: &Scope, quota: &Quota, mark: u64) -> bool {
        let added =
            self.known.lock().unwrap_or_else(PoisonError::into_inner).add(scope.id(), quota);
        if added {
            let free = self.cells(mark).find(|cell| cell.load(Ordering::Relaxed) == 0);
            if let Some(cell) = free.or(self.cells(mark).next()) {
                cell.store(mark, Ordering::Relaxed);
            }
        }
        added
    }

    /// Where a mark may be.
    fn cells(&self, mark: u64) -> impl Iterator<Item = &AtomicU64> {
        let first = (mark.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize;
        (0..PROBES).map(move |i| &self.marks[(first + i) % MARKS])
    }

    /// The counters of a scope that are known, and whether these are all.
    pub(super) fn of<T>(&self, scope: &Scope, look: impl FnOnce(&[Quota], bool) -> T) -> T {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        match known.scopes.get(&scope.id()) {
            Some(scope) => look(&scope.quotas, !scope.others),
            None => look(&[], !known.others),
        }
    }
}

impl Noted {
    fn add(&mut self, scope: u64, quota: &Quota) -> bool {
        let room = self.count < MAX_OF_ALL;
        if !room && !self.scopes.contains_key(&scope) {
            self.others = true;
            return false;
        }
        let scope = self.scopes.entry(scope).or_default();
        if scope.quotas.iter().any(|other| other.identity() == quota.identity()) {
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

/// What a scope is charged under, to be kept in a file.
#[cfg(feature = "saved")]
pub(super) struct Charged {
    pub(super) scope: u64,
    pub(super) quotas: Vec<Quota>,
    /// Whether these are not all.
    pub(super) others: bool,
}

#[cfg(feature = "saved")]
impl Counters {
    /// The counters of all scopes, and whether there are scopes beside these.
    pub(super) fn all(&self) -> (Vec<Charged>, bool) {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let charged = known.scopes.iter().map(|(&scope, OfScope { quotas, others })| Charged {
            scope,
            quotas: quotas.clone(),
            others: *others,
        });
        (charged.collect(), known.others)
    }

    /// Those of a file.
    pub(super) fn restored(all: Vec<Charged>, others: bool) -> Self {
        let mut known = Noted { others, ..Noted::default() };
        for Charged { scope, quotas, others } in all {
            quotas.iter().for_each(|quota| _ = known.add(scope, quota));
            if others {
                known.scopes.entry(scope).or_default().others = true;
            }
        }
        Self { known: Mutex::new(known), ..Self::default() }
    }
}
