//! Warnings before a limit is reached: [`NearLimit`].

use std::sync::Arc;

use crate::decision::{Decision, Usage};
use crate::key::Key;
use crate::quota::{Quota, Quotas};
use crate::store::Scope;

/// A key has just used a share of a limit: [`Limit::warn_at`](crate::Limit::warn_at).
///
/// It is for the app's own use: a key may be an address or an id. `Debug` shows no key.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct NearLimit<'a> {
    /// The name of the limit. It is empty if the limit has none.
    pub name: &'a str,
    /// The key: [`Key::readable`] shows it.
    pub key: &'a Key,
    /// The quota of which the share is used.
    pub quota: Quota,
    /// The standing of the key under this quota, after the charge.
    pub usage: Usage,
    /// The share in percent, as given to [`Limit::warn_at`](crate::Limit::warn_at).
    pub percent: u8,
}

/// A share of a limit, and what to call at it.
#[derive(Clone)]
pub(crate) struct Warning {
    percent: u8,
    warn: Arc<dyn Fn(&NearLimit<'_>) + Send + Sync>,
}

impl Warning {
    #[track_caller]
    pub(super) fn new<F>(percent: u8, warn: F) -> Self
    where
        F: Fn(&NearLimit<'_>) + Send + Sync + 'static,
    {
        assert!(
            (1..=100).contains(&percent),
            "{percent}% is no share of a limit: write .warn_at(80, ..)"
        );
        Self { percent, warn: Arc::new(warn) }
    }

    /// Warns if the last `taken` tokens of a decision have reached the share.
    pub(super) fn look(
        &self,
        scope: &Scope,
        key: &Key,
        quotas: &Quotas,
        decision: &Decision,
        taken: u64,
    ) {
        let (name, percent) = (scope.name(), self.percent);
        for (&quota, &usage) in quotas.iter().zip(decision.usage()) {
            if usage.has_reached(percent, taken) {
                scope.observe().warned();
                (self.warn)(&NearLimit { name, key, quota, usage, percent });
            }
        }
    }
}
