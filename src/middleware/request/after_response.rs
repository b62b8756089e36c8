//! Applies the response to the charge: it may correct the charge, and gets the headers.

use http::Response;

use super::LimitedRequest;
use crate::decision::Decision;
use crate::limits::Limiter;
use crate::middleware::correction::Actual;
use crate::middleware::cost::TrueCost;
use crate::middleware::headers::is_refused_inside;
use crate::middleware::service::Shared;

impl<J> LimitedRequest<J> {
    /// Returns whether this response may [correct](Self::correct) the charge.
    #[inline]
    pub(crate) fn is_corrected_by<R>(&self, response: &Response<R>) -> bool {
        self.current.shared.options.count_if.is_some()
            || self.shadow
            || !response.extensions().is_empty()
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
        let now = || self.current.shared.limits.now();
        let headers = &self.governing(Some(decision)).headers;
        let limits = || (0..self.count()).map(|place| self.limit_at(place));
        headers.stamp_passed(response, limits, decision, now)
    }

    /// Corrects the charge by the response, and adds the headers.
    #[inline(never)]
    pub(crate) fn correct<R>(&mut self, mut response: Response<R>) -> Response<R> {
        if let Some(cost) = response.extensions().get::<TrueCost>() {
            cost.note_settled(self.settled());
        }
        if self.charged.is_none() && !self.has_aside() {
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
            self.correct_aside(&actual);
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
        self.settled().next()?;
        let costs = cost.costs().map(Actual::Costs);
        if costs.is_none() {
            let charged = self.charged.clone().map(|decision| (self.correction(), decision));
            let aside = self.aside_correction();
            cost.settle_at_end(move |costs| {
                let actual = Actual::Costs(costs.clone());
                if let Some((correction, decision)) = charged {
                    correction.make(&decision, &actual).0.detach();
                }
                aside(&actual);
            });
        }
        costs
    }

    /// Returns the names of the layer's limits that are settled by true costs.
    fn settled(&self) -> impl Iterator<Item = &str> {
        let settled = |limiter: &&Limiter| limiter.live().limit().settled;
        self.current.shared.limits.limiters().iter().filter(settled).map(Limiter::name)
    }
}
