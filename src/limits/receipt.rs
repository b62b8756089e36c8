//! Proof of a charge: [`Receipt`], and [`KeptReceipt`] for another process.

use crate::decision::{Decision, RateLimited};
use crate::store::{OwnedAccount, Scope};

#[cfg(feature = "serde")]
mod kept;

#[cfg(feature = "serde")]
pub use kept::KeptReceipt;

/// Proof of a charge that passed, to correct it once: it can't be copied. Dropping it leaves the
/// charge as it is.
///
/// A [`Limiter`](crate::Limiter) corrects the charge of its one limit:
///
/// ```
/// use tower_fixed_window::{Limiter, Quota};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = Limiter::new(Quota::per_day(1_000));
/// let receipt = limiter.charge("alice", 100).await??;
/// let decision = receipt.decision();
/// assert_eq!((decision.granted(), decision.remaining()), (100, 900));
/// limiter.refund(receipt).await?;
/// # Ok(()) }
/// ```
///
/// [`Limits`](crate::Limits) correct a charge of all of them:
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
/// let receipt = limits.charge(lines).await??;
/// assert_eq!(receipt.decision().of("tokens").unwrap().granted(), 600);
/// limits.settle(receipt, [("tokens", 812)]).await?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Receipt {
    /// In their places of the charge.
    pub(crate) lines: Vec<ReceiptLine>,
    pub(crate) decision: Decision,
}

/// What was charged in a line.
#[derive(Debug)]
pub(crate) struct ReceiptLine {
    pub(crate) account: OwnedAccount,
    /// `true` if quotas of the key's own, or of the charge's, decided, and not the limiter's.
    pub(crate) own: bool,
}

impl ReceiptLine {
    /// The name that it was charged under.
    pub(crate) fn scope(&self) -> &Scope {
        self.account.as_account().scope()
    }
}

impl Receipt {
    /// Returns the receipt of a charge that passed, or the refusal.
    pub(crate) fn of(lines: Vec<ReceiptLine>, decision: Decision) -> Result<Self, RateLimited> {
        Ok(Self { lines, decision: decision.passed()? })
    }

    /// Returns the decision.
    pub fn decision(&self) -> &Decision {
        &self.decision
    }
}
