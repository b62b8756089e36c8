//! One request's dealings with the limiter: who pays, what was charged, and how that is corrected
//! when the response, or the end of the request, shows what it was.

use std::sync::Arc;
use std::time::Duration;

use http::Response;
use http::request::Parts;

use crate::cost::TrueCost;
use crate::decision::Decision;
use crate::headers;
use crate::key::{Key, MissingKey};
use crate::limiter::Receipt;
use crate::live::Policy;
use crate::observe;
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

    /// Asks the store; `None`: the request passes uncounted.
    #[inline]
    pub(crate) fn ask(&mut self, parts: &Parts) -> Result<Option<Reply<Decision>>, Refusal> {
        let options = &self.shared.options;
        if options.skips(parts) {
            return Ok(None);
        }
        if let Err(missing) = options.key.extract(parts, &mut self.key) {
            if !missing.is_client() {
                observe::mistake(&missing);
            }
            return if self.shadow { Ok(None) } else { Err(Refusal::MissingKey(missing)) };
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
        Ok(Some(self.shared.limiter.send(charge)))
    }

    #[inline]
    pub(crate) fn verdict(&mut self, answer: Result<Decision, StoreError>) -> Verdict {
        let options = &self.shared.options;
        let decision = match answer {
            Ok(decision) => decision,
            // A standing that is unknown is not reported (S23).
            Err(_) if options.on_store_failure == OnStoreFailure::Deny && !self.shadow => {
                return Verdict::Refuse(Refusal::StoreFailed);
            }
            Err(_) => return Verdict::Pass,
        };
        if !decision.allowed() {
            return match self.shadow {
                true => Verdict::Pass,
                false => Verdict::Refuse(Refusal::RateLimited(decision)),
            };
        }
        let wait = decision.ready_after();
        if wait > options.max_wait {
            self.settle(&decision, 0);
            return Verdict::Refuse(Refusal::RateLimited(decision.into_refusal()));
        }
        self.charged = Some(decision);
        self.refund_on_drop = !wait.is_zero() || options.refund_dropped;
        if wait.is_zero() { Verdict::Pass } else { Verdict::PassIn(wait) }
    }

    /// The decision that a handler is to find.
    pub(crate) fn exposed(&self) -> Option<Decision> {
        if self.shared.options.expose_decision { self.charged.clone() } else { None }
    }

    /// The service is called: what was reserved is used now.
    pub(crate) fn calling(&mut self) {
        self.refund_on_drop = self.shared.options.refund_dropped;
    }

    /// The response has come: what was charged is corrected by it, and told.
    #[inline]
    pub(crate) fn finish<R>(&mut self, mut response: Response<R>) -> Response<R> {
        let Some(mut decision) = self.charged.take() else { return response };
        let plain = self.shared.options.count_if.is_none() && !self.shadow;
        if !plain || !response.extensions().is_empty() {
            if headers::is_refused_inside(&response) {
                self.settle(&decision, 0);
                return response;
            }
            let cost;
            (response, cost) = self.true_cost(response, &decision);
            if let Some(cost) = cost {
                self.settle(&decision, cost);
                decision = decision.with_cost(cost);
            }
        }
        if !self.shadow
            && !headers::stamp_passed(&mut response, &self.account(), &decision, &self.policy.fixed)
        {
            // Whom an inner layer of ours refused, this one has not counted (S9).
            self.settle(&decision, 0);
        }
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

    fn account(&self) -> Account<'_> {
        let quotas = self.quotas.as_deref().unwrap_or(&self.policy.quotas);
        Account::new(self.shared.limiter.scope(), quotas, &self.key)
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
        );
        let mut response = self.shared.reject.reject(&why);
        headers::stamp_refusal(&mut response, &self.account(), &why, &self.policy.fixed);
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
