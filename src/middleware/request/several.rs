//! A request through several limits that are decided together (S37).

use std::slice;

use http::Response;
use http::request::Parts;

use super::charges::{LimitCharge, LimitCharges, Shadow};
use super::{LimitedRequest, Next};
use crate::decision::{Decision, MAX_LIMITS};
use crate::key::Key;
use crate::limiter::{Limiter, observe_decision};
use crate::limits;
use crate::middleware::correction::{Actual, Charged, Correction, PendingDecision};
use crate::middleware::headers::PreparedHeaders;
use crate::middleware::reason::Reason;
use crate::middleware::rejection::{Reject, Rejection};
use crate::middleware::shared::Shared;
use crate::observe::{self, Outcome};
use crate::quota::Quotas;
use crate::store::{Account, Charge, Reply};

impl<J> LimitedRequest<J> {
    /// Extracts key, quotas and cost for each limit, and charges all limits or puts the request in
    /// the queue.
    #[inline(never)]
    pub(super) fn start_several(&mut self, parts: &Parts) -> Next {
        // Shadow mode is a limit's own here; `find_charges` separates limits in shadow mode.
        self.shadow = false;
        let mut charges = LimitCharges::default();
        let missing = self.find_charges(parts, &mut charges);
        self.rare().limit_charges = Some(charges);
        match missing {
            Err(reason) => Next::Refuse(reason),
            Ok(()) => self.charge_enforced(parts),
        }
    }

    /// Charges the limits that can refuse, or puts the request in the queue. Limits that are in
    /// shadow mode by now can't refuse any more.
    pub(super) fn charge_enforced(&mut self, parts: &Parts) -> Next {
        if let Some(mut charges) = self.rare().limit_charges.take() {
            let is_shadow =
                |charge: &mut LimitCharge| self.limiter_of(charge.limit).live().is_shadow();
            let shadows: Vec<_> = charges.enforced.extract_if(.., is_shadow).collect();
            charges.shadows.extend(shadows.into_iter().map(|charge| (charge, Shadow::default())));
            self.rare().limit_charges = Some(charges);
        }
        let has_charges = self.limit_charges().is_some_and(|of| !of.enforced.is_empty());
        if has_charges && self.may_wait() {
            self.join_queue(parts, 0)
        } else if has_charges {
            self.charge_several(parts)
        } else {
            self.awaits_response = true;
            self.charge_shadows(parts);
            Next::Call
        }
    }

    /// Returns whether the request may have to wait. Requests that pass in any case, or never,
    /// don't.
    fn may_wait(&self) -> bool {
        let Some(charges) = self.limit_charges().filter(|_| self.shared().queue.is_some()) else {
            return false;
        };
        charges.enforced.iter().any(|charge| charge.cost > 0)
            && charges.enforced.iter().all(|charge| self.quotas_of(charge).can_grant(charge.cost))
    }

    fn find_charges(&self, parts: &Parts, charges: &mut LimitCharges) -> Result<(), Reason> {
        for (i, limiter) in self.limiters().iter().enumerate() {
            let (limit, is_shadow) = (limiter.live().limit(), limiter.live().is_shadow());
            let mut key = Key::default();
            charges.last = i;
            if let Err(missing) = limit.key.extract(parts, &mut key) {
                if !missing.is_client() {
                    observe::mistake(&missing);
                }
                if !is_shadow {
                    return Err(Reason::MissingKey(missing));
                }
                limiter.scope().observe().answered(Outcome::ShadowMissingKey);
                continue;
            }
            let plan = self.current.settings_of(i).plan.as_ref();
            let quotas = match plan.and_then(|plan| plan(parts, &key)) {
                None => None,
                Some(plan) => match plan.quotas() {
                    None => continue,
                    Some(&quotas) => Some(quotas),
                },
            };
            let cost = limit.cost.as_ref().map_or(1, |cost| cost(parts));
            let charge = LimitCharge { limit: i, key, cost, quotas };
            match is_shadow {
                true => charges.shadows.push((charge, Shadow::default())),
                false => charges.enforced.push(charge),
            }
        }
        Ok(())
    }

    fn charge_several(&mut self, parts: &Parts) -> Next {
        let Some(charges) = self.limit_charges() else { return Next::Call };
        match self.send_several(charges).into_now() {
            Ok(answer) => self.decide(parts, answer),
            Err(later) => Next::Decide(PendingDecision::new(later, self.refund())),
        }
    }

    pub(super) fn send_several(&self, charges: &LimitCharges) -> Reply<Decision> {
        let limits = self.shared().several.as_ref().expect("it has the charges of several");
        let mut limiters = [&limits.limiters()[0]; MAX_LIMITS];
        for (limiter, charge) in limiters.iter_mut().zip(&charges.enforced) {
            *limiter = &limits.limiters()[charge.limit];
        }
        limits.send(limiters, &self.charges_of(charges))
    }

    /// Charges the limits in shadow mode, after the others have passed.
    #[cold]
    #[inline(never)]
    pub(super) fn charge_shadows(&self, parts: &Parts) {
        let Some(charges) = self.limit_charges() else { return };
        for (charge, shadow) in &charges.shadows {
            let (charged, shadow) = (self.charged_of(charge), shadow.clone());
            let charge = Charge::new(charged.account.as_account(), charge.cost);
            let reply = charged.limiter.send(charge);
            let route = charged.limiter.live().tracker().and_then(|tracker| tracker.route());
            let route = route.and_then(|route| Some(route(parts)?.to_owned()));
            let note = move |answer| {
                let (scope, account) = (charged.limiter.scope(), charged.account.as_account());
                match answer {
                    Ok(decision) => {
                        let (key, quotas) = (account.key(), account.quotas());
                        observe_decision(scope, quotas, &decision, true);
                        // First, since a hook of the app's may panic.
                        shadow.decided(&charged, decision.clone());
                        let route = |_: &_| route.map(Into::into);
                        charged.limiter.watch(key, quotas, &decision, route);
                    }
                    Err(_) => scope.observe().answered(Outcome::FailedOpen),
                }
            };
            match reply.into_now() {
                Ok(answer) => note(answer),
                Err(later) => Reply::later(async move {
                    note(later.await);
                    Ok(())
                })
                .detach(),
            }
        }
    }

    /// Corrects the charges of limits in shadow mode.
    pub(super) fn correct_shadows(&self, actual: &Actual) {
        for (charge, shadow) in
            self.limit_charges().into_iter().flat_map(|charges| &charges.shadows)
        {
            shadow.correct(&self.charged_of(charge), actual);
        }
    }

    /// Returns a closure that corrects the charges of limits in shadow mode later.
    pub(super) fn shadow_correction(&self) -> Box<dyn FnOnce(&Actual) + Send> {
        let shadows = self.limit_charges().into_iter().flat_map(|charges| &charges.shadows);
        let shadows: Vec<_> =
            shadows.map(|(charge, shadow)| (self.charged_of(charge), shadow.clone())).collect();
        Box::new(move |actual| {
            shadows.iter().for_each(|(charged, shadow)| shadow.correct(charged, actual));
        })
    }

    pub(super) fn correction_of(&self, charges: &LimitCharges) -> Correction {
        let charged = charges.enforced.iter().map(|charge| self.charged_of(charge));
        Correction::of_several(charged).expect("some limit was charged")
    }

    fn charged_of(&self, charge: &LimitCharge) -> Charged {
        let limiter = self.limiter_of(charge.limit);
        Charged {
            account: Account::new(limiter.scope(), self.quotas_of(charge), &charge.key).to_owned(),
            own: charge.quotas.is_some(),
            limiter: limiter.clone(),
        }
    }

    /// Returns the names and quotas of all limits that were decided.
    pub(super) fn limits_of<'a>(&'a self, charges: &'a LimitCharges) -> Vec<(&'a str, &'a Quotas)> {
        let of = |charge: &'a LimitCharge| {
            (self.limiter_of(charge.limit).name(), self.quotas_of(charge))
        };
        charges.enforced.iter().map(of).collect()
    }

    /// Returns the limit whose name and headers the response gets.
    pub(super) fn governing(&self, charges: &LimitCharges, decision: Option<&Decision>) -> usize {
        let name = decision.and_then(|decision| decision.governing_limit());
        let mut limits = charges.enforced.iter().map(|charge| charge.limit);
        limits.find(|limit| name == Some(self.limiter_of(*limit).name())).unwrap_or(charges.last)
    }

    pub(super) fn headers_of(&self, limit: usize) -> &PreparedHeaders {
        &self.current.settings_of(limit).headers
    }

    /// Returns the response to a refused request that has several limits, or a plan.
    #[inline(never)]
    pub(super) fn reject_rare<R>(&self, parts: &Parts, reason: &Reason) -> Response<R>
    where
        J: Reject<R>,
    {
        let limits = match self.limit_charges() {
            Some(charges) => self.limits_of(charges),
            None => vec![(self.shared().limiter.name(), self.quotas())],
        };
        let limit =
            self.limit_charges().map_or(0, |charges| self.governing(charges, reason.decision()));
        let why = Rejection {
            reason,
            limited: self.shared().options.status,
            name: self.limiter_of(limit).name(),
            limits: &limits,
            last_body: None,
            headers: self.headers_of(limit),
        };
        self.reject_by(parts, &why)
    }

    pub(super) fn stamp_several<R>(
        &self,
        charges: &LimitCharges,
        response: &mut Response<R>,
        decision: &Decision,
    ) -> bool {
        let headers = self.headers_of(self.governing(charges, Some(decision)));
        let now = || self.current.shared.limiter.now();
        headers.stamp_passed(response, || self.limits_of(charges), decision, now)
    }

    pub(super) fn report_several(&self, charges: &LimitCharges, decision: &Decision) {
        limits::observe_all(decision, &self.charges_of(charges));
    }

    /// Reports a request that passes without a decision.
    pub(super) fn pass_several(&self, charges: &LimitCharges, outcome: Outcome) {
        for charge in &charges.enforced {
            self.limiter_of(charge.limit).scope().observe().answered(outcome);
        }
    }

    /// Reports a request that is refused without a decision, by the limit whose key is missing or
    /// by all limits.
    pub(super) fn report_undecided(
        &self,
        charges: &LimitCharges,
        reason: &Reason,
        outcome: Outcome,
    ) {
        let missing = reason.missing_from_client();
        let scope = |limit| self.limiter_of(limit).scope().observe();
        match reason {
            Reason::MissingKey(_) => scope(charges.last).refused_undecided(outcome, missing),
            _ => {
                for charge in &charges.enforced {
                    scope(charge.limit).refused_undecided(outcome, missing);
                }
            }
        }
    }

    pub(super) fn limiter_of(&self, limit: usize) -> &Limiter {
        &self.limiters()[limit]
    }

    /// Returns the limiters of all limits, or of the only one.
    fn limiters(&self) -> &[Limiter] {
        let Shared { limiter, several, .. } = self.shared();
        several.as_ref().map_or(slice::from_ref(limiter), |limits| limits.limiters())
    }

    pub(super) fn has_shadows(&self) -> bool {
        self.limit_charges().is_some_and(|charges| !charges.shadows.is_empty())
    }

    /// Returns whether any limit is settled by true costs.
    pub(super) fn is_settled(&self) -> bool {
        self.settled_names().next().is_some()
    }

    pub(super) fn settled_names(&self) -> impl Iterator<Item = &str> {
        let settled = |limiter: &&Limiter| limiter.live().limit().settled;
        self.limiters().iter().filter(settled).map(Limiter::name)
    }

    pub(super) fn quotas_of<'a>(&'a self, charge: &'a LimitCharge) -> &'a Quotas {
        charge.quotas.as_ref().unwrap_or(&self.current.settings_of(charge.limit).quotas)
    }

    fn charges_of<'a>(&'a self, charges: &'a LimitCharges) -> Vec<Charge<'a>> {
        let sent = |charge: &'a LimitCharge| {
            let limiter = self.limiter_of(charge.limit);
            let account = Account::new(limiter.scope(), self.quotas_of(charge), &charge.key);
            Charge::new(account, charge.cost)
        };
        charges.enforced.iter().map(sent).collect()
    }
}
