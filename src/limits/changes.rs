//! The changes of a limit since it was built, for good or until an instant: [`Changes`].

use std::collections::HashMap;
use std::sync::Arc;

use foldhash::quality::RandomState;

use crate::key::Key;
use crate::observe::Change;
use crate::quota::Quotas;

/// An instant that no clock reaches.
pub(super) const NEVER: i64 = i64::MAX;

/// The quotas of single keys, each until an instant.
pub(super) type KeyQuotas = HashMap<Key, (Quotas, i64), RandomState>;

/// The changes of a limit. Instants are in milliseconds.
#[derive(Default)]
pub(super) struct Changes {
    pub(super) quotas: Changed<Quotas>,
    pub(super) shadow: Changed<bool>,
    /// Shared with requests in flight.
    pub(super) keys: Arc<KeyQuotas>,
}

/// A value in place of the one that a limit was built with.
pub(super) struct Changed<T> {
    for_good: Option<T>,
    for_now: Option<(T, i64)>,
}

impl<T> Default for Changed<T> {
    fn default() -> Self {
        Self { for_good: None, for_now: None }
    }
}

impl<T: Copy> Changed<T> {
    pub(super) fn get(&self) -> Option<T> {
        self.for_now.map(|(value, _)| value).or(self.for_good)
    }

    pub(super) fn for_good(&self) -> Option<T> {
        self.for_good
    }

    /// Replaces all earlier changes.
    pub(super) fn set(&mut self, value: T) {
        *self = Self { for_good: Some(value), for_now: None };
    }

    pub(super) fn set_until(&mut self, value: T, until: i64) {
        self.for_now = Some((value, until));
    }

    fn until(&self) -> Option<i64> {
        self.for_now.map(|(_, until)| until)
    }

    fn end(&mut self, now: i64) -> bool {
        self.for_now.take_if(|(_, until)| *until <= now).is_some()
    }
}

impl Changes {
    pub(super) fn set_key(&mut self, key: Key, quotas: Quotas, until: i64) {
        Arc::make_mut(&mut self.keys).insert(key, (quotas, until));
    }

    pub(super) fn clear_key(&mut self, key: &Key) {
        if self.keys.contains_key(key) {
            Arc::make_mut(&mut self.keys).remove(key);
        }
    }

    /// Returns whether all quotas are the ones that the limit was built with.
    pub(super) fn has_no_quotas(&self) -> bool {
        self.quotas.get().is_none() && self.keys.is_empty()
    }

    /// Ends the changes whose time is over, and returns their kinds.
    pub(super) fn end(&mut self, now: i64) -> Vec<Change> {
        let mut ended = Vec::new();
        if self.quotas.end(now) {
            ended.push(Change::Quotas);
        }
        if self.shadow.end(now) {
            ended.push(Change::Shadow);
        }
        let before = self.keys.len();
        if self.keys.values().any(|(_, until)| *until <= now) {
            Arc::make_mut(&mut self.keys).retain(|_, (_, until)| *until > now);
        }
        ended.extend((self.keys.len()..before).map(|_| Change::Key));
        ended
    }

    /// Returns the instant when the next change ends.
    pub(super) fn next_end(&self) -> i64 {
        let keys = self.keys.values().map(|(_, until)| *until);
        keys.chain(self.quotas.until()).chain(self.shadow.until()).min().unwrap_or(NEVER)
    }

    /// Returns the instant when the last change of a kind ends, if there is one.
    pub(super) fn last_end(&self, of: Change) -> Option<i64> {
        match of {
            Change::Quotas => self.quotas.until(),
            Change::Shadow => self.shadow.until(),
            Change::Key => self.keys.values().map(|(_, until)| *until).max(),
        }
    }
}
