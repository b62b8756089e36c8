//! The charge of one limit, among several: [`Line`].

use std::fmt;

use crate::key::Key;
use crate::quota::Quotas;

/// A limit in a charge of several: the name of the limit, the key, and the cost. A limit without
/// a line takes no part in the charge.
///
/// ```
/// use tower_fixed_window::{Limits, Line, Quota, Quotas};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limits = Limits::new([
///     Quota::per_minute(60).name("requests"),
///     Quota::per_hour(1_000).name("tokens"),
/// ]);
///
/// // A customer's plan.
/// let pro: Quotas = "50_000/hour".parse()?;
/// let tokens = Line::new("tokens", "acme", 600).with_quotas(&pro);
/// let decision = limits.check([Line::new("requests", "acme", 1), tokens]).await?;
/// assert_eq!(decision.of("tokens").unwrap().limit(), 50_000);
///
/// // This request needs no tokens.
/// let decision = limits.check([Line::new("requests", "acme", 1)]).await?;
/// assert!(decision.of("tokens").is_none());
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[must_use = "a line charges nothing unless it is part of a charge"]
pub struct Line<'a> {
    pub(super) name: &'a str,
    pub(super) key: Key,
    pub(super) cost: u64,
    pub(super) quotas: Option<&'a Quotas>,
}

impl<'a> Line<'a> {
    /// Charges the limit of this name `cost` tokens of `key`.
    pub fn new(name: &'a str, key: impl Into<Key>, cost: u64) -> Self {
        Self { name, key: key.into(), cost, quotas: None }
    }

    /// Charges the same counters under other quotas, such as those of a customer's plan.
    pub fn with_quotas(self, quotas: &'a Quotas) -> Self {
        Self { quotas: Some(quotas), ..self }
    }
}

impl fmt::Debug for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, cost, .. } = self;
        f.debug_struct("Line").field("name", name).field("cost", cost).finish_non_exhaustive()
    }
}
