//! Charges that are corrected when their request has ended, or was dropped while the store decided.
//! The page of `middleware` says what is returned for a dropped request.

use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use crate::decision::Decision;
use crate::limits::{Limiter, ReceiptLine};
use crate::middleware::cost::Costs;
use crate::store::{Reply, StoreError};

#[derive(Clone)]
pub(super) enum Actual {
    Nothing,
    /// The true costs of the settled limits. Other limits keep their charges.
    Costs(Costs),
}

pub(super) struct Correction(pub(super) Vec<Charged>);

pub(super) struct Charged {
    pub(super) limiter: Limiter,
    pub(super) line: ReceiptLine,
}

impl Actual {
    pub(super) fn of(&self, limiter: &Limiter, granted: u64) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::Costs(costs) if limiter.live().limit().settled => {
                costs.of(limiter.name()).unwrap_or(granted)
            }
            Self::Costs(_) => granted,
        }
    }
}

impl Charged {
    pub(super) fn make(&self, decision: &Decision, actual: &Actual) -> (Reply<()>, Decision) {
        let actual = actual.of(&self.limiter, decision.granted());
        let settled = self.limiter.settle_line(&self.line, decision, actual);
        (settled, decision.clone().with_cost(actual))
    }
}

impl Correction {
    pub(super) fn make(&self, decision: &Decision, actual: &Actual) -> (Reply<()>, Decision) {
        let mut replies = Vec::new();
        let corrected = decision.map_lines(|place, of| {
            let (reply, corrected) = self.0[place].make(&of, actual);
            replies.push(reply);
            corrected
        });
        (Reply::all(replies), corrected)
    }

    pub(super) fn give_back(&self, decision: &Decision) -> Reply<()> {
        let returned =
            self.0.iter().enumerate().filter_map(|(place, Charged { limiter, line })| {
                Some(limiter.give_back(line, decision.at(place)?.as_ref()))
            });
        Reply::all(returned.collect())
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
    Decided(Decision),
}

impl AsideCharge {
    pub(super) fn note(&self, charged: &Charged, decision: Decision) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = mem::replace(&mut *state, AsideState::Decided(decision));
        drop(state);
        if let AsideState::Corrected(actual) = before {
            self.correct(charged, &actual);
        }
    }

    pub(super) fn correct(&self, charged: &Charged, actual: &Actual) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &*state {
            AsideState::Decided(decision) if decision.allowed() => {
                let (reply, corrected) = charged.make(decision, actual);
                *state = AsideState::Decided(corrected);
                drop(state);
                reply.detach();
            }
            AsideState::Decided(_) => {}
            _ => *state = AsideState::Corrected(actual.clone()),
        }
    }
}

/// If this is dropped, a charge that was not sent is withdrawn, and one that was sent is refunded
/// where that is promised (S14).
pub(crate) struct PendingDecision {
    reply: Option<Reply<Decision>>,
    sent: bool,
    refund: Option<Box<Correction>>,
}

impl PendingDecision {
    pub(super) fn new(reply: Reply<Decision>, refund: Option<Correction>) -> Self {
        Self { reply: Some(reply), sent: false, refund: refund.map(Box::new) }
    }

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Decision, StoreError>> {
        self.sent = true;
        let reply = self.reply.as_mut().expect("polled after it was done");
        let answer = ready!(Pin::new(reply).poll(cx));
        self.reply = None;
        Poll::Ready(answer)
    }

    /// Drops `kept` when the tokens are back.
    pub(super) fn abandon(&mut self, kept: impl Send + 'static) {
        let Some(reply) = self.reply.take().filter(|_| self.sent) else { return };
        let Some(refund) = self.refund.take() else { return };
        let refunded = Reply::later(async move {
            let _kept = kept;
            let decision = reply.await?;
            if decision.allowed() {
                refund.give_back(&decision).await?;
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
