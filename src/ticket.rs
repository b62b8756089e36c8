//! One request's dealings with the limiter: who pays, what was charged, and how that is corrected
//! when the response, or the end of the request, shows what it was.

use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use http::{Extensions, Response};

use crate::cost::TrueCost;
use crate::decision::Decision;
use crate::headers;
use crate::key::{Key, MissingKey};
use crate::limiter::{Receipt, observe_decision};
use crate::live::Policy;
use crate::observe::{self, Outcome};
use crate::quota::Quotas;
use crate::rejection::{Reason, Reject, Rejection};
use crate::service::Shared;
use crate::store::{Account, Charge, OnStoreFailure, Reply, StoreError};

pub(crate) struct Ticket<J> {
    shared: Arc<Shared<J>>,
    policy: Arc<Policy>,
    key: Key,
    /// The quotas of this request, where they are not the layer's.
    quotas: Option<Box<Quotas>>,
    /// What was taken and may still be corrected.
    charged: Option<Decision>,
    /// Whether to give it back if the request is dropped now.
    refund_on_drop: bool,
    shadow: bool,
}

/// What the store says.
pub(crate) enum Asked {
    Now(Verdict),
    Later(Reply<Decision>),
}

/// What becomes of a request.
pub(crate) enum Verdict {
    Pass,
    /// It has a reservation that is due then.
    PassIn(Duration),
    Refuse(Refusal),
}

/// Why a request does not pass.
pub(crate) enum Refusal {
    RateLimited(Decision),
    MissingKey(MissingKey),
    StoreFailed,
    /// It waited, and the queue was closed.
    Closed,
}

impl<J> Ticket<J> {
    #[inline]
    pub(crate) fn new(shared: &Arc<Shared<J>>, policy: &Arc<Policy>) -> Self {
        Self {
            shadow: shared.live.shadow(shared.options.shadow),
            shared: Arc::clone(shared),
            policy: Arc::clone(policy),
            key: Key::default(),
            quotas: None,
            charged: None,
            refund_on_drop: false,
        }
    }

    pub(crate) fn shared(&self) -> &Shared<J> {
        &self.shared
    }

    /// Asks the store.
    #[inline]
    pub(crate) fn ask(&mut self, parts: &Parts) -> Asked {
        let options = &self.shared.options;
        if options.skips(parts) {
            return Asked::Now(Verdict::Pass);
        }
        if let Err(missing) = options.key.extract(parts, &mut self.key) {
            if !missing.is_client() {
                observe::mistake(&missing);
            }
            return Asked::Now(match self.shadow {
                true => self.pass(Outcome::ShadowMissingKey),
                false => Verdict::Refuse(Refusal::MissingKey(missing)),
            });
        }
        if let Some(quota_fn) = &options.quota_fn {
            let quotas = quota_fn(parts, &self.key);
            let queue = options.queue.filter(|_| !self.shadow);
            self.quotas = Some(Box::new(queue.map_or(quotas, |tokens| quotas.reserving(tokens))));
        }
        let cost = options.cost_fn.as_ref().map_or(1, |cost_fn| cost_fn(parts));
        let charge = Charge::new(self.account(), cost);
        let may_wait = options.queue.is_some() && !self.shadow;
        let charge = if may_wait { charge.reserving() } else { charge };
        match self.shared.limiter.send(charge).into_now() {
            Ok(answer) => Asked::Now(self.verdict(parts, answer)),
            Err(later) => Asked::Later(later),
        }
    }

    #[inline]
    pub(crate) fn verdict(
        &mut self,
        parts: &Parts,
        answer: Result<Decision, StoreError>,
    ) -> Verdict {
        let options = &self.shared.options;
        let decision = match answer {
            Ok(decision) => decision,
            // A standing that is unknown is not reported (S23).
            Err(_) if options.on_store_failure == OnStoreFailure::Deny && !self.shadow => {
                return Verdict::Refuse(Refusal::StoreFailed);
            }
            Err(_) => return self.pass(Outcome::FailedOpen),
        };
        if !decision.allowed() {
            return match self.shadow {
                true => self.pass_in_shadow(parts, decision),
                false => Verdict::Refuse(Refusal::RateLimited(decision)),
            };
        }
        let wait = decision.ready_after();
        if wait > options.max_wait {
            self.settle(&decision, 0);
            return Verdict::Refuse(Refusal::RateLimited(decision.into_refusal()));
        }
        self.charged = Some(decision);
        self.charged.iter().for_each(|decision| self.decided(parts, decision));
        self.refund_on_drop = !wait.is_zero() || options.refund_dropped;
        if wait.is_zero() { Verdict::Pass } else { Verdict::PassIn(wait) }
    }

    /// The service is called: what was reserved is used now.
    #[inline]
    pub(crate) fn calling(&mut self, extensions: &mut Extensions) {
        let options = &self.shared.options;
        self.refund_on_drop = options.refund_dropped;
        if options.expose_decision {
            self.charged.clone().map(|decision| extensions.insert(decision));
        }
    }

    /// Whether a response may show that the charge was wrong: then it has to be
    /// [corrected](Self::correct).
    #[inline]
    pub(crate) fn is_corrected_by<R>(&self, response: &Response<R>) -> bool {
        self.shared.options.count_if.is_some() || self.shadow || !response.extensions().is_empty()
    }

    /// Tells the standing.
    #[inline]
    pub(crate) fn tell<R>(&mut self, response: &mut Response<R>) {
        if let Some(decision) = &self.charged
            && !headers::stamp_passed(response, &self.account(), decision, &self.policy.fixed)
        {
            // Whom an inner layer of ours refused, this one has not counted (S9).
            self.give_back();
        }
        // Whatever becomes of the response now, the charge stands.
        self.refund_on_drop = false;
    }

    /// Corrects the charge by what the response shows, and tells the standing.
    #[inline(never)]
    pub(crate) fn correct<R>(&mut self, mut response: Response<R>) -> Response<R> {
        let Some(decision) = self.charged.take() else { return response };
        if headers::is_refused_inside(&response) {
            self.settle(&decision, 0);
            return response;
        }
        let cost;
        (response, cost) = self.true_cost(response, &decision);
        self.charged = Some(match cost {
            Some(cost) => {
                self.settle(&decision, cost);
                decision.with_cost(cost)
            }
            None => decision,
        });
        if !self.shadow {
            self.tell(&mut response);
        }
        self.refund_on_drop = false;
        response
    }

    /// The cost that the response shows, where it is another than was charged; one that is still
    /// adding up is settled when it is known.
    fn true_cost<R>(
        &self,
        response: Response<R>,
        decision: &Decision,
    ) -> (Response<R>, Option<u64>) {
        let (parts, body) = response.into_parts();
        let counts = self.shared.options.count_if.as_ref().is_none_or(|count_if| count_if(&parts));
        let reported = parts.extensions.get::<TrueCost>().filter(|_| self.shared.options.settle);
        let cost = match reported {
            _ if !counts => Some(0),
            Some(cost) => cost.known().or_else(|| {
                let limiter = self.shared.limiter.clone();
                let receipt = Receipt::new(self.account(), decision.clone());
                cost.settle_at_end(move |cost| limiter.settle(receipt, cost).detach());
                None
            }),
            None => None,
        };
        (Response::from_parts(parts, body), cost)
    }

    /// Returns what was taken, if anything was.
    pub(crate) fn give_back(&mut self) {
        if let Some(decision) = self.charged.take() {
            self.settle(&decision, 0);
        }
    }

    /// Corrects what was charged, without waiting for that (S14).
    fn settle(&self, decision: &Decision, actual: u64) {
        self.shared.limiter.settle_account(self.account(), decision, actual).detach();
    }

    /// Tells the operator of a decision, and whoever else wants to know. It is where it stays, by
    /// then: a decision is large enough for each move of it to be felt.
    #[inline(always)]
    fn decided(&self, parts: &Parts, decision: &Decision) {
        observe_decision(self.shared.limiter.scope(), self.quotas(), decision, self.shadow);
        if let Some(on_decision) = &self.shared.options.on_decision {
            on_decision(parts, decision);
        }
    }

    #[inline]
    fn pass_in_shadow(&self, parts: &Parts, decision: Decision) -> Verdict {
        self.decided(parts, &decision);
        Verdict::Pass
    }

    /// Passes it without a decision.
    #[inline]
    fn pass(&self, outcome: Outcome) -> Verdict {
        self.shared.limiter.scope().observe().answered(outcome);
        Verdict::Pass
    }

    /// A request does not pass.
    #[inline]
    pub(crate) fn refused(&self, parts: &Parts, refusal: &Refusal) {
        let observed = self.shared.limiter.scope().observe();
        match refusal {
            Refusal::RateLimited(decision) => self.decided(parts, decision),
            Refusal::MissingKey(_) => observed.answered(Outcome::MissingKey),
            Refusal::StoreFailed => observed.answered(Outcome::FailedClosed),
            // It was told when it got its reservation.
            Refusal::Closed => {}
        }
    }

    fn quotas(&self) -> &Quotas {
        self.quotas.as_deref().unwrap_or(&self.policy.quotas)
    }

    fn account(&self) -> Account<'_> {
        Account::new(self.shared.limiter.scope(), self.quotas(), &self.key)
    }

    /// The response to a request that does not pass.
    pub(crate) fn refuse<R>(&self, refusal: &Refusal) -> Response<R>
    where
        J: Reject<R>,
    {
        let reason = match refusal {
            Refusal::RateLimited(decision) => Reason::RateLimited(decision),
            Refusal::MissingKey(missing) => Reason::MissingKey(missing),
            Refusal::StoreFailed => Reason::StoreFailed,
            Refusal::Closed => Reason::QueueClosed,
        };
        let why = Rejection::new(
            reason,
            self.shared.options.status,
            self.account(),
            Some(&self.policy.body).filter(|_| self.quotas.is_none()),
            &self.policy.fixed,
        );
        let mut response = self.shared.reject.reject(&why);
        match reason {
            Reason::RateLimited(decision) => {
                let fixed = &self.policy.fixed;
                headers::stamp_refusal(&mut response, &self.account(), decision, fixed);
            }
            Reason::MissingKey(_) => headers::stamp_failure(&mut response, false),
            _ => headers::stamp_failure(&mut response, true),
        }
        response
    }
}

impl<J> Drop for Ticket<J> {
    fn drop(&mut self) {
        if self.refund_on_drop {
            self.give_back();
        }
    }
}
