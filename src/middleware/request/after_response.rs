//! Applies the response to the charge: it may correct the charge, and gets the headers.

use http::Response;

use super::LimitedRequest;
use crate::decision::Decision;
use crate::middleware::correction::Actual;
use crate::middleware::cost::TrueCost;
use crate::middleware::headers::is_refused_inside;
use crate::middleware::shared::Shared;

impl<J> LimitedRequest<J> {
    /// Returns whether this response may [correct](Self::correct) the charge.
    #[inline]
    pub(crate) fn is_corrected_by<R>(&self, response: &Response<R>) -> bool {
        self.current.shared.options.count_if.is_some()
            || self.shadow
            || !response.extensions().is_empty()
            // Several limits, all in shadow mode.
            || (self.charged.is_none() && self.has_shadows())
    }

    /// Adds the headers to the response.
    #[inline]
    pub(crate) fn stamp<R>(&mut self, response: &mut Response<R>) {
        if let Some(decision) = &self.charged
            && !self.stamp_by(response, decision)
        {
            // This layer does not count what an inner layer of this crate has refused (S9).
            self.give_back();
        }
        // The charge stands from here on, even if the response is dropped.
        self.awaits_response = false;
    }

    #[inline(always)]
    fn stamp_by<R>(&self, response: &mut Response<R>, decision: &Decision) -> bool {
        if let Some(charges) = self.limit_charges() {
            return self.stamp_several(charges, response, decision);
        }
        let limiter = &self.current.shared.limiter;
        let limits = || [(limiter.name(), self.quotas())];
        self.current.settings.headers.stamp_passed(response, limits, decision, || limiter.now())
    }

    /// Corrects the charge by the response, and adds the headers.
    #[inline(never)]
    pub(crate) fn correct<R>(&mut self, mut response: Response<R>) -> Response<R> {
        if let Some(cost) = response.extensions().get::<TrueCost>() {
            cost.note_settled(self.settled_names());
        }
        if self.charged.is_none() && !self.has_shadows() {
            return response;
        }
        if is_refused_inside(&response) {
            self.give_back();
            return response;
        }
        // `charged` is kept until the closures of `actual` have returned: if one panics, dropping
        // the request refunds the charge.
        let actual;
        (response, actual) = self.read_true_cost(response);
        if let Some(actual) = actual {
            self.correct_shadows(&actual);
            if let Some(decision) = self.charged.take() {
                let (settled, corrected) = self.correction().make(&decision, &actual);
                settled.detach();
                self.charged = Some(corrected);
            }
        }
        if !self.shadow {
            self.stamp(&mut response);
        }
        self.awaits_response = false;
        response
    }

    /// Returns the cost to which the response corrects the charge. The costs of a streamed body are
    /// settled when the body ends.
    fn read_true_cost<R>(&self, response: Response<R>) -> (Response<R>, Option<Actual>) {
        let (parts, body) = response.into_parts();
        let Shared { options, .. } = self.shared();
        let counts = options.count_if.as_ref().is_none_or(|count_if| count_if(&parts));
        let actual = match parts.extensions.get::<TrueCost>() {
            _ if !counts => Some(Actual::Nothing),
            Some(cost) => self.costs_or_wait_for_end(cost),
            None => None,
        };
        (Response::from_parts(parts, body), actual)
    }

    /// Returns the costs of settled limits if they are final. Otherwise the limits are corrected
    /// when the body ends.
    fn costs_or_wait_for_end(&self, cost: &TrueCost) -> Option<Actual> {
        if !self.is_settled() {
            return None;
        }
        let costs = cost.costs().map(Actual::Costs);
        if costs.is_none() {
            let charged = self.charged.clone().map(|decision| (self.correction(), decision));
            let shadows = self.shadow_correction();
            cost.settle_at_end(move |costs| {
                let actual = Actual::Costs(costs.clone());
                if let Some((correction, decision)) = charged {
                    correction.make(&decision, &actual).0.detach();
                }
                shadows(&actual);
            });
        }
        costs
    }
}
