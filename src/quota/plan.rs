//! The quotas of a request, or no limit at all: [`Plan`].

use super::Quota;
use super::set::Quotas;

/// The text of a plan without quotas.
pub(super) const UNLIMITED: &str = "unlimited";

/// The plan of a request: quotas, or no limit at all. The closure of
/// [`Limit::by_plan`](crate::Limit::by_plan) returns anything that is one: a [`Quota`],
/// [`Quotas`], or an `Option` of either, where `None` is [`UNLIMITED`](Self::UNLIMITED). In text,
/// no limit is `unlimited`.
///
/// ```
/// use tower_fixed_window::{Plan, Quota};
///
/// assert_eq!("unlimited".parse(), Ok(Plan::UNLIMITED));
/// assert_eq!(Plan::UNLIMITED.to_string(), "unlimited");
///
/// let plan: Plan = "60/hour".parse()?;
/// assert_eq!(plan.quotas(), Some(&Quota::per_hour(60).into()));
/// # Ok::<_, tower_fixed_window::ParseQuotaError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[doc(alias = "unlimited")]
pub struct Plan(Option<Quotas>);

impl Plan {
    /// No limit at all.
    pub const UNLIMITED: Self = Self(None);

    /// The quotas; `None`: no limit.
    pub fn quotas(&self) -> Option<&Quotas> {
        self.0.as_ref()
    }
}

impl From<Quota> for Plan {
    fn from(quota: Quota) -> Self {
        Self(Some(quota.into()))
    }
}

impl From<Quotas> for Plan {
    fn from(quotas: Quotas) -> Self {
        Self(Some(quotas))
    }
}

impl From<Option<Quota>> for Plan {
    fn from(quota: Option<Quota>) -> Self {
        Self(quota.map(Quotas::from))
    }
}

impl From<Option<Quotas>> for Plan {
    fn from(quotas: Option<Quotas>) -> Self {
        Self(quotas)
    }
}
