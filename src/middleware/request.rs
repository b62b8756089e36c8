//! A request on its way through the limit: its key, its charge, and what follows from the decision.
//! `response` has what follows from the response.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::request::Parts;
use http::{Extensions, Response};

use super::correction::{Correction, PendingDecision, Refund};
use super::queue::Waiter;
use super::reason::Reason;
use super::rejection::{Reject, Rejection};
use super::shared::{Current, Shared};
use super::stacked;
use super::upload::Drain;
use crate::decision::Decision;
use crate::key::Key;
use crate::limiter::observe_decision;
use crate::observe::{self, Outcome};
use crate::quota::Quotas;
use crate::store::{Account, Charge, OnStoreFailure, Reply, StoreError};

mod response;

pub(crate) struct LimitedRequest<J> {
    current: Arc<Current<J>>,
    key: Key,
    /// The quotas of this request, where they are not the layer's.
    quotas: Option<Box<Quotas>>,
    /// What was taken and may still be corrected.
    charged: Option<Decision>,
    /// Whether to give it back if the request is dropped now.
    refund_on_drop: bool,
    shadow: bool,
    /// Where the layer has a queue.
    waiter: Option<Box<Waiter>>,
}

/// What happens to a request next.
pub(crate) enum Next {
    /// The service is called.
    Call,
    /// It has a reservation, and waits until that is due.
    Wait(Duration),
    /// It charges when the service is ready, and late requests that came before it have had their
    /// turn.
    ChargeInTurn,
    /// It waits for the store.
    Decide(PendingDecision),
    Refuse(Reason),
}

impl<J> LimitedRequest<J> {
    #[inline]
    pub(crate) fn new(current: Arc<Current<J>>) -> Self {
        Self {
            shadow: current.shared.live.shadow(current.shared.options.shadow),
            current,
            key: Key::default(),
            quotas: None,
            charged: None,
            refund_on_drop: false,
            waiter: None,
        }
    }

    pub(crate) fn shared(&self) -> &Shared<J> {
        &self.current.shared
    }

    /// Finds key, quotas and cost, and charges.
    #[inline]
    pub(crate) fn start(&mut self, parts: &Parts) -> Next {
        let options = &self.current.shared.options;
        if options.skips(parts) {
            return Next::Call;
        }
        if let Err(missing) = options.key.extract(parts, &mut self.key) {
            if !missing.is_client() {
                observe::mistake(&missing);
            }
            return match self.shadow {
                true => self.pass(Outcome::ShadowMissingKey),
                false => Next::Refuse(Reason::MissingKey(missing)),
            };
        }
        if let Some(quota_fn) = &options.quota_fn {
            let plan = quota_fn(parts, &self.key);
            let Some(&quotas) = plan.quotas() else { return Next::Call };
            let queue = options.queue.filter(|_| !self.shadow);
            self.quotas = Some(Box::new(queue.map_or(quotas, |tokens| quotas.reserving(tokens))));
        }
        if options.queue.is_some() && !self.shadow {
            let waiter = Waiter::new(&self.current.shared.live.queue, &self.key);
            let behind = waiter.is_late();
            self.waiter = Some(Box::new(waiter));
            if behind {
                return Next::ChargeInTurn;
            }
        }
        self.charge(parts, self.cost(parts))
    }

    fn cost(&self, parts: &Parts) -> u64 {
        self.current.shared.options.cost_fn.as_ref().map_or(1, |cost_fn| cost_fn(parts))
    }

    #[inline(always)]
    fn charge(&mut self, parts: &Parts, cost: u64) -> Next {
        match self.current.shared.limiter.send(self.charge_of(cost)).into_now() {
            Ok(answer) => self.decide(parts, answer),
            Err(later) => Next::Decide(PendingDecision::new(later, self.refund())),
        }
    }

    #[inline]
    fn charge_of(&self, cost: u64) -> Charge<'_> {
        let charge = Charge::new(self.account(), cost);
        if self.waiter.is_some() { charge.reserving() } else { charge }
    }

    /// For a request that is dropped while the store decides, where that is promised.
    fn refund(&self) -> Option<Refund> {
        let always = self.current.shared.options.refund_dropped;
        (always || self.waiter.is_some()).then(|| Refund { correction: self.correction(), always })
    }

    /// Whether the window that it has waited for is over.
    pub(crate) fn is_late(&self) -> bool {
        self.waiter.as_ref().is_some_and(|waiter| waiter.is_late())
    }

    /// Ready when it may charge anew: those that were late before it go first.
    pub(crate) fn turn(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.waiter.as_mut().map_or(Poll::Ready(()), |waiter| waiter.turn(cx))
    }

    /// Takes tokens of another window than the one that is over.
    pub(crate) fn charge_again(&mut self, parts: &Parts) -> Next {
        // This may panic: what was taken is refunded then, too.
        let cost = self.cost(parts);
        // Other quotas may have windows that still run.
        let returned = self.charged.take().map(|decision| self.settled(&decision, 0));
        if self.quotas.is_none() {
            self.current = Current::new(&self.current.shared);
        }
        if let Some(waiter) = &mut self.waiter {
            waiter.charges();
        }
        match returned.and_then(|reply| reply.into_now().err()) {
            None => self.charge(parts, cost),
            Some(returned) => {
                let (limiter, charge) =
                    (self.current.shared.limiter.clone(), self.charge_of(cost).to_owned());
                Next::Decide(PendingDecision::after(returned, limiter, charge, self.refund()))
            }
        }
    }

    /// What follows from the store's answer.
    #[inline]
    pub(crate) fn decide(&mut self, parts: &Parts, answer: Result<Decision, StoreError>) -> Next {
        let options = &self.current.shared.options;
        let decision = match answer {
            Ok(decision) => decision,
            // A standing that is unknown is not reported (S23).
            Err(_) if options.on_store_failure == OnStoreFailure::Deny && !self.shadow => {
                return Next::Refuse(Reason::StoreFailed);
            }
            Err(_) => return self.pass(Outcome::FailedOpen),
        };
        if !decision.allowed() {
            if self.shadow {
                self.report(parts, &decision);
                return Next::Call;
            }
            return Next::Refuse(Reason::RateLimited(decision));
        }
        if self.waiter.is_some() || decision.ready_at_ms().is_some() {
            return self.decide_in_queue(parts, decision);
        }
        // Before anything that may panic.
        self.refund_on_drop = options.refund_dropped;
        self.charged = Some(decision);
        self.report_charged(parts);
        Next::Call
    }

    /// A request that may have to wait has got tokens.
    #[inline(never)]
    fn decide_in_queue(&mut self, parts: &Parts, decision: Decision) -> Next {
        let options = &self.current.shared.options;
        let waited = self.waiter.as_ref().and_then(|waiter| waiter.has_waited());
        let wait = decision.ready_after();
        if wait > options.max_wait.saturating_sub(waited.unwrap_or_default()) {
            self.settled(&decision, 0).detach();
            return Next::Refuse(Reason::RateLimited(decision.into_refusal()));
        }
        // Before anything that may panic.
        self.refund_on_drop = !wait.is_zero() || options.refund_dropped;
        self.charged = Some(decision);
        // A request that was reported to wait is reported again only if it is refused.
        if self.waiter.as_ref().is_none_or(|waiter| !waiter.has_reserved()) {
            self.report_charged(parts);
        }
        if wait.is_zero() {
            return Next::Call;
        }
        if let (Some(waiter), Some(decision)) = (&mut self.waiter, &self.charged) {
            waiter.reserve(good_for(decision));
        }
        Next::Wait(wait)
    }

    /// The service is about to be called: what was reserved is used now.
    #[inline]
    pub(crate) fn calling(&mut self, extensions: &mut Extensions) {
        self.leave_queue();
        let options = &self.current.shared.options;
        self.refund_on_drop = options.refund_dropped;
        if options.expose_decision {
            self.charged.clone().map(|decision| extensions.insert(decision));
        }
        if self.current.shared.watch.is_on() {
            self.mark(extensions);
        }
    }

    /// Whether a layer inside of this one may refuse it long before its response is complete.
    #[inline]
    pub(crate) fn may_be_refused_inside<B: 'static>(&self, body: &B) -> bool {
        stacked::are_possible()
            && self.charged.is_some()
            && Drain::may_read(&self.current.shared.options.drains, body)
    }

    /// For other layers on the way of the request.
    #[cold]
    #[inline(never)]
    fn mark(&self, extensions: &mut Extensions) {
        let Shared { limiter, options, live, watch, .. } = &*self.current.shared;
        if self.charged.is_some() {
            watch.mark((limiter.scope().name(), live, options), &self.key, extensions);
        }
    }

    /// A request is refused.
    #[inline]
    pub(crate) fn refused(&mut self, parts: &Parts, reason: &Reason) {
        self.leave_queue();
        if let Reason::RateLimited(decision) = reason {
            self.report(parts, decision);
        } else if let Some(outcome) = reason.consequences().outcome {
            let missing = match reason {
                Reason::MissingKey(missing) if missing.is_client() => Some(missing),
                _ => None,
            };
            self.current.shared.limiter.scope().observe().refused_undecided(outcome, missing);
        }
    }

    #[inline]
    fn leave_queue(&mut self) {
        #[inline(never)]
        fn leave(waiter: &mut Option<Box<Waiter>>) {
            *waiter = None;
        }
        if self.waiter.is_some() {
            leave(&mut self.waiter);
        }
    }

    /// The response to a refused request.
    pub(crate) fn reject<R>(&self, parts: &Parts, reason: &Reason) -> Response<R>
    where
        J: Reject<R>,
    {
        let why = Rejection {
            reason,
            limited: self.current.shared.options.status,
            name: self.current.shared.limiter.scope().name(),
            quotas: Some(self.quotas()),
            prepared_body: Some(&self.current.settings.body).filter(|_| self.quotas.is_none()),
            headers: &self.current.settings.headers,
        };
        let mut response = self.current.shared.reject.reject(parts, &why);
        why.complete(&mut response);
        response
    }

    /// Returns what was taken, if anything was, without waiting for that (S14).
    pub(crate) fn give_back(&mut self) {
        if let Some(decision) = self.charged.take() {
            self.settled(&decision, 0).detach();
        }
    }

    fn settled(&self, decision: &Decision, actual: u64) -> Reply<()> {
        match self.current.shared.live.is_current(&self.current.settings) {
            true => self.current.shared.limiter.settle_account(self.account(), decision, actual),
            false => self.correction().make(decision, actual),
        }
    }

    /// Corrects the charge later.
    fn correction(&self) -> Correction {
        Correction {
            limiter: self.current.shared.limiter.clone(),
            account: self.account().to_owned(),
            live: self.quotas.is_none().then(|| Arc::clone(&self.current.shared.live)),
        }
    }

    /// Reports the decision where it stays: it is large enough for each move of it to be felt.
    #[inline(always)]
    fn report_charged(&self, parts: &Parts) {
        if let Some(decision) = &self.charged {
            self.report(parts, decision);
        }
    }

    /// Reports a decision to the operator, and to the layer's hook.
    #[inline(always)]
    fn report(&self, parts: &Parts, decision: &Decision) {
        observe_decision(self.current.shared.limiter.scope(), self.quotas(), decision, self.shadow);
        if let Some(on_decision) = &self.current.shared.options.on_decision {
            on_decision(parts, decision);
        }
    }

    /// Passes it without a decision.
    fn pass(&self, outcome: Outcome) -> Next {
        self.current.shared.limiter.scope().observe().answered(outcome);
        Next::Call
    }

    fn quotas(&self) -> &Quotas {
        self.quotas.as_deref().unwrap_or(&self.current.settings.quotas)
    }

    fn account(&self) -> Account<'_> {
        Account::new(self.current.shared.limiter.scope(), self.quotas(), &self.key)
    }
}

impl<J> Drop for LimitedRequest<J> {
    fn drop(&mut self) {
        if self.refund_on_drop {
            self.give_back();
        }
    }
}

/// For how long after it was decided a reservation is that of a window which is not over.
fn good_for(decision: &Decision) -> Duration {
    // One less: it was a fraction of a millisecond later than the store says.
    let left = decision.good_until_ms().saturating_sub(decision.now_ms()).saturating_sub(1);
    Duration::from_millis(left.max(0) as u64)
}
