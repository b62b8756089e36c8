//! Charges that are corrected when their request has ended, or was dropped while the store decided.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use super::live::Live;
use crate::decision::Decision;
use crate::limiter::Limiter;
use crate::store::{OwnedAccount, OwnedCharge, Reply, StoreError};

/// Corrects a charge after its request has ended.
pub(crate) struct Correction {
    pub(crate) limiter: Limiter,
    pub(crate) account: OwnedAccount,
    /// For the quotas in force by then; `None` where the request had its own.
    pub(crate) live: Option<Arc<Live>>,
}

impl Correction {
    pub(crate) fn make(self, decision: &Decision, actual: u64) -> Reply<()> {
        let account = match self.live {
            Some(live) => self.account.updated(&live.quotas()),
            None => self.account,
        };
        self.limiter.settle_account(account.as_account(), decision, actual)
    }
}

/// A decision that the store has not made yet. If it is dropped, a charge that was not sent is
/// withdrawn, and a charge that was sent is refunded (S14).
pub(crate) struct PendingDecision {
    reply: Option<Reply<Decision>>,
    sent: bool,
    /// For a charge that is sent after a refund.
    withdrawn: Option<Arc<AtomicBool>>,
    refund: Option<Box<Refund>>,
}

/// Refunds the charge of a request that was dropped.
pub(crate) struct Refund {
    pub(crate) correction: Correction,
    /// Not only reservations.
    pub(crate) always: bool,
}

impl PendingDecision {
    pub(crate) fn new(reply: Reply<Decision>, refund: Option<Refund>) -> Self {
        Self { reply: Some(reply), sent: false, withdrawn: None, refund: refund.map(Box::new) }
    }

    /// For a charge that is sent after earlier tokens were refunded.
    pub(crate) fn after(
        returned: Reply<()>,
        limiter: Limiter,
        charge: OwnedCharge,
        refund: Option<Refund>,
    ) -> Self {
        let withdrawn = Arc::new(AtomicBool::new(false));
        let is_withdrawn = Arc::clone(&withdrawn);
        let reply = Reply::later(async move {
            let _counted_if_it_fails = returned.await;
            if is_withdrawn.load(Ordering::Acquire) {
                return Err(StoreError::new("the charge was withdrawn"));
            }
            limiter.send(charge.as_charge()).await
        });
        let mut this = Self::new(reply, refund);
        this.withdrawn = Some(withdrawn);
        this
    }

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Decision, StoreError>> {
        self.sent = true;
        let reply = self.reply.as_mut().expect("polled after it was done");
        let answer = ready!(Pin::new(reply).poll(cx));
        self.reply = None;
        Poll::Ready(answer)
    }
}

impl Drop for PendingDecision {
    fn drop(&mut self) {
        let Some(reply) = self.reply.take().filter(|_| self.sent) else { return };
        if let Some(withdrawn) = &self.withdrawn {
            withdrawn.store(true, Ordering::Release);
        }
        let Some(refund) = self.refund.take() else { return };
        let Refund { correction, always } = *refund;
        let refunded = Reply::later(async move {
            let decision = reply.await?;
            if decision.allowed() && (always || decision.ready_at_ms().is_some()) {
                correction.make(&decision, 0).await?;
            }
            Ok(())
        });
        refunded.detach();
    }
}
