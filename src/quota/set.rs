//! Several quotas of one key, [`Quotas`]; and those of a request, or no limit at all: [`Plan`].

use std::fmt;
use std::slice;

use super::Quota;

/// One to four quotas that are charged together, all or none.
///
/// Create it with [`Quota::and`], from a single [`Quota`], or from text.
///
/// ```
/// use tower_fixed_window::{Quota, Quotas};
///
/// let quotas: Quotas = "33/minute, 2000/hour".parse()?;
/// assert_eq!(quotas, Quota::per_minute(33).and(Quota::per_hour(2_000)));
/// assert_eq!(quotas.as_ref(), [Quota::per_minute(33), Quota::per_hour(2_000)]);
/// assert_eq!(quotas.into_iter().map(Quota::limit).collect::<Vec<_>>(), [33, 2_000]);
/// # Ok::<_, tower_fixed_window::ParseQuotaError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Quotas {
    // Slots from `len` on repeat the first quota, so that each slot has one.
    quotas: [Quota; Quotas::MAX],
    pub(crate) periods: Periods,
    len: u8,
}

/// The period of each quota on a calendar, by which clients know it. Others know their window's
/// length.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Periods(u16);

impl Periods {
    const BITS: usize = 4;

    const fn and(self, i: usize, quota: &Quota) -> Self {
        Self(self.0 | (quota.period() as u16) << (Self::BITS * i))
    }

    /// [`Quota::period`] of the quota at this position.
    #[inline]
    pub(crate) fn of(self, i: usize) -> usize {
        (self.0 >> (Self::BITS * i) & ((1 << Self::BITS) - 1)).into()
    }
}

impl Quotas {
    pub(crate) const MAX: usize = 4;

    pub(super) const fn one(quota: Quota) -> Self {
        Self { quotas: [quota; Self::MAX], periods: Periods(0).and(0, &quota), len: 1 }
    }

    /// Adds a quota. For quotas from a database or a file, parse text with commas instead.
    ///
    /// # Panics
    /// If the set already holds four quotas, or one with the same window and start.
    #[must_use]
    #[track_caller]
    pub const fn and(self, quota: Quota) -> Self {
        match self.try_and(quota) {
            Ok(quotas) => quotas,
            Err(error) => panic!("{}", error),
        }
    }

    pub(super) const fn try_and(mut self, quota: Quota) -> Result<Self, &'static str> {
        const EQUAL_WINDOWS: &str = "two quotas of one set have the same window and anchor and \
            would be one counter: keep the smaller";

        let len = self.len as usize;
        if len == Self::MAX {
            return Err("a set holds at most 4 quotas: stack a second layer for more");
        }
        let mut i = 0;
        while i < len {
            if self.quotas[i].same_counter(&quota) {
                return Err(EQUAL_WINDOWS);
            }
            i += 1;
        }
        self.quotas[len] = quota;
        self.periods = self.periods.and(len, &quota);
        self.len += 1;
        Ok(self)
    }

    /// Returns whether this cost can ever pass (S8).
    pub(crate) fn can_grant(&self, cost: u64) -> bool {
        self.iter().all(|quota| cost == 0 || quota.limit > 0 && cost <= quota.capacity)
    }

    /// For a count that nothing limits.
    pub(crate) fn lifted(mut self) -> Self {
        self.quotas = self.quotas.map(|quota| quota.with_limit(Quota::MAX_TOKENS));
        self
    }

    /// For one of `nodes`, rounded up.
    pub(crate) fn share(mut self, nodes: u64) -> Self {
        for quota in &mut self.quotas {
            quota.limit = quota.limit.div_ceil(nodes);
            quota.capacity = quota.capacity.div_ceil(nodes);
            quota.max_reserved = quota.max_reserved.div_ceil(nodes);
        }
        self
    }

    /// Replaces each quota by the one of `current` with the same counter, if there is one. A quota
    /// that has granted reservations may still have some (S14).
    pub(crate) fn updated(mut self, current: &Quotas) -> Self {
        for quota in &mut self.quotas {
            if let Some(current) = current.iter().find(|current| current.same_counter(quota)) {
                let reserved = quota.max_reserved.max(current.max_reserved);
                let max_reserved = reserved.min(Quota::MAX_TOKENS - current.capacity);
                *quota = Quota { max_reserved, ..*current };
            }
        }
        self
    }

    // Without the comparison that a slice of this length makes.
    pub(crate) const fn len(&self) -> usize {
        self.len as usize
    }

    #[inline]
    pub(crate) fn first(&self) -> &Quota {
        &self.quotas[0]
    }

    #[inline]
    pub(crate) fn as_slice(&self) -> &[Quota] {
        &self.quotas[..self.len as usize]
    }

    #[inline]
    pub(crate) fn iter(&self) -> slice::Iter<'_, Quota> {
        self.as_slice().iter()
    }
}

impl AsRef<[Quota]> for Quotas {
    fn as_ref(&self) -> &[Quota] {
        self.as_slice()
    }
}

impl From<Quota> for Quotas {
    fn from(quota: Quota) -> Self {
        Self::one(quota)
    }
}

impl From<&Self> for Quotas {
    fn from(quotas: &Self) -> Self {
        *quotas
    }
}

impl<'a> IntoIterator for &'a Quotas {
    type Item = &'a Quota;
    type IntoIter = slice::Iter<'a, Quota>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl fmt::Debug for Quotas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Quotas({self})")
    }
}

/// A request's quotas, or no limit at all. The closure of
/// [`Limit::by_plan`](crate::Limit::by_plan) returns anything that converts into a plan: a
/// [`Quota`], [`Quotas`], or an `Option` of either, where `None` means
/// [`UNLIMITED`](Self::UNLIMITED). As text, no limit is `unlimited`.
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
    /// A plan without a limit: requests pass uncounted and without headers.
    pub const UNLIMITED: Self = Self(None);

    /// Returns the quotas, or `None` if there is no limit.
    pub fn quotas(&self) -> Option<&Quotas> {
        self.0.as_ref()
    }
}

macro_rules! is_a_plan {
    ($($quotas:ty),*) => {$(
        impl From<$quotas> for Plan {
            fn from(quotas: $quotas) -> Self {
                Self(Some(quotas.into()))
            }
        }

        impl From<Option<$quotas>> for Plan {
            fn from(quotas: Option<$quotas>) -> Self {
                Self(quotas.map(Into::into))
            }
        }
    )*};
}

is_a_plan!(Quota, Quotas, &Quotas);
