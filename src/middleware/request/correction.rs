//! Charges that are corrected when their request has ended, or was dropped while the store decided.
//! The page of `middleware` says what is returned for a dropped request.

use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use crate::decision::Decision;
use crate::limits::{Limiter, Limits, Receipt, ReceiptLine};
use crate::middleware::cost::Costs;
use crate::store::{Reply, StoreError};
use crate::sync::{Mutex, lock};

/// A response's word on its charge. A true cost holds also if the response does not count (S15).
#[derive(Clone)]
pub(super) struct Actual {
    /// True costs of settled limits, by name.
    pub(super) costs: Costs,
    /// The charges of other limits stay, or are refunded.
    pub(super) counts: bool,
}

impl Actual {
    pub(super) fn nothing() -> Self {
        Self { costs: Costs::default(), counts: false }
    }

    fn cost(&self, limiter: &Limiter, granted: u64) -> u64 {
        match self.costs.get(limiter.name()) {
            Some(cost) if limiter.live.limit.settled => *cost,
            _ if self.counts => granted,
            _ => 0,
        }
    }

    /// Returns the decision with these costs.
    pub(super) fn correct(&self, receipt: &Receipt, limits: &Limits) -> (Reply<()>, Decision) {
        receipt.correct(&limits.limiters, |_, limiter, granted| Some(self.cost(limiter, granted)))
    }
}

/// The charge of a limit in shadow mode, for which the request does not wait. It may be corrected
/// before it is decided.
#[derive(Clone, Default)]
pub(super) struct AsideCharge(Arc<Mutex<AsideState>>);

#[derive(Default)]
enum AsideState {
    #[default]
    Undecided,
    /// The correction waits for the decision.
    Corrected(Actual),
    Decided(Receipt),
}

impl AsideCharge {
    pub(super) fn note(&self, receipt: Receipt, limits: &Limits) {
        let before = mem::replace(&mut *lock(&self.0), AsideState::Decided(receipt));
        if let AsideState::Corrected(actual) = before {
            self.correct(&actual, limits);
        }
    }

    pub(super) fn correct(&self, actual: &Actual, limits: &Limits) {
        let mut state = lock(&self.0);
        match &mut *state {
            AsideState::Decided(receipt) if receipt.decision.is_allowed() => {
                let (reply, corrected) = actual.correct(receipt, limits);
                receipt.decision = corrected;
                drop(state);
                reply.detach();
            }
            AsideState::Decided(_) => {}
            state => *state = AsideState::Corrected(actual.clone()),
        }
    }
}

/// If this is dropped, a charge that was not sent is withdrawn, and one that was sent is refunded
/// where that is promised (S14).
pub(super) struct PendingDecision {
    reply: Option<Reply<Decision>>,
    sent: bool,
    refund: Option<(Limits, Vec<ReceiptLine>)>,
}

impl PendingDecision {
    pub(super) fn new(reply: Reply<Decision>, refund: Option<(Limits, Vec<ReceiptLine>)>) -> Self {
        Self { reply: Some(reply), sent: false, refund }
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Decision, StoreError>> {
        self.sent = true;
        let reply = self.reply.as_mut().expect("polled after it was done");
        let answer = ready!(Pin::new(reply).poll(cx));
        self.reply = None;
        Poll::Ready(answer)
    }

    /// Drops `kept` when the tokens are back.
    pub(super) fn abandon(&mut self, kept: impl Send + 'static) {
        let Some(reply) = self.reply.take().filter(|_| self.sent) else { return };
        let Some((limits, lines)) = self.refund.take() else { return };
        let refunded = Reply::later(async move {
            let _kept = kept;
            let decision = reply.await?;
            if decision.is_allowed() {
                Receipt::new(lines, decision).correct(&limits.limiters, |_, _, _| None).0.await?;
            }
            Ok(())
        });
        refunded.detach();
    }
}

impl Drop for PendingDecision {
    fn drop(&mut self) {
        self.abandon(());
    }
}
