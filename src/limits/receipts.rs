//! Proof of a charge of several limits: [`Receipts`], and [`KeptReceipts`] for another process.

use crate::decision::Decision;
use crate::limiter::Receipt;

#[cfg(feature = "serde")]
mod kept;

#[cfg(feature = "serde")]
pub use kept::KeptReceipts;

/// Proof of a charge of several limits, for [`Limits::refund`](crate::Limits::refund) or
/// [`Limits::settle`](crate::Limits::settle), once: it can't be copied. Dropping it leaves the
/// charge as it is.
///
/// ```
/// use tower_fixed_window::{Limits, Line, Quota};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limits = Limits::new([
///     Quota::per_day(9).name("requests"),
///     Quota::per_day(1_000).name("tokens"),
/// ]);
/// let lines = [Line::new("requests", "acme", 1), Line::new("tokens", "acme", 600)];
/// let receipts = limits.charge(lines).await??;
/// assert_eq!(receipts.decision().of("tokens").unwrap().granted(), 600);
/// limits.refund(receipts).await?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Receipts {
    pub(super) receipts: Vec<Receipt>,
    pub(super) decision: Decision,
}

impl Receipts {
    /// Returns the decision over all limits.
    pub fn decision(&self) -> &Decision {
        &self.decision
    }
}
