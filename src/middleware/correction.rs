//! Charges that are corrected when their request has ended, or was dropped while the store decided.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use super::live::Live;
use crate::decision::Decision;
use crate::limiter::{Limiter, freed};
use crate::store::{OwnedAccount, Reply, StoreError};

/// Corrects a charge after its request has ended.
pub(crate) struct Correction {
    pub(crate) limiter: Limiter,
    pub(crate) account: OwnedAccount,
    pub(crate) live: Arc<Live>,
    /// Whether the request had quotas of its own, and not those in force.
    pub(crate) own: bool,
}

impl Correction {
    pub(crate) fn make(self, decision: &Decision, actual: u64) -> Reply<()> {
        let Self { limiter, account, live, own } = self;
        let account = if own { account } else { account.updated(&live.quotas()) };
        let account = account.as_account();
        let settled = limiter.settle_account(account, decision, actual);
        freed::note_after(limiter.scope(), account.key(), settled)
    }
}

/// A decision that the store has not made yet. If it is dropped, a charge that was not sent is
/// withdrawn, and a charge that was sent is refunded where that is promised (S14).
pub(crate) struct PendingDecision {
    reply: Option<Reply<Decision>>,
    sent: bool,
    refund: Option<Box<Correction>>,
}

impl PendingDecision {
    pub(crate) fn new(reply: Reply<Decision>, refund: Option<Correction>) -> Self {
        Self { reply: Some(reply), sent: false, refund: refund.map(Box::new) }
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
        let Some(refund) = self.refund.take() else { return };
        let refunded = Reply::later(async move {
            let decision = reply.await?;
            if decision.allowed() {
                refund.make(&decision, 0).await?;
            }
            Ok(())
        });
        refunded.detach();
    }
}
