//! A request on its way through the limit: its key, its charge, and what follows from the decision.
//! `response` has what follows from the response.

use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::request::Parts;
use http::{Extensions, Response};

use super::correction::{Correction, PendingDecision};
use super::reason::Reason;
use super::rejection::{Reject, Rejection};
use super::shared::{Current, Shared};
use super::stacked;
use super::upload::Drain;
use crate::decision::Decision;
use crate::key::Key;
use crate::limiter::{freed, observe_decision};
use crate::line::{End, Place};
use crate::observe::{self, Outcome};
use crate::quota::Quotas;
use crate::store::{Account, Charge, Reply, StoreError};

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
    /// Its place in the line of its key, where it may wait.
    place: Option<Box<Place>>,
}

/// What happens to a request next.
pub(crate) enum Next {
    /// The service is called.
    Call,
    /// It waits in its line.
    Wait,
    /// It is charged where it is in its line.
    Charge,
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
            place: None,
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
            self.quotas = Some(Box::new(quotas));
        }
        let cost = self.cost(parts);
        match &self.current.shared.queue {
            // What passes in any case, or never does, has no need to wait.
            Some(_) if cost > 0 && !self.shadow && self.quotas().can_grant(cost) => {
                self.join(parts, cost)
            }
            _ => self.charge(parts, cost),
        }
    }

    fn cost(&self, parts: &Parts) -> u64 {
        self.current.shared.options.cost_fn.as_ref().map_or(1, |cost_fn| cost_fn(parts))
    }

    #[inline(always)]
    fn charge(&mut self, parts: &Parts, cost: u64) -> Next {
        match self.current.shared.limiter.send(Charge::new(self.account(), cost)).into_now() {
            Ok(answer) => self.decide(parts, answer),
            Err(later) => Next::Decide(PendingDecision::new(later, self.refund())),
        }
    }

    /// For a request that is dropped while the store decides, where that is promised.
    fn refund(&self) -> Option<Correction> {
        self.current.shared.options.refund_dropped.then(|| self.correction())
    }

    /// Takes its place in the line of its key.
    #[inline(never)]
    fn join(&mut self, parts: &Parts, cost: u64) -> Next {
        let Some(queue) = &self.current.shared.queue else { return Next::Call };
        match Place::join(queue, &self.key, self.quotas(), self.quotas.is_some(), cost) {
            Ok(place) => {
                self.place = Some(Box::new(place));
                match self.poll_charge(parts, None) {
                    Poll::Ready(next) => next,
                    Poll::Pending => Next::Charge,
                }
            }
            Err(refusal) => Next::Refuse(Reason::RateLimited(refusal)),
        }
    }

    /// Ready when it is its turn in the line, or its wait has ended otherwise.
    pub(crate) fn poll_turn(&mut self, parts: &Parts, cx: &mut Context<'_>) -> Poll<Option<Next>> {
        let quotas = self.quotas_now();
        let Some(place) = &mut self.place else { return Poll::Ready(Some(Next::Call)) };
        match ready!(place.poll_turn(&quotas, cx)) {
            Ok(()) => Poll::Ready(None),
            Err(end) => Poll::Ready(Some(self.end(parts, end))),
        }
    }

    /// Charges it in its turn, when the service is ready.
    pub(crate) fn poll_charge(
        &mut self,
        parts: &Parts,
        cx: Option<&mut Context<'_>>,
    ) -> Poll<Next> {
        let quotas = self.quotas_now();
        let Some(place) = &mut self.place else { return Poll::Ready(Next::Call) };
        Poll::Ready(match ready!(place.poll_charge(&quotas, cx)) {
            Ok(decision) => {
                self.renew();
                self.decide(parts, Ok(decision))
            }
            Err(end) => self.end(parts, end),
        })
    }

    fn end(&mut self, parts: &Parts, end: End) -> Next {
        match end {
            End::LetGo => Next::Wait,
            End::Refused(refusal) => Next::Refuse(Reason::RateLimited(refusal)),
            End::Failed(error) => self.decide(parts, Err(error)),
            End::Unanswered => Next::Refuse(Reason::StoreFailed),
            End::Closed => Next::Refuse(Reason::QueueClosed),
        }
    }

    /// The quotas that it is charged by when its turn has come.
    fn quotas_now(&self) -> Quotas {
        self.quotas.as_deref().copied().unwrap_or_else(|| self.current.shared.live.quotas())
    }

    /// The settings may have changed while it waited.
    fn renew(&mut self) {
        let Current { shared, settings } = &*self.current;
        if !shared.live.is_current(settings) {
            self.current = Current::new(shared);
        }
    }

    /// What follows from the store's answer.
    #[inline]
    pub(crate) fn decide(&mut self, parts: &Parts, answer: Result<Decision, StoreError>) -> Next {
        let options = &self.current.shared.options;
        let decision = match answer {
            Ok(decision) => decision,
            // A standing that is unknown is not reported (S23).
            Err(error) if error.denies() && !self.shadow => {
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
        // Before anything that may panic.
        self.refund_on_drop = options.refund_dropped;
        self.charged = Some(decision);
        self.report_charged(parts);
        Next::Call
    }

    /// The service is about to be called.
    #[inline]
    pub(crate) fn calling(&mut self, extensions: &mut Extensions) {
        let options = &self.current.shared.options;
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
        self.leave();
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

    /// It is served or refused: it is the turn of the next one in its line.
    #[inline]
    pub(crate) fn leave(&mut self) {
        #[inline(never)]
        fn leave(place: &mut Option<Box<Place>>) {
            *place = None;
        }
        if self.place.is_some() {
            leave(&mut self.place);
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
        let Shared { limiter, live, .. } = &*self.current.shared;
        if !live.is_current(&self.current.settings) {
            return self.correction().make(decision, actual);
        }
        let settled = limiter.settle_account(self.account(), decision, actual);
        freed::note_after(limiter.scope(), &self.key, settled)
    }

    /// Corrects the charge later.
    fn correction(&self) -> Correction {
        Correction {
            limiter: self.current.shared.limiter.clone(),
            account: self.account().to_owned(),
            live: Arc::clone(&self.current.shared.live),
            own: self.quotas.is_some(),
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
