//! Conversions into [`Limits`]: from quotas, one limit or several, and limiters.

use super::Limits;
use crate::limit::Limit;
use crate::limiter::Limiter;
use crate::quota::{Quota, Quotas};

/// A value that converts into [`Limits`]. A trait of this crate, since only its advice is shown by
/// the compiler.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a limit",
    label = "write a quota here, such as `Quota::per_minute(60)`",
    note = "a text is parsed first: `\"60/minute\".parse::<Quotas>()?`",
    note = "`Quotas`, `Limit`, an array or a `Vec` of limits, `Limiter`, `&Limiter`, `Limits` and `&Limits` do as well"
)]
pub trait IntoLimits {
    #[doc(hidden)]
    fn into_limits(self) -> Limits;
}

#[diagnostic::do_not_recommend]
impl<T: Into<Limits>> IntoLimits for T {
    fn into_limits(self) -> Limits {
        self.into()
    }
}

impl From<Quota> for Limits {
    fn from(quota: Quota) -> Self {
        Limit::from(quota).into()
    }
}

impl From<Quotas> for Limits {
    fn from(quotas: Quotas) -> Self {
        Limit::from(quotas).into()
    }
}

impl From<Limit> for Limits {
    fn from(limit: Limit) -> Self {
        Self::unchecked(vec![limit])
    }
}

impl From<Vec<Limit>> for Limits {
    fn from(limits: Vec<Limit>) -> Self {
        Self::unchecked(limits)
    }
}

impl<const N: usize> From<[Limit; N]> for Limits {
    fn from(limits: [Limit; N]) -> Self {
        Self::unchecked(limits.into())
    }
}

impl From<Limiter> for Limits {
    fn from(limiter: Limiter) -> Self {
        let store = limiter.shared_store().clone();
        Self { limits: [limiter].into(), store }
    }
}

impl From<&Limiter> for Limits {
    fn from(limiter: &Limiter) -> Self {
        limiter.clone().into()
    }
}

impl From<&Self> for Limits {
    fn from(limits: &Self) -> Self {
        limits.clone()
    }
}
