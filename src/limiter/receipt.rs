//! Proof of a charge: [`Receipt`].

use crate::decision::Decision;
use crate::store::{OwnedAccount, Scope};

#[cfg(feature = "serde")]
mod kept;

#[cfg(feature = "serde")]
pub use kept::KeptReceipt;

/// Proof of a charge that passed, for [`Limiter::refund`](crate::Limiter::refund) or
/// [`Limiter::settle`](crate::Limiter::settle), once: it can't be copied. Dropping it leaves the
/// charge as it is.
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
#[derive(Debug)]
pub struct Receipt {
    pub(super) account: OwnedAccount,
    pub(super) decision: Decision,
    /// `true` if quotas of the key's own, or of the charge's, decided, and not the limiter's.
    pub(super) own: bool,
}

impl Receipt {
    pub(crate) fn new(account: OwnedAccount, decision: Decision, own: bool) -> Self {
        Self { account, decision, own }
    }

    /// The name that it was charged under.
    pub(crate) fn scope(&self) -> &Scope {
        self.account.as_account().scope()
    }

    /// Returns the decision.
    pub fn decision(&self) -> &Decision {
        &self.decision
    }
}
