//! A request on its way through the limit, from its key to the decision: [`LimitedRequest`].
//! `response` corrects the charge when the response is there.

use std::sync::Arc;

use http::request::Parts;
use http::{Extensions, Response};

use super::correction::{Actual, Charged, Correction, PendingDecision};
use super::reason::Reason;
use super::rejection::{Reject, Rejection};
use super::shared::{Current, Shared};
use crate::decision::Decision;
use crate::key::Key;
use crate::limit::PlanFn;
use crate::limiter::observe_decision;
use crate::observe::{self, Outcome};
use crate::quota::Quotas;
use crate::store::{Account, Charge, Reply, StoreError};

mod after_response;
mod charges;
mod several;
mod waiting;
mod watched;

use charges::LimitCharges;
use waiting::Waiting;

pub(crate) struct LimitedRequest<J> {
    current: Arc<Current<J>>,
    key: Key,
    /// The charge that may still be corrected.
    charged: Option<Decision>,
    /// `true` from the charge to the response: until then the charge may be refunded (S9, S14).
    awaits_response: bool,
    shadow: bool,
    /// Fields that few requests need, boxed to keep the others small.
    rare: Option<Box<Rare>>,
}

#[derive(Default)]
struct Rare {
    /// The quotas of this request's plan.
    quotas: Option<Quotas>,
    /// The request's place in the queue, if the layer has one.
    waiting: Option<Waiting>,
    /// The request's charges, if the layer has several limits.
    limit_charges: Option<LimitCharges>,
}

/// The next step of a request.
pub(crate) enum Next {
    /// Call the service.
    Call,
    /// Wait in the queue.
    Wait,
    /// Charge the request in the queue, once the service is ready.
    Ask,
    /// Wait for the store's answer.
    Decide(PendingDecision),
    Refuse(Reason),
}

impl<J> LimitedRequest<J> {
    #[inline]
    pub(crate) fn new(current: Arc<Current<J>>) -> Self {
        Self {
            shadow: current.shared.limiter.live().is_shadow(),
            current,
            key: Key::default(),
            charged: None,
            awaits_response: false,
            rare: None,
        }
    }

    pub(crate) fn shared(&self) -> &Shared<J> {
        &self.current.shared
    }

    /// Extracts key, plan and cost of the request, and charges it or puts it in the queue.
    #[inline]
    pub(crate) fn start(&mut self, parts: &Parts) -> Next {
        let Shared { limit, several, options, queue, .. } = &*self.current.shared;
        if options.skips(parts) {
            return Next::Call;
        }
        if several.is_some() {
            return self.start_several(parts);
        }
        if let Err(missing) = limit.key.extract(parts, &mut self.key) {
            if !missing.is_client() {
                observe::mistake(&missing);
            }
            return match self.shadow {
                true => self.pass(Outcome::ShadowMissingKey),
                false => Next::Refuse(Reason::MissingKey(missing)),
            };
        }
        if let Some(plan) = &self.current.settings.plan
            && !choose_quotas(plan, parts, &self.key, &mut self.rare)
        {
            return Next::Call;
        }
        let cost = limit.cost.as_ref().map_or(1, |cost| cost(parts));
        match queue {
            // Requests that pass in any case, or never, don't wait.
            Some(_) if cost > 0 && !self.shadow && self.quotas().can_grant(cost) => {
                self.join_queue(parts, cost)
            }
            _ => self.charge(parts, cost),
        }
    }

    #[inline(always)]
    fn charge(&mut self, parts: &Parts, cost: u64) -> Next {
        let reply = self.current.shared.limiter.send(Charge::new(self.account(), cost));
        match reply.move_to(&mut self.charged, Decision::allowed) {
            Ok(()) => self.pass_charged(parts),
            Err(reply) => match reply.into_now() {
                Ok(answer) => self.decide(parts, answer),
                Err(later) => Next::Decide(PendingDecision::new(later, self.refund())),
            },
        }
    }

    /// Sends the charge of a request in the queue. `cost` is the cost for the only limit.
    fn send(&self, cost: u64) -> Reply<Decision> {
        match self.limit_charges() {
            Some(charges) => self.send_several(charges),
            None => self.current.shared.limiter.send(Charge::new(self.account(), cost)),
        }
    }

    /// Returns the correction for a request that is dropped while the store decides, if the layer
    /// promises a refund (S14).
    fn refund(&self) -> Option<Correction> {
        self.current.shared.options.refund_dropped.then(|| self.correction())
    }

    /// Applies the store's answer, and returns the next step.
    #[inline]
    pub(crate) fn decide(&mut self, parts: &Parts, answer: Result<Decision, StoreError>) -> Next {
        let decision = match answer {
            Ok(decision) => decision,
            // Without an answer there is no standing to report (S23).
            Err(error) if error.denies() && !self.shadow => {
                return Next::Refuse(Reason::StoreFailed);
            }
            Err(_) => {
                if self.has_shadows() {
                    // Their store may be well.
                    self.awaits_response = true;
                    self.charge_shadows(parts);
                }
                return self.pass(Outcome::FailedOpen);
            }
        };
        if !decision.allowed() {
            if self.shadow {
                self.report_shadow(parts, &decision);
                return Next::Call;
            }
            return Next::Refuse(Reason::RateLimited(decision));
        }
        self.charged = Some(decision);
        self.pass_charged(parts)
    }

    /// Reports the charge, and lets the request pass.
    #[inline(always)]
    fn pass_charged(&mut self, parts: &Parts) -> Next {
        // Set before hooks, which may panic.
        self.awaits_response = true;
        self.report_charged(parts);
        if self.rare.is_some() {
            self.follow_charge(parts);
        }
        Next::Call
    }

    /// Prepares the extensions of a request whose service is about to be called.
    #[inline]
    pub(crate) fn prepare_call(&mut self, extensions: &mut Extensions) {
        let options = &self.current.shared.options;
        if options.expose_decision {
            self.charged.clone().map(|decision| extensions.insert(decision));
        }
        if self.current.shared.watch.is_on() {
            self.mark(extensions);
        }
    }

    /// Marks the request as charged, for other layers that it goes through.
    #[cold]
    #[inline(never)]
    fn mark(&self, extensions: &mut Extensions) {
        let Shared { limiter, options, watch, .. } = &*self.current.shared;
        if self.charged.is_some() {
            let first = self.limit_charges().and_then(|charges| charges.first_key());
            let key = first.unwrap_or(&self.key);
            watch.mark(limiter, options, key, extensions);
        }
    }

    /// Leaves the queue and reports the refusal.
    #[inline]
    pub(crate) fn report_refusal(&mut self, parts: &Parts, reason: &Reason) {
        self.leave_queue();
        if let Reason::RateLimited(decision) = reason {
            self.report(parts, decision);
            if self.rare.is_some() || self.current.shared.limiter.live().is_watched() {
                self.watch_decision(parts, decision);
            }
        } else if let Some(outcome) = reason.consequences().outcome {
            match self.limit_charges() {
                Some(charges) => self.report_undecided(charges, reason, outcome),
                None => {
                    let observed = self.current.shared.limiter.scope().observe();
                    observed.refused_undecided(outcome, reason.missing_from_client());
                }
            }
        }
    }

    /// Returns the response to a refused request.
    #[inline(always)]
    pub(crate) fn reject<R>(&self, parts: &Parts, reason: &Reason) -> Response<R>
    where
        J: Reject<R>,
    {
        if self.rare.is_some() {
            return self.reject_rare(parts, reason);
        }
        let Current { settings, shared, .. } = &*self.current;
        let name = shared.limiter.name();
        let why = Rejection {
            reason,
            limited: shared.options.status,
            name,
            limits: &[(name, &settings.quotas)],
            last_body: Some(&settings.body),
            headers: &settings.headers,
        };
        self.reject_by(parts, &why)
    }

    #[inline]
    fn reject_by<R>(&self, parts: &Parts, why: &Rejection<'_>) -> Response<R>
    where
        J: Reject<R>,
    {
        let mut response = self.current.shared.reject.reject(parts, why);
        why.complete(&mut response);
        response
    }

    /// Returns whether there is a charge, and no response yet.
    pub(crate) fn awaits_response(&self) -> bool {
        self.awaits_response
    }

    /// Refunds the charge, if there is one, in the background (S14).
    pub(crate) fn give_back(&mut self) {
        if let Some(decision) = &self.charged {
            self.correction().make(decision, &Actual::Nothing).0.detach();
        }
        self.correct_shadows(&Actual::Nothing);
        self.charged = None;
        self.awaits_response = false;
    }

    /// Returns a handle that corrects the charge later.
    fn correction(&self) -> Correction {
        if let Some(charges) = self.limit_charges() {
            return self.correction_of(charges);
        }
        let limiter = self.current.shared.limiter.clone();
        let (account, own) = (self.account().to_owned(), self.has_own_quotas());
        Correction::of_one(Charged { limiter, account, own })
    }

    /// Reports the charge's decision by reference, since moving it is measurable.
    #[inline(always)]
    fn report_charged(&self, parts: &Parts) {
        if let Some(decision) = &self.charged {
            self.report(parts, decision);
        }
    }

    /// Reports a decision to the operator, and to the layer's hook.
    #[inline(always)]
    fn report(&self, parts: &Parts, decision: &Decision) {
        if let Some(charges) = self.limit_charges() {
            self.report_several(charges, decision);
        } else {
            let scope = self.current.shared.limiter.scope();
            observe_decision(scope, self.quotas(), decision, self.shadow);
        }
        if let Some(on_decision) = &self.current.shared.options.on_decision {
            on_decision(parts, decision);
        }
    }

    /// Lets the request pass without a decision.
    fn pass(&self, outcome: Outcome) -> Next {
        match self.limit_charges() {
            None => self.current.shared.limiter.scope().observe().answered(outcome),
            Some(charges) => self.pass_several(charges, outcome),
        }
        Next::Call
    }

    fn quotas(&self) -> &Quotas {
        self.own_quotas().unwrap_or(&self.current.settings.quotas)
    }

    #[cold]
    fn rare(&mut self) -> &mut Rare {
        self.rare.get_or_insert_default()
    }

    #[inline]
    fn limit_charges(&self) -> Option<&LimitCharges> {
        self.rare.as_ref()?.limit_charges.as_ref()
    }

    #[inline]
    fn own_quotas(&self) -> Option<&Quotas> {
        self.rare.as_ref()?.quotas.as_ref()
    }

    fn has_own_quotas(&self) -> bool {
        self.own_quotas().is_some()
    }

    fn account(&self) -> Account<'_> {
        Account::new(self.current.shared.limiter.scope(), self.quotas(), &self.key)
    }
}

/// Sets the quotas of a request whose plan has others than the limit, and returns `false` if its
/// plan is unlimited.
#[inline(never)]
fn choose_quotas(plan: &PlanFn, parts: &Parts, key: &Key, rare: &mut Option<Box<Rare>>) -> bool {
    let quotas = match plan(parts, key) {
        None => None,
        Some(plan) => match plan.quotas() {
            None => return false,
            Some(&quotas) => Some(quotas),
        },
    };
    rare.get_or_insert_default().quotas = quotas;
    true
}

impl<J> Drop for LimitedRequest<J> {
    fn drop(&mut self) {
        if self.awaits_response && self.current.shared.options.refund_dropped {
            self.give_back();
        }
        if self.rare.is_some() {
            self.give_back_granted();
        }
    }
}
